"""Which tiers of an object run, and when that changes: degrade, promote, and all between.

Pure: what is seen of the tiers (`capacity`), the room there is, what was remembered and the time go
in as a `Case`, a `Decision` comes out (`degrade_case`).

The rules, in the order in which `decide` asks:

1. A person's pin wins: the pinned tier serves, and the others go once it answers.
2. On the primary: it is left when fewer than `minAvailable` pods answer and capacity is what lacks,
   or they are not let in, for `degrade.afterSeconds`. The first fallback that fits is started
   (`fallbacks`).
3. On a fallback (`promote`): the primary's pods stay pending, so that the scheduler decides when
   they fit, and a tier goes when a better one has been ready for `promote.afterSeconds`. A fallback
   that finds no place itself, or cannot run, hands over to the next.
4. A fallback that answers gets more of its pods, and a better fallback is started beside it, with
   units that the primary could not use even together with the fallback's own. Pods of a fallback
   beyond those that are needed go, one at a time, where the primary then fits.
5. Where the primary fits only on the fallback's own units (`swap`), `surge` says so and `swap`
   drains the fallback first: bounded, and with a back-off when it does not work out.

The operator never ends the last pod that answers, except by a swap, which is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from deepseek_operator import promote, swap
from deepseek_operator.capacity import View
from deepseek_operator.degrade_case import LOOK_AGAIN_SECONDS, Case, Decision, names, stamp, started
from deepseek_operator.fallbacks import first_that_fits, no_capacity, primary_serves, start
from deepseek_operator.fleet import Units
from deepseek_operator.tiers import PRIMARY


def decide(case: Case) -> Decision:
    """The next step of one object."""
    case = replace(case, memory=case.memory.plausible(case.rules, case.now))
    decision = _decide(case)
    message = decision.message
    if case.rules.pin is not None and case.pinned is None:
        known = ", ".join(view.name for view in case.views)
        message += (
            f" The annotation deepseek.dev/pin names no tier of this object: allowed are {known}."
        )
    return replace(
        decision,
        message=message,
        promises=_promises(case, decision),
        again_seconds=_again_seconds(decision, case.now),
    )


def _promises(case: Case, decision: Decision) -> tuple[tuple[str, Units], ...]:
    """What the fallbacks' pods that the scheduler has not placed yet will take of what is free."""
    promises: list[tuple[str, Units]] = []
    room = case.room
    for view in case.fallbacks:
        asked = decision.replicas.get(view.name, 0)
        coming = (asked if view.most is None else min(asked, view.most)) - view.seen.num_placed
        if coming > 0 and not (view.seen.over_quota_since or view.seen.refused_since):
            places = room.places(view, coming)
            promises += places
            room = room.less(places)
    return tuple(promises)


def _again_seconds(decision: Decision, now: datetime) -> float | None:
    """After what time to decide anew: what is waited for may come before what is told."""
    memory = decision.memory
    ends = (time for time in (memory.next_attempt, memory.next_step) if time is not None)
    waits = [max(1.0, (end - now).total_seconds()) for end in ends if end > now]
    if decision.again_seconds is not None:
        waits.append(decision.again_seconds)
    return min(waits, default=None)


def _decide(case: Case) -> Decision:
    if not case.fallbacks or case.primary.wanted == 0:
        return primary_serves(case)
    pinned = case.pinned
    if pinned is not None and not pinned.tier.is_primary:
        return _pinned(case, pinned)
    if case.active:
        return promote.on_fallback(case)
    if case.memory.phase == "swapping":
        return swap.go_on(case)
    return _on_primary(case)


def _pinned(case: Case, pinned: View) -> Decision:
    """A person's choice; the others serve on until it answers."""
    is_there = pinned.seen.num_ready > 0
    replicas = {view.name: view.seen.asked for view in case.active if not is_there}
    replicas[pinned.name] = max(1, pinned.wanted)
    replicas[PRIMARY] = 0 if is_there else case.primary.wanted
    memory = started(case, pinned) if case.memory.phase == "primary" else case.memory
    memory = replace(memory, phase="degraded", fallback=pinned.name, next_attempt=None)
    verb = "serves" if is_there else "is being started"
    message = (
        f"Fallback {names([pinned])} {verb}, because the annotation deepseek.dev/pin names it;"
        " remove the annotation to promote the primary."
    )
    return Decision(replicas, True, "Pinned", message, memory)


def _on_primary(case: Case) -> Decision:
    primary, memory = case.primary, case.memory
    is_pinned = case.pinned is not None
    cause = _cause(case) if not is_pinned or case.rolls_via_fallback else None
    if cause is None:
        words = " It is pinned, so no fallback takes over." if is_pinned else ""
        return primary_serves(case, words)
    was_left = memory.phase in {"degraded", "blocked"} and any(
        view.name == memory.fallback for view in case.fallbacks
    )
    # Somebody deleted the Deployment of a fallback that was there: nothing is waited for.
    due = case.now if was_left else cause.due
    wait = (due - case.now).total_seconds()
    if wait > 0:
        message = (
            f"{cause.words}. Unless that changes, a fallback takes over at {stamp(due)},"
            f" after degrade.afterSeconds ({case.rules.degrade_after_seconds:.0f})."
        )
        return Decision({PRIMARY: primary.wanted}, False, "DegradePending", message, memory, wait)
    gives_way = primary.is_hopeless
    chosen = first_that_fits(case, case.fallbacks, without=(primary,) if gives_way else ())
    if chosen is not None:
        return start(case, chosen, cause.words, primary_gives_way=gives_way)
    if case.rolls_via_fallback and primary.seen.num_ready:
        return replace(
            primary_serves(case),
            message="The primary model serves; a change of it waits for free units.",
            again_seconds=LOOK_AGAIN_SECONDS,
            waits_for_capacity=True,
        )
    return no_capacity(case, cause.words, {PRIMARY: primary.wanted})


@dataclass(frozen=True)
class _Cause:
    """Why the primary should be left."""

    due: datetime
    words: str


def _cause(case: Case) -> _Cause | None:
    primary, now = case.primary, case.now
    seen = primary.seen
    if case.rolls_via_fallback:
        return _Cause(now, "a rollout that has no free unit goes through a fallback")
    if seen.num_ready >= primary.needed:
        return None
    few = f"{seen.num_ready} of {primary.wanted} pods answer"
    if case.demand is not None:
        return _Cause(now, f"{few}: {case.demand}")
    if seen.trouble is not None and seen.trouble.reason == "ModelTooLarge":
        return _Cause(now, f"{few}: {seen.trouble.message}")
    since = primary.stuck_since if primary.is_refused else primary.starved_since
    if since is None:
        return None
    return _Cause(since + case.rules.degrade_after, f"{few}: {primary.lack!r}")
