"""Shares, quotas and limits: examples in words, and what must hold for every input."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_operator.devices import GPU, MIB, VGPU_MEMORY, NodeDevices, Pool, Supply, supply_of
from deepseek_operator.quota import (
    CHANGE_POINTS,
    Claim,
    Ledger,
    TenantDeal,
    Workload,
    deal,
    decayed,
    is_news,
    most_pods,
    percent_of,
    starts_to_shrink,
    written_now,
)

CARD = 100 * 1024 * MIB
SLICE = 18 * 1024 * MIB
MIG = "nvidia.com/mig-1g.18gb"


def cards(count: int, unit_bytes: int = CARD) -> Supply:
    return supply_of(
        [NodeDevices((Pool(GPU, "whole", count, unit_bytes, unit_bytes),), frozenset({GPU}))]
    )


def claim(name: str, least: int = 0, most: int = 100, **more: Any) -> Claim:
    given: dict[str, Any] = {"namespaces": (name,), "partition": "whole"} | more
    return Claim(name=name, min_percent=least, max_percent=most, **given)


def asks(namespace: str, wanted: int, running: int = 0, **more: Any) -> Workload:
    given: dict[str, Any] = {
        "name": "chat", "resource": GPU, "units": 1, "tier": "primary", "partition": "whole",
    } | more  # fmt: skip
    return Workload(namespace=namespace, wanted=wanted, running=running, **given)


def shares(dealt: Mapping[str, TenantDeal]) -> dict[str, int]:
    return {name: tenant.share_units for name, tenant in dealt.items()}


def test_what_nobody_asks_for_goes_to_owners_then_by_weight() -> None:
    claims = [claim("a", 50, 65), claim("b", 0, 100, weight=100), claim("c", 0, 100, weight=300)]

    dealt = deal(cards(16), claims, [])

    assert dealt["a"].guarantee_units == 8
    assert shares(dealt) == {"a": 10, "b": 1, "c": 5}


def test_an_unused_guarantee_flows_to_those_who_ask() -> None:
    claims = [claim("owner", 50), claim("borrower", 0)]

    dealt = deal(cards(16), claims, [asks("borrower", 16)])

    # One unit stays, so that pods that nobody here knows of can be tried.
    assert shares(dealt) == {"owner": 1, "borrower": 15}


def test_an_owner_who_asks_gets_his_guarantee_and_the_borrower_is_over() -> None:
    claims = [claim("owner", 50), claim("borrower", 0)]
    workloads = [asks("borrower", 15, running=15), asks("owner", 6, running=1)]

    dealt = deal(cards(16), claims, workloads)

    assert shares(dealt) == {"owner": 7, "borrower": 9}
    assert dealt["borrower"].excess_units == 6
    assert dealt["borrower"].limits == {("borrower", "chat", "primary"): 9}
    assert dealt["owner"].limits == {}


def test_what_pods_of_no_tenant_hold_can_be_lent_to_nobody() -> None:
    claims = [claim("owner", 25), claim("borrower", 0)]
    workloads = [asks("borrower", 8, running=4), asks("owner", 2)]

    dealt = deal(cards(8), claims, workloads, {GPU: 4})

    assert shares(dealt) == {"owner": 2, "borrower": 2}
    assert dealt["borrower"].excess_units == 2


def test_a_cap_holds_whatever_is_asked() -> None:
    dealt = deal(cards(16), [claim("a", 0, 65)], [asks("a", 1000)])

    assert dealt["a"].share_units == 10
    assert dealt["a"].hard["a"][f"requests.{GPU}"] == 10


def test_spare_memory_that_two_ask_for_is_divided_by_weight() -> None:
    claims = [claim("a", 25), claim("b", 25, weight=300)]

    dealt = deal(cards(16), claims, [asks("a", 16), asks("b", 16)])

    assert shares(dealt) == {"a": 6, "b": 10}


def test_past_use_keeps_memory_for_who_used_it_until_lately() -> None:
    idle = [claim("a", 0, 100), claim("b", 0, 100, past_bytes=12 * CARD)]

    assert shares(deal(cards(16), idle, [])) == {"a": 2, "b": 14}
    # What somebody asks for goes first.
    assert shares(deal(cards(16), idle, [asks("a", 10)])) == {"a": 10, "b": 6}


def test_the_quota_moves_as_use_shifts() -> None:
    past = {"a": 12.0 * CARD, "b": 0.0}
    moved = []
    for _ in range(6):
        claims = [claim(name, 0, 100, past_bytes=int(past[name])) for name in past]
        dealt = deal(cards(16), claims, [asks("b", 4, running=4)])
        moved.append(shares(dealt))
        past = {
            "a": decayed(past["a"], 0, 60, half_life_seconds=60),
            "b": decayed(past["b"], 4 * CARD, 60, half_life_seconds=60),
        }

    assert moved[0] == {"a": 12, "b": 4}
    assert [share["a"] for share in moved] == sorted((share["a"] for share in moved), reverse=True)
    assert moved[-1] == {"a": 6, "b": 10}


def test_without_dynamic_a_share_does_not_move() -> None:
    claims = [claim("fixed", 25, 50, is_dynamic=False), claim("b", 0)]

    quiet = deal(cards(16), claims, [])
    busy = deal(cards(16), claims, [asks("b", 16)])

    assert quiet["fixed"].share_units == busy["fixed"].share_units == 8


def test_guarantees_that_do_not_fit_shrink_alike() -> None:
    dealt = deal(cards(16), [claim("a", 75), claim("b", 75)], [asks("a", 16), asks("b", 16)])

    assert shares(dealt) == {"a": 8, "b": 8}
    assert dealt["a"].promised_units == 12
    assert dealt["a"].guarantee_units == 8


def test_a_cap_below_one_unit_is_nothing() -> None:
    dealt = deal(cards(4), [claim("a", 0, 20)], [asks("a", 1)])

    assert dealt["a"].cap_units == 0
    assert dealt["a"].hard["a"][f"requests.{GPU}"] == 0
    assert dealt["a"].too_large == {("a", "chat", "primary")}
    assert dealt["a"].limits == {("a", "chat", "primary"): 0}


def test_a_cluster_without_gpus_deals_nothing() -> None:
    dealt = deal(Supply(), [claim("a", 20)], [asks("a", 1)])

    assert dealt["a"].share_units == 0
    assert dealt["a"].hard == {"a": {f"requests.{GPU}": 0}}


def test_the_lowest_priority_gives_way_first_then_the_youngest() -> None:
    workloads = [
        asks("a", 3, 3, name="low", priority=-5, created="2026-01-01"),
        asks("a", 3, 3, name="old", created="2026-01-01"),
        asks("a", 3, 3, name="young", created="2026-02-01"),
        asks("a", 3, 3, name="high", priority=5, created="2026-03-01"),
    ]

    dealt = deal(cards(16), [claim("a", 0, 50)], workloads)

    assert dealt["a"].limits == {("a", "young", "primary"): 2, ("a", "low", "primary"): 0}


def test_pods_of_others_count_and_are_not_ended() -> None:
    foreign = Workload("a", "job", GPU, units=1, wanted=0, running=5)

    dealt = deal(cards(8), [claim("a", 0, 75)], [foreign, asks("a", 4, 4)])

    assert dealt["a"].foreign_units == 5
    assert dealt["a"].limits == {("a", "chat", "primary"): 1}


def test_a_pod_of_several_cards_is_not_cut() -> None:
    dealt = deal(cards(16), [claim("a", 0, 45)], [asks("a", 4, 4, units=2)])

    assert dealt["a"].share_units == 7
    assert dealt["a"].limits == {("a", "chat", "primary"): 3}


def test_the_remainder_goes_where_most_is_used() -> None:
    tenant = claim("t", 0, 100, namespaces=("a", "b", "c"))

    dealt = deal(cards(8), [tenant], [asks("b", 3, 3)])

    assert {ns: hard[f"requests.{GPU}"] for ns, hard in dealt["t"].hard.items()} == {
        "a": 2, "b": 5, "c": 1,
    }  # fmt: skip


def test_names_outside_the_partition_get_nothing() -> None:
    supply = supply_of(
        [
            NodeDevices((Pool(GPU, "whole", 4, CARD, CARD),), frozenset({GPU})),
            NodeDevices((Pool(MIG, "mig:1g.18gb", 7, SLICE, CARD),), frozenset({GPU, MIG})),
            NodeDevices((), frozenset({"nvidia.com/mig-2g.35gb"}), problem="Node x: …"),
        ]
    )
    claims = [claim("cut", 10, 100, partition="mig:1g.18gb"), claim("plain", 0)]

    dealt = deal(supply, claims, [])

    assert dealt["cut"].hard["cut"] == {
        f"requests.{GPU}": 0, f"requests.{MIG}": 7, "requests.nvidia.com/mig-2g.35gb": 0,
    }  # fmt: skip
    assert dealt["plain"].hard["plain"][f"requests.{MIG}"] == 0


def shared_out(count: int = 4 * 81920, slots: int = 40) -> Supply:
    names = frozenset({GPU, VGPU_MEMORY, "nvidia.com/gpumem-percentage"})
    pool = Pool(VGPU_MEMORY, "vgpu", count, MIB, 81920 * MIB)
    return supply_of([NodeDevices((pool,), names, vgpu_slots=slots)])


def test_vgpu_memory_is_dealt_in_mebibytes() -> None:
    tenant = claim("a", 0, 50, partition="vgpu")
    pods = asks("a", 100, resource=VGPU_MEMORY, partition="vgpu", units=4096)

    dealt = deal(shared_out(), [tenant], [pods])

    assert dealt["a"].hard["a"] == {
        f"requests.{GPU}": 40,
        f"requests.{VGPU_MEMORY}": 2 * 81920,
        "requests.nvidia.com/gpumem-percentage": 0,
    }
    assert dealt["a"].limits == {("a", "chat", "primary"): 40}


def test_a_pod_may_not_take_more_of_a_card_than_the_tenant_may() -> None:
    tenant = claim("a", 0, 100, partition="vgpu", max_percent_per_card=50)
    small = asks("a", 1, resource=VGPU_MEMORY, partition="vgpu", units=40960, name="small")
    large = asks("a", 1, resource=VGPU_MEMORY, partition="vgpu", units=40961, name="large")

    dealt = deal(shared_out(), [tenant], [small, large])

    assert dealt["a"].too_large == {("a", "large", "primary")}
    assert dealt["a"].limits == {("a", "large", "primary"): 0}


def test_a_deployment_for_another_partition_gets_no_pods() -> None:
    slice_ = asks("a", 1, 1, resource=MIG, partition="mig:1g.18gb")

    dealt = deal(cards(4), [claim("a", 0, 100)], [slice_])

    assert dealt["a"].outside == {slice_.key}
    assert dealt["a"].limits == {slice_.key: 0}


SINGLE = supply_of(
    [
        NodeDevices((Pool(GPU, "whole", 4, CARD, CARD),), frozenset({GPU})),
        NodeDevices((Pool(GPU, "mig:1g.18gb", 7, SLICE),), frozenset({GPU})),
    ]
)
"""Cards, and slices of the strategy single, which have the same name."""


def test_a_pod_outside_the_partition_counts_where_its_name_is_shared_and_has_to_end() -> None:
    """The quota counts it by its name, so what is said of the tenant must too."""
    inside, slice_ = asks("a", 2, 2), asks("a", 1, 1, name="slice", partition="mig:1g.18gb")

    dealt = deal(SINGLE, [claim("a", 0, 50)], [inside, slice_])["a"]
    gone = deal(SINGLE, [claim("a", 0, 50)], [inside, replace(slice_, running=0)])["a"]

    assert dealt.share_units == 2
    assert (dealt.running_units, dealt.excess_units, dealt.num_barred) == (3, 1, 1)
    # The tenant's own do not give way for it.
    assert dealt.limits == {slice_.key: 0}
    assert (gone.hard, gone.is_over) == (dealt.hard, False)


@pytest.mark.parametrize(
    "barred",
    [
        pytest.param(
            asks("a", 1, 1, resource=MIG, partition="mig:1g.18gb"), id="another partition"
        ),
        pytest.param(asks("a", 1, 1, units=4), id="too large"),
    ],
)
def test_pods_that_may_not_run_have_to_end_though_the_share_has_room(barred: Workload) -> None:
    dealt = deal(cards(8), [claim("a", 0, 40)], [barred])["a"]

    assert dealt.limits == {barred.key: 0}
    assert dealt.is_over


def test_a_whole_card_is_shared_with_nobody() -> None:
    dealt = deal(cards(4), [claim("a", 0, 100, max_percent_per_card=10)], [asks("a", 1)])

    assert dealt["a"].limits == {}


def test_one_namespace_gets_more_when_another_has_less() -> None:
    dealt = {"a": 3, "b": 7}

    def now(standing: dict[str, int]) -> dict[str, int]:
        return written_now(dealt, 10, {"a": 3, "b": 5}, standing)

    assert now({"a": 5, "b": 5}) == {"a": 3, "b": 5}
    assert now({"a": 4, "b": 5}) == {"a": 3, "b": 6}
    assert now({"a": 3, "b": 6}) == {"a": 3, "b": 7}
    assert now({}) == {"a": 3, "b": 7}


def test_nothing_is_raised_while_more_can_be_held_than_the_share() -> None:
    dealt, written = {"a": 3, "b": 7}, {"a": 1, "b": 5}

    assert written_now(dealt, 10, written, {"a": 5, "b": 6}) == {"a": 1, "b": 5}
    assert written_now(dealt, 10, written, {"a": 4, "b": 6}) == {"a": 3, "b": 6}
    assert written_now(dealt, 10, {"a": 9}, {"a": 9, "b": 9}) == {"a": 3, "b": 0}


PLACES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20))


@given(PLACES, PLACES, PLACES, st.integers(0, 10))
def test_no_moment_is_above_the_share(
    dealt: dict[str, int], written: dict[str, int], over: dict[str, int], spare: int
) -> None:
    share = sum(dealt.values()) + spare
    standing = {p: written.get(p, 0) + over.get(p, 0) for p in {*written, *over}}

    now = written_now(dealt, share, written, standing)

    assert all(now[place] <= dealt[place] for place in dealt)
    raised = [place for place in dealt if now[place] > written.get(place, 0)]
    held_at_most = sum(max(now.get(p, 0), standing.get(p, 0)) for p in {*now, *standing})
    assert not raised or held_at_most <= share
    settled = {place: min(now[place], standing.get(place, 0)) for place in dealt}
    assert written_now(dealt, share, settled, settled) == dealt


def test_the_end_of_a_grace_period_leaves_time_to_drain() -> None:
    assert starts_to_shrink(100.0, grace_seconds=120, drain_seconds=43) == 162.0
    assert starts_to_shrink(100.0, grace_seconds=10, drain_seconds=43) == 100.0


def test_running_pods_go_on_until_they_must_end() -> None:
    assert most_pods(2, 5, may_end_pods=False) == 5
    assert most_pods(2, 1, may_end_pods=False) == 2
    assert most_pods(2, 5, may_end_pods=True) == 2
    assert most_pods(None, 5, may_end_pods=True) is None


def test_past_use_halves_in_a_half_life_and_steady_use_stays() -> None:
    assert decayed(100, 0, 60, half_life_seconds=60) == 50
    assert decayed(0, 100, 120, half_life_seconds=60) == 75
    assert decayed(100, 100, 12345, half_life_seconds=60) == 100
    assert decayed(100, 0, -60, half_life_seconds=60) == 100


def test_a_ledger_begins_where_the_status_ended() -> None:
    first, second = Ledger(), Ledger()
    first.look("a", None, 100, half_life_seconds=60, now=0)
    told = first.look("a", None, 0, half_life_seconds=60, now=60)

    resumed = second.look("a", (told, 60.0), 0, half_life_seconds=60, now=5)

    assert told == 50
    assert resumed == 25


def test_a_ledger_forgets_tenants_that_are_gone() -> None:
    ledger = Ledger()
    ledger.look("a", None, 100, half_life_seconds=60, now=0)
    ledger.forget(())

    assert ledger.look("a", None, 7, half_life_seconds=60, now=1) == 7


def test_only_a_change_of_five_points_is_news() -> None:
    assert not is_news(50, 54.9, total_bytes=100)
    assert is_news(50, 45.0, total_bytes=100)
    assert CHANGE_POINTS == 5


def test_percent_is_rounded() -> None:
    assert percent_of(33.5, 100) == 34
    assert percent_of(1, 0) == 0


# What must hold for every input.

NAMESPACES = ("n1", "n2", "n3", "n4", "n5", "n6")
PARTITIONS = ("whole", "mig:1g.18gb", "vgpu")
RESOURCES = {"whole": GPU, "mig:1g.18gb": MIG, "vgpu": VGPU_MEMORY}


@st.composite
def supplies(draw: st.DrawFn) -> Supply:
    names = frozenset({GPU, MIG, VGPU_MEMORY})
    nodes = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("whole", "small", "cut", "single", "vgpu")))
        count = draw(st.integers(0, 12))
        pool = {
            "whole": Pool(GPU, "whole", count, CARD, CARD),
            "small": Pool(GPU, "whole", count, CARD // 3, CARD // 3),
            "cut": Pool(MIG, "mig:1g.18gb", count, SLICE, CARD),
            "single": Pool(GPU, "mig:1g.18gb", count, SLICE),
            "vgpu": Pool(VGPU_MEMORY, "vgpu", count * 1000, MIB, 8000 * MIB),
        }[kind]
        nodes.append(NodeDevices((pool,), names, vgpu_slots=10))
    return supply_of(nodes)


@st.composite
def tenants(draw: st.DrawFn) -> list[Claim]:
    free = list(NAMESPACES)
    found = []
    for number in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, min(3, len(free))))
        own, free = tuple(free[:size]), free[size:]
        most = draw(st.integers(1, 100))
        found.append(
            Claim(
                name=f"t{number}",
                namespaces=own,
                min_percent=draw(st.integers(0, most)),
                max_percent=most,
                partition=draw(st.sampled_from(PARTITIONS)),
                weight=draw(st.integers(1, 1000)),
                max_percent_per_card=draw(st.none() | st.integers(1, 100)),
                is_dynamic=draw(st.booleans()),
                past_bytes=draw(st.integers(0, 20)) * CARD,
            )
        )
    return found


@st.composite
def workloads(draw: st.DrawFn) -> list[Workload]:
    found = []
    for number in range(draw(st.integers(0, 6))):
        partition = draw(st.sampled_from(PARTITIONS))
        resource = RESOURCES[partition]
        is_ours = draw(st.booleans())
        wanted = draw(st.integers(0, 12))
        found.append(
            Workload(
                namespace=draw(st.sampled_from(NAMESPACES)),
                name=f"w{number}",
                resource=resource,
                units=draw(st.integers(1, 3000 if resource == VGPU_MEMORY else 4)),
                wanted=wanted,
                running=draw(st.integers(0, 12)),
                priority=draw(st.integers(-2, 2)),
                tier="primary" if is_ours else "",
                partition=partition if is_ours else "",
            )
        )
    return found


def dealt_units(tenant: TenantDeal, supply: Supply, partition: str) -> dict[str, int]:
    """Units of the partition's names over all namespaces."""
    stock = supply.stocks.get(partition)
    names = stock.counts if stock is not None else {}
    return {name: sum(hard[f"requests.{name}"] for hard in tenant.hard.values()) for name in names}


