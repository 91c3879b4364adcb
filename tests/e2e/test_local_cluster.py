"""The local cluster itself: what it promises to pods and to people, and that it leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError

import pytest

from cluster import Cluster, ClusterError, images, leftovers, network, places, processes
from cluster.node import Namespaces, cluster_cgroup
from site_under_test import eventually

pytestmark = pytest.mark.e2e

NAMESPACE = "traffic"
SERVER = """\
import http.server, os, socket
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(socket.gethostname().encode())
print("serving as", os.getuid(), os.getgid(), flush=True)
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""
CLIENT = """\
import urllib.request
for _ in range(20):
    print(urllib.request.urlopen("http://web.traffic.svc.cluster.local", timeout=5).read().decode())
"""


@pytest.fixture(scope="module")
def cluster():
    """A cluster of its own with two servers, one on each node, under restricted pod security."""
    leftovers.remove_orphans()
    cluster = Cluster(leftovers.owned("self"), node_grace_seconds=8)
    try:
        cluster.up(with_images=True)
        cluster.control_plane.kubectl("create", "namespace", NAMESPACE)
        cluster.control_plane.kubectl(
            "label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted"
        )
        cluster.control_plane.apply(*web(images.references()["operator"]))
        settled(cluster)
        yield cluster
    finally:
        assert cluster.down() == []


def test_a_second_up_says_that_it_is_up(cluster):
    done = command(cluster.name, "up")

    assert done.returncode == 0
    assert "was already up" in done.stderr


def test_both_nodes_are_ready_and_carry_a_pod(cluster):
    nodes = json.loads(cluster.control_plane.kubectl("get", "nodes", "-o", "json"))["items"]

    assert [is_ready(node) for node in nodes] == [True, True]
    assert {pod["spec"]["nodeName"] for pod in pods(cluster)} == {"node1", "node2"}


def test_every_pod_reaches_both_pods_through_the_service_by_name(cluster):
    names = {pod["metadata"]["name"] for pod in pods(cluster)}

    for name in names:
        # Each node hears of both some time after they are Ready.
        eventually(lambda name=name: answers(cluster, name) == names, f"{name} reaches both")


def test_this_machine_reaches_the_service(cluster):
    address = cluster.control_plane.kubectl(
        "get", "service", "web", "-n", NAMESPACE, "-o", "jsonpath={.spec.clusterIP}"
    )

    names = {pod["metadata"]["name"] for pod in pods(cluster)}
    eventually(lambda: ask(f"http://{address}") in names, "a pod answers")


def test_logs_show_a_user_of_group_0(cluster):
    for pod in pods(cluster):
        logs = cluster.control_plane.kubectl("logs", "-n", NAMESPACE, pod["metadata"]["name"])

        assert logs.startswith("serving as 23456 0\n")


def test_a_network_policy_is_enforced_and_its_end_too(cluster):
    asking, asked = pods(cluster)
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "closed", "namespace": NAMESPACE},
        "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]},
    }
    assert can_reach(cluster, asking, asked)

    cluster.control_plane.apply(policy)
    eventually(lambda: not can_reach(cluster, asking, asked), "nobody gets in")
    # This machine is the node's own, as kubelets are.
    assert ask(f"http://{asked['status']['podIP']}:8000") == asked["metadata"]["name"]
    cluster.control_plane.kubectl("delete", "networkpolicy", "closed", "-n", NAMESPACE)

    eventually(lambda: can_reach(cluster, asking, asked), "the other gets in")


def test_nodes_offer_gpus_that_are_not_there(cluster):
    cluster.set_gpus("node2", {"gpu": 2, "mig-1g.18gb": 3})
    before = reported_at(node(cluster, "node2"))
    eventually(lambda: reported_at(node(cluster, "node2")) != before, "the kubelet reports")

    offered = node(cluster, "node2")["status"]["allocatable"]
    assert offered["nvidia.com/gpu"] == "2"
    assert offered["nvidia.com/mig-1g.18gb"] == "3"


def test_a_node_that_loses_its_cable_is_not_ready_until_it_has_it_again(cluster):
    cluster.set_cable("node2", connected=False)
    eventually(lambda: not is_ready(node(cluster, "node2")), "node2 is not Ready")

    cluster.set_cable("node2", connected=True)
    eventually(lambda: is_ready(node(cluster, "node2")), "node2 is Ready")


def test_a_stopped_node_ends_its_pods_and_comes_back(cluster):
    lost = next(pod for pod in pods(cluster) if pod["spec"]["nodeName"] == "node2")
    url = f"http://{lost['status']['podIP']}:8000"
    assert ask(url) == lost["metadata"]["name"]

    cluster.stop_node("node2")
    with pytest.raises((URLError, TimeoutError, ConnectionError)):
        urllib.request.urlopen(url, timeout=2)
    eventually(lambda: not is_ready(node(cluster, "node2")), "node2 is not Ready")
    cluster.start_node("node2")

    settled(cluster)
    assert {pod["spec"]["nodeName"] for pod in pods(cluster)} == {"node1", "node2"}


