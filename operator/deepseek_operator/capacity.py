"""What a tier's pods have and lack, and what would fit where.

Pure, and nothing is decided here: `degrade` and `rollout` ask. Times are those on the pods' and
Deployments' own conditions, so they mean the same after a restart of the operator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from deepseek_operator.fleet import ENDED_PHASES, Fleet, Units, Wish, charges_of
from deepseek_operator.kinds import Manifest
from deepseek_operator.pods import Trouble, names_quota, refusal_of, worst_trouble
from deepseek_operator.tiers import Tier

LEAVING_SECONDS = 5.0
"""Pods that end hold their units for their grace period and about this long."""
_HOPELESS = frozenset({"ModelTooLarge", "ModelUnusable", "WorkerCrashing", "ImageUnavailable"})
"""Troubles that waiting does not heal."""


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
    charges: tuple[tuple[datetime, Units], ...] = ()
    """Of each pod, when it was made, and what ResourceQuotas count of it by their keys."""
    unschedulable_since: tuple[datetime, ...] = ()
    """Of each pod for which the scheduler found no node, the earliest first."""
    words: str = ""
    """Why, in the scheduler's or the API server's words."""
    over_quota_since: datetime | None = None
    """Since when the API server refuses pods for a quota."""
    over_quota: str = ""
    """Its words."""
    refused_since: datetime | None = None
    """Since when it refuses them for another reason, such as an admission policy."""
    refusal: str = ""
    """Its words."""
    leaves_at: datetime | None = None
    """When the last pod that is ending will have given back its units."""
    bound: Mapping[str, int] = field(default_factory=dict)
    """By node, pods that hold units there."""
    num_placed: int = 0
    """Pods whose units are counted on their node, or for which there is no node."""
    num_hopeless: int = 0
    """Pods that do not answer, for a reason that waiting does not heal."""
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
        now: For times that are missing, and for pods that have just started.
        is_counted: Whether the units of a pod, as `namespace/name`, are counted on its node;
            absent, as soon as it is bound.
    """
    holding = [pod for pod in pods if pod["status"].get("phase") not in ENDED_PHASES]
    live = [pod for pod in holding if "deletionTimestamp" not in pod["metadata"]]
    ends = [
        _time(pod["metadata"]["deletionTimestamp"], now)
        for pod in holding
        if "deletionTimestamp" in pod["metadata"]
    ]
    ready, down = _ready_and_down(live, now)
    unschedulable = [
        condition
        for pod in live
        if (condition := _condition(pod, "PodScheduled")).get("status") == "False"
        and condition.get("reason") == "Unschedulable"
    ]
    refusal = refusal_of(deployment) or {}
    words = str(refusal.get("message", ""))
    refused_since = _time(refusal.get("lastTransitionTime"), now) if refusal else None
    is_over_quota = names_quota(words)
    return Seen(
        exists=deployment is not None,
        asked=int((deployment or {}).get("spec", {}).get("replicas") or 0),
        ready_since=ready,
        down_since=down,
        charges=tuple(
            (_time(pod["metadata"].get("creationTimestamp"), now), charges_of(pod["spec"]))
            for pod in live
        ),
        unschedulable_since=tuple(
            sorted(_time(condition.get("lastTransitionTime"), now) for condition in unschedulable)
        ),
        words=unschedulable[0].get("message", "") if unschedulable else "",
        over_quota_since=refused_since if is_over_quota else None,
        over_quota=words if is_over_quota else "",
        refused_since=refused_since if not is_over_quota else None,
        refusal=words if not is_over_quota else "",
        leaves_at=max(ends) + timedelta(seconds=LEAVING_SECONDS) if ends else None,
        bound=Counter(node for pod in holding if (node := pod["spec"].get("nodeName"))),
        num_placed=sum(_is_placed(pod, is_counted) for pod in live) + len(unschedulable),
        num_hopeless=sum(_is_hopeless(worst_trouble([pod], now)) for pod in live),
        trouble=worst_trouble(live, now),
    )


def _ready_and_down(
    pods: Iterable[Manifest], now: datetime
) -> tuple[tuple[datetime, ...], tuple[datetime, ...]]:
    """Since when each pod that answers does, and each other one does not; the earliest first."""
    ready: list[datetime] = []
    down: list[datetime] = []
    for pod in pods:
        condition = _condition(pod, "Ready")
        since = condition.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
        (ready if condition.get("status") == "True" else down).append(_time(since, now))
    return tuple(sorted(ready)), tuple(sorted(down))


