"""Which tiers of an object run, and when that changes: degrade, promote, and all between.

Pure: what is seen of the tiers, the room there is, what was remembered and the time go in, a
`Decision` comes out. Nothing is kept here. What has to survive a restart is in the cluster (the
times on the pods' conditions, the Deployments there are) or in `Memory`, which the status holds; a
lost memory costs at most one attempt that was being waited for.

The rules, in the order in which `decide` asks:

1. A person's pin wins: the pinned tier serves, and the others go once it answers.
2. On the primary: it is left when fewer than `minAvailable` pods answer and capacity is what lacks,
   for `degrade.afterSeconds`. The first fallback that fits is started.
3. On a fallback: the primary's pods stay pending, so that the scheduler decides when they fit, and
   a tier goes when a better one has been ready for `promote.afterSeconds`. A fallback that finds no
   place itself hands over to the next.
4. A fallback that answers gets more of its pods, and a better fallback is started beside it, with
   units that the primary could not use even together with the fallback's own. Pods of a fallback
   beyond those that are needed go, one at a time, where the primary then fits.
5. Where the primary fits only on the fallback's own units, `surge` says so and `swap` drains the
   fallback first: bounded, and with a back-off when it does not work out.

The operator never ends the last pod that answers, except by a swap, which is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from deepseek_contract.status import DegradedReason
from deepseek_operator.fleet import Fleet, Units, Wish, units
from deepseek_operator.kinds import Manifest
from deepseek_operator.pods import Trouble, names_quota, refusal_of, worst_trouble
from deepseek_operator.tiers import PRIMARY, Tier

Phase = Literal["primary", "degraded", "blocked", "swapping"]

FIRST_BACKOFF_SECONDS = 15.0
LONGEST_BACKOFF_SECONDS = 300.0
"""Pauses before a primary whose pods were refused is tried again: doubling."""
LONGEST_SWAP_BACKOFF_SECONDS = 3600.0
"""The same for a swap that failed, which costs an interruption."""
BIND_SECONDS = 60.0
"""How long after the fallback has drained the primary may take to be placed in a swap."""
SWAP_SECONDS = 900.0
"""How long it may take to answer then, reading its model included."""
LOOK_AGAIN_SECONDS = 30.0
"""How often a decision that waits for capacity is looked at, besides at each change."""
SWAP_LOOK_SECONDS = 5.0
"""How often a swap is looked at."""
TRIAL_SECONDS = 900.0
"""How long a better fallback may take to answer beside one that does."""
LEAVING_SECONDS = 5.0
"""Pods that end hold their units for their grace period and about this long."""
_HOPELESS = frozenset({"ModelTooLarge", "ModelUnusable", "WorkerCrashing", "ImageUnavailable"})
"""Troubles that waiting does not heal."""


# What is seen.


@dataclass(frozen=True)
class Seen:
    """What a tier's Deployment and pods tell. Pods that are ending count only as `bound`."""

    exists: bool = False
    asked: int = 0
    """Pods that the Deployment asks for."""
    ready_since: tuple[datetime, ...] = ()
    """Of each pod that answers, the earliest first."""
    down_since: tuple[datetime, ...] = ()
    """Of each pod that does not, the earliest first."""
    created_at: tuple[datetime, ...] = ()
    """Of each pod, the earliest first."""
    unschedulable_since: tuple[datetime, ...] = ()
    """Of each pod for which the scheduler found no node, the earliest first."""
    words: str = ""
    """Why, in the scheduler's or the API server's words."""
    over_quota_since: datetime | None = None
    """Since when the API server refuses pods for a quota."""
    over_quota: str = ""
    """Its words."""
    leaves_at: datetime | None = None
    """When the last pod that is ending will have given back its units."""
    bound: Mapping[str, int] = field(default_factory=dict)
    """By node, pods that hold units there."""
    num_placed: int = 0
    """Pods whose units are counted on their node, or for which there is no node."""
    trouble: Trouble | None = None

    @property
    def num_ready(self) -> int:
        """Pods that answer."""
        return len(self.ready_since)

    @property
    def num_pods(self) -> int:
        """Pods that are not ending."""
        return len(self.ready_since) + len(self.down_since)


