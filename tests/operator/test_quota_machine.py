"""Dealt quotas under any sequence of nodes, wishes, foreign pods, lags and killed operators.

The quota controller and the ReplicaSets are played: a quota that was written holds only once the
controller has seen it, the operator hears of that later still, and whoever may create pods does so
as soon as they are let in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deepseek_operator.devices import GPU, MIB, NodeDevices, Pool, Supply, supply_of
from deepseek_operator.quota import (
    Claim,
    TenantDeal,
    Workload,
    deal,
    standing_units,
    written_now,
)

CARD = 80 * 1024 * MIB
KEY = f"requests.{GPU}"
NAMESPACES = ("a1", "a2", "b1")
OWNER = {"a1": "a", "a2": "a", "b1": "b"}
SOME = st.sets(st.sampled_from(NAMESPACES))
WISHES = st.dictionaries(st.sampled_from(NAMESPACES), st.sampled_from([0, 1, 4, 20]))


@dataclass
class Place:
    """A namespace with its quota and its pods of one card each."""

    written: int | None = None
    """What its ResourceQuota says; None before there is one."""
    enforced: int | None = None
    """What the quota controller has seen of it."""
    heard: int | None = None
    """What the operator knows of that, and of the pods that the quota counts."""
    heard_held: int = 0
    wanted: int = 0
    """Pods that its deployment is to have."""
    ours: int = 0
    foreign: int = 0

    @property
    def held(self) -> int:
        return self.ours + self.foreign

    @property
    def standing(self) -> int:
        """What the operator reckons with, as `tenancy` reads it off the quota's status."""
        if self.written is None:
            return self.held
        return standing_units(self.written, self.heard, self.heard_held)

    @property
    def reach(self) -> int:
        """What its pods could come to be without another word of the operator."""
        return max(self.held, self.enforced or 0, self.written or 0)

    def hear(self) -> None:
        self.heard, self.heard_held = self.enforced, self.held

    def create(self) -> None:
        """What a ReplicaSet does: as many pods as it is let."""
        while self.ours < self.wanted and self.lets_in(1):
            self.ours += 1

    def lets_in(self, more: int) -> bool:
        return self.enforced is not None and self.held + more <= self.enforced


