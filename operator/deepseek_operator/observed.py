"""What was seen of one object and of all that belongs to it: what a plan is made from.

Pure. The cluster fills it in, the plan and the status read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepseek_operator import loader
from deepseek_operator.autoscale import ExternalMetrics, ScaledTier
from deepseek_operator.devices import Supply
from deepseek_operator.fleet import Fleet, Units
from deepseek_operator.kinds import (
    AUTOSCALER,
    DEPLOYMENT,
    HTTP_ROUTE,
    SCALED_OBJECT,
    Manifest,
    Reference,
)
from deepseek_operator.pods import with_refusal
from deepseek_operator.quota import PodLimit
from deepseek_operator.render import TIER_LABEL, Owner, deployment_name
from deepseek_operator.tiers import PRIMARY, Tier
from deepseek_operator.workers import Reading


@dataclass(frozen=True)
class Observed:
    """One object and all that belongs to it, as views (see `views.view`)."""

    owner: Manifest
    children: Mapping[Reference, Manifest] = field(default_factory=dict)
    """Live children, without those of the model's cache."""
    pods: tuple[Manifest, ...] = ()
    """The workers."""
    cache: Mapping[Reference, Manifest] = field(default_factory=dict)
    """Claim, policy and jobs of the model's cache."""
    loader_pods: tuple[Manifest, ...] = ()
    foreign_claims: Mapping[str, Manifest] = field(default_factory=dict)
    """Of the claims that the spec names and somebody else made, those that are there, by name."""
    missing_secrets: tuple[str, ...] = ()
    """Secrets that the spec names and that are not there, or lack the key, in words."""
    missing_authorities: Mapping[str, str] = field(default_factory=dict)
    """By model's source: the same of the ConfigMap with the authority that its server needs."""
    loader_refusals: Mapping[str, str] = field(default_factory=dict)
    """By cache: why the API server refuses the loader's pod, in its words."""
    pod_refusals: Mapping[str, str] = field(default_factory=dict)
    """By Deployment whose pods the API server refuses, why it does now, where events tell."""
    quarantined: tuple[Manifest, ...] = ()
    """Workers that left their node's service and still hold its units."""
    readings: Mapping[str, Reading] = field(default_factory=dict)
    """What the workers say of themselves, by the uid of the pod."""
    is_deaf: bool = False
    """Whether most nodes are silent at once, so that it is rather us who hear nothing."""
    ready_nodes: Mapping[str, bool] | None = None
    """Whether each node is ready; None where the operator may not see them."""
    tolerated: Mapping[Reference, tuple[str, ...]] = field(default_factory=dict)
    """Deviations that came back with the answer to our own apply: an admission webhook of this
    cluster wants them so, and writing again would not change that."""

    supply: Supply | None = None
    """What the cluster's nodes offer; None where the operator sees none."""
    limits: Mapping[str, PodLimit] = field(default_factory=dict)
    """By tier, how many pods its tenant's share has room for."""
    fleet: Fleet | None = None
    """The nodes; None where the operator may not see them."""
    promised: Mapping[str, Units] = field(default_factory=dict)
    """By node, units that other objects' pods will take that are not bound yet."""
    foreign_autoscalers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """HorizontalPodAutoscalers of others, by the name of the Deployment that they scale."""
    external_metrics: ExternalMetrics = field(default_factory=ExternalMetrics)

    @property
    def identity(self) -> Owner:
        """The object, as children name it."""
        metadata = self.owner["metadata"]
        return Owner(metadata["namespace"], metadata["name"], metadata["uid"])

    def deployment(self, tier: str = PRIMARY) -> Manifest | None:
        """A tier's Deployment; if its pods are refused, in the newest words."""
        owner = self.identity
        name = deployment_name(owner, tier)
        live = self.children.get(Reference(DEPLOYMENT.kind, owner.namespace, name))
        words = self.pod_refusals.get(name)
        return live if live is None or words is None else with_refusal(live, words)

    @property
    def route(self) -> Manifest | None:
        """The HTTPRoute."""
        owner = self.identity
        return self.children.get(Reference(HTTP_ROUTE.kind, owner.namespace, owner.name))

    def scaled(self, tier: Tier) -> ScaledTier:
        """A tier with what has to do with its number of pods."""
        owner = self.identity
        name = deployment_name(owner, tier.name)
        return ScaledTier(
            owner=owner,
            tier=tier,
            deployment=self.deployment(tier.name),
            autoscaler=self.children.get(Reference(AUTOSCALER.kind, owner.namespace, name)),
            scaled_object=self.children.get(Reference(SCALED_OBJECT.kind, owner.namespace, name)),
            foreign=self.foreign_autoscalers.get(name, ()),
            pods=self.pods_of(tier.name),
            external_metrics=self.external_metrics,
        )

    @property
    def has_loader_without_pod(self) -> bool:
        """Whether a download waits for its pod to be created."""
        return any(loader.waits_for_pod(live) for live in self.cache.values())

    def pods_of(self, tier: str = PRIMARY) -> tuple[Manifest, ...]:
        """The workers of a tier."""
        return tuple(
            pod
            for pod in self.pods
            if (pod["metadata"].get("labels") or {}).get(TIER_LABEL) == tier
        )
