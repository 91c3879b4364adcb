"""A primary that fits only on the units of the fallback that serves: said, or swapped.

Pure. With `promote.strategy: surge` the status says so. With `swap` the fallback is drained first,
which is the one thing that ends the last pod that answers: bounded, and with a back-off when it
does not work out. Where nodes are not seen only a quota's refusal tells of this.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from deepseek_operator.degrade_case import (
    LONGEST_SWAP_BACKOFF_SECONDS,
    LOOK_AGAIN_SECONDS,
    Case,
    Decision,
    Memory,
    names,
    refused,
    stamp,
)
from deepseek_operator.fallbacks import first_that_fits, no_capacity, primary_serves, start
from deepseek_operator.fleet import units
from deepseek_operator.tiers import PRIMARY

BIND_SECONDS = 60.0
"""How long after the fallback has drained the primary may take to be placed."""
SWAP_SECONDS = 900.0
"""How long it may take to answer then, reading its model included."""
SWAP_LOOK_SECONDS = 5.0
"""How often a swap is looked at."""
_QUOTA = re.compile(r"exceeded quota: [^,]+, requested: (.*), used: (.*), limited: (.*)")


def is_blocked(case: Case) -> bool:
    """Whether the primary would fit if the fallback were not there."""
    room, primary = case.room, case.primary
    if primary.is_coming:
        return False
    is_down = primary.seen.asked < primary.wanted
    if _is_blocked_by_quota(case) or (is_down and case.memory.phase == "blocked"):
        return True
    return (
        (is_down or bool(primary.seen.unschedulable_since))
        and room.fits(primary) is False
        and room.fits(primary, case.active) is True
    )


def _is_blocked_by_quota(case: Case) -> bool:
    """Whether the refusal would not have come without the fallback's pods.

    One from before they were made, which was why they were, tells nothing of that.
    """
    refused_at = case.primary.seen.over_quota_since
    found = _QUOTA.search(case.primary.seen.over_quota)
    if found is None or refused_at is None:
        return False
    requested, used, limited = (_amounts(part) for part in found.groups())
    held: Counter[str] = Counter()
    for view in case.active:
        for created, charges in view.seen.charges:
            if created < refused_at:
                held.update(charges)
    return bool(limited) and all(
        requested.get(key, 0) + used.get(key, 0) - held[key] <= most
        for key, most in limited.items()
    )


def _amounts(text: str) -> dict[str, int]:
    amounts = {}
    for part in text.split(","):
        key, _, amount = (word.strip() for word in part.partition("="))
        try:
            amounts[key] = units(key.removeprefix("requests.").removeprefix("limits."), amount)
        except ValueError:
            continue
    return amounts


def wait(case: Case, replicas: Mapping[str, int], memory: Memory) -> Decision:
    """The fallback serves, and is in the primary's way."""
    rules = case.rules
    if memory.phase != "blocked" or memory.since is None:
        memory = replace(memory, phase="blocked", since=case.now)
    since = memory.since or case.now
    message = (
        f"Fallback {names(case.active)} serves, and the primary fits only on its units (since"
        f" {stamp(since)})."
    )
    again = LOOK_AGAIN_SECONDS
    if rules.strategy == "surge":
        message += (
            " Free more units, or set promote.strategy to swap, which drains the fallback first."
        )
    else:
        due = max(since + rules.promote_after, memory.next_attempt or since)
        message += f" The fallback is drained for it at {stamp(due)}."
        again = min(again, max(0.0, (due - case.now).total_seconds()))
    return Decision.until_capacity(replicas, "PromotionBlockedByFallback", message, memory, again)


def is_due(case: Case) -> bool:
    """Whether the primary has been blocked for long enough, and was not tried in vain just now."""
    memory, rules = case.memory, case.rules
    if rules.strategy != "swap" or memory.phase != "blocked" or memory.since is None:
        return False
    is_rested = memory.next_attempt is None or memory.next_attempt <= case.now
    is_time = memory.since + rules.promote_after <= case.now and is_rested
    return is_time and is_blocked(case) and not case.rolls_via_fallback


def begin(case: Case) -> Decision:
    """Drain the fallback."""
    memory = replace(case.memory, phase="swapping", since=case.now)
    return _draining(case, memory, f"Fallback {names(case.active)} is drained")


def go_on(case: Case) -> Decision:
    """The fallback is gone for the primary; it comes back when that does not work out."""
    primary, memory = case.primary, case.memory
    if primary.ready_since is not None:
        return primary_serves(case)
    failure = _failure(case)
    if failure is None:
        return _draining(case, memory, f"Fallback {memory.fallback} was drained")
    words = f"the primary could not take its place back, {failure}"
    memory = refused(case, memory, LONGEST_SWAP_BACKOFF_SECONDS)
    memory = replace(memory, phase="degraded", since=case.now)
    order = sorted(case.fallbacks, key=lambda view: view.name != memory.fallback)
    chosen = first_that_fits(case, order, without=(primary,))
    if chosen is None:
        decision = no_capacity(case, words, {PRIMARY: primary.wanted})
        return replace(decision, memory=memory)
    decision = start(case, chosen, words, primary_gives_way=True)
    return replace(decision, memory=replace(memory, fallback=chosen.name))


def _failure(case: Case) -> str | None:
    """Why the primary will not answer with the fallback's units, as far as that shows yet."""
    primary, seen = case.primary, case.primary.seen
    elapsed = (case.now - (case.memory.since or case.now)).total_seconds()
    refusal = seen.over_quota or seen.refusal
    if refusal and seen.num_pods < primary.needed and elapsed > case.rules.drain_seconds:
        return f"its pods are refused: {refusal!r}"
    if primary.is_hopeless and seen.trouble is not None:
        return seen.trouble.message
    is_waiting = bool(seen.unschedulable_since) and not primary.is_coming
    is_placed = not is_waiting and (seen.bound or not seen.down_since)
    if elapsed > case.rules.drain_seconds + BIND_SECONDS and not is_placed:
        return f"it finds no place even so: {seen.words!r}"
    if elapsed > SWAP_SECONDS:
        return f"it does not answer after {elapsed:.0f} s"
    return None


def _draining(case: Case, memory: Memory, words: str) -> Decision:
    message = f"{words}, so that the primary finds its place; nothing may answer meanwhile."
    primary = case.primary
    # Pods that a quota would refuse while the fallback's are still there are not asked for yet.
    is_draining = any(view.seen.bound or view.seen.num_pods for view in case.fallbacks)
    asked = primary.seen.asked if is_draining and primary.seen.exists else primary.wanted
    return Decision({PRIMARY: asked}, True, "SwapInProgress", message, memory, SWAP_LOOK_SECONDS)
