"""A control plane for tests: up in seconds, and gone with whoever asked for it."""

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
