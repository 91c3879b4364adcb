"""The local cluster itself: what it promises to pods and to people, and that it leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from urllib.error import URLError

import pytest

from cluster import Cluster, ClusterError, images, leftovers, network, places, processes
from cluster.node import cluster_cgroup

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
        answers = cluster.control_plane.kubectl(
            "exec", "-n", NAMESPACE, name, "--", "python", "-c", CLIENT
        )

        assert Counter(answers.split()).keys() == names


def test_this_machine_reaches_the_service(cluster):
    address = cluster.control_plane.kubectl(
        "get", "service", "web", "-n", NAMESPACE, "-o", "jsonpath={.spec.clusterIP}"
    )

    with urllib.request.urlopen(f"http://{address}", timeout=5) as answer:
        assert answer.read().decode() in {pod["metadata"]["name"] for pod in pods(cluster)}


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
    wait_until(lambda: not can_reach(cluster, asking, asked), 10)
    with urllib.request.urlopen(f"http://{asked['status']['podIP']}:8000", timeout=5) as answer:
        assert answer.status == 200  # this machine is the node's own, as kubelets are
    cluster.control_plane.kubectl("delete", "networkpolicy", "closed", "-n", NAMESPACE)

    wait_until(lambda: can_reach(cluster, asking, asked), 10)


def test_nodes_offer_gpus_that_are_not_there(cluster):
    cluster.set_gpus("node2", {"gpu": 2, "mig-1g.18gb": 3})
    time.sleep(6)  # longer than the kubelet takes to report again

    node = json.loads(cluster.control_plane.kubectl("get", "node", "node2", "-o", "json"))
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "2"
    assert node["status"]["allocatable"]["nvidia.com/mig-1g.18gb"] == "3"


def test_a_node_that_loses_its_cable_is_not_ready_until_it_has_it_again(cluster):
    cluster.set_cable("node2", connected=False)
    wait_until(lambda: not is_ready(node(cluster, "node2")), 40)

    cluster.set_cable("node2", connected=True)
    wait_until(lambda: is_ready(node(cluster, "node2")), 40)


def test_a_stopped_node_ends_its_pods_and_comes_back(cluster):
    lost = next(pod for pod in pods(cluster) if pod["spec"]["nodeName"] == "node2")
    url = f"http://{lost['status']['podIP']}:8000"
    urllib.request.urlopen(url, timeout=5).close()

    cluster.stop_node("node2")
    with pytest.raises((URLError, TimeoutError, ConnectionError)):
        urllib.request.urlopen(url, timeout=2)
    wait_until(lambda: not is_ready(node(cluster, "node2")), 40)
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
    conditions = {found["type"]: found["status"] for found in node["status"]["conditions"]}
    return conditions["Ready"] == "True"


def settled(cluster):
    cluster.control_plane.kubectl(
        "rollout", "status", "deployment/web", "-n", NAMESPACE, "--timeout=90s"
    )


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


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
