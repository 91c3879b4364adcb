"""Partitions and shares in one object's plan, pods and status, on a simulated API server."""

from __future__ import annotations

from typing import Any

import pytest
from scenes import Simulation, condition

from deepseek_operator.devices import GPU, MIB, NodeDevices, Pool, Supply, supply_of
from deepseek_operator.kinds import AUTOSCALER, Manifest
from deepseek_operator.quota import PodLimit

MIG = "nvidia.com/mig-1g.18gb"
SLICE_BYTES = 16384 * MIB
SINGLE = supply_of([NodeDevices((Pool(GPU, "mig:1g.18gb", 7, SLICE_BYTES),), frozenset({GPU}))])
MIXED = supply_of([NodeDevices((Pool(MIG, "mig:1g.18gb", 7, SLICE_BYTES),), frozenset({MIG}))])
SLICE: dict[str, Any] = {"gpu": {"mode": "mig", "migProfile": "1g.18gb"}}
SHARE: dict[str, Any] = {"gpu": {"mode": "vgpu", "memoryGiB": 20, "memoryLimitPercent": 80}}
NODE_TERMS = "requiredDuringSchedulingIgnoredDuringExecution"


def settled(document: dict[str, Any], supply: Supply | None = None) -> Simulation:
    cluster = Simulation(document, supply=supply)
    cluster.settle()
    return cluster


def template(cluster: Simulation) -> Manifest:
    spec: Manifest = cluster.deployment["spec"]["template"]["spec"]
    return spec


def resources(cluster: Simulation) -> Manifest:
    found: Manifest = template(cluster)["containers"][0]["resources"]
    assert found["requests"] == found["limits"]
    return found["limits"]


def node_terms(cluster: Simulation) -> list[Manifest]:
    affinity = template(cluster).get("affinity") or {}
    terms: list[Manifest] = (
        affinity.get("nodeAffinity", {}).get(NODE_TERMS, {}).get("nodeSelectorTerms", [])
    )
    return terms


def limit(now: int, soon: int | None = None) -> dict[str, PodLimit]:
    return {"primary": PodLimit(now, now if soon is None else soon, "Tenant a may use less.")}


def test_a_slice_under_mixed_is_asked_for_by_its_own_name() -> None:
    cluster = settled(SLICE, MIXED)

    assert resources(cluster) == {MIG: "1"}
    assert node_terms(cluster) == []
    # The device that the pod sees is the slice.
    assert "--memory-limit-percent=90" in template(cluster)["containers"][0]["args"]


def test_a_slice_under_single_is_a_gpu_of_nodes_that_are_cut_so() -> None:
    cluster = settled(SLICE, SINGLE)

    assert resources(cluster) == {GPU: "1"}
    (term,) = node_terms(cluster)
    assert {
        "key": "nvidia.com/gpu.slices.gi", "operator": "In", "values": ["1"],
    } in term["matchExpressions"]  # fmt: skip


def test_pods_stay_as_they_are_while_their_nodes_come_and_go() -> None:
    cluster = settled(SLICE, SINGLE)

    cluster.supply = supply_of(())
    assert cluster.plan().is_empty
    cluster.supply = MIXED
    cluster.settle()

    assert resources(cluster) == {MIG: "1"}


def test_a_share_of_a_card_limits_the_scheduler_and_the_worker() -> None:
    cluster = settled(SHARE)

    assert resources(cluster) == {GPU: "1", "nvidia.com/gpumem": "20480"}
    limit_bytes = 20 * 2**30 * 80 // 100
    assert f"--memory-limit-bytes={limit_bytes}" in template(cluster)["containers"][0]["args"]
    assert "--device=cuda" in template(cluster)["containers"][0]["args"]
    assert node_terms(cluster) == []


def test_conditions_on_the_device_hold_beside_those_of_the_object() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    disk = {"key": "disk", "operator": "Exists"}
    terms = [{"matchExpressions": [zone]}, {"matchExpressions": [disk]}]
    wish = {"nodeAffinity": {NODE_TERMS: {"nodeSelectorTerms": terms}}}

    found = node_terms(settled({"pod": {"affinity": wish}}))

    device = {"key": "nvidia.com/gpu.slices.gi", "operator": "DoesNotExist"}
    assert [term["matchExpressions"] for term in found] == [[zone, device], [disk, device]]