@settings(max_examples=150)
@given(supplies(), tenants(), workloads(), st.integers(0, 20))
def test_dealt_quotas_stay_under_each_cap_and_the_cluster(
    supply: Supply, claims: list[Claim], asking: list[Workload], outside: int
) -> None:
    held = {GPU: outside, VGPU_MEMORY: 100 * outside}
    dealt = deal(supply, claims, asking, held)

    by_name: dict[str, int] = {}
    for tenant in claims:
        found = dealt[tenant.name]
        units = dealt_units(found, supply, tenant.partition)
        cap_bytes = supply.total_bytes * tenant.max_percent // 100
        assert sum(count * supply.unit_bytes(name) for name, count in units.items()) <= cap_bytes
        assert sum(units.values()) <= found.share_units
        for name, count in units.items():
            by_name[tenant.partition + name] = by_name.get(tenant.partition + name, 0) + count
        inside = {f"requests.{name}" for name in units}
        places = {f"requests.{GPU}"} if tenant.partition == "vgpu" and found.share_units else set()
        for hard in found.hard.values():
            assert all(key.startswith("requests.nvidia.com/") for key in hard)
            assert all(hard[key] == 0 for key in hard if key not in inside | places)
    for partition, stock in supply.stocks.items():
        for name, count in stock.counts.items():
            assert by_name.get(partition + name, 0) <= max(0, count - held.get(name, 0))
        members = [claim.name for claim in claims if claim.partition == partition]
        assert sum(dealt[name].guarantee_units for name in members) <= stock.count
        assert sum(dealt[name].share_units for name in members) <= stock.count