def see(
    deployment: Manifest | None,
    pods: Iterable[Manifest],
    now: datetime,
    is_counted: Callable[[str], bool] | None = None,
) -> Seen:
    """What one tier's Deployment and pods tell.

    Args:
        deployment: The tier's, or None.
        pods: The tier's.
        now: For times that are missing.
        is_counted: Whether the units of a pod, as `namespace/name`, are counted on its node;
            absent, as soon as it is bound.
    """
    live: list[Manifest] = []
    bound: dict[str, int] = {}
    leaves_at: datetime | None = None
    placed = 0
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if node and pod["status"].get("phase") not in {"Succeeded", "Failed"}:
            bound[node] = bound.get(node, 0) + 1
        ends = pod["metadata"].get("deletionTimestamp")
        if ends is not None:
            gone = _time(ends, now) + timedelta(seconds=LEAVING_SECONDS)
            leaves_at = gone if leaves_at is None else max(leaves_at, gone)
        elif pod["status"].get("phase") not in {"Succeeded", "Failed"}:
            live.append(pod)
            metadata = pod["metadata"]
            key = f"{metadata['namespace']}/{metadata['name']}"
            if node and (is_counted is None or is_counted(key)):
                placed += 1
    unschedulable = [
        condition
        for pod in live
        for condition in pod["status"].get("conditions") or []
        if condition["type"] == "PodScheduled"
        and condition["status"] == "False"
        and condition.get("reason") == "Unschedulable"
    ]
    refusal = refusal_of(deployment) or {}
    words = str(refusal.get("message", ""))
    is_over_quota = names_quota(words)
    ready: list[datetime] = []
    down: list[datetime] = []
    for pod in live:
        condition = _ready_condition(pod)
        since = _time(
            condition.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp"), now
        )
        (ready if condition.get("status") == "True" else down).append(since)
    return Seen(
        exists=deployment is not None,
        asked=int((deployment or {}).get("spec", {}).get("replicas") or 0),
        ready_since=tuple(sorted(ready)),
        down_since=tuple(sorted(down)),
        created_at=tuple(
            sorted(_time(pod["metadata"].get("creationTimestamp"), now) for pod in live)
        ),
        unschedulable_since=tuple(
            sorted(_time(found.get("lastTransitionTime"), now) for found in unschedulable)
        ),
        words=unschedulable[0].get("message", "") if unschedulable else "",
        over_quota_since=_time(refusal.get("lastTransitionTime"), now) if is_over_quota else None,
        over_quota=words if is_over_quota else "",
        leaves_at=leaves_at,
        bound=bound,
        num_placed=placed + len(unschedulable),
        trouble=worst_trouble(live),
    )


def _ready_condition(pod: Manifest) -> Manifest:
    for condition in pod["status"].get("conditions") or []:
        if condition["type"] == "Ready":
            found: Manifest = condition
            return found
    return {}


def _time(text: str | None, now: datetime) -> datetime:
    try:
        return datetime.fromisoformat(text) if text else now
    except ValueError:
        return now


@dataclass(frozen=True)
class View:
    """A tier with what is seen of it."""

    tier: Tier
    wanted: int
    """Pods that it has when it serves."""
    seen: Seen
    may_start: bool = True
    """Whether its pods would find their model."""
    most: int | None = None
    """Pods that its tenant's share has room for now; None where that is no limit."""

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    @property
    def needed(self) -> int:
        """Pods that have to answer. A fallback may have found room for fewer than it wants."""
        most = self.wanted if self.tier.is_primary else (self.seen.asked or self.wanted)
        return max(1, min(self.tier.spec.min_available, most))

    @property
    def is_active(self) -> bool:
        """Whether its Deployment asks for pods."""
        return self.seen.asked > 0

    @property
    def ready_since(self) -> datetime | None:
        """Since when as many pods answer as have to."""
        since = self.seen.ready_since
        return since[self.needed - 1] if len(since) >= self.needed else None

    @property
    def starved_since(self) -> datetime | None:
        """Since when too few pods answer while capacity is what lacks."""
        seen = self.seen
        lacking = list(seen.unschedulable_since[:1])
        down = list(seen.down_since)
        if seen.over_quota_since is not None:
            lacking.append(seen.over_quota_since)
            down += [seen.over_quota_since] * max(0, self.wanted - seen.num_pods)
        if seen.num_ready >= self.needed or not lacking:
            return None
        # Too few answer since so many were down that fewer than needed were left.
        enough = max(0, min(self.wanted - self.needed, len(down) - 1))
        since = max(min(lacking), sorted(down)[enough] if down else min(lacking))
        # A pod of its own that is ending may be what the new one waits for.
        return max(since, seen.leaves_at) if seen.leaves_at is not None else since


