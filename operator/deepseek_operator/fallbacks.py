"""Starting a fallback, and what is decided where none is needed or none fits.

Pure. `degrade`, `promote` and `swap` end here, each for its own reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepseek_operator.capacity import View
from deepseek_operator.degrade_case import (
    LOOK_AGAIN_SECONDS,
    Case,
    Decision,
    Memory,
    names,
    refused,
    started,
)
from deepseek_operator.pods import sentence
from deepseek_operator.tiers import PRIMARY


def primary_serves(case: Case, more: str = "") -> Decision:
    """The primary alone, as it should be."""
    message = f"The primary model is the one that serves.{_narrower(case)}{more}"
    memory = Memory(degradations=case.memory.degradations)
    return Decision({PRIMARY: case.primary.wanted}, False, "PrimaryServing", message, memory)


def _narrower(case: Case) -> str:
    """A sentence for each fallback that answers less than the primary."""
    primary = case.primary.tier.model.max_context_tokens
    sentences = []
    for view in case.fallbacks:
        tokens = view.tier.model.max_context_tokens
        if tokens is not None and (primary is None or tokens < primary):
            ours = f"the primary's {primary}" if primary is not None else "the primary's own"
            sentences.append(
                f" Fallback {view.name} is narrower: it refuses contexts above {tokens} tokens,"
                f" where the limit is {ours} otherwise."
            )
    return "".join(sentences)


def first_that_fits(
    case: Case, candidates: Iterable[View], without: Iterable[View] = ()
) -> View | None:
    """The first that has its model and a place; where nobody knows of places, the first.

    Args:
        case: Everything.
        candidates: In the order in which they are tried.
        without: Tiers that would go for it.
    """
    going = tuple(without)
    for view in candidates:
        if view.may_start and case.room.fits(view, going) is not False:
            return view
    return None


def start(case: Case, chosen: View, words: str, *, primary_gives_way: bool = False) -> Decision:
    """Start a fallback, beside the primary's pods that answer or wait.

    Args:
        case: Everything.
        chosen: The fallback.
        words: Why.
        primary_gives_way: Whether the primary's pods that do not answer may go for it, because
            they never will.
    """
    primary, room = case.primary, case.room
    replicas = {PRIMARY: primary.wanted}
    memory = started(case, chosen)
    # One that has its place and is given up holds what the fallback lacks, be it of a quota.
    is_in_the_way = primary.is_coming or room.fits(chosen) is not True
    if primary_gives_way and is_in_the_way:
        replicas[PRIMARY] = primary.seen.num_ready
        memory = refused(case, memory)
    elif primary.seen.over_quota_since is not None:
        replicas[PRIMARY] = num_kept(case)
        memory = refused(case, memory)
    # Pods of a fallback that wait would take the units that the primary waits for.
    fitting = len(room.places(chosen, chosen.wanted)) if room.is_known else chosen.needed
    replicas[chosen.name] = max(1, fitting)
    message = sentence(f"Fallback {names([chosen])} is being started, since {words}")
    return Decision(replicas, True, "FallbackStarting", message, memory, LOOK_AGAIN_SECONDS)


def num_kept(case: Case) -> int:
    """How many pods the primary keeps where a quota may be short of what they hold.

    Those that answer; and where these are enough with those that have their place, all of them:
    made anew they would only come later. Not where the recovery ladder has given them up.
    """
    seen = case.primary.seen
    if case.primary.is_coming and case.demand is None:
        return seen.num_pods - len(seen.unschedulable_since)
    return seen.num_ready


def no_capacity(case: Case, words: str, replicas: Mapping[str, int]) -> Decision:
    """Nothing to start: all stays as it is until units become free."""
    not_there = [view.name for view in case.fallbacks if not view.may_start]
    extra = f" Models of {', '.join(not_there)} are not there yet." if not_there else ""
    is_coming = case.primary.is_coming
    what = "No fallback fits" if is_coming else "Neither the primary nor any fallback fits"
    then = " The primary's pods that have their place are waited for." if is_coming else ""
    message = (
        f"{sentence(f'{what}: {words}')} No node that the pods may use has enough free units."
        f"{extra} Free some, add nodes, or add a smaller fallback.{then}"
    )
    return Decision.until_capacity(replicas, "NoCapacity", message, case.memory)