def _is_placed(pod: Manifest, is_counted: Callable[[str], bool] | None) -> bool:
    metadata = pod["metadata"]
    return bool(pod["spec"].get("nodeName")) and (
        is_counted is None or is_counted(f"{metadata['namespace']}/{metadata['name']}")
    )


def _is_hopeless(trouble: Trouble | None) -> bool:
    return trouble is not None and trouble.reason in _HOPELESS


def _condition(pod: Manifest, kind: str) -> Manifest:
    conditions: list[Manifest] = pod["status"].get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _time(text: str | None, now: datetime) -> datetime:
    return datetime.fromisoformat(text) if text else now


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
    def expected(self) -> int:
        """Pods that it is to have now. A fallback may have found room for fewer than it wants."""
        return self.wanted if self.tier.is_primary else (self.seen.asked or self.wanted)

    @property
    def needed(self) -> int:
        """Pods that have to answer."""
        return max(1, min(self.tier.spec.min_available, self.expected))

    @property
    def is_active(self) -> bool:
        """Whether its Deployment asks for pods."""
        return self.seen.asked > 0

    @property
    def is_hopeless(self) -> bool:
        """Whether no pod answers, for a reason that waiting does not heal."""
        return self.seen.num_ready == 0 and _is_hopeless(self.seen.trouble)

    @property
    def is_coming(self) -> bool:
        """Whether as many pods as have to answer do so, or are on their way to."""
        seen = self.seen
        num_on_their_way = seen.num_pods - len(seen.unschedulable_since) - seen.num_hopeless
        return not self.is_hopeless and num_on_their_way >= self.needed

    @property
    def is_refused(self) -> bool:
        """Whether too few pods are let in: a quota frees up, a policy does not."""
        return self.seen.num_pods < self.needed and self.seen.refused_since is not None

    @property
    def cannot_run(self) -> bool:
        """Whether it is hopeless, or will be if what refuses its pods goes on to."""
        return self.is_hopeless or self.is_refused

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
            down += [seen.over_quota_since] * max(0, self.expected - seen.num_pods)
        if seen.num_ready >= self.needed or not lacking:
            return None
        since = max(min(lacking), self._too_few_since(down))
        # A pod of its own that is ending may be what the new one waits for.
        return max(since, seen.leaves_at) if seen.leaves_at is not None else since

    @property
    def stuck_since(self) -> datetime | None:
        """Since when too few pods answer and waiting alone does not help."""
        if self.is_hopeless:
            return self._too_few_since(self.seen.down_since)
        if self.is_coming:
            return None
        return self.seen.refused_since if self.is_refused else self.starved_since

    def _too_few_since(self, down: Iterable[datetime]) -> datetime:
        """Since when so many are down that fewer than needed are left."""
        times = sorted(down)
        return times[max(0, min(self.expected - self.needed, len(times) - 1))]

    @property
    def lack(self) -> str:
        """What it lacks, in the API server's or the scheduler's words; empty where nothing."""
        return self.seen.over_quota or self.seen.words or self.seen.refusal


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
        back: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for other in without:
            for node, number in other.seen.bound.items():
                for resource, amount in self.requests(other).items():
                    back[node][resource] += amount * number
        return self._fleet.place(self._wishes[view.name], self._promised, back) is not None

    def less(self, places: Iterable[tuple[str, Units]]) -> Room:
        """What is left when units on some nodes are promised as well."""
        promised = self._taken()
        for node, amounts in places:
            promised[node].update(amounts)
        return Room(self._wishes, self._fleet, promised)

    def requests(self, view: View) -> Units:
        """What one pod of a tier asks for."""
        wish = self._wishes.get(view.name)
        return wish.requests if wish is not None else {}

    def places(self, view: View, most: int) -> list[tuple[str, Units]]:
        """The nodes that so many pods would go to, as far as they fit, and the units they take."""
        if self._fleet is None:
            return []
        wish = self._wishes[view.name]
        taken = self._taken()
        found: list[tuple[str, Units]] = []
        for _ in range(most):
            node = self._fleet.place(wish, taken)
            if node is None:
                break
            found.append((node, wish.requests))
            taken[node].update(wish.requests)
        return found

    def _taken(self) -> defaultdict[str, Counter[str]]:
        """What was promised, to add to."""
        taken: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for node, amounts in self._promised.items():
            taken[node].update(amounts)
        return taken