class Room:
    """What would fit where: the fleet, less what was promised to other objects."""

    def __init__(
        self,
        wishes: Mapping[str, Wish] | None = None,
        fleet: Fleet | None = None,
        promised: Mapping[str, Units] | None = None,
    ) -> None:
        self._wishes = wishes or {}
        self._fleet = fleet if fleet is not None and fleet.is_known else None
        self._promised = promised or {}

    @property
    def is_known(self) -> bool:
        """Whether there is more to go by than what the scheduler says of pods."""
        return self._fleet is not None

    def fits(self, view: View, without: Iterable[View] = ()) -> bool | None:
        """Whether one pod of a tier fits now; None where nobody knows.

        Args:
            view: The tier.
            without: Tiers whose units count as free.
        """
        if self._fleet is None:
            return None
        back: dict[str, dict[str, int]] = {}
        for other in without:
            for node, number in other.seen.bound.items():
                units_back = back.setdefault(node, {})
                for resource, amount in self.requests(other).items():
                    units_back[resource] = units_back.get(resource, 0) + amount * number
        found = self._fleet.place(self._wishes[view.name], self._promised, back)
        return found is not None

    def requests(self, view: View) -> Units:
        """What one pod of a tier asks for."""
        wish = self._wishes.get(view.name)
        return wish.requests if wish is not None else {}

    def places(self, view: View, most: int) -> list[tuple[str, Units]]:
        """The nodes that so many pods would go to, as far as they fit, and the units they take."""
        if self._fleet is None:
            return []
        wish = self._wishes[view.name]
        taken = {node: dict(amounts) for node, amounts in self._promised.items()}
        found: list[tuple[str, Units]] = []
        for _ in range(most):
            node = self._fleet.place(wish, taken)
            if node is None:
                break
            found.append((node, wish.requests))
            on_node = taken.setdefault(node, {})
            for resource, amount in wish.requests.items():
                on_node[resource] = on_node.get(resource, 0) + amount
        return found


