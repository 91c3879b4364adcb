"""Who may use how much GPU memory: shares of the cluster, dealt into whole units.

Pure; time is an argument. `deal` goes from tenants, what the cluster has and what they ask for to
a share for each tenant, ResourceQuotas for its namespaces and limits for its deployments. Equal
input gives an equal result, whatever the order, and the result of a deal moves nothing in the next
one as long as nobody asks for something else.

A share is built up in stages, each of which hands out what the ones before it left:

1. to each tenant what it asks for of its guarantee, and one unit more so that it can ask;
2. what is asked for beyond guarantees, by weight;
3. past use, which decays: who used memory until lately finds it there when he comes back;
4. the rest of the guarantees;
5. the rest of the cluster, by weight.

No stage goes above a tenant's cap, and all work in whole units of the tenant's partition: caps
and guarantees are percentages of the whole cluster's bytes, rounded down to units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deepseek_operator.devices import (
    GPU,
    VGPU,
    VGPU_MEMORY,
    VGPU_MEMORY_PERCENT,
    Stock,
    Supply,
)

CHANGE_POINTS = 5
"""Past use that differs by less from what was last told moves no quota."""
SHRINK_MARGIN_SECONDS = 15.0
"""Between the order to end a pod and its end there is its draining and this."""
ROOM_TO_ASK_BYTES = 2**30
"""A tenant below its guarantee has room for one unit, and of tiny units for so many bytes."""


@dataclass(frozen=True)
class Claim:
    """A tenant, as far as its share depends on it."""

    name: str
    namespaces: tuple[str, ...]
    """Those that are its own: one that an older tenant names is not."""
    min_percent: int
    max_percent: int
    partition: str
    weight: int = 100
    max_percent_per_card: int | None = None
    is_dynamic: bool = True
    past_bytes: int = 0
    """Past use as it was last told (see `decayed`)."""


@dataclass(frozen=True)
class Workload:
    """Pods that ask for the same units."""

    namespace: str
    name: str
    resource: str
    units: int
    """A pod asks for."""
    wanted: int
    """Pods that a deployment is to have."""
    running: int = 0
    """Pods that exist: a quota counts them from their creation."""
    priority: int = 0
    created: str = ""
    tier: str = ""
    """Of a deployment; empty for pods of somebody else, which nobody here can end."""
    drain_seconds: float = 0.0
    """How long one of its pods may take to end."""
    partition: str = ""
    """Which a deployment's pods are for; pods of somebody else count by resource name alone."""

    @property
    def is_ours(self) -> bool:
        """Whether the operator sets the number of these pods."""
        return bool(self.tier)

    @property
    def asked_units(self) -> int:
        """What it is about: somebody else's pods are all there already."""
        return self.units * (self.wanted if self.is_ours else self.running)

    @property
    def key(self) -> WorkloadKey:
        """What limits go by."""
        return (self.namespace, self.name, self.tier)


WorkloadKey = tuple[str, str, str]


@dataclass(frozen=True)
class PodLimit:
    """How many pods of a tier its tenant's share has room for."""

    now: int
    """The most there may be now: those that run may go on for the grace period."""
    soon: int
    """The most there may be after that; an autoscaler is told at once."""
    message: str
    """Why, for people."""


@dataclass(frozen=True)
class TenantDeal:
    """What one tenant gets."""

    share_units: int
    unit_bytes: int
    cap_units: int
    guarantee_units: int
    """After guarantees were made to fit the cluster."""
    promised_units: int
    """What the tenant's `minPercent` comes to."""
    hard: Mapping[str, Mapping[str, int]]
    """By namespace: what its ResourceQuota says."""
    limits: Mapping[WorkloadKey, int]
    """The most pods of each deployment that cannot have all it wants."""
    too_large: Collection[WorkloadKey] = ()
    """Deployments one pod of which is more than the cap, or more than the cap of a card."""
    outside: Collection[WorkloadKey] = ()
    """Deployments whose pods are for another partition than the tenant's."""
    num_barred: int = 0
    """Running pods of deployments that may have none, whatever the share has room for. No share is
    made larger for them: they hold what they hold until the grace period has ended them."""
    asked_units: int = 0
    running_units: int = 0
    """Under the partition's resource names, which are what a quota counts by: pods of another
    partition that shares a name are among them."""
    foreign_units: int = 0
    """Units of running pods that are not of deployments."""

    @property
    def share_bytes(self) -> int:
        """The share in bytes."""
        return self.share_units * self.unit_bytes

    @property
    def excess_units(self) -> int:
        """Running beyond the share."""
        return max(0, self.running_units - self.share_units)

    @property
    def is_over(self) -> bool:
        """Whether pods run that have to end."""
        return self.excess_units > 0 or self.num_barred > 0


