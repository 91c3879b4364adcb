"""How a change reaches a tier's pods: no hang on a full cluster, and no end of the last ready pod.

Pure. A new pod is started first if a unit is free; otherwise pods are replaced one at a time where
there are two or more; otherwise a fallback serves meanwhile. Without one the change waits for a
unit, and the condition Progressing says so.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from deepseek_operator.capacity import Room, View
from deepseek_operator.drift import deviations
from deepseek_operator.kinds import Manifest
from deepseek_operator.render import HASH_ANNOTATION

Strategy = Literal["surge", "replace"]


@dataclass(frozen=True)
class Rollout:
    """How the pods of a tier change now."""

    strategy: Strategy
    goes_via_fallback: bool = False
    """Whether a fallback has to answer before a pod is ended."""
    is_new: bool = False
    """Whether the live Deployment does not have the change yet."""
    trouble: str | None = None
    """Why it waits."""


def rollout_of(
    view: View,
    live: Manifest | None,
    wanted: Manifest,
    room: Room,
    *,
    has_fallbacks: bool,
    tolerated: Collection[str] = (),
) -> Rollout:
    """Decide for one tier.

    Args:
        view: The tier.
        live: Its Deployment, or None.
        wanted: The manifest of its Deployment, made with the live strategy where there is one.
        room: Where pods fit.
        has_fallbacks: Whether something else can serve meanwhile.
        tolerated: Deviations that an admission webhook makes of what is applied: they stay.
    """
    if live is None:
        return Rollout(_first_strategy(view))
    is_new = _changes(live, wanted, tolerated)
    is_under_way = is_new or _has_old_pods(live)
    is_waiting = is_under_way and bool(view.seen.unschedulable_since)
    trouble = f"A new pod finds no node: {view.seen.words!r}." if is_waiting else None
    before = Rollout(live_strategy(live), False, is_new, trouble)
    rollout = view.tier.spec.rollout
    if rollout == "viaFallback":
        via_fallback = is_under_way and view.seen.num_ready > 0
        return replace(before, strategy="replace", goes_via_fallback=via_fallback)
    if rollout != "auto" or view.tier.gpu.mode == "cpu":
        return replace(before, strategy=_first_strategy(view))
    if not is_under_way or (before.strategy == "replace" and not is_new):
        return before
    has_place = room.fits(view) is not False if is_new else not is_waiting
    return _by_room(view, before, has_place=has_place, has_fallbacks=has_fallbacks)


def _by_room(view: View, before: Rollout, *, has_place: bool, has_fallbacks: bool) -> Rollout:
    """The automatic choice for a change that is due."""
    if has_place:
        return replace(before, strategy="surge")
    if view.seen.num_ready != 1:
        # With two or more, one is left; with none, nothing is lost.
        return replace(before, strategy="replace")
    if has_fallbacks:
        return replace(before, goes_via_fallback=True)
    return replace(before, strategy="surge", trouble=before.trouble or _FULL)


_FULL = (
    "A new pod needs a unit that is not free, and the old pod is the only one that answers. Free a"
    " unit, add a fallback, or set spec.rollout to replace, which interrupts the service."
)


def _first_strategy(view: View) -> Strategy:
    rollout = view.tier.spec.rollout
    if rollout == "auto":
        return "surge" if view.tier.gpu.mode == "cpu" else "replace"
    return "surge" if rollout == "surge" else "replace"


def live_strategy(live: Manifest) -> Strategy:
    """How a Deployment replaces its pods now."""
    rolling = (live["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    return "surge" if rolling.get("maxSurge") not in {None, 0, "0", "0%"} else "replace"


def _changes(live: Manifest, wanted: Manifest, tolerated: Collection[str]) -> bool:
    """Whether applying the manifest would make new pods, as far as can be told."""
    template = {"spec": {"template": wanted["spec"]["template"]}}
    if not set(deviations(template, live)) <= set(tolerated):
        return True
    ours = wanted["metadata"]["annotations"][HASH_ANNOTATION]
    theirs = (live["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)
    return theirs is not None and theirs != ours


def _has_old_pods(live: Manifest) -> bool:
    status = live.get("status") or {}
    if status.get("observedGeneration", 0) < live["metadata"].get("generation", 0):
        # The controller has not seen the last change: of the pods, unless the number is another.
        return bool(live["spec"].get("replicas", 1) == status.get("replicas", 0))
    return bool(status.get("updatedReplicas", 0) < status.get("replicas", 0))