# What is remembered and decided.


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
            **{name: _stamp(time) for name, time in times.items() if time is not None},
            **({"fallback": self.fallback} if self.fallback is not None else {}),
            "attempts": self.attempts,
            "generation": self.generation,
            "degradations": self.degradations,
        }


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _stored_time(value: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return time if time is not None and time.tzinfo is not None else None


def _stamp(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def backoff_seconds(attempts: int, longest: float = LONGEST_BACKOFF_SECONDS) -> float:
    """The pause after the n-th attempt (n >= 1) failed."""
    return min(longest, FIRST_BACKOFF_SECONDS * 2.0 ** min(attempts - 1, 20))


@dataclass(frozen=True)
class Rules:
    """What the object says about all this."""

    after_seconds: float = 60
    promote_after_seconds: float = 300
    strategy: Literal["surge", "swap"] = "surge"
    pin: str | None = None
    """The annotation `deepseek.dev/pin`."""
    drain_seconds: float = 45
    """How long a pod may take to end."""


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


def decide(case: Case) -> Decision:
    """The next step of one object."""
    case = replace(case, memory=_plausible(case.memory, case.rules, case.now))
    decision = _decide(case)
    promises: list[tuple[str, Units]] = []
    for view in case.views[1:]:
        # Pods that the scheduler has not placed yet will take what is free now.
        asked = decision.replicas.get(view.name, 0)
        coming = (asked if view.most is None else min(asked, view.most)) - view.seen.num_placed
        if coming > 0 and view.seen.over_quota_since is None:
            promises += case.room.places(view, coming)
    decision = replace(
        decision, promises=tuple(promises), again_seconds=_again_seconds(decision, case.now)
    )
    if case.rules.pin is not None and case.pinned is None:
        known = ", ".join(view.name for view in case.views)
        words = (
            f"The annotation deepseek.dev/pin names no tier of this object: allowed are {known}."
        )
        decision = replace(decision, message=f"{decision.message} {words}")
    return decision


def _again_seconds(decision: Decision, now: datetime) -> float | None:
    """After what time to decide anew: what is waited for may come before what is told."""
    memory = decision.memory
    ends = (time for time in (memory.next_attempt, memory.next_step) if time is not None)
    waits = [max(1.0, (end - now).total_seconds()) for end in ends if end > now]
    if decision.again_seconds is not None:
        waits.append(decision.again_seconds)
    return min(waits, default=None)


def _plausible(memory: Memory, rules: Rules, now: datetime) -> Memory:
    """The memory without times that no pause leads to: a clock that was ahead was set back."""

    def within(time: datetime | None, seconds: float) -> datetime | None:
        return min(time, now + timedelta(seconds=seconds)) if time is not None else None

    longest_step = max(TRIAL_SECONDS, rules.promote_after_seconds)
    return replace(
        memory,
        since=within(memory.since, 0),
        next_attempt=within(memory.next_attempt, LONGEST_SWAP_BACKOFF_SECONDS),
        next_step=within(memory.next_step, longest_step),
    )


def _decide(case: Case) -> Decision:
    if not case.fallbacks or case.primary.wanted == 0:
        return _serving(case, "The primary model is the one that serves.")
    pinned = case.pinned
    if pinned is not None and not pinned.tier.is_primary:
        return _pinned(case, pinned)
    if case.active:
        return _on_fallback(case)
    if case.memory.phase == "swapping":
        return _swapping(case)
    return _on_primary(case)


def _serving(case: Case, message: str) -> Decision:
    """The primary alone, as it should be."""
    memory = Memory(degradations=case.memory.degradations)
    return Decision({PRIMARY: case.primary.wanted}, False, "PrimaryServing", message, memory)


def _pinned(case: Case, pinned: View) -> Decision:
    """A person's choice; the others serve on until it answers."""
    is_there = pinned.seen.num_ready > 0
    replicas = {view.name: view.seen.asked for view in case.active if not is_there}
    replicas[pinned.name] = max(1, pinned.wanted)
    replicas[PRIMARY] = 0 if is_there else case.primary.wanted
    memory = _started(case, pinned) if case.memory.phase == "primary" else case.memory
    memory = replace(memory, phase="degraded", fallback=pinned.name, next_attempt=None)
    verb = "serves" if is_there else "is being started"
    message = (
        f"Fallback {pinned.name} ({pinned.tier.model.source}) {verb}, because the annotation"
        " deepseek.dev/pin names it; remove the annotation to promote the primary."
    )
    return Decision(replicas, True, "Pinned", message, memory)


# On the primary.


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
    since = primary.starved_since
    if since is None:
        return None
    words = seen.over_quota or seen.words
    return _Cause(since + timedelta(seconds=case.rules.after_seconds), f"{few}: {words!r}")


def _on_primary(case: Case) -> Decision:
    memory, rules = case.memory, case.rules
    is_pinned = case.pinned is not None
    cause = _cause(case) if not is_pinned or case.rolls_via_fallback else None
    if cause is None:
        words = " It is pinned, so no fallback takes over." if is_pinned else ""
        return _serving(case, f"The primary model is the one that serves.{_narrower(case)}{words}")
    lost = _by_name(case, memory.fallback) if memory.phase in {"degraded", "blocked"} else None
    if lost is not None and not case.rolls_via_fallback:
        # Its Deployment was there and somebody deleted it, so nothing is waited for.
        cause = replace(cause, due=case.now)
    wait = (cause.due - case.now).total_seconds()
    if wait > 0:
        message = (
            f"{cause.words}. Unless that changes, a fallback takes over at {_stamp(cause.due)},"
            f" after degrade.afterSeconds ({rules.after_seconds:.0f})."
        )
        return Decision(
            {PRIMARY: case.primary.wanted}, False, "DegradePending", message, memory, wait
        )
    gives_way = _is_hopeless(case.primary)
    chosen = _first_that_fits(case, case.fallbacks, primary_gives_way=gives_way)
    if chosen is None and case.rolls_via_fallback and case.primary.seen.num_ready:
        decision = _serving(case, "The primary model serves; a change of it waits for free units.")
        return replace(decision, again_seconds=LOOK_AGAIN_SECONDS, waits_for_capacity=True)
    if chosen is None:
        return _no_capacity(case, cause.words, {PRIMARY: case.primary.wanted})
    return _start(case, chosen, cause.words, primary_gives_way=gives_way)


def _by_name(case: Case, name: str | None) -> View | None:
    return next((view for view in case.fallbacks if view.name == name), None)


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


def _first_that_fits(
    case: Case, candidates: Iterable[View], *, primary_gives_way: bool
) -> View | None:
    """The first that has its model and a place; where nobody knows of places, the first."""
    without = (case.primary,) if primary_gives_way else ()
    for view in candidates:
        if view.may_start and case.room.fits(view, without) is not False:
            return view
    return None


def _is_hopeless(view: View) -> bool:
    trouble = view.seen.trouble
    return view.seen.num_ready == 0 and trouble is not None and trouble.reason in _HOPELESS


def _no_capacity(case: Case, words: str, replicas: Mapping[str, int]) -> Decision:
    not_there = [view.name for view in case.fallbacks if not view.may_start]
    extra = f" Models of {', '.join(not_there)} are not there yet." if not_there else ""
    message = (
        f"Neither the primary nor any fallback fits: {words}. No node that the pods may use has"
        f" enough free units.{extra} Free some, add nodes, or add a smaller fallback."
    )
    return Decision(
        replicas, True, "NoCapacity", message, case.memory, LOOK_AGAIN_SECONDS,
        waits_for_capacity=True,
    )  # fmt: skip


def _started(case: Case, chosen: View) -> Memory:
    degradations = case.memory.degradations + 1
    return Memory("degraded", case.now, chosen.name, degradations=degradations)


def _start(case: Case, chosen: View, words: str, *, primary_gives_way: bool = False) -> Decision:
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
    memory = _started(case, chosen)
    is_in_the_way = primary_gives_way and room.fits(chosen) is not True
    if primary.seen.over_quota_since is not None or is_in_the_way:
        replicas[PRIMARY] = primary.seen.num_ready
        memory = _refused(case, memory)
    # Pods of a fallback that wait would take the units that the primary waits for.
    fitting = len(room.places(chosen, chosen.wanted)) if room.is_known else chosen.needed
    replicas[chosen.name] = max(1, fitting)
    message = (
        f"Fallback {chosen.name} ({chosen.tier.model.source}) is being started, since {words}."
    )
    return Decision(replicas, True, "FallbackStarting", message, memory, LOOK_AGAIN_SECONDS)


def _refused(case: Case, memory: Memory, longest: float = LONGEST_BACKOFF_SECONDS) -> Memory:
    attempts = memory.attempts + 1
    pause = timedelta(seconds=backoff_seconds(attempts, longest))
    return replace(
        memory, attempts=attempts, next_attempt=case.now + pause, generation=case.generation
    )


# On a fallback.


def _on_fallback(case: Case) -> Decision:
    settled = _settled(case)
    if settled is not None and settled.tier.is_primary:
        return _serving(case, f"The primary model is the one that serves.{_narrower(case)}")
    kept = {
        view.name: view.seen.asked
        for view in case.active
        if settled is None or view.tier.rank <= settled.tier.rank
    }
    if _swap_is_due(case):
        memory = replace(case.memory, phase="swapping", since=case.now)
        words = f"Fallback {_names(case.active)} is drained"
        return _swap_goes_on(case, memory, words)
    asked, memory = _primary_beside(case)
    if len(kept) < len(case.active):
        memory = replace(memory, next_step=None)
    replicas = {PRIMARY: asked, **kept}
    if case.primary.ready_since is not None and not case.rolls_via_fallback:
        return _promoting(case, replicas, memory)
    if not any(view.seen.num_ready for view in case.active):
        return _fallback_missing(case, replicas, memory)
    replicas, memory = _bettered(case, replicas, memory)
    if _is_blocked(case):
        return _blocked(case, replicas, memory)
    primary = case.primary.seen
    is_undecided = primary.num_pods < case.primary.wanted and primary.over_quota_since is None
    if memory.phase == "blocked" and not is_undecided:
        memory = replace(memory, phase="degraded", since=case.now)
    return _waiting(case, replicas, memory)


def _bettered(
    case: Case, replicas: dict[str, int], memory: Memory
) -> tuple[dict[str, int], Memory]:
    """More or fewer pods of the fallback that answers, or a better one beside it.

    Nothing is taken that the primary waits for: only where it would not fit even with the
    fallbacks' own units back are free units used, and pods that are not needed are given back as
    soon as it would.
    """
    serving = next(view for view in case.active if view.seen.num_ready)
    trials = [view for view in case.active if view.tier.rank < serving.tier.rank]
    if trials:
        return _trying(case, serving, trials, replicas, memory)
    seen = serving.seen
    if seen.over_quota_since is not None and serving.needed <= seen.num_pods < seen.asked:
        # The others were one too many for a quota.
        return {**replicas, serving.name: seen.num_pods}, _paused(case, memory)
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
    wait = timedelta(seconds=case.rules.promote_after_seconds)
    grown = {**replicas, serving.name: seen.asked + more}
    return grown, replace(memory, next_step=case.now + wait) if more else memory


def _trying(
    case: Case, serving: View, trials: list[View], replicas: dict[str, int], memory: Memory
) -> tuple[dict[str, int], Memory]:
    """Better fallbacks that were started beside the one that answers, and do not answer yet."""
    failed = {view.name for view in trials if _has_failed(case, view)}
    if failed:
        kept = {name: number for name, number in replicas.items() if name not in failed}
        return kept, replace(_paused(case, memory), fallback=serving.name)
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
    wait = timedelta(seconds=case.rules.promote_after_seconds)
    is_steady = serving.ready_since is not None and serving.ready_since + wait <= case.now
    if better.tier.is_primary or not is_steady:
        return replicas, memory
    number = max(1, len(case.room.places(better, better.wanted)))
    until = case.now + timedelta(seconds=TRIAL_SECONDS)
    tried = replace(memory, fallback=better.name, next_step=until)
    return {**replicas, better.name: number}, tried


def _paused(case: Case, memory: Memory) -> Memory:
    return replace(memory, next_step=case.now + timedelta(seconds=LONGEST_BACKOFF_SECONDS))


def _has_failed(case: Case, trial: View) -> bool:
    """Whether a better fallback that was started finds no place, cannot run, or takes too long."""
    since = trial.starved_since
    wait = timedelta(seconds=case.rules.after_seconds)
    is_late = case.memory.next_step is not None and case.memory.next_step <= case.now
    return _is_hopeless(trial) or is_late or (since is not None and since + wait <= case.now)


def _standing(case: Case, view: View) -> Literal["fits", "blocked", "away"]:
    """Whether a better tier than the one that serves fits, or would with the fallbacks' units."""
    room, seen = case.room, view.seen
    if view.tier.is_primary:
        if _is_blocked(case):
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
    is_changing = seen.leaves_at is not None or seen.num_pods != seen.asked
    return seen.asked if is_changing else seen.asked - 1


def _settled(case: Case) -> View | None:
    """The best tier that has been ready for long enough to do without those after it."""
    wait = timedelta(seconds=case.rules.promote_after_seconds)
    for view in (case.primary, *case.active):
        since = view.ready_since
        if since is None or (view.tier.is_primary and case.rolls_via_fallback):
            continue
        is_wanted_now = view.tier.is_primary and case.rules.pin == PRIMARY
        if is_wanted_now or since + wait <= case.now:
            return view
    return None


def _primary_beside(case: Case) -> tuple[int, Memory]:
    """How many pods the primary asks for beside a fallback, and what to remember of it.

    They stay pending where nodes are what lacks. Where a quota does, or where they can never
    answer and hold units, they are scaled down to those that answer, and tried again later.
    """
    primary, memory = case.primary, case.memory
    if memory.phase == "primary":
        # Whoever started the fallback ended before the status told, or it was lost since.
        memory = _started(case, case.active[0])
    seen = primary.seen
    is_down = seen.exists and seen.asked < primary.wanted
    if is_down:
        is_due = memory.next_attempt is None or memory.next_attempt <= case.now
        if memory.generation == case.generation and not is_due:
            return seen.asked, memory
        return primary.wanted, replace(memory, next_attempt=None)
    is_enough = any(view.ready_since for view in case.active)
    is_refused = any(view.seen.over_quota_since for view in case.active)
    holds_quota = is_refused and seen.down_since and not is_enough
    if seen.over_quota_since is not None or holds_quota:
        return seen.num_ready, _refused(case, memory)
    return primary.wanted, memory


def _promoting(case: Case, replicas: Mapping[str, int], memory: Memory) -> Decision:
    since = case.primary.ready_since or case.now
    due = since + timedelta(seconds=case.rules.promote_after_seconds)
    message = (
        f"The primary has been ready since {_stamp(since)} and serves beside fallback"
        f" {_names(case.active)}, which goes at {_stamp(due)}, after promote.afterSeconds"
        f" ({case.rules.promote_after_seconds:.0f})."
    )
    memory = replace(memory, phase="degraded", attempts=0)
    wait = max(0.0, (due - case.now).total_seconds())
    return Decision(replicas, True, "Promoting", message, memory, wait)


def _names(views: Iterable[View]) -> str:
    return " and ".join(f"{view.name} ({view.tier.model.source})" for view in views)


def _fallback_missing(case: Case, replicas: dict[str, int], memory: Memory) -> Decision:
    """The fallback does not answer yet; if it finds no place, another one may."""
    current = case.active[-1]
    since = current.starved_since
    if since is None:
        message = f"Fallback {_names(case.active)} is being started."
        return Decision(replicas, True, "FallbackStarting", message, memory, LOOK_AGAIN_SECONDS)
    words = current.seen.over_quota or current.seen.words
    due = since + timedelta(seconds=case.rules.after_seconds)
    wait = (due - case.now).total_seconds()
    if wait > 0:
        message = f"Fallback {current.name} finds no place: {words!r}."
        return Decision(
            replicas, True, "FallbackStarting", message, memory, wait, waits_for_capacity=True
        )
    following = [view for view in case.fallbacks if view.tier.rank > current.tier.rank]
    if case.room.fits(current) is False:
        following += [view for view in case.fallbacks if view.tier.rank < current.tier.rank]
    chosen = _first_that_fits(case, following, primary_gives_way=False)
    if chosen is None:
        return replace(_no_capacity(case, repr(words), replicas), memory=memory)
    decision = _start(case, chosen, f"fallback {current.name} finds no place: {words!r}")
    # Nothing of the earlier fallback answers, so nothing is lost with it.
    return replace(
        decision,
        replicas={PRIMARY: replicas[PRIMARY], chosen.name: decision.replicas[chosen.name]},
        memory=replace(memory, since=case.now, fallback=chosen.name),
    )


def _is_blocked(case: Case) -> bool:
    """Whether the primary would fit if the fallback were not there."""
    room, primary = case.room, case.primary
    is_down = primary.seen.asked < primary.wanted
    if _is_blocked_by_quota(case) or (is_down and case.memory.phase == "blocked"):
        return True
    return (
        (is_down or bool(primary.seen.unschedulable_since))
        and room.fits(primary) is False
        and room.fits(primary, case.active) is True
    )


def _swap_is_due(case: Case) -> bool:
    """Whether the primary has been blocked for long enough, and was not tried in vain just now."""
    memory, rules = case.memory, case.rules
    if rules.strategy != "swap" or memory.phase != "blocked" or memory.since is None:
        return False
    due = memory.since + timedelta(seconds=rules.promote_after_seconds)
    is_rested = memory.next_attempt is None or memory.next_attempt <= case.now
    return due <= case.now and is_rested and _is_blocked(case) and not case.rolls_via_fallback


def _blocked(case: Case, replicas: dict[str, int], memory: Memory) -> Decision:
    rules = case.rules
    if memory.phase != "blocked" or memory.since is None:
        memory = replace(memory, phase="blocked", since=case.now)
    since = memory.since or case.now
    message = (
        f"Fallback {_names(case.active)} serves, and the primary fits only on its units (since"
        f" {_stamp(since)})."
    )
    if rules.strategy == "surge":
        message += (
            " Free more units, or set promote.strategy to swap, which drains the fallback first."
        )
        again = LOOK_AGAIN_SECONDS
        return Decision(
            replicas, True, "PromotionBlockedByFallback", message, memory, again,
            waits_for_capacity=True,
        )  # fmt: skip
    due = since + timedelta(seconds=rules.promote_after_seconds)
    if memory.next_attempt is not None:
        due = max(due, memory.next_attempt)
    message += f" The fallback is drained for it at {_stamp(due)}."
    wait = max(0.0, (due - case.now).total_seconds())
    return Decision(
        replicas, True, "PromotionBlockedByFallback", message, memory,
        min(wait, LOOK_AGAIN_SECONDS), waits_for_capacity=True,
    )  # fmt: skip


def _waiting(case: Case, replicas: dict[str, int], memory: Memory) -> Decision:
    seen = case.primary.seen
    words = seen.over_quota or seen.words or (seen.trouble.message if seen.trouble else "")
    reason = f": {words!r}" if words else "."
    message = (
        f"Fallback {_names(case.active)} serves, {seen.num_ready} of {case.primary.wanted} pods of"
        f" the primary answer{reason}"
    )
    if not case.room.is_known:
        message += (
            " The operator may not see nodes here, so only the scheduler tells when the primary"
            " fits, and a swap is never tried."
        )
    return Decision(
        replicas, True, "FallbackServing", message, memory, LOOK_AGAIN_SECONDS,
        waits_for_capacity=True,
    )  # fmt: skip


# A swap.


def _swap_goes_on(case: Case, memory: Memory, words: str) -> Decision:
    message = f"{words}, so that the primary finds its place; nothing may answer meanwhile."
    primary = case.primary
    # Pods that a quota would refuse while the fallback's are still there are not asked for yet.
    is_draining = any(view.seen.bound or view.seen.num_pods for view in case.fallbacks)
    asked = primary.seen.asked if is_draining and primary.seen.exists else primary.wanted
    return Decision({PRIMARY: asked}, True, "SwapInProgress", message, memory, SWAP_LOOK_SECONDS)


def _swapping(case: Case) -> Decision:
    """The fallback is gone for the primary; it comes back when that does not work out."""
    primary, memory = case.primary, case.memory
    if primary.ready_since is not None:
        return _serving(case, f"The primary model is the one that serves.{_narrower(case)}")
    elapsed = (case.now - (memory.since or case.now)).total_seconds()
    is_placed = bool(primary.seen.bound) or not primary.seen.down_since
    failure = None
    if primary.seen.over_quota_since is not None and elapsed > case.rules.drain_seconds:
        failure = f"its pods are refused: {primary.seen.over_quota!r}"
    elif _is_hopeless(primary):
        failure = primary.seen.trouble.message if primary.seen.trouble else ""
    elif elapsed > case.rules.drain_seconds + BIND_SECONDS and (
        primary.seen.unschedulable_since or not is_placed
    ):
        failure = f"it finds no place even so: {primary.seen.words!r}"
    elif elapsed > SWAP_SECONDS:
        failure = f"it does not answer after {elapsed:.0f} s"
    if failure is None:
        return _swap_goes_on(case, memory, f"Fallback {memory.fallback} was drained")
    order = sorted(case.fallbacks, key=lambda view: view.name != memory.fallback)
    chosen = _first_that_fits(case, order, primary_gives_way=True)
    words = f"the primary could not take its place back, {failure}"
    failed = _refused(case, memory, LONGEST_SWAP_BACKOFF_SECONDS)
    if chosen is None:
        decision = _no_capacity(case, words, {PRIMARY: primary.wanted})
        return replace(decision, memory=replace(failed, phase="degraded", since=case.now))
    decision = _start(case, chosen, words, primary_gives_way=True)
    return replace(
        decision,
        memory=replace(failed, phase="degraded", since=case.now, fallback=chosen.name),
    )


# Quota, as far as a refusal tells.

_QUOTA = re.compile(r"exceeded quota: [^,]+, requested: (.*), used: (.*), limited: (.*)")


def _is_blocked_by_quota(case: Case) -> bool:
    """Whether the refusal would not have come without the fallback's pods.

    One from before they were made, which was why they were, tells nothing of that.
    """
    refused_at = case.primary.seen.over_quota_since
    found = _QUOTA.search(case.primary.seen.over_quota)
    if found is None or refused_at is None:
        return False
    requested, used, limited = (_amounts(part) for part in found.groups())
    held: dict[str, int] = {}
    for view in case.active:
        number = sum(created < refused_at for created in view.seen.created_at)
        for resource, amount in case.room.requests(view).items():
            held[resource] = held.get(resource, 0) + amount * number
        held["pods"] = held.get("pods", 0) + number
    return bool(limited) and all(
        requested.get(key, 0) + used.get(key, 0) - held.get(key.removeprefix("requests."), 0)
        <= most
        for key, most in limited.items()
    )


def _amounts(text: str) -> dict[str, int]:
    amounts = {}
    for part in text.split(","):
        key, _, amount = part.partition("=")
        try:
            amounts[key.strip()] = units(key.strip().removeprefix("requests."), amount.strip())
        except ValueError:
            continue
    return amounts