@dataclass(frozen=True)
class _Entry:
    """A tenant among those of its partition, in units."""

    claim: Claim
    least: int
    most: int
    asked: int
    past: int
    room: int

    @property
    def now(self) -> int:
        """What it asks for, and room to ask for more."""
        return min(self.most, max(self.asked, min(self.least, self.asked + self.room)))


def decayed(past_bytes: float, used_bytes: int, seconds: float, half_life_seconds: float) -> float:
    """Past use a while later, if so much was used meanwhile.

    It moves half the way to what is used in each half-life: steady use is its own past. A clock
    that went back moves nothing.
    """
    kept: float = 0.5 ** (max(0.0, seconds) / half_life_seconds)
    return used_bytes + (past_bytes - used_bytes) * kept


def is_news(told_bytes: int, bytes_now: float, total_bytes: int) -> bool:
    """Whether past use is so far from what was last told that it is told again."""
    return abs(bytes_now - told_bytes) * 100 >= CHANGE_POINTS * max(1, total_bytes)


def deal(
    supply: Supply,
    claims: Iterable[Claim],
    workloads: Iterable[Workload],
    held_outside: Mapping[str, int] | None = None,
) -> dict[str, TenantDeal]:
    """The share of each tenant, by its name.

    Args:
        supply: What the nodes offer.
        claims: The tenants.
        workloads: What is asked for and held in their namespaces.
        held_outside: By resource name, units on nodes that pods of no tenant hold: these can be
            given to nobody, though percentages are of all there is.
    """
    by_namespace: dict[str, list[Workload]] = {}
    for workload in workloads:
        by_namespace.setdefault(workload.namespace, []).append(workload)
    by_partition: dict[str, list[Claim]] = {}
    for claim in sorted(claims, key=lambda claim: claim.name):
        by_partition.setdefault(claim.partition, []).append(claim)
    dealt: dict[str, TenantDeal] = {}
    for partition, members in by_partition.items():
        stock = supply.stocks.get(partition, Stock({}, 0)).without(held_outside or {})
        asking = {
            claim.name: [
                workload
                for namespace in claim.namespaces
                for workload in by_namespace.get(namespace, ())
                if workload.partition == partition or workload.resource in stock.counts
            ]
            for claim in members
        }
        for name, tenant in _deal_partition(supply, stock, members, asking).items():
            mine = next(claim for claim in members if claim.name == name)
            outside = [
                workload
                for namespace in mine.namespaces
                for workload in by_namespace.get(namespace, ())
                if workload.is_ours and workload.partition != partition
            ]
            keys = frozenset(workload.key for workload in outside)
            dealt[name] = replace(
                tenant,
                limits={**tenant.limits, **dict.fromkeys(keys, 0)},
                outside=keys,
                num_barred=tenant.num_barred + sum(workload.running for workload in outside),
            )
    return dealt


def standing_units(written: int, enforced: int | None, used: int) -> int:
    """Units that the pods of a namespace may come to hold, whatever is written next.

    The quota controller may have seen what was written since it was last heard of, so that what it
    enforces can be either.

    Args:
        written: What the ResourceQuota says.
        enforced: What the quota controller last told that it enforces; None before it has.
        used: What it last counted.
    """
    return max(written, enforced or 0, used)


