"""A node is lost, a device fails: pods change node, against a real API server.

There are no kubelets and no scheduler here: the tests play both.
"""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from real import Server, eventually
from responder import Responder, add_node, bind, run_worker
from test_controller import complete, dsd, pods, status_of

from conftest import Start
from deepseek_operator.kinds import DEEPSEEK_DEPLOYMENT, EVENT, POD, Kind, Manifest
from deepseek_operator.recovery import QUARANTINE_LABEL

pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(300)]

CPU = {"gpu": {"mode": "cpu"}}
SLICE = Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
DEPLOYMENT_LABEL = "deepseek.dev/deployment"


@pytest.fixture
def responder() -> Iterator[Responder]:
    with Responder() as found:
        yield found


@pytest.fixture
def nodes(server: Server, namespace: str) -> Iterator[tuple[str, str]]:
    """Two nodes of the test's own, which pods are bound to by hand."""
    names = (f"{namespace}-a", f"{namespace}-b")
    for name in names:
        add_node(server, name)
    yield names
    for name in names:
        server.ask("DELETE", f"/api/v1/nodes/{name}")


def workers(server: Server, namespace: str) -> list[Manifest]:
    """The workers in service."""
    return [
        pod
        for pod in pods(server, namespace)
        if DEPLOYMENT_LABEL in pod["metadata"].get("labels", {})
    ]


def in_quarantine(server: Server, namespace: str) -> list[Manifest]:
    path = POD.path(namespace)
    found: list[Manifest] = server.must("GET", path, labelSelector=QUARANTINE_LABEL)["items"]
    return found


def place(server: Server, responder: Responder, pod: Manifest, node: str) -> None:
    """Play the scheduler and the kubelet."""
    responder.nodes[pod["metadata"]["name"]] = node
    bind(server, pod, node)
    run_worker(server, pod)


def serving(
    server: Server, namespace: str, responder: Responder, nodes: tuple[str, str], **spec: Any
) -> dict[str, Manifest]:
    """An object with a Ready pod on each node; the pods by node."""
    server.apply(dsd(namespace, spec={**CPU, "replicas": 2, **spec}))
    complete(server, namespace)
    found = eventually(lambda: len(workers(server, namespace)) == 2 and workers(server, namespace))
    for pod, node in zip(found, nodes, strict=True):
        place(server, responder, pod, node)
    eventually(lambda: status_of(server, namespace)["readyReplicas"] == 2, what="both are Ready")
    eventually(lambda: len(responder.asked) == 2, what="both are asked")
    return dict(zip(nodes, found, strict=True))


def replacement(server: Server, namespace: str, known: dict[str, Manifest]) -> Manifest:
    old = {pod["metadata"]["uid"] for pod in known.values()}

    def find() -> Manifest | None:
        for pod in workers(server, namespace):
            if pod["metadata"]["uid"] not in old:
                return pod
        return None

    found = eventually(find, what="the replacement")
    assert found is not None
    return found


def endpoints(server: Server, namespace: str) -> set[str]:
    """Names of the pods that the Service sends requests to."""
    return {
        endpoint["targetRef"]["name"]
        for found in server.list(SLICE, namespace)
        for endpoint in found.get("endpoints") or []
        if endpoint["conditions"]["ready"]
    }


def test_the_pod_of_a_silent_node_leaves_service_and_is_replaced(
    server: Server, namespace: str, start: Start, responder: Responder, nodes: tuple[str, str]
) -> None:
    operator = start(WORKER_STATE_URL=responder.url, PROBE_SECONDS="0.5", PROBE_TIMEOUT_SECONDS="2")
    known = serving(server, namespace, responder, nodes)
    lost, well = known[nodes[0]], known[nodes[1]]
    names = {pod["metadata"]["name"] for pod in known.values()}
    eventually(lambda: endpoints(server, namespace) == names)

    responder.silent.add(nodes[0])
    (jailed,) = eventually(lambda: in_quarantine(server, namespace), what="the quarantine")
    fresh = replacement(server, namespace, known)
    left = eventually(lambda: endpoints(server, namespace) == {well["metadata"]["name"]})
    eventually(lambda: status_of(server, namespace)["recovery"]["level"] == 2)
    kept = in_quarantine(server, namespace)
    place(server, responder, fresh, nodes[1])
    eventually(lambda: not in_quarantine(server, namespace), what="the lost pod is gone")
    eventually(lambda: status_of(server, namespace)["recovery"]["level"] == 0)

    assert left
    assert jailed["metadata"]["uid"] == lost["metadata"]["uid"]
    assert jailed["metadata"]["labels"][QUARANTINE_LABEL] == "chat"
    owner = server.get(DEEPSEEK_DEPLOYMENT, namespace, "chat") or {}
    references = jailed["metadata"]["ownerReferences"]
    assert [found["uid"] for found in references] == [owner["metadata"]["uid"]]
    # Until the replacement is bound, the lost pod is what keeps it off the lost node.
    assert kept
    assert "deletionTimestamp" not in kept[0]["metadata"]
    recovery = status_of(server, namespace)["recovery"]
    assert recovery["nodeSwitches"] == 1
    assert "message" not in recovery
    assert recovery["switches"][0]["node"] == nodes[0]
    assert recovery["switches"][0]["cause"] == "NodeSilent"
    history = str(status_of(server, namespace)["history"])
    assert f"left node {nodes[0]}, because the node does not answer" in history
    events = [e for e in server.list(EVENT, namespace) if e["reason"] == "NodeSwitched"]
    assert len(events) == 1
    assert b"deepseek_node_switches_total{" in operator.ask("/metrics").content


