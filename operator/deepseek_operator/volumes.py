"""Whether a volume brings a tier's pods their model: an image, a folder of the node, a claim.

Pure. Called by `models`, and by `download` of the claim that a model is downloaded to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepseek_contract.status import ModelCachedReason
from deepseek_operator.draft import Draft
from deepseek_operator.kinds import Manifest
from deepseek_operator.observed import Observed
from deepseek_operator.pods import creation_refusal, image_trouble, placement_trouble
from deepseek_operator.tiers import Tier

CLAIM_CHECK_SECONDS = 15.0
"""How often a volume or Secret of somebody else is looked for; it is not watched."""


@dataclass(frozen=True)
class ModelState:
    """Whether pods find the model, and what is being done about it: the condition ModelCached."""

    status: Literal["True", "False"]
    reason: ModelCachedReason
    message: str
    may_start: bool = True
    """Whether a pod started now could find the model."""


def image_volume(tier: Tier, image: str, observed: Observed) -> ModelState:
    """An image that each node mounts into the pods."""
    for pod in observed.pods_of(tier.name):
        trouble = image_trouble(pod)
        if trouble is not None and image in trouble.message:
            return ModelState("False", "ImageUnavailable", trouble.message)
    return ModelState("True", "InImageVolume", f"The node mounts {image} into each pod.")


def node_path(tier: Tier, path: str, observed: Observed) -> ModelState:
    """A folder that each node has."""
    refusal = creation_refusal(observed.deployment(tier.name))
    if refusal is not None and "hostPath" in refusal:
        return ModelState(
            "False",
            "CacheForbidden",
            f"The namespace's pod security forbids folders of the node: {refusal!r}. Use another"
            " form of spec.model.source, or serve from a namespace whose level is privileged.",
        )
    return ModelState("True", "OnNode", f"Each node has the model in {path}.")


def named_claim(tier: Tier, name: str, field: str, observed: Observed, draft: Draft) -> ModelState:
    """The state of a claim that somebody else made; `field` of the object names it."""
    claim = observed.foreign_claims.get(name)
    if claim is None:
        draft.look_again(CLAIM_CHECK_SECONDS)
        return ModelState(
            "False",
            "ClaimMissing",
            f"There is no PersistentVolumeClaim {name} in this namespace: create it, or change"
            f" {field}.",
        )
    if claim["status"].get("phase") != "Bound":
        draft.look_again(CLAIM_CHECK_SECONDS)
        return ModelState(
            "False",
            "ClaimPending",
            f"The claim {name} has no volume yet. Its storage class may wait for the first pod;"
            " if this lasts, `kubectl describe pvc` says why.",
        )
    trouble = one_node_only(claim, observed.pods_of(tier.name))
    if trouble is not None:
        return ModelState("False", "SingleNodeVolume", trouble)
    return ModelState("True", "OnVolume", f"The claim {name} holds the model.")


def one_node_only(claim: Manifest, pods: tuple[Manifest, ...]) -> str | None:
    """A message, when pods need a second node and the volume can only be on one."""
    modes = claim["spec"].get("accessModes") or []
    if any(mode in {"ReadWriteMany", "ReadOnlyMany"} for mode in modes):
        return None
    placed = {pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")}
    waiting = [trouble for pod in pods if (trouble := placement_trouble(pod)) is not None]
    if not placed or not waiting:
        return None
    return (
        f"The volume of {claim['metadata']['name']} ({', '.join(modes)}) can be on one node only,"
        f" which is {sorted(placed)[0]}, and {len(waiting)} of the pods do not fit there. Use a"
        " ReadWriteMany claim, or fewer replicas."
    )