def test_a_term_that_holds_for_no_node_goes_on_holding_for_none() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    wish = {"nodeAffinity": {NODE_TERMS: {"nodeSelectorTerms": [{}, zone]}}}

    assert len(node_terms(settled({"pod": {"affinity": wish}}))) == 1


@pytest.mark.parametrize("terms", [[{}], [{}, {}], [{"matchFields": []}, {}]])
def test_terms_that_all_hold_for_no_node_do_so_together(terms: list[Manifest]) -> None:
    wish = {"nodeAffinity": {NODE_TERMS: {"nodeSelectorTerms": terms}}}

    assert node_terms(settled({"pod": {"affinity": wish}})) == [{}]


def test_what_no_node_offers_is_the_reason() -> None:
    document: dict[str, Any] = {"gpu": {"mode": "mig", "migProfile": "1g.99gb"}}

    told = condition(settled(document, MIXED).status, "Ready")

    assert (told["status"], told["reason"]) == ("False", "PartitionUnavailable")
    assert "offered are: 1g.18gb" in told["message"]
    assert condition(settled(document).status, "Ready")["reason"] != "PartitionUnavailable"


def test_where_no_tenants_are_known_it_is_said() -> None:
    def told(cluster: Simulation) -> str:
        return str(condition(cluster.status, "QuotaExceeded")["message"])

    assert "knows no tenants" in told(settled({}))
    assert "tenants" not in told(settled({}, MIXED))


def test_a_share_that_has_room_for_fewer_pods_is_kept_and_said() -> None:
    cluster = settled({"replicas": 4})
    cluster.limits = limit(3, soon=1)
    cluster.settle()
    assert cluster.deployment["spec"]["replicas"] == 3

    cluster.limits = limit(1)
    cluster.settle()
    cluster.roll_out()
    cluster.reconcile()

    assert cluster.deployment["spec"]["replicas"] == 1
    told = condition(cluster.status, "QuotaExceeded")
    assert (told["status"], told["reason"]) == ("True", "TenantLimit")
    assert told["message"] == "Tenant a may use less."
    assert condition(cluster.status, "Ready")["reason"] == "Available"
    assert cluster.plan().wishes == {"primary": 4}


def test_a_share_without_room_is_why_nothing_serves() -> None:
    cluster = settled({"replicas": 1})
    cluster.limits = limit(0)
    cluster.settle()

    assert cluster.deployment["spec"]["replicas"] == 0
    assert condition(cluster.status, "Ready")["reason"] == "TenantLimit"


def test_no_replicas_are_no_matter_of_a_share() -> None:
    cluster = settled({"replicas": 0})
    cluster.limits = limit(0)
    cluster.settle()

    assert condition(cluster.status, "Ready")["reason"] == "ScaledToZero"


SCALED: dict[str, Any] = {"autoscaling": {"minReplicas": 3, "maxReplicas": 8}}


@pytest.mark.parametrize(
    ("now", "soon", "bounds"),
    [
        pytest.param(5, 4, (3, 4), id="its most goes down at once"),
        pytest.param(5, 2, (2, 2), id="and its least with it"),
        pytest.param(5, 0, (1, 1), id="while pods may go on it has one"),
    ],
)
def test_an_autoscaler_is_told_first(now: int, soon: int, bounds: tuple[int, int]) -> None:
    cluster = settled(SCALED)
    cluster.limits = limit(now, soon)
    cluster.settle()

    spec = cluster.child(AUTOSCALER.kind, "chat-primary")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == bounds


def test_below_one_the_autoscaler_goes_before_the_scale() -> None:
    cluster = settled(SCALED)
    cluster.limits = limit(0)

    first = cluster.reconcile()

    assert [live["kind"] for live in first.delete] == [AUTOSCALER.kind]
    assert cluster.deployment["spec"]["replicas"] == 3
    cluster.settle()
    assert cluster.deployment["spec"]["replicas"] == 0