@settings(max_examples=80)
@given(supplies(), tenants(), workloads(), st.randoms())
def test_the_order_of_the_input_means_nothing(
    supply: Supply, claims: list[Claim], asking: list[Workload], random: Any
) -> None:
    shuffled = list(claims), list(asking)
    for items in shuffled:
        random.shuffle(items)

    assert deal(supply, *shuffled) == deal(supply, claims, asking)


@settings(max_examples=80)
@given(supplies(), tenants(), workloads())
def test_steady_input_gives_a_steady_result(
    supply: Supply, claims: list[Claim], asking: list[Workload]
) -> None:
    """When the deployments have followed their limits and ask for the same, nothing moves."""
    dealt = deal(supply, claims, asking)
    followed = [
        replace(
            workload,
            running=min(
                workload.wanted,
                *(tenant.limits.get(workload.key, workload.wanted) for tenant in dealt.values()),
            ),
        )
        if workload.is_ours
        else workload
        for workload in asking
    ]

    again = deal(supply, claims, followed)

    assert shares(again) == shares(dealt)
    for name, tenant in again.items():
        assert tenant.hard == dealt[name].hard
        assert tenant.limits == dealt[name].limits


@settings(max_examples=80)
@given(supplies(), tenants(), workloads())
def test_an_owner_who_asks_has_his_guarantee_and_borrowers_are_told_to_go(
    supply: Supply, claims: list[Claim], asking: list[Workload]
) -> None:
    dealt = deal(supply, claims, asking)

    for tenant in dealt.values():
        assert tenant.share_units >= min(tenant.asked_units, tenant.guarantee_units)
        assert tenant.share_units <= tenant.cap_units
    for claim_, tenant in ((c, dealt[c.name]) for c in claims):
        kept = 0
        for workload in asking:
            stock = supply.stocks.get(claim_.partition)
            if workload.namespace not in claim_.namespaces or not stock:
                continue
            if workload.partition == claim_.partition and workload.resource in stock.counts:
                pods = min(workload.wanted, tenant.limits.get(workload.key, workload.wanted))
                kept += pods * workload.units
        # What is left to run after everybody follows fits beside the pods of others.
        assert kept <= max(0, tenant.share_units - tenant.foreign_units)


@settings(max_examples=80)
@given(
    st.integers(0, 10**15), st.integers(0, 10**15),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(1, 1e7),
)  # fmt: skip
def test_past_use_stays_between_what_it_was_and_what_is_used(
    past: int, used: int, steps: list[float], half_life: float
) -> None:
    for before, seconds in zip(itertools.repeat(past), steps, strict=False):
        now = decayed(before, used, seconds, half_life)

        assert min(before, used) - 1 <= now <= max(before, used) + 1