def test_an_operator_killed_in_the_middle_counts_once_and_finishes(
    server: Server, namespace: str, start: Start, responder: Responder, nodes: tuple[str, str]
) -> None:
    settings = {
        "WORKER_STATE_URL": responder.url,
        "PROBE_SECONDS": "0.5",
        "PROBE_TIMEOUT_SECONDS": "2",
    }
    first = start(**settings)
    known = serving(server, namespace, responder, nodes)

    responder.silent.add(nodes[0])
    eventually(lambda: in_quarantine(server, namespace), every=0.01)
    first.stop(signal.SIGKILL)
    start("second", **settings)
    place(server, responder, replacement(server, namespace, known), nodes[1])
    eventually(lambda: not in_quarantine(server, namespace), what="the lost pod is gone")

    eventually(lambda: status_of(server, namespace)["recovery"]["level"] == 0)
    assert status_of(server, namespace)["recovery"]["nodeSwitches"] == 1
    assert len(workers(server, namespace)) == 2


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"is_stalled": True, "seconds_since_step": 12.0}, "EngineStalled"),
        ({"phase": "failed", "reason": "DeviceFault", "message": "ECC"}, "DeviceFault"),
        ({"is_exhausted": True, "out_of_memory_failures": 3}, "MemoryExhausted"),
    ],
    ids=["a stall", "a device", "memory"],
)
def test_a_worker_that_tells_of_a_fault_is_moved(
    server: Server, namespace: str, start: Start, responder: Responder, nodes: tuple[str, str],
    state: dict[str, Any], cause: str,
) -> None:  # fmt: skip
    start(WORKER_STATE_URL=responder.url, PROBE_SECONDS="0.3")
    known = serving(server, namespace, responder, nodes)
    broken = known[nodes[1]]["metadata"]["name"]

    responder.states[broken] = state

    (jailed,) = eventually(lambda: in_quarantine(server, namespace), what="the quarantine")
    eventually(lambda: status_of(server, namespace)["recovery"]["switches"])
    assert jailed["metadata"]["name"] == broken
    assert jailed["metadata"]["annotations"]["deepseek.dev/quarantine-cause"] == cause
    assert status_of(server, namespace)["recovery"]["switches"][0]["cause"] == cause


def test_without_a_budget_nobody_is_moved_and_the_status_says_so(
    server: Server, namespace: str, start: Start, responder: Responder, nodes: tuple[str, str]
) -> None:
    start(WORKER_STATE_URL=responder.url, PROBE_SECONDS="0.3")
    recovery = {"nodeSwitchesPerHour": 0}
    known = serving(server, namespace, responder, nodes, recovery=recovery)

    broken = known[nodes[0]]["metadata"]["name"]
    responder.states[broken] = {"phase": "failed", "reason": "DeviceFault", "message": "ECC"}

    told = eventually(
        lambda: (found := status_of(server, namespace)["recovery"])["level"] == 3 and found
    )
    assert "node switching is used up (0 of 0" in told["message"].lower()
    assert in_quarantine(server, namespace) == []
    eventually(
        lambda: any(e["reason"] == "NodeSwitchingUsedUp" for e in server.list(EVENT, namespace))
    )


def test_an_object_that_is_deleted_takes_its_quarantined_pods_along(
    server: Server, namespace: str, start: Start, responder: Responder, nodes: tuple[str, str]
) -> None:
    operator = start(WORKER_STATE_URL=responder.url, PROBE_SECONDS="0.3")
    known = serving(server, namespace, responder, nodes)
    responder.states[known[nodes[0]]["metadata"]["name"]] = {"is_stalled": True}
    eventually(lambda: in_quarantine(server, namespace))
    operator.stop(signal.SIGKILL)

    server.delete(DEEPSEEK_DEPLOYMENT, namespace, "chat", propagationPolicy="Background")

    def is_going() -> bool:
        return all("deletionTimestamp" in p["metadata"] for p in in_quarantine(server, namespace))

    eventually(is_going, what="the garbage collector takes it")