class QuotaMachine(RuleBasedStateMachine):
    """Two tenants of whole cards."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, int] = {}
        self.claims: list[Claim] = []
        self.places = {name: Place() for name in NAMESPACES}
        self.past: dict[str, int] = {}
        self.may_hold: dict[str, int] = {}
        """By tenant, the most that its pods may come to hold: its share at the last look, or what
        could come before that look could write anything."""

    @initialize(
        least=st.lists(st.integers(0, 60), min_size=2, max_size=2),
        more=st.lists(st.integers(1, 60), min_size=2, max_size=2),
        is_dynamic=st.lists(st.booleans(), min_size=2, max_size=2),
    )
    def begin(self, least: list[int], more: list[int], is_dynamic: list[bool]) -> None:
        self.nodes = {"n1": 8, "n2": 8}
        for number, name in enumerate("ab"):
            own = tuple(place for place in NAMESPACES if OWNER[place] == name)
            most = min(100, least[number] + more[number])
            dynamic = is_dynamic[number]
            self.claims.append(Claim(name, own, least[number], most, "whole", is_dynamic=dynamic))

    # What the operator sees and does.

    @property
    def supply(self) -> Supply:
        return supply_of(
            NodeDevices((Pool(GPU, "whole", count, CARD, CARD),), frozenset({GPU}))
            for count in self.nodes.values()
        )

    def workloads(self) -> list[Workload]:
        found = []
        for name, place in self.places.items():
            found.append(
                Workload(
                    name, "chat", GPU, 1, place.wanted, place.ours, tier="primary",
                    partition="whole",
                )
            )  # fmt: skip
            found.append(Workload(name, "", GPU, 1, 0, place.foreign))
        return found

    def dealt(self) -> dict[str, TenantDeal]:
        claims = [
            replace(claim, past_bytes=self.past.get(claim.name, 0) * CARD) for claim in self.claims
        ]
        return deal(self.supply, claims, self.workloads())

    def held(self, tenant: str) -> int:
        return sum(place.held for name, place in self.places.items() if OWNER[name] == tenant)

    def wanted_now(self, dealt: dict[str, TenantDeal]) -> dict[str, int]:
        """By namespace, what its quota is to say now."""
        found: dict[str, int] = {}
        for tenant in dealt.values():
            hard = {name: keys[KEY] for name, keys in tenant.hard.items()}
            standing = {name: self.places[name].standing for name in hard}
            written = {name: self.places[name].written or 0 for name in hard}
            found |= written_now(hard, tenant.share_units, written, standing)
        return found

    @rule(
        seen_before=SOME,
        heard=SOME,
        wishes=WISHES,
        writes=st.sampled_from([3, 3, 0, 1, 2]),
        seen=SOME,
        late_wishes=WISHES,
    )
    def the_operator_looks_amid_others(
        self, seen_before: set[str], heard: set[str], wishes: dict[str, int], writes: int,
        seen: set[str], late_wishes: dict[str, int],
    ) -> None:  # fmt: skip
        """One look, of which a killed operator writes a part, and what others do around it."""
        for name in seen_before:
            self.the_quota_controller_looks(name)
        for name in heard:
            self.places[name].hear()
        self.deployments_are_scaled(wishes)
        self.look(writes)
        for name in seen:
            self.the_quota_controller_looks(name)
            self.no_tenant_comes_to_hold_more_than_its_share()
        self.deployments_are_scaled(late_wishes)

    def look(self, writes: int) -> None:
        dealt = self.dealt()
        wanted = self.wanted_now(dealt)
        for name, tenant in dealt.items():
            mine = [place for owned, place in self.places.items() if OWNER[owned] == name]
            self.may_hold[name] = max(tenant.share_units, sum(place.reach for place in mine))
        order = sorted(wanted, key=lambda name: wanted[name] > (self.places[name].written or 0))
        for name in order[:writes]:
            self.places[name].written = wanted[name]
            # The answer to the write tells both.
            self.places[name].hear()

    # What everybody else does.

    def the_quota_controller_looks(self, name: str) -> None:
        self.places[name].enforced = self.places[name].written
        self.places[name].create()

    def deployments_are_scaled(self, wishes: dict[str, int]) -> None:
        for name, wanted in wishes.items():
            place = self.places[name]
            place.wanted = wanted
            place.ours = min(place.ours, wanted)
            place.create()

    @rule(names=SOME)
    def pods_beyond_a_limit_end(self, names: set[str]) -> None:
        dealt = self.dealt()
        for name in names:
            limit = dealt[OWNER[name]].limits.get((name, "chat", "primary"))
            place = self.places[name]
            place.ours = place.ours if limit is None else min(place.ours, limit)

    @rule(name=st.sampled_from(NAMESPACES), number=st.integers(1, 4))
    def somebody_creates_pods(self, name: str, number: int) -> None:
        if self.places[name].lets_in(number):
            self.places[name].foreign += number

    @rule(name=st.sampled_from(NAMESPACES))
    def somebodys_pods_end(self, name: str) -> None:
        self.places[name].foreign = 0
        self.places[name].create()

    @rule(tenant=st.sampled_from("ab"), cards=st.integers(0, 20))
    def past_use_is_told(self, tenant: str, cards: int) -> None:
        self.past[tenant] = cards

    @rule(name=st.sampled_from(["n1", "n2", "n3"]), cards=st.sampled_from([0, 1, 4, 8]))
    def a_node_changes(self, name: str, cards: int) -> None:
        self.nodes[name] = cards

    # What holds.

    @invariant()
    def what_is_dealt_is_within_each_cap_and_the_cluster(self) -> None:
        dealt = self.dealt()
        total = sum(self.nodes.values())
        for claim in self.claims:
            units = sum(keys[KEY] for keys in dealt[claim.name].hard.values())
            assert units <= total * claim.max_percent // 100
        assert sum(sum(k[KEY] for k in t.hard.values()) for t in dealt.values()) <= total

    @invariant()
    def no_tenant_comes_to_hold_more_than_its_share(self) -> None:
        for tenant, most in self.may_hold.items():
            assert self.held(tenant) <= most, tenant

    def teardown(self) -> None:
        """With steady input the quotas come to rest: seen and followed, they are what was dealt."""
        if not self.claims:
            return
        for _ in range(6):
            dealt = self.dealt()
            for name, units in self.wanted_now(dealt).items():
                self.places[name].written = self.places[name].enforced = units
            for name, place in self.places.items():
                limit = dealt[OWNER[name]].limits.get((name, "chat", "primary"))
                place.ours = place.ours if limit is None else min(place.ours, limit)
                place.create()
                place.hear()
        dealt = self.dealt()
        wanted = self.wanted_now(dealt)
        assert all(self.places[name].written == units for name, units in wanted.items())
        for tenant in dealt.values():
            if tenant.foreign_units <= tenant.share_units:
                hard = {name: keys[KEY] for name, keys in tenant.hard.items()}
                assert {name: wanted[name] for name in hard} == hard
                assert not tenant.is_over


QuotaMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=15)
test_quotas = QuotaMachine.TestCase
