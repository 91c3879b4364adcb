"""What nodes offer: every MIG strategy, HAMi, time-slicing, and labels that contradict."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_contract.deployment import Gpu
from deepseek_operator.devices import (
    HAMI_ANNOTATION,
    MIB,
    NodeDevices,
    Pool,
    devices_of,
    mig_resource,
    node_requirements,
    partition_of,
    requests_of,
    resource_of,
    supply_of,
    unavailable,
    units_of,
)
from deepseek_operator.fleet import Node, Wish, admits

H200 = {
    "nvidia.com/gpu.product": "NVIDIA-H200",
    "nvidia.com/gpu.memory": "143771",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.replicas": "1",
    "nvidia.com/mig.strategy": "none",
}
SINGLE = {
    "nvidia.com/gpu.product": "NVIDIA-H200-MIG-1g.18gb",
    "nvidia.com/gpu.memory": "16384",
    "nvidia.com/gpu.count": "56",
    "nvidia.com/mig.strategy": "single",
}
MIXED = {
    **H200,
    "nvidia.com/mig.strategy": "mixed",
    "nvidia.com/mig-1g.18gb.count": "7",
    "nvidia.com/mig-1g.18gb.memory": "16384",
    "nvidia.com/mig-1g.18gb.product": "NVIDIA-H200-MIG-1g.18gb",
}
CARDS = [
    {"id": "GPU-1", "count": 10, "devmem": 81559, "devcore": 100, "type": "NVIDIA-H100",
     "numa": 0, "health": True},
    {"id": "GPU-2", "count": 10, "devmem": 81559, "devcore": 100, "type": "NVIDIA-H100",
     "numa": 1, "health": False},
]  # fmt: skip


def node(
    labels: dict[str, str], annotations: dict[str, str] | None = None, **units: int
) -> NodeDevices:
    allocatable = {
        f"nvidia.com/{name.replace('_', '-').replace('-g', 'g')}": n for name, n in units.items()
    }
    return devices_of("node1", labels, annotations or {}, allocatable)


def slices(labels: dict[str, str], resource: str, count: int, gpu: int = 0) -> NodeDevices:
    return devices_of("node1", labels, {}, {resource: count, "nvidia.com/gpu": gpu})


def test_a_card_has_the_memory_that_its_label_says() -> None:
    found = node(H200, gpu=8)

    assert found.pools == (Pool("nvidia.com/gpu", "whole", 8, 143771 * MIB, 143771 * MIB),)


def test_units_that_are_unhealthy_are_not_offered() -> None:
    assert node(H200, gpu=7).pools[0].count == 7
    assert node(H200, gpu=0).pools == ()


def test_slices_under_the_strategy_single_are_called_gpus() -> None:
    found = node(SINGLE, gpu=56)

    assert found.pools == (Pool("nvidia.com/gpu", "mig:1g.18gb", 56, 16384 * MIB),)


def test_slices_under_the_strategy_mixed_have_names_of_their_own() -> None:
    found = slices(MIXED, "nvidia.com/mig-1g.18gb", 7, gpu=7)

    assert found.pools == (
        Pool("nvidia.com/gpu", "whole", 7, 143771 * MIB, 143771 * MIB),
        Pool("nvidia.com/mig-1g.18gb", "mig:1g.18gb", 7, 16384 * MIB, 143771 * MIB),
    )


def test_the_strategy_single_on_uncut_cards_leaves_them_whole() -> None:
    found = node(H200 | {"nvidia.com/mig.strategy": "single"}, gpu=8)

    assert [pool.partition for pool in found.pools] == ["whole"]


PROFILES = ["1g.5gb", "1g.12gb", "2g.20gb", "3g.40gb", "7g.80gb", "1g.10gb+me"]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("strategy", ["none", "single", "mixed"])
def test_each_profile_has_one_name_under_each_strategy(profile: str, strategy: str) -> None:
    gigabytes = int(profile.split(".")[1].partition("gb")[0])
    memory = str(gigabytes * 950)
    resource = mig_resource(profile)

    assert "+" not in resource
    if strategy == "mixed":
        labels = {f"{resource}.memory": memory, "nvidia.com/mig.strategy": "mixed"}
        found = slices(labels, resource, 3)
    else:
        product = "NVIDIA-A100-MIG-" + profile.replace("+", ".")
        labels = {
            "nvidia.com/gpu.product": product,
            "nvidia.com/gpu.memory": memory,
            "nvidia.com/mig.strategy": strategy,
        }
        found = node(labels, gpu=3)
    if strategy == "none":
        assert "whole cards" in found.problem
        return
    assert found.pools[0].partition == f"mig:{profile}"
    assert found.pools[0].unit_bytes == int(memory) * MIB
    wanted = Gpu.parse({"mode": "mig", "migProfile": profile})
    assert partition_of(wanted) == found.pools[0].partition


def test_a_slice_without_a_memory_label_has_what_its_name_promises() -> None:
    found = slices({"nvidia.com/mig.strategy": "mixed"}, "nvidia.com/mig-1g.18gb", 2)

    assert found.pools[0].unit_bytes == 18 * 1024 * MIB


def test_a_time_sliced_card_is_offered_in_parts() -> None:
    labels = H200 | {
        "nvidia.com/gpu.product": "NVIDIA-H200-SHARED",
        "nvidia.com/gpu.replicas": "4",
        "nvidia.com/gpu.count": "2",
    }

    found = node(labels, gpu=8)

    assert found.pools[0].unit_bytes == 143771 * MIB // 4
    assert found.pools[0].card_bytes == 143771 * MIB


@pytest.mark.parametrize(
    "register",
    [
        json.dumps(CARDS),
        "GPU-1,10,81559,100,NVIDIA-H100,0,true:GPU-2,10,81559,100,NVIDIA-H100,1,false:",
    ],
    ids=["JSON", "the older form"],
)
def test_hami_offers_the_memory_of_healthy_cards(register: str) -> None:
    found = node({}, {HAMI_ANNOTATION: register}, gpu=20)

    assert found.pools == (Pool("nvidia.com/gpumem", "vgpu", 81559, MIB, 81559 * MIB),)
    assert found.vgpu_slots == 20


CONTRADICTIONS = {
    "no memory": ({"nvidia.com/gpu.product": "NVIDIA-H200"}, "no label nvidia.com/gpu.memory"),
    "memory 0": (H200 | {"nvidia.com/gpu.memory": "0"}, "no label nvidia.com/gpu.memory"),
    "memory in words": (H200 | {"nvidia.com/gpu.memory": "141Gi"}, "is no number"),
    "more than counted": (H200 | {"nvidia.com/gpu.count": "4"}, "gpu.count is 4"),
    "cut unlike": (
        SINGLE | {"nvidia.com/gpu.product": "NVIDIA-H200-MIG-INVALID"}, "not all cut alike",
    ),
    "slices without a strategy": (SINGLE | {"nvidia.com/mig.strategy": "none"}, "whole cards"),
    "memory of another slice": (SINGLE | {"nvidia.com/gpu.memory": "71000"}, "says 18 GB"),
    "memory of another card": (
        H200 | {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}, "says 40 GB",
    ),
    "a card of nothing": (H200 | {"nvidia.com/gpu.product": "NVIDIA-X-0GB"}, "says 0 GB"),
    "a slice of nothing": (
        SINGLE | {"nvidia.com/gpu.product": "NVIDIA-H200-MIG-1g.0gb"}, "says 0 GB",
    ),
    "a profile that is none": (
        SINGLE | {"nvidia.com/gpu.product": "NVIDIA-H200-MIG-small"}, "no MIG profile",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_node_whose_labels_contradict_offers_nothing_and_says_why(case: str) -> None:
    labels, words = CONTRADICTIONS[case]

    found = node(labels, gpu=8)

    assert found.pools == ()
    assert found.resources == {"nvidia.com/gpu"}
    assert found.problem.startswith("Node node1: ")
    assert words in found.problem


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (MIXED | {"nvidia.com/mig.strategy": "single"}, "has no such name"),
        (MIXED | {"nvidia.com/mig-1g.18gb.memory": "71000"}, "says 18 GB"),
        (MIXED | {"nvidia.com/mig-1g.18gb.count": "2"}, "count is 2"),
    ],
)
def test_slices_that_contradict_their_labels_are_not_offered(
    labels: dict[str, str], words: str
) -> None:
    assert words in slices(labels, "nvidia.com/mig-1g.18gb", 7).problem


@pytest.mark.parametrize(
    "register",
    [
        "[{}]",
        "[null]",
        "[" * 5000,
        '[{"devmem": 1e999, "health": true}]',
        '[{"devmem": -1, "health": true}]',
        "GPU-1,10,-1,100,NVIDIA-H100,0,true:",
        "GPU-1,10",
    ],
)
def test_an_annotation_of_hami_that_is_not_understood_is_said(register: str) -> None:
    assert "not understood" in node({}, {HAMI_ANNOTATION: register}, gpu=1).problem


LABELS = tuple({**SINGLE, **MIXED, "nvidia.com/mig-1g.0gb.memory": ""})
VALUES = st.sampled_from(
    ("0", "1", "143771", "-1", "x", "single", "NVIDIA-A100-SXM4-40GB", "X-0GB", "X-MIG-1g.0gb")
) | st.text(max_size=8)
NAMES = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.0gb", "nvidia.com/mig-")


@given(
    st.dictionaries(st.sampled_from(LABELS), VALUES),
    st.dictionaries(st.just(HAMI_ANNOTATION), st.text('[]{}:,-19"e true')),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 2**63 - 1)),
)
def test_whatever_a_node_says_of_itself_the_others_are_counted(
    labels: dict[str, str], annotations: dict[str, str], allocatable: dict[str, int]
) -> None:
    """One node that nobody thought of would end the sharing of all others."""
    found = devices_of("node1", labels, annotations, allocatable)

    assert all(pool.count > 0 for pool in found.pools)
    assert supply_of([found, node(H200, gpu=8)]).total_bytes >= 8 * 143771 * MIB


def test_the_cluster_is_the_sum_of_its_nodes_without_those_that_contradict() -> None:
    wrong = node({}, gpu=4)

    supply = supply_of([node(H200, gpu=8), node(SINGLE, gpu=56), wrong, NodeDevices()])

    assert supply.total_bytes == (8 * 143771 + 56 * 16384) * MIB
    assert supply.profiles == ("1g.18gb",)
    assert supply.problems == (wrong.problem,)


def test_a_name_of_two_sizes_counts_with_the_larger() -> None:
    small = H200 | {"nvidia.com/gpu.memory": "40960", "nvidia.com/gpu.product": "A100-SXM4-40GB"}

    supply = supply_of([node(H200, gpu=8), node(small, gpu=8), node(SINGLE, gpu=56)])

    assert supply.stocks["whole"].counts == {"nvidia.com/gpu": 16}
    assert supply.stocks["whole"].unit_bytes == 143771 * MIB
    # A quota for nvidia.com/gpu cannot tell a slice from a card.
    assert supply.stocks["mig:1g.18gb"].unit_bytes == 143771 * MIB
    assert supply.total_bytes == (8 * 143771 + 8 * 40960 + 56 * 16384) * MIB


SLICE = Gpu.parse({"mode": "mig", "migProfile": "1g.18gb"})
SHARE = Gpu.parse({"mode": "vgpu", "memoryGiB": 20})
WHOLE_CARD = Gpu.parse({"mode": "whole"})
SINGLE_ONLY = supply_of([node(SINGLE, gpu=56)])
MIXED_ONLY = supply_of([slices(MIXED, "nvidia.com/mig-1g.18gb", 7)])
BOTH = supply_of([node(SINGLE, gpu=56), slices(MIXED, "nvidia.com/mig-1g.18gb", 7)])


@pytest.mark.parametrize(
    ("supply", "live", "wanted"),
    [
        pytest.param(SINGLE_ONLY, (), "nvidia.com/gpu", id="single"),
        pytest.param(MIXED_ONLY, (), "nvidia.com/mig-1g.18gb", id="mixed"),
        pytest.param(BOTH, (), "nvidia.com/mig-1g.18gb", id="both"),
        pytest.param(BOTH, ("nvidia.com/gpu",), "nvidia.com/gpu", id="both, and one runs"),
        pytest.param(MIXED_ONLY, ("nvidia.com/gpu",), "nvidia.com/mig-1g.18gb", id="moved"),
        pytest.param(supply_of(()), ("nvidia.com/gpu",), "nvidia.com/gpu", id="nodes went"),
        pytest.param(supply_of(()), (), "nvidia.com/mig-1g.18gb", id="no node yet"),
        pytest.param(None, (), "nvidia.com/mig-1g.18gb", id="no nodes seen"),
    ],
)
def test_a_slice_is_called_as_the_nodes_call_it(
    supply: Any, live: tuple[str, ...], wanted: str
) -> None:
    assert resource_of(SLICE, supply, live) == wanted


def test_pods_ask_for_their_device_and_vgpu_pods_for_memory_too() -> None:
    assert requests_of(SLICE, "nvidia.com/mig-1g.18gb") == {"nvidia.com/mig-1g.18gb": 1}
    assert requests_of(SHARE, resource_of(SHARE, None)) == {
        "nvidia.com/gpu": 1, "nvidia.com/gpumem": 20480,
    }  # fmt: skip
    assert requests_of(WHOLE_CARD, resource_of(WHOLE_CARD, None)) == {"nvidia.com/gpu": 1}
    assert requests_of(Gpu.parse({"mode": "cpu"}), "") == {}
    assert units_of(Gpu.parse({"mode": "cpu"})) == 0


def admitted(gpu: Gpu, labels: dict[str, str]) -> bool:
    terms = [{"matchExpressions": node_requirements(gpu, "nvidia.com/gpu")}]
    here = Node("node1", labels, (), {}, is_ready=True, is_cordoned=False)
    return admits(here, Wish({}, node_affinity=tuple(terms)))


def cut(profile: str, memory: int, *, ofa: int = 0) -> dict[str, str]:
    return {
        "nvidia.com/mig.strategy": "single",
        "nvidia.com/gpu.slices.gi": profile[0],
        "nvidia.com/gpu.memory": str(memory),
        "nvidia.com/gpu.engines.ofa": str(ofa),
    }


MEMORY = {
    "1g.5gb": 4864, "1g.10gb": 9728, "1g.12gb": 11008, "1g.18gb": 16384, "1g.20gb": 19968,
    "2g.10gb": 9856, "2g.20gb": 19968, "3g.20gb": 20096, "3g.40gb": 40192, "4g.40gb": 40192,
    "7g.80gb": 81152, "7g.141gb": 143771,
}  # fmt: skip


@pytest.mark.parametrize("profile", MEMORY)
def test_a_slice_called_gpu_is_told_from_cards_and_from_all_other_slices(profile: str) -> None:
    gpu = Gpu.parse({"mode": "mig", "migProfile": profile})

    found = [other for other, memory in MEMORY.items() if admitted(gpu, cut(other, memory))]

    assert found == [profile]
    assert not admitted(gpu, H200)


def test_a_slice_with_media_engines_is_told_from_one_without() -> None:
    gpu = Gpu.parse({"mode": "mig", "migProfile": "1g.10gb+me"})

    assert admitted(gpu, cut("1g.10gb", 9728, ofa=1))
    assert not admitted(gpu, cut("1g.10gb", 9728))


def test_a_whole_card_is_never_a_slice_that_is_called_a_card() -> None:
    assert admitted(WHOLE_CARD, H200)
    assert admitted(WHOLE_CARD, {})
    assert not admitted(WHOLE_CARD, cut("1g.18gb", 16384))


@pytest.mark.parametrize(
    ("gpu", "supply", "words"),
    [
        pytest.param(
            {"mode": "mig", "migProfile": "1g.99gb"}, BOTH, "offered are: 1g.18gb", id="profile",
        ),
        pytest.param({"mode": "mig", "migProfile": "1g.18gb"}, supply_of(()), "none", id="no MIG"),
        pytest.param({"mode": "vgpu", "memoryGiB": 1}, BOTH, "Install HAMi", id="no HAMi"),
        pytest.param(
            {"mode": "vgpu", "memoryGiB": 80},
            supply_of([node({}, {HAMI_ANNOTATION: json.dumps(CARDS)}, gpu=20)]),
            "the largest card that HAMi shares out has 79 GiB",
            id="more than a card",
        ),
    ],
)  # fmt: skip
def test_what_no_node_can_run_is_said(gpu: dict[str, Any], supply: Any, words: str) -> None:
    assert words in (unavailable(Gpu.parse(gpu), supply) or "")


def test_what_some_node_can_run_or_nobody_knows_of_is_not_refused() -> None:
    assert unavailable(SLICE, BOTH) is None
    assert unavailable(SLICE, None) is None
    assert unavailable(WHOLE_CARD, supply_of(())) is None
