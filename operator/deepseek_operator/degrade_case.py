"""What one decision about an object's tiers is made from, what it is, and what outlives it.

Nothing is kept here. What has to survive a restart is in the cluster (the times on the pods'
conditions, the Deployments there are) or in `Memory`, which the status holds; a lost memory costs
at most one attempt that was being waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from deepseek_contract.status import DegradedReason
from deepseek_operator.capacity import Room, View
from deepseek_operator.fleet import Units

Phase = Literal["primary", "degraded", "blocked", "swapping"]

FIRST_BACKOFF_SECONDS = 15.0
LONGEST_BACKOFF_SECONDS = 300.0
"""Pauses before a primary whose pods were refused is tried again: doubling."""
LONGEST_SWAP_BACKOFF_SECONDS = 3600.0
"""The same for a swap that failed, which costs an interruption."""
LOOK_AGAIN_SECONDS = 30.0
"""How often a decision that waits for capacity is looked at, besides at each change."""
TRIAL_SECONDS = 900.0
"""How long a better fallback may take to answer beside one that does."""


@dataclass(frozen=True)
class Memory:
    """What the status keeps from one decision to the next."""

    phase: Phase = "primary"
    since: datetime | None = None
    """When the phase began."""
    fallback: str | None = None
    """The fallback that was started last."""
    attempts: int = 0
    """Refused primaries or failed swaps in a row."""
    next_attempt: datetime | None = None
    """Until when the primary is not tried again."""
    next_step: datetime | None = None
    """Until when the fallback gets no more pods and no better one is tried beside it."""
    generation: int = 0
    """The object's, when the primary was last refused: a changed spec is tried at once."""
    degradations: int = 0
    """How often a fallback took over."""

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> Memory:
        """Read the status; what is not understood there is forgotten."""
        stored = stored or {}
        phase = stored.get("phase")
        if phase not in {"degraded", "blocked", "swapping"}:
            return cls(degradations=_count(stored.get("degradations")))
        return cls(
            phase=phase,
            since=_stored_time(stored.get("since")),
            fallback=stored.get("fallback") if isinstance(stored.get("fallback"), str) else None,
            attempts=_count(stored.get("attempts")),
            next_attempt=_stored_time(stored.get("nextAttemptTime")),
            next_step=_stored_time(stored.get("nextStepTime")),
            generation=_count(stored.get("generation")),
            degradations=_count(stored.get("degradations")),
        )

    def document(self) -> dict[str, Any] | None:
        """For the status; None while there is nothing to remember."""
        if self == Memory():
            return None
        times = {
            "since": self.since,
            "nextAttemptTime": self.next_attempt,
            "nextStepTime": self.next_step,
        }
        return {
            "phase": self.phase,
            **{name: stamp(time) for name, time in times.items() if time is not None},
            **({"fallback": self.fallback} if self.fallback is not None else {}),
            "attempts": self.attempts,
            "generation": self.generation,
            "degradations": self.degradations,
        }

    def plausible(self, rules: Rules, now: datetime) -> Memory:
        """Without times that no pause leads to: a clock that was ahead was set back."""

        def within(time: datetime | None, seconds: float) -> datetime | None:
            return min(time, now + timedelta(seconds=seconds)) if time is not None else None

        return replace(
            self,
            since=within(self.since, 0),
            next_attempt=within(self.next_attempt, LONGEST_SWAP_BACKOFF_SECONDS),
            next_step=within(self.next_step, max(TRIAL_SECONDS, rules.promote_after_seconds)),
        )


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _stored_time(value: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return time if time is not None and time.tzinfo is not None else None


def stamp(time: datetime) -> str:
    """A time as the API server writes it."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Rules:
    """What the object says about all this."""

    degrade_after_seconds: float = 60
    promote_after_seconds: float = 300
    strategy: Literal["surge", "swap"] = "surge"
    pin: str | None = None
    """The annotation `deepseek.dev/pin`."""
    drain_seconds: float = 45
    """How long a pod may take to end."""

    @property
    def degrade_after(self) -> timedelta:
        """How long capacity has to be what lacks."""
        return timedelta(seconds=self.degrade_after_seconds)

    @property
    def promote_after(self) -> timedelta:
        """How long a better tier has to be ready before a worse one goes."""
        return timedelta(seconds=self.promote_after_seconds)


@dataclass(frozen=True)
class Case:
    """All that one decision is made from."""

    views: tuple[View, ...]
    """The primary first."""
    rules: Rules
    room: Room
    memory: Memory
    now: datetime
    generation: int = 0
    demand: str | None = None
    """Why the recovery ladder wants a fallback at once, if it does."""
    rolls_via_fallback: bool = False
    """Whether the primary's pods are to be replaced while a fallback serves."""

    @property
    def primary(self) -> View:
        """The first tier."""
        return self.views[0]

    @property
    def fallbacks(self) -> tuple[View, ...]:
        """All other tiers."""
        return self.views[1:]

    @property
    def active(self) -> tuple[View, ...]:
        """The fallbacks that run."""
        return tuple(view for view in self.fallbacks if view.is_active)

    @property
    def pinned(self) -> View | None:
        """The tier that a person wants, where there is one of that name."""
        return next((view for view in self.views if view.name == self.rules.pin), None)


@dataclass(frozen=True)
class Decision:
    """Which tiers run now, and what is said about it."""

    replicas: Mapping[str, int]
    """Pods by tier."""
    degraded: bool
    reason: DegradedReason
    message: str
    memory: Memory
    again_seconds: float | None = None
    """After what time to decide anew, if nothing happens before."""
    waits_for_capacity: bool = False
    """Whether free units anywhere may change the decision."""
    promises: tuple[tuple[str, Units], ...] = ()
    """Nodes and units that the pods will take that are not bound yet."""

    @classmethod
    def until_capacity(
        cls,
        replicas: Mapping[str, int],
        reason: DegradedReason,
        message: str,
        memory: Memory,
        again_seconds: float = LOOK_AGAIN_SECONDS,
    ) -> Decision:
        """Degraded, until free units anywhere may change that."""
        return cls(replicas, True, reason, message, memory, again_seconds, waits_for_capacity=True)


def backoff_seconds(attempts: int, longest: float = LONGEST_BACKOFF_SECONDS) -> float:
    """The pause after the n-th attempt (n >= 1) failed."""
    return min(longest, FIRST_BACKOFF_SECONDS * 2.0 ** min(attempts - 1, 20))


def started(case: Case, chosen: View) -> Memory:
    """The memory once a fallback takes over from the primary."""
    degradations = case.memory.degradations + 1
    return Memory("degraded", case.now, chosen.name, degradations=degradations)


def refused(case: Case, memory: Memory, longest: float = LONGEST_BACKOFF_SECONDS) -> Memory:
    """The memory once the primary was tried in vain."""
    attempts = memory.attempts + 1
    pause = timedelta(seconds=backoff_seconds(attempts, longest))
    return replace(
        memory, attempts=attempts, next_attempt=case.now + pause, generation=case.generation
    )


def paused(case: Case, memory: Memory) -> Memory:
    """The memory once more of a fallback, or a better one, was tried in vain."""
    return replace(memory, next_step=case.now + timedelta(seconds=LONGEST_BACKOFF_SECONDS))


def names(views: Iterable[View]) -> str:
    """Tiers with their models, for a message."""
    return " and ".join(f"{view.name} ({view.tier.model.source})" for view in views)
