"""While a fallback serves: back to the primary, on to the next fallback, or more and better of it.

Pure. Nothing is taken that the primary waits for: only where it would not fit even with the
fallbacks' own units back are free units used, and pods that are not needed are given back as soon
as it would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Literal

from deepseek_operator import swap
from deepseek_operator.capacity import View
from deepseek_operator.degrade_case import (
    LOOK_AGAIN_SECONDS,
    TRIAL_SECONDS,
    Case,
    Decision,
    Memory,
    names,
    paused,
    refused,
    stamp,
    started,
)
from deepseek_operator.fallbacks import (
    first_that_fits,
    no_capacity,
    num_kept,
    primary_serves,
    start,
)
from deepseek_operator.pods import sentence
from deepseek_operator.tiers import PRIMARY


def on_fallback(case: Case) -> Decision:
    """The next step of an object that a fallback serves, or is to serve."""
    settled = _settled(case)
    if settled is not None and settled.tier.is_primary:
        return primary_serves(case)
    kept = {
        view.name: view.seen.asked
        for view in case.active
        if settled is None or view.tier.rank <= settled.tier.rank
    }
    if swap.is_due(case):
        return swap.begin(case)
    asked, memory = _primary_beside(case)
    if len(kept) < len(case.active):
        memory = replace(memory, next_step=None)
    replicas = {PRIMARY: asked, **kept}
    if case.primary.ready_since is not None and not case.rolls_via_fallback:
        return _promoting(case, replicas, memory)
    if not any(view.seen.num_ready for view in case.active):
        return _fallback_missing(case, replicas, memory)
    replicas, memory = _improved(case, replicas, memory)
    if swap.is_blocked(case):
        return swap.wait(case, replicas, memory)
    primary = case.primary.seen
    is_refused = primary.over_quota_since is not None or primary.refused_since is not None
    is_decided = primary.num_pods >= case.primary.wanted or is_refused or case.primary.is_coming
    if memory.phase == "blocked" and is_decided:
        memory = replace(memory, phase="degraded", since=case.now)
    return _waiting(case, replicas, memory)


def _settled(case: Case) -> View | None:
    """The best tier that has been ready for long enough to do without those after it."""
    for view in (case.primary, *case.active):
        since = view.ready_since
        if since is None or (view.tier.is_primary and case.rolls_via_fallback):
            continue
        is_wanted_now = view.tier.is_primary and case.rules.pin == PRIMARY
        if is_wanted_now or since + case.rules.promote_after <= case.now:
            return view
    return None


def _primary_beside(case: Case) -> tuple[int, Memory]:
    """How many pods the primary asks for beside a fallback, and what to remember of it.

    They stay pending where nodes are what lacks. Where a quota does, be it for the fallback, or
    where they can never answer and hold units, they are scaled down to those that answer or are
    enough, and tried again later.
    """
    primary, memory = case.primary, case.memory
    if memory.phase == "primary":
        # Whoever started the fallback ended before the status told, or it was lost since.
        memory = started(case, case.active[0])
    seen = primary.seen
    is_enough = any(view.ready_since for view in case.active)
    is_refused = any(view.seen.over_quota_since for view in case.active)
    is_starved = any(view.starved_since for view in case.active)
    kept = num_kept(case)
    is_in_the_way = (is_refused and kept < seen.num_pods) or (is_starved and primary.is_hopeless)
    has_to_go = is_in_the_way and not is_enough
    if seen.exists and seen.asked < primary.wanted:
        is_due = memory.next_attempt is None or memory.next_attempt <= case.now
        if memory.generation == case.generation and not is_due:
            return min(seen.asked, kept) if has_to_go else seen.asked, memory
        return primary.wanted, replace(memory, next_attempt=None)
    if has_to_go or seen.over_quota_since is not None:
        return kept, refused(case, memory)
    return primary.wanted, memory


def _promoting(case: Case, replicas: Mapping[str, int], memory: Memory) -> Decision:
    since = case.primary.ready_since or case.now
    due = since + case.rules.promote_after
    message = (
        f"The primary has been ready since {stamp(since)} and serves beside fallback"
        f" {names(case.active)}, which goes at {stamp(due)}, after promote.afterSeconds"
        f" ({case.rules.promote_after_seconds:.0f})."
    )
    memory = replace(memory, phase="degraded", attempts=0)
    wait = max(0.0, (due - case.now).total_seconds())
    return Decision(replicas, True, "Promoting", message, memory, wait)


def _fallback_missing(case: Case, replicas: dict[str, int], memory: Memory) -> Decision:
    """No fallback answers yet; where the last one finds no place or cannot run, another one may."""
    current = case.active[-1]
    since = current.stuck_since
    if since is None:
        message = f"Fallback {names(case.active)} is being started."
        return Decision(replicas, True, "FallbackStarting", message, memory, LOOK_AGAIN_SECONDS)
    why = f"{current.name} {_plight(current)}"
    waiting = Decision.until_capacity(
        replicas, "FallbackStarting", sentence(f"Fallback {why}"), memory
    )
    wait = (since + case.rules.degrade_after - case.now).total_seconds()
    if wait > 0:
        return replace(waiting, again_seconds=wait)
    # A better one that was started beside it may still answer; with the rest nothing is lost.
    coming = [view for view in case.active[:-1] if not _has_failed(case, view)]
    following = [view for view in _following(case, current) if view not in coming]
    decision = _handed_over(case, following, coming, replicas, memory)
    if decision is not None:
        return decision
    if coming or (current.cannot_run and not following):
        return waiting
    return replace(no_capacity(case, f"fallback {why}", replicas), memory=memory)


def _handed_over(
    case: Case,
    following: list[View],
    coming: list[View],
    replicas: Mapping[str, int],
    memory: Memory,
) -> Decision | None:
    """The first of `following` that fits where all go but those that are `coming`."""
    primary, current = case.primary, case.active[-1]
    going = [view for view in case.active if view not in coming]
    chosen = first_that_fits(case, following, without=going)
    # A primary that can never answer holds nothing that one needs that could.
    gives_way = chosen is None and primary.is_hopeless
    if gives_way:
        chosen = first_that_fits(case, following, without=(*going, primary))
    if chosen is None:
        return None
    why = f"fallback {current.name} {_plight(current)}"
    decision = start(case, chosen, why, primary_gives_way=gives_way)
    asked = {PRIMARY: replicas[PRIMARY], **{view.name: replicas[view.name] for view in coming}}
    if gives_way:
        asked[PRIMARY] = decision.replicas[PRIMARY]
        memory = refused(case, memory)
    if current.cannot_run and chosen.tier.rank < current.tier.rank:
        memory = paused(case, memory)
    return replace(
        decision,
        replicas={**asked, chosen.name: decision.replicas[chosen.name]},
        memory=replace(memory, since=case.now, fallback=chosen.name),
    )


def _following(case: Case, current: View) -> list[View]:
    """The fallbacks that may take over from one that is stuck, in the order of trying."""
    worse = [view for view in case.fallbacks if view.tier.rank > current.tier.rank]
    better = [view for view in case.fallbacks if view.tier.rank < current.tier.rank]
    if current.cannot_run:
        # Of several that cannot run none is tried again and again without a pause.
        next_step = case.memory.next_step
        may_go_back = next_step is None or next_step <= case.now
    else:
        may_go_back = case.room.fits(current) is False
    return worse + better if may_go_back else worse


def _plight(view: View) -> str:
    """What keeps a fallback from answering, where waiting alone does not help."""
    trouble = view.seen.trouble
    if view.is_hopeless and trouble is not None:
        return f"cannot run: {trouble.message}"
    if view.is_refused:
        return f"cannot run, its pods are refused: {view.seen.refusal!r}"
    return f"finds no place: {view.lack!r}"


def _waiting(case: Case, replicas: dict[str, int], memory: Memory) -> Decision:
    seen = case.primary.seen
    words = case.primary.lack or (seen.trouble.message if seen.trouble else "")
    reason = f": {words!r}." if words else "."
    message = (
        f"Fallback {names(case.active)} serves, {seen.num_ready} of {case.primary.wanted} pods of"
        f" the primary answer{reason}"
    )
    if not case.room.is_known:
        message += (
            " The operator may not see nodes here, so only the scheduler tells when the primary"
            " fits, and a swap is never tried."
        )
    return Decision.until_capacity(replicas, "FallbackServing", message, memory)


def _improved(
    case: Case, replicas: dict[str, int], memory: Memory
) -> tuple[dict[str, int], Memory]:
    """More or fewer pods of the fallback that answers, or a better one beside it."""
    serving = next(view for view in case.active if view.seen.num_ready)
    trials = [view for view in case.active if view.tier.rank < serving.tier.rank]
    if trials:
        return _trying(case, serving, trials, replicas, memory)
    seen = serving.seen
    if seen.over_quota_since is not None and serving.needed <= seen.num_pods < seen.asked:
        # The others were one too many for a quota.
        return {**replicas, serving.name: seen.num_pods}, paused(case, memory)
    in_the_way = [view for view in _before(case, serving) if _standing(case, view) == "blocked"]
    if in_the_way and seen.num_ready > serving.needed:
        return {**replicas, serving.name: _with_one_fewer(serving)}, memory
    if memory.next_step is not None and memory.next_step > case.now:
        return replicas, memory
    is_first = in_the_way[:1] == [case.primary] and case.rules.strategy == "swap"
    better = next((v for v in _before(case, serving) if _standing(case, v) == "fits"), None)
    if better is not None and not is_first:
        return _with_trial(case, serving, better, replicas, memory)
    more = 0 if in_the_way else _growth(case, serving)
    if more:
        memory = replace(memory, next_step=case.now + case.rules.promote_after)
    return {**replicas, serving.name: seen.asked + more}, memory


def _trying(
    case: Case, serving: View, trials: list[View], replicas: dict[str, int], memory: Memory
) -> tuple[dict[str, int], Memory]:
    """Better fallbacks that were started beside the one that answers, and do not answer yet."""
    failed = {view.name for view in trials if _has_failed(case, view)}
    if failed:
        kept = {name: number for name, number in replicas.items() if name not in failed}
        return kept, replace(paused(case, memory), fallback=serving.name)
    until = memory.next_step or case.now + timedelta(seconds=TRIAL_SECONDS)
    return replicas, replace(memory, next_step=until)


def _before(case: Case, serving: View) -> list[View]:
    """The better tiers that nothing but capacity keeps from starting, the best first."""
    return [
        view
        for view in (case.primary, *case.fallbacks)
        if view.tier.rank < serving.tier.rank
        and view.may_start
        and (view.most is None or view.most >= view.needed)
    ]


def _with_trial(
    case: Case, serving: View, better: View, replicas: dict[str, int], memory: Memory
) -> tuple[dict[str, int], Memory]:
    """A better fallback beside one that has answered for long enough; the primary comes itself."""
    since = serving.ready_since
    is_steady = since is not None and since + case.rules.promote_after <= case.now
    if better.tier.is_primary or not is_steady:
        return replicas, memory
    number = max(1, len(case.room.places(better, better.wanted)))
    until = case.now + timedelta(seconds=TRIAL_SECONDS)
    tried = replace(memory, fallback=better.name, next_step=until)
    return {**replicas, better.name: number}, tried


def _has_failed(case: Case, trial: View) -> bool:
    """Whether a better fallback that was started finds no place, cannot run, or takes too long."""
    since = trial.stuck_since
    is_stuck = since is not None and since + case.rules.degrade_after <= case.now
    is_late = case.memory.next_step is not None and case.memory.next_step <= case.now
    return trial.is_hopeless or is_stuck or is_late


def _standing(case: Case, view: View) -> Literal["fits", "blocked", "away"]:
    """Whether a better tier than the one that serves fits, or would with the fallbacks' units."""
    room, seen = case.room, view.seen
    if view.tier.is_primary:
        if view.is_refused:
            return "away"
        if swap.is_blocked(case):
            return "blocked"
        is_coming = not seen.unschedulable_since and seen.asked >= view.wanted
        return "away" if not is_coming and room.fits(view, case.active) is False else "fits"
    if room.fits(view) is True:
        return "fits"
    return "blocked" if room.fits(view, case.active) else "away"


def _growth(case: Case, serving: View) -> int:
    """Pods that the fallback may have beside those that it has, which all answer."""
    asked = serving.seen.asked
    wanted = serving.wanted if serving.most is None else min(serving.wanted, serving.most)
    if serving.seen.num_ready < asked or wanted <= asked:
        return 0
    return len(case.room.places(serving, wanted - asked))


def _with_one_fewer(serving: View) -> int:
    """Pods of a fallback that has one to spare; the next goes once the one before is gone."""
    seen = serving.seen
    # Pods that are refused are not waited for.
    is_coming = seen.num_pods < seen.asked and seen.refused_since is None
    is_changing = seen.leaves_at is not None or seen.num_pods > seen.asked or is_coming
    return seen.asked if is_changing else seen.num_pods - 1
