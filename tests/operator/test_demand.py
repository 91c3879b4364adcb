"""What deployments ask for and what pods hold."""

from __future__ import annotations

from typing import Any

import pytest
from scenes import owner_of, spec_of

from deepseek_operator.demand import holdings_of, workloads_of, workloads_of_others
from deepseek_operator.devices import (
    GPU,
    MIB,
    VGPU_MEMORY,
    NodeDevices,
    Pool,
    Supply,
    supply_of,
)
from deepseek_operator.fleet import Load
from deepseek_operator.quota import Claim, Workload, deal

CARD = 80 * 1024 * MIB
MIG = "nvidia.com/mig-1g.18gb"
BIG = NodeDevices((Pool(GPU, "whole", 8, CARD, CARD),), frozenset({GPU}))
SMALL = NodeDevices((Pool(GPU, "whole", 8, CARD // 2, CARD // 2),), frozenset({GPU}))
SHARED = NodeDevices((Pool(VGPU_MEMORY, "vgpu", 81920, MIB, CARD),), frozenset({GPU}))
DEVICES = {"big": BIG, "small": SMALL, "shared": SHARED}


def worker(node: str, tier: str = "primary", **requests: int) -> Load:
    return Load("team", node, requests or {GPU: 1}, "chat", tier)


def asked(
    document: dict[str, Any],
    *,
    live: dict[str, Any] | None = None,
    wishes: dict[str, int] | None = None,
    held_at: dict[str, int] | None = None,
    loads: tuple[Load, ...] = (),
    supply: Supply | None = None,
) -> list[Workload]:
    return workloads_of(
        owner_of(document),
        spec_of(document),
        live=live or {},
        holdings=holdings_of(loads, DEVICES),
        supply=supply or supply_of(DEVICES.values()),
        wishes=wishes or {},
        held_at=held_at or {},
    )


def deployment(replicas: int) -> dict[str, Any]:
    return {"spec": {"replicas": replicas, "template": {"spec": {"containers": []}}}}


def test_bytes_are_those_of_the_node_that_a_pod_is_on() -> None:
    held = holdings_of([worker("big"), worker("small"), worker("")], DEVICES)

    assert held.used_bytes == {"team": CARD + CARD // 2}
    assert held.workers == {("team", "chat", "primary"): 3}
    assert held.others == {}


def test_pods_of_others_count_by_resource_name() -> None:
    loads = [Load("team", "big", {GPU: 2, "cpu": 1000}), Load("team", "", {MIG: 1})]

    found = workloads_of_others(holdings_of(loads, DEVICES), {"team"})

    assert [(w.resource, w.units * w.running, w.is_ours) for w in found] == [
        (GPU, 2, False), (MIG, 1, False),
    ]  # fmt: skip


def test_what_pods_of_no_tenant_hold_is_told_apart() -> None:
    loads = [
        Load("team", "big", {GPU: 2}),
        Load("free", "big", {GPU: 3}),
        Load("free", "", {GPU: 1}),
    ]

    held = holdings_of(loads, DEVICES)

    assert held.outside({"team"}) == {GPU: 3}
    assert [w.namespace for w in workloads_of_others(held, {"team"})] == ["team"]


def test_memory_that_hami_gives_of_each_device_counts_for_each() -> None:
    """Case B14: 2 devices of 2048 MiB are 4096, which is a budget of 4096 and not of 4095."""
    pod = Load("team", "shared", {GPU: 2, VGPU_MEMORY: 2048})
    held = holdings_of([pod], DEVICES)

    assert held.used_bytes == {"team": 4096 * MIB}
    assert held.others == {("team", VGPU_MEMORY): 4096}

    supply = supply_of([SHARED])
    tenant = Claim("t", ("team",), 0, 5, "vgpu")
    fits = deal(supply, [tenant], workloads_of_others(held, {"team"}))["t"]
    assert fits.share_units == 4096
    assert fits.excess_units == 0
    one_more = Load("team", "shared", {GPU: 2, VGPU_MEMORY: 2049})
    over = deal(supply, [tenant], workloads_of_others(holdings_of([one_more], DEVICES), {"team"}))[
        "t"
    ]
    assert over.excess_units == 2


def test_a_pod_that_names_no_amount_of_a_shared_card_has_all_of_it() -> None:
    held = holdings_of([Load("team", "shared", {GPU: 1})], DEVICES)

    assert held.used_bytes == {"team": CARD}
    assert held.others == {("team", VGPU_MEMORY): 81920}


def test_a_fixed_number_of_pods_is_asked_for_whatever_runs() -> None:
    document = {"replicas": 4, "priority": 7}

    (found,) = asked(document, live={"primary": deployment(1)}, loads=(worker("big"),))

    assert (found.wanted, found.running, found.units, found.priority) == (4, 1, 1, 7)
    assert (found.partition, found.resource, found.tier) == ("whole", GPU, "primary")
    assert found.drain_seconds == 43


def test_what_the_plan_wishes_goes_before_the_spec() -> None:
    assert asked({"replicas": 4}, wishes={"primary": 0})[0].wanted == 0


def test_a_model_on_a_cpu_asks_for_nothing() -> None:
    assert asked({"gpu": {"mode": "cpu"}}) == []


@pytest.mark.parametrize(
    ("replicas", "held_at", "wanted"),
    [
        pytest.param(3, None, 3, id="what the autoscaler set"),
        pytest.param(0, None, 2, id="nothing yet"),
        pytest.param(3, 3, 4, id="held at its limit it would have one more"),
        pytest.param(2, 3, 2, id="below its limit it is content"),
        pytest.param(8, 8, 8, id="never above its own most"),
    ],
)
def test_a_scaled_tier_asks_for_what_its_autoscaler_wants(
    replicas: int, held_at: int | None, wanted: int
) -> None:
    document = {"autoscaling": {"minReplicas": 2, "maxReplicas": 8}}
    held = {} if held_at is None else {"primary": held_at}

    found = asked(document, live={"primary": deployment(replicas)}, held_at=held)

    assert found[0].wanted == wanted


def test_a_share_of_a_card_is_asked_for_in_mebibytes_and_a_slice_by_its_name() -> None:
    share = asked({"gpu": {"mode": "vgpu", "memoryGiB": 20}})[0]
    slice_ = asked({"gpu": {"mode": "mig", "migProfile": "1g.18gb"}})[0]

    assert (share.resource, share.units, share.partition) == (VGPU_MEMORY, 20480, "vgpu")
    assert (slice_.resource, slice_.units, slice_.partition) == (MIG, 1, "mig:1g.18gb")