def written_now(
    hard: Mapping[str, int],
    share: int,
    written: Mapping[str, int],
    standing: Mapping[str, int],
) -> dict[str, int]:
    """The part of a tenant's new quotas that can be written without a moment above its share.

    A smaller quota ends no pod, and holds only once the quota controller has seen it. So what one
    namespace gets more waits until another has really less. What stands is the most that can be
    held, not what is: while that is above the share nothing is raised, not even within it.

    Args:
        hard: By place, what was dealt.
        share: What the tenant may use.
        written: By place, what its quota says now; a place without a quota is not in it.
        standing: By place, what can be held there now (see `standing_units`).
    """
    left = share - sum(standing.values())
    now = {}
    for place in sorted(hard):
        has, stands = written.get(place, 0), standing.get(place, 0)
        if left < 0:
            now[place] = min(hard[place], has)
            continue
        more = min(left, max(0, hard[place] - stands))
        left -= more
        now[place] = min(hard[place], stands + more)
    return now


def starts_to_shrink(over_since: float, grace_seconds: float, drain_seconds: float) -> float:
    """When pods beyond a share are ended: as late as lets them drain within the grace period."""
    return over_since + max(0.0, grace_seconds - drain_seconds - SHRINK_MARGIN_SECONDS)


def most_pods(limit: int | None, running: int, *, may_end_pods: bool) -> int | None:
    """How many pods a deployment may have now; None for no limit.

    Until the grace period asks for their end, those that run may go on.
    """
    if limit is None or may_end_pods:
        return limit
    return max(limit, running)


