"""Nodes and what is left on them, from events alone."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_operator.fleet import (
    Fleet,
    Wish,
    admits,
    charges_of,
    limits_of,
    node_of,
    requests_of,
    wish_of,
)
from deepseek_operator.kinds import Manifest

GPU = "nvidia.com/gpu"


def node(
    name: str = "a",
    *,
    gpus: int = 8,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    taints: list[dict[str, str]] | None = None,
    cordoned: bool = False,
    **amounts: str,
) -> Manifest:
    allocatable = {"cpu": "32", "memory": "64Gi", "pods": "110", GPU: str(gpus), **amounts}
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": taints or [], **({"unschedulable": True} if cordoned else {})},
        "status": {
            "allocatable": allocatable,
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }


def pod(
    name: str, at: str = "a", *, gpus: int = 1, phase: str = "Running", **spec: Any
) -> Manifest:
    container = {"name": "c", "resources": {"limits": {GPU: str(gpus)}}}
    return {
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"nodeName": at, "containers": [container], **spec},
        "status": {"phase": phase},
    }


def fleet_of(*manifests: Manifest) -> Fleet:
    fleet = Fleet()
    for manifest in manifests:
        if "allocatable" in manifest["status"]:
            fleet.notice_node(None, manifest)
        else:
            fleet.notice_pod(None, manifest)
    return fleet


def gpus(number: int, **rules: Any) -> Wish:
    return Wish({GPU: number}, **rules)


class TestUnits:
    def test_what_pods_ask_for_is_not_free(self) -> None:
        fleet = fleet_of(node(), pod("x", gpus=3), pod("y", gpus=1), pod("z", at="b"))

        assert fleet.free("a", GPU) == 4
        assert fleet.free("b", GPU) == 0
        assert fleet.allocatable(GPU) == 8

    def test_a_pod_that_ends_or_goes_gives_its_units_back(self) -> None:
        fleet = fleet_of(node(), pod("x", gpus=3), pod("y", gpus=2))

        assert fleet.notice_pod("MODIFIED", pod("x", gpus=3, phase="Succeeded"))
        assert fleet.notice_pod("DELETED", pod("y", gpus=2))

        assert fleet.free("a", GPU) == 8
        assert fleet.used("a") == {}

    def test_a_pod_that_is_not_bound_takes_no_units(self) -> None:
        fleet = fleet_of(node(), pod("x", at="", gpus=2))

        assert fleet.free("a", GPU) == 8
        assert [load.requests[GPU] for load in fleet.loads] == [2]

    def test_only_news_is_news(self) -> None:
        fleet = fleet_of(node(), pod("x"))

        assert not fleet.notice_pod("MODIFIED", pod("x"))
        assert not fleet.notice_node("MODIFIED", node())
        assert fleet.notice_node("MODIFIED", node(ready=False))
        assert not fleet.notice_pod("DELETED", pod("unknown"))

    def test_a_listing_drops_what_it_does_not_have(self) -> None:
        fleet = fleet_of(node("a"), node("b"), pod("x"), pod("y"))

        assert fleet.keep_nodes({"a"})
        assert fleet.keep_pods({"team/y"})

        assert fleet.nodes.keys() == {"a"}
        assert fleet.free("a", GPU) == 7

    def test_more_asked_for_than_there_is_leaves_nothing_and_not_less(self) -> None:
        assert fleet_of(node(gpus=1), pod("x", gpus=3)).free("a", GPU) == 0

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["ADDED", "MODIFIED", "DELETED"]),
                st.sampled_from(["x", "y", "z"]),
                st.sampled_from(["", "a", "b"]),
                st.integers(0, 3),
                st.sampled_from(["Running", "Failed"]),
            )
        )
    )
    def test_the_sums_are_those_of_the_pods_there_are(self, events: list[tuple]) -> None:
        fleet, live = fleet_of(node("a"), node("b")), {}
        for kind, name, at, number, phase in events:
            fleet.notice_pod(kind, pod(name, at, gpus=number, phase=phase))
            live.pop(name, None)
            if kind != "DELETED" and phase == "Running":
                live[name] = (at, number)

        for place in ("a", "b"):
            wanted = sum(number for at, number in live.values() if at == place)
            assert fleet.free(place, GPU) == max(0, 8 - wanted)
            assert fleet.used(place).get(GPU, 0) == wanted
        assert sum(load.requests.get(GPU, 0) for load in fleet.loads) == sum(
            number for _, number in live.values()
        )


class TestRequests:
    def test_containers_add_up_and_a_limit_counts_as_a_request(self) -> None:
        containers = [
            {"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {GPU: "2"}}},
            {"resources": {"requests": {"cpu": 1}}},
            {},
        ]

        assert requests_of({"containers": containers}) == {"cpu": 1500, "memory": 2**30, GPU: 2}

    def test_the_largest_init_container_counts_where_it_needs_more(self) -> None:
        spec = {
            "containers": [{"resources": {"requests": {"cpu": "1"}}}],
            "initContainers": [
                {"resources": {"requests": {"cpu": "3"}}},
                {"resources": {"requests": {"cpu": "2", GPU: "1"}}},
            ],
        }

        assert requests_of(spec) == {"cpu": 3000, GPU: 1}

    def test_sidecars_count_with_both(self) -> None:
        spec = {
            "containers": [{"resources": {"requests": {"cpu": "1"}}}],
            "initContainers": [
                {"restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
                {"resources": {"requests": {"cpu": "2"}}},
            ],
        }

        assert requests_of(spec) == {"cpu": 3000}

    def test_what_the_pod_itself_asks_for_wins_and_overhead_is_added(self) -> None:
        spec = {
            "containers": [{"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
            "resources": {"requests": {"cpu": "2"}},
            "overhead": {"cpu": "250m"},
        }

        assert requests_of(spec) == {"cpu": 2250, "memory": 2**30}


# A pod's rules, a node, and whether the node is open for the pod.
PLACES = {
    "no rule": ({}, node(), True),
    "the label is there": ({"nodeSelector": {"z": "1"}}, node(labels={"z": "1"}), True),
    "the label has another value": ({"nodeSelector": {"z": "1"}}, node(labels={"z": "2"}), False),
    "the node is not ready": ({}, node(ready=False), False),
    "the node is cordoned": ({}, node(cordoned=True), False),
    "a taint": ({}, node(taints=[{"key": "t", "effect": "NoSchedule"}]), False),
    "a taint that only discourages": (
        {}, node(taints=[{"key": "t", "effect": "PreferNoSchedule"}]), True,
    ),
    "a taint that is tolerated by its value": (
        {"tolerations": [{"key": "t", "operator": "Equal", "value": "v"}]},
        node(taints=[{"key": "t", "value": "v", "effect": "NoExecute"}]), True,
    ),
    "a taint of another value": (
        {"tolerations": [{"key": "t", "value": "v"}]},
        node(taints=[{"key": "t", "value": "w", "effect": "NoSchedule"}]), False,
    ),
    "every taint is tolerated": (
        {"tolerations": [{"operator": "Exists"}]},
        node(taints=[{"key": "t", "effect": "NoSchedule"}]), True,
    ),
    "another effect is tolerated": (
        {"tolerations": [{"key": "t", "operator": "Exists", "effect": "NoExecute"}]},
        node(taints=[{"key": "t", "effect": "NoSchedule"}]), False,
    ),
}  # fmt: skip


class TestCharges:
    """What a ResourceQuota counts of a pod."""

    def test_requests_limits_and_the_pod_itself(self) -> None:
        resources = {"requests": {"cpu": "500m"}, "limits": {"cpu": "2", GPU: "1"}}

        charges = charges_of({"containers": [{"resources": resources}]})

        assert charges == {
            "cpu": 500,
            "requests.cpu": 500,
            "limits.cpu": 2000,
            GPU: 1,
            f"requests.{GPU}": 1,
            f"limits.{GPU}": 1,
            "pods": 1,
            "count/pods": 1,
        }

    def test_limits_of_containers_add_up_unless_the_pod_has_its_own(self) -> None:
        """An overhead adds to a limit, and makes none."""
        one = {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
        spec = {
            "containers": [one, {}],
            "initContainers": [
                {"resources": {"limits": {"cpu": "3"}}},
                {"restartPolicy": "Always", **one},
            ],
            "overhead": {"cpu": "250m", "ephemeral-storage": "1Gi"},
        }

        assert limits_of(spec) == {"cpu": 3250, "memory": 2 * 2**30}
        assert limits_of({**spec, "resources": {"limits": {"cpu": "2"}}})["cpu"] == 2250


class TestPlaces:
    @pytest.mark.parametrize(("spec", "place", "is_open"), PLACES.values(), ids=PLACES)
    def test_a_node_is_open_as_the_scheduler_says(
        self, spec: dict, place: Manifest, is_open: bool
    ) -> None:
        assert admits(node_of(place), wish_of(spec)) is is_open

    @pytest.mark.parametrize(
        ("operator", "values", "labels", "is_open"),
        [
            ("In", ["a", "b"], {"z": "b"}, True),
            ("In", ["a"], {}, False),
            ("NotIn", ["a"], {"z": "b"}, True),
            ("NotIn", ["a"], {}, True),
            ("NotIn", ["a"], {"z": "a"}, False),
            ("Exists", [], {"z": ""}, True),
            ("Exists", [], {}, False),
            ("DoesNotExist", [], {}, True),
            ("Gt", ["3"], {"z": "4"}, True),
            ("Gt", ["3"], {"z": "3"}, False),
            ("Lt", ["3"], {"z": "2"}, True),
            ("Lt", ["3"], {"z": "many"}, False),
            ("Unknown", ["3"], {"z": "3"}, False),
        ],
    )
    def test_required_affinity(
        self, operator: str, values: list[str], labels: dict, is_open: bool
    ) -> None:
        rule = {"key": "z", "operator": operator, "values": values}
        required = {"nodeSelectorTerms": [{}, {"matchExpressions": [rule]}]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}

        assert admits(node_of(node(labels=labels)), wish_of({"affinity": affinity})) is is_open

    def test_whole_units_of_one_node_count_and_not_those_of_two(self) -> None:
        fleet = fleet_of(node("a", gpus=1), node("b", gpus=1))

        assert fleet.place(gpus(1)) == "a"
        assert fleet.place(gpus(2)) is None

    def test_the_tightest_node_is_taken(self) -> None:
        fleet = fleet_of(node("a", gpus=8), node("b", gpus=8), pod("x", at="b", gpus=7))

        assert fleet.place(gpus(1)) == "b"

    def test_promised_units_are_not_free_and_returned_ones_are(self) -> None:
        fleet = fleet_of(node("a", gpus=2), pod("x", gpus=1))

        assert fleet.place(gpus(1)) == "a"
        assert fleet.place(gpus(1), taken={"a": {GPU: 1}}) is None
        assert fleet.place(gpus(2)) is None
        assert fleet.place(gpus(2), given_back={"a": {GPU: 1}}) == "a"

    def test_a_node_that_is_full_of_pods_takes_none(self) -> None:
        assert fleet_of(node(gpus=8, pods="1"), pod("x")).place(gpus(1)) is None

    def test_other_resources_count_too(self) -> None:
        fleet = fleet_of(node(cpu="1"))

        assert fleet.place(Wish({"cpu": 1000})) == "a"
        assert fleet.place(Wish({"cpu": 1001})) is None
        assert fleet.place(Wish({"nvidia.com/mig-1g.18gb": 1})) is None

    @given(
        nodes=st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=6
        ),
        number=st.integers(0, 3),
        taken=st.dictionaries(st.integers(0, 5), st.integers(1, 2)),
        returned=st.dictionaries(st.integers(0, 5), st.integers(1, 2)),
    )
    def test_of_those_that_fit_it_is_the_first_with_the_fewest_left(
        self,
        nodes: list[tuple[int, int, bool]],
        number: int,
        taken: dict[int, int],
        returned: dict[int, int],
    ) -> None:
        fleet = fleet_of(
            *(
                node(f"n{i}", gpus=gpus, cpu=str(cpus), labels={"open": str(is_open)})
                for i, (gpus, cpus, is_open) in enumerate(nodes)
            )
        )
        left = {
            i: gpus - taken.get(i, 0) + returned.get(i, 0) - number
            for i, (gpus, cpus, is_open) in enumerate(nodes)
            if is_open and cpus >= 2
        }
        # Without devices all nodes are alike.
        fitting = [
            (free if number else 0, f"n{i}") for i, free in left.items() if free >= 0 or not number
        ]
        wish = Wish({"cpu": 2000, **({GPU: number} if number else {})}, {"open": "True"})

        found = fleet.place(
            wish,
            taken={f"n{i}": {GPU: units} for i, units in taken.items()},
            given_back={f"n{i}": {GPU: units} for i, units in returned.items()},
        )

        assert found == min(fitting, default=(0, None))[1]


def test_a_large_cluster_takes_little_memory() -> None:
    """Nodes with the labels of a GPU cloud, and ten foreign pods on each."""
    labels = {f"nvidia.com/feature-{number}": "true" for number in range(40)}
    tracemalloc.start()
    fleet = Fleet()
    for number in range(200):
        fleet.notice_node(None, node(f"node-{number}", labels=labels))
    for number in range(2000):
        fleet.notice_pod(None, pod(f"pod-{number}", at=f"node-{number % 200}", gpus=number % 2))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert fleet.free("node-1", GPU) == 0
    assert kept < 200 * 16 * 2**10


def test_pods_that_come_and_go_leave_no_memory_behind() -> None:
    """Each asks for something else, as an autoscaler of requests has it."""
    fleet = fleet_of(node(), pod("stays", gpus=3))
    tracemalloc.start()
    for number in range(10_000):
        fleet.notice_pod("ADDED", pod("comes", gpus=1, overhead={"memory": str(number)}))
        fleet.notice_pod("DELETED", pod("comes"))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert fleet.free("a", GPU) == 5
    assert kept < 2 * 2**20
