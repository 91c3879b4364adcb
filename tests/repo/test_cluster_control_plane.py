"""A control plane for tests: up in seconds, and gone with whoever asked for it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from cluster import ClusterError, ControlPlane, places, processes

pytestmark = pytest.mark.control_plane


@pytest.fixture(scope="module")
def control_plane():
    with ControlPlane(f"repo-tests-{os.getpid()}", components=()) as running:
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


def test_a_killed_owner_takes_its_control_plane_along():
    name = f"repo-tests-killed-{os.getpid()}"
    source = (
        f"import sys, time; sys.path.insert(0, {str(places.SOURCE.parent)!r})\n"
        "from cluster import ControlPlane\n"
        f"with ControlPlane({name!r}, components=()):\n"
        "    print('up', flush=True); time.sleep(300)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    left = ControlPlane(name)
    try:
        with owner:
            assert owner.stdout.readline() == b"up\n"
            assert len(processes.marked(left.state)) == 2

            owner.send_signal(signal.SIGKILL)

        deadline = time.monotonic() + 10
        while processes.marked(left.state):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        left.stop()
    assert not left.state.exists()


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
    with ControlPlane(f"repo-tests-kwok-{os.getpid()}", components) as fleet:
        fleet.kubectl("create", "-f", "-", stdin=json.dumps(node))
        fleet.apply(deployment)

        fleet.kubectl("rollout", "status", "deployment/simulated", "--timeout=60s")
        fleet.kubectl("wait", "--for=condition=Ready", "node/fake", "--timeout=60s")