def _deal_partition(
    supply: Supply,
    stock: Stock,
    members: Sequence[Claim],
    asking: Mapping[str, Sequence[Workload]],
) -> dict[str, TenantDeal]:
    unit = stock.unit_bytes
    promised = {
        claim.name: _units(supply.total_bytes, claim.min_percent, unit) for claim in members
    }
    granted = _scaled(promised, stock.count)
    entries = []
    fitting: dict[str, list[Workload]] = {}
    too_large: dict[str, set[WorkloadKey]] = {}
    for claim in members:
        most = min(stock.count, _units(supply.total_bytes, claim.max_percent, unit))
        inside = [w for w in asking[claim.name] if _is_inside(w, claim)]
        large = {w.key for w in inside if w.is_ours and _is_too_large(w, claim, most, stock)}
        fitting[claim.name] = [w for w in inside if w.key not in large]
        too_large[claim.name] = large
        entries.append(
            _Entry(
                claim,
                least=min(granted[claim.name], most),
                most=most,
                asked=sum(workload.asked_units for workload in fitting[claim.name]),
                past=claim.past_bytes // unit if unit else 0,
                room=max(1, ROOM_TO_ASK_BYTES // unit) if unit else 0,
            )
        )
    shares = _shares(stock.count, entries)
    left_by_name = dict(stock.counts)
    dealt = {}
    for entry in entries:
        name = entry.claim.name
        share = shares[name]
        allowed = _allowed(share, fitting[name])
        needs = _needs(fitting[name], allowed)
        hard = _hard(supply, entry.claim, share, needs, left_by_name)
        limits = {
            w.key: allowed[w.key] for w in fitting[name] if w.is_ours and allowed[w.key] < w.wanted
        } | dict.fromkeys(too_large[name], 0)
        running = asking[name]
        dealt[name] = TenantDeal(
            share_units=share,
            unit_bytes=unit,
            cap_units=entry.most,
            guarantee_units=entry.least,
            promised_units=promised[name],
            hard=hard,
            limits=limits,
            too_large=frozenset(too_large[name]),
            num_barred=sum(w.running for w in running if w.key in too_large[name]),
            asked_units=entry.asked,
            running_units=sum(w.units * w.running for w in running),
            foreign_units=sum(w.units * w.running for w in running if not w.is_ours),
        )
    return dealt


def _units(total_bytes: int, percent: int, unit_bytes: int) -> int:
    return total_bytes * percent // (100 * unit_bytes) if unit_bytes else 0


def _is_inside(workload: Workload, claim: Claim) -> bool:
    """Whether pods are for the tenant's partition; those of others go by resource name alone."""
    return not workload.is_ours or workload.partition == claim.partition


def _is_too_large(workload: Workload, claim: Claim, most: int, stock: Stock) -> bool:
    if workload.units > most:
        return True
    if claim.max_percent_per_card is None or stock.card_bytes is None:
        return False
    if stock.unit_bytes >= stock.card_bytes:
        return False  # whole cards are shared with nobody
    return workload.units * stock.unit_bytes * 100 > claim.max_percent_per_card * stock.card_bytes


def _scaled(promised: Mapping[str, int], capacity: int) -> dict[str, int]:
    """Guarantees that fit: all of them smaller by the same factor where they do not."""
    total = sum(promised.values())
    if total <= capacity:
        return dict(promised)
    return {name: units * capacity // total for name, units in promised.items()}


def _shares(capacity: int, entries: Sequence[_Entry]) -> dict[str, int]:
    """Whole units for each tenant; at most `most` each and `capacity` together."""
    fixed = _Filling(capacity, entries)
    fixed.raise_to(lambda entry: entry.least)
    fixed.raise_to(lambda entry: entry.most)
    filling = _Filling(capacity, entries)
    filling.raise_to(
        lambda entry: (
            min(entry.least, entry.now) if entry.claim.is_dynamic else fixed.units[entry.claim.name]
        )
    )
    moving = [entry for entry in entries if entry.claim.is_dynamic]
    filling.raise_to(lambda entry: entry.now, moving)
    filling.raise_to(lambda entry: min(entry.least, entry.past), moving)
    filling.raise_to(lambda entry: min(entry.most, entry.past), moving)
    filling.raise_to(lambda entry: entry.least, moving)
    filling.raise_to(lambda entry: entry.most, moving)
    return filling.units


class _Filling:
    """Units that are handed out stage by stage."""

    def __init__(self, capacity: int, entries: Sequence[_Entry]) -> None:
        self._left = capacity
        self._entries = entries
        self.units = {entry.claim.name: 0 for entry in entries}

    def raise_to(
        self, target: Callable[[_Entry], int], entries: Sequence[_Entry] | None = None
    ) -> None:
        """Raise each towards its target, by weight where not all can have it."""
        weights = {
            entry.claim.name: entry.claim.weight
            for entry in (self._entries if entries is None else entries)
        }
        missing = {
            entry.claim.name: target(entry) - self.units[entry.claim.name]
            for entry in self._entries
            if entry.claim.name in weights and target(entry) > self.units[entry.claim.name]
        }
        for name, given in _by_weight(self._left, missing, weights).items():
            self.units[name] += given
            self._left -= given


def _by_weight(
    amount: int, missing: Mapping[str, int], weights: Mapping[str, int]
) -> dict[str, int]:
    """Divide whole units by weight, nobody more than is missing.

    What does not divide goes to the largest fractions, and among equals by name.
    """
    given = {name: 0 for name in missing if missing[name] <= 0}
    left = amount
    while True:
        open_names = [name for name in sorted(missing) if name not in given]
        total = sum(weights[name] for name in open_names)
        sated = [name for name in open_names if missing[name] * total <= left * weights[name]]
        if not sated:
            break
        for name in sated:
            given[name] = missing[name]
        left -= sum(missing[name] for name in sated)
    portions = {name: divmod(left * weights[name], total) for name in open_names}
    left -= sum(floor for floor, _ in portions.values())
    for name in sorted(open_names, key=lambda name: (-portions[name][1], name)):
        given[name] = portions[name][0] + (left > 0)
        left -= left > 0
    return given


def _allowed(share: int, workloads: Sequence[Workload]) -> dict[WorkloadKey, int]:
    """Pods of each workload: pods of others first, then by priority, age and name."""
    order = sorted(
        workloads, key=lambda w: (w.is_ours, -w.priority, w.created, w.namespace, w.name, w.tier)
    )
    allowed: dict[WorkloadKey, int] = {}
    left = share
    for workload in order:
        pods = workload.running
        if workload.is_ours:
            pods = min(workload.wanted, max(0, left) // workload.units)
        allowed[workload.key] = allowed.get(workload.key, 0) + pods
        left -= pods * workload.units
    return allowed


Place = tuple[str, str]
"""A namespace and a resource name."""


def _needs(workloads: Sequence[Workload], allowed: Mapping[WorkloadKey, int]) -> dict[Place, int]:
    """Units that the allowed pods take."""
    needs: dict[Place, int] = {}
    for workload in workloads:
        place = (workload.namespace, workload.resource)
        needs[place] = needs.get(place, 0) + allowed[workload.key] * workload.units
    return needs


def _hard(
    supply: Supply,
    claim: Claim,
    share: int,
    needs: Mapping[Place, int],
    left_by_name: dict[str, int],
) -> dict[str, dict[str, int]]:
    """Deal a share into one ResourceQuota a namespace; takes it from `left_by_name`."""
    names = list(left_by_name) if share else []
    units = {(namespace, name): 0 for namespace in claim.namespaces for name in names}
    left = share

    def give(place: Place, amount: int) -> None:
        nonlocal left
        given = max(0, min(amount, left, left_by_name[place[1]]))
        units[place] += given
        left_by_name[place[1]] -= given
        left -= given

    for place in sorted(needs):
        if place in units:
            give(place, needs[place])
    # What nobody needs now is room to start in: as much in each namespace, and what does not
    # divide where most is used.
    use = {
        namespace: sum(needs.get((namespace, name), 0) for name in names)
        for namespace in claim.namespaces
    }
    by_use = sorted(claim.namespaces, key=lambda namespace: (-use[namespace], namespace))
    for name in sorted(names, key=lambda name: -left_by_name[name]):
        room = min(left, left_by_name[name])
        each, remainder = divmod(room, len(by_use)) if by_use else (0, 0)
        for index, namespace in enumerate(by_use):
            give((namespace, name), each + (index < remainder))
    return {
        namespace: _keys(supply, claim.partition, {
            name: units[namespace, name] for name in names
        })
        for namespace in sorted(claim.namespaces)
    }  # fmt: skip


def _keys(supply: Supply, partition: str, units: Mapping[str, int]) -> dict[str, int]:
    """The keys of a ResourceQuota: every name of the cluster's GPUs, 0 for what is not dealt."""
    names = {*supply.resources, *units, GPU}
    amounts = {name: units.get(name, 0) for name in names}
    if partition == VGPU and units.get(VGPU_MEMORY):
        # Under HAMi the memory is what counts; the pods' devices are so many places on cards.
        amounts[GPU] = supply.vgpu_slots
        amounts[VGPU_MEMORY_PERCENT] = 0
    return {f"requests.{name}": amounts[name] for name in sorted(amounts)}


def percent_of(amount_bytes: float, total_bytes: int) -> int:
    """Rounded to whole percent."""
    return min(100, math.floor(amount_bytes * 100 / total_bytes + 0.5)) if total_bytes else 0


@dataclass
class Ledger:
    """Past use of tenants, between one look and the next.

    What is told (in status) is what deals go by, so that they are the same after a restart; the
    finer value in between is kept here.
    """

    _past: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By tenant: bytes, and when."""

    def look(
        self,
        name: str,
        told: tuple[float, float] | None,
        used_bytes: int,
        half_life_seconds: float,
        now: float,
    ) -> float:
        """Past use of a tenant now, in bytes.

        Args:
            name: The tenant.
            told: What its status says in bytes, and the age of that in seconds: where a new
                process begins.
            used_bytes: What its pods hold now.
            half_life_seconds: After which time past use counts half.
            now: In seconds, of a clock that never goes back.
        """
        known = self._past.get(name)
        if known is not None:
            before, seconds = known[0], now - known[1]
        else:
            before, seconds = told if told is not None else (float(used_bytes), 0.0)
        past = decayed(before, used_bytes, seconds, half_life_seconds)
        self._past[name] = (past, now)
        return past

    def forget(self, names: Collection[str]) -> None:
        """Keep only these tenants."""
        self._past = {name: past for name, past in self._past.items() if name in names}
