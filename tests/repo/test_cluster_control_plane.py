"""A control plane for tests: up in seconds, and gone with whoever asked for it."""

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import ClusterError, ControlPlane, leftovers, places, processes

pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def control_plane():
    with ControlPlane("repo-tests", components=()) as running:
        yield running


def test_the_api_server_answers(control_plane):
    assert control_plane.is_running()
    assert "kube-system" in control_plane.kubectl("get", "namespaces")


def test_objects_outlive_a_restart_of_the_api_server(control_plane):
    control_plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "outlives"}})

    control_plane.stop_component("kube-apiserver")
    assert not control_plane.is_running()
    control_plane.start_api_server()

    assert "outlives" in control_plane.kubectl("get", "namespaces")


def test_what_kubectl_says_is_in_the_error(control_plane):
    with pytest.raises(ClusterError, match="not found"):
        control_plane.kubectl("get", "namespace", "none")


OWNER = """
import sys, time
sys.path.insert(0, {tools!r})
from cluster import ControlPlane
with ControlPlane({name!r}, components=()) as plane:
    print(plane.state, flush=True)
    sys.stdin.read()
"""


@contextmanager
def owned(name):
    """A control plane of another process, by its folder."""
    source = OWNER.format(tools=str(places.SOURCE.parent), name=name)
    owner = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        try:
            yield owner, Path(owner.stdout.readline().strip())
        finally:
            owner.stdin.close()


def test_a_killed_owner_takes_its_control_plane_along():
    with owned("repo-tests-killed") as (owner, state):
        assert len(processes.marked(state)) == 2

        owner.send_signal(signal.SIGKILL)
        owner.wait()
        deadline = time.monotonic() + 60
        while processes.marked(state):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert state.exists()

    leftovers.remove_orphans()

    assert not state.exists()


def test_two_processes_use_one_name_beside_each_other(control_plane):
    with owned(control_plane.name) as (_, other):
        assert other != control_plane.state
        assert control_plane.is_running()
        assert len(processes.marked(other)) == 2
        theirs = json.loads((other / "ports.json").read_text())
        assert not set(theirs.values()) & set(control_plane.ports.values())

        leftovers.remove_orphans()

        assert len(processes.marked(other)) == 2
    assert not other.exists()
    assert control_plane.is_running()


def test_an_unknown_component_is_refused():
    with pytest.raises(ClusterError, match=r"unknown components .*allowed are"):
        ControlPlane("never", components=("kube-api-server",))


def test_simulated_nodes_run_what_the_scheduler_gives_them():
    components = ("kube-controller-manager", "kube-scheduler", "kwok")
    amounts = {"cpu": "8", "memory": "64Gi", "pods": "10", "nvidia.com/gpu": "8"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "fake", "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {"capacity": amounts, "allocatable": amounts},
    }
    container = {"name": "c", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    labels = {"app": "simulated"}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "simulated", "namespace": "default"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    with ControlPlane("repo-tests-kwok", components) as fleet:
        fleet.kubectl("create", "-f", "-", stdin=json.dumps(node))
        fleet.apply(deployment)

        fleet.kubectl("rollout", "status", "deployment/simulated", "--timeout=240s")
        fleet.kubectl("wait", "--for=condition=Ready", "node/fake", "--timeout=240s")