def test_an_unknown_node_is_named_with_those_there_are(cluster):
    with pytest.raises(ClusterError, match=r"no node 'node9'; there are \['node1', 'node2'\]"):
        cluster.stop_node("node9")


@pytest.mark.parametrize(
    "said",
    [
        pytest.param("connected the network", id="before the control plane"),
        pytest.param("started the control plane", id="before the nodes"),
        pytest.param("started node1", id="between the nodes"),
    ],
)
def test_a_start_that_was_killed_half_way_leaves_nothing_after_down(said):
    name = leftovers.owned("killed")
    state = places.clusters() / name
    before = interfaces()
    starting = subprocess.Popen(words(name, "up"), stderr=subprocess.PIPE, text=True)
    with starting:
        for line in starting.stderr:
            if said in line:
                break
        time.sleep(0.3)  # into the next step
        starting.send_signal(signal.SIGKILL)
    assert processes.marked(state)

    done = command(name, "down")

    assert (done.returncode, done.stdout) == (0, "")
    assert not processes.marked(state)
    assert not state.exists()
    assert str(state) not in Path("/proc/mounts").read_text()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/{cluster_cgroup(state)}"))
    assert interfaces() == before


def test_the_end_unplugs_the_host_though_the_kernel_keeps_the_switch():
    state = places.clusters() / leftovers.owned("lingers")
    before = interfaces()
    switch = network.start_switch(state, network.choose(set(), network.routed()))
    assert interfaces() > before

    # As long as somebody looks in, the kernel keeps the switch and its end of the cable.
    with Path(f"/proc/{switch.pid}/ns/net").open():
        assert leftovers.remove(state) == []

        assert interfaces() == before


def test_nothing_runs_any_more_in_namespaces_that_were_ended():
    state = places.clusters() / leftovers.owned("ends")
    try:
        held = Namespaces.hold("slow", state, "pid", "mount")
        inside = os.readlink(f"/proc/{held.pid}/ns/pid")
        # To give so much memory back takes a moment.
        code = "held = b'x' * 2**30; print('up', flush=True); input()"
        with subprocess.Popen(
            held.command(sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as dying:
            assert dying.stdout.readline() == b"up\n"
            assert len(running_in(inside)) > 1

            held.end()

            assert running_in(inside) == []
    finally:
        assert leftovers.remove(state) == []


def running_in(namespace):
    """The processes in a namespace of process ids."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/pid"):
        with suppress(OSError):
            process = processes.at(int(link.parts[2]))
            if os.readlink(link) == namespace and process is not None:
                found.append(process)
    return found


def words(name, *rest):
    return [sys.executable, str(places.SOURCE), "--name", name, *rest]


def command(name, *rest):
    return subprocess.run(words(name, *rest), capture_output=True, text=True, check=False)


def interfaces():
    return set(os.listdir("/sys/class/net"))


def pods(cluster):
    listed = cluster.control_plane.kubectl(
        "get", "pods", "-n", NAMESPACE, "-l", "app=web", "-o", "json"
    )
    return json.loads(listed)["items"]


def can_reach(cluster, asking, asked):
    code = (
        "import socket\n"
        "try:\n"
        f"    socket.create_connection(('{asked['status']['podIP']}', 8000), 1).close()\n"
        "except TimeoutError:\n"
        "    print('no')\n"
        "else:\n"
        "    print('yes')\n"
    )
    answer = cluster.control_plane.kubectl(
        "exec", "-n", NAMESPACE, asking["metadata"]["name"], "--", "python", "-c", code
    )
    return {"yes": True, "no": False}[answer.strip()]


def node(cluster, name):
    return json.loads(cluster.control_plane.kubectl("get", "node", name, "-o", "json"))


def is_ready(node):
    return readiness(node)["status"] == "True"


def reported_at(node):
    """When its kubelet last said how it does."""
    return readiness(node)["lastHeartbeatTime"]


def readiness(node):
    return next(found for found in node["status"]["conditions"] if found["type"] == "Ready")


def ask(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def answers(cluster, name):
    """Who answers a pod that asks the Service again and again."""
    said = cluster.control_plane.kubectl(
        "exec", "-n", NAMESPACE, name, "--", "python", "-c", CLIENT
    )
    return set(said.split())


def settled(cluster):
    cluster.control_plane.kubectl(
        "rollout", "status", "deployment/web", "-n", NAMESPACE, "--timeout=240s"
    )


def web(image):
    """Two servers that keep apart, and their Service."""
    labels = {"app": "web"}
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 23456,
            "runAsGroup": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": labels},
            }
        ],
        "terminationGracePeriodSeconds": 1,
        "containers": [
            {
                "name": "web",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["python", "-c", SERVER],
                "ports": [{"name": "http", "containerPort": 8000}],
                "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    }
    metadata = {"name": "web", "namespace": NAMESPACE}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": "http"}]},
    }
    return deployment, service
