"""The tiers of one object: its primary model, and the fallbacks that may serve instead of it.

Pure. A tier is the object's spec with a model, a GPU block and a number of pods of its own, so
whatever renders or watches one tier reads it like an object that has no other. Each tier that has
pods is a Deployment of its own; one Service selects the Ready pods of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from deepseek_contract.deployment import DeepSeekDeploymentSpec, Gpu
from deepseek_contract.model import FallbackModel, ModelSpec
from deepseek_operator.quota import PodLimit

PRIMARY = "primary"
"""Name of the first tier."""


@dataclass(frozen=True)
class Tier:
    """One of the models that may serve the object."""

    name: str
    """Value of the label `deepseek.dev/tier`."""
    rank: int
    """0 is the primary; the fallbacks follow in their order."""
    spec: DeepSeekDeploymentSpec
    """The object's spec with this tier's model, GPU block and replicas."""
    resource: str = ""
    """The name of the units that its pods ask for, where that is a matter of the nodes."""

    primary: ModelSpec | None = None
    """Of a fallback, the model that it serves instead of."""

    @property
    def model(self) -> ModelSpec:
        """What it serves. Every tier has the object's served name."""
        return self.spec.model

    @property
    def gpu(self) -> Gpu:
        """What it computes on."""
        return self.spec.gpu

    @property
    def replicas(self) -> int:
        """Pods wanted now. A fallback with none has no Deployment."""
        return self.spec.replicas

    @property
    def is_primary(self) -> bool:
        """Whether this is what the object asks for first."""
        return self.rank == 0

    def with_replicas(self, replicas: int) -> Tier:
        """The same tier with another number of pods."""
        return self._with(replicas=replicas)

    def with_rollout(self, rollout: Literal["surge", "replace"]) -> Tier:
        """The same tier with another way to its pods."""
        return self._with(rollout=rollout)

    def _with(self, **changes: object) -> Tier:
        if all(getattr(self.spec, name) == value for name, value in changes.items()):
            return self
        return replace(self, spec=self.spec.model_copy(update=changes))

    def within(self, limit: PodLimit | None) -> Tier:
        """The same tier with no more pods than its tenant's share has room for.

        An autoscaler is told at once what will be left; where that is nothing, it goes before the
        last pods do.
        """
        if limit is None:
            return self
        scaling = self.spec.autoscaling
        if scaling is not None and limit.now > 0:
            most = max(1, min(scaling.max_replicas, limit.soon))
            fewer = {"max_replicas": most, "min_replicas": min(scaling.min_replicas, most)}
            changes = {"autoscaling": scaling.model_copy(update=fewer)}
            return replace(self, spec=self.spec.model_copy(update=changes))
        return self.with_replicas(min(self.replicas, limit.now))


def tiers_of(
    spec: DeepSeekDeploymentSpec, replicas: Mapping[str, int] | None = None
) -> tuple[Tier, ...]:
    """All tiers of an object, the primary first.

    Args:
        spec: The object's.
        replicas: Pods wanted now by tier; absent, the primary has those of the spec and a
            fallback none. An autoscaler changes any number but 0.
    """
    wanted = replicas or {}
    scaling = spec.autoscaling
    first = spec.replicas if scaling is None else scaling.min_replicas
    tiers = [Tier(PRIMARY, 0, spec).with_replicas(wanted.get(PRIMARY, first))]
    for rank, fallback in enumerate(spec.fallbacks or (), start=1):
        changes = {
            "model": _model(fallback.model, spec.model),
            "gpu": fallback.gpu,
            "replicas": wanted.get(fallback.name, 0),
        }
        of_its_own = spec.model_copy(update=changes)
        tiers.append(Tier(fallback.name, rank, of_its_own, primary=spec.model))
    return tuple(tiers)


def _model(fallback: FallbackModel, primary: ModelSpec) -> ModelSpec:
    """A fallback's model under the name that clients ask for."""
    fields = {name: getattr(fallback, name) for name in FallbackModel.model_fields}
    return primary.model_copy(update={**fields, "lora": None})
