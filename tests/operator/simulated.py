"""A fleet of simulated nodes with GPUs, its pods and tenants, and a zone that can fall silent.

The API server, the scheduler and the controllers are real, with Kubernetes' own eviction rates.
kwok plays the kubelets, in a process of its own for the zone; one scripted worker answers for all.
Pods of others leave two GPUs on as many nodes as there are deployments that need two, and one on
others: there is room elsewhere for what is lost, but not for two GPUs on one node.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from real import Server, connect, eventually, install_crds
from responder import Responder
from scenes import condition

from cluster import ControlPlane
from cluster.control_plane import Network
from deepseek_operator.kinds import (
    DEEPSEEK_DEPLOYMENT,
    DEEPSEEK_TENANT,
    NODE,
    POD,
    Manifest,
)
from deepseek_operator.recovery import QUARANTINE_LABEL
from deepseek_operator.render import DEPLOYMENT_LABEL, MANAGED_BY_SELECTOR, TIER_LABEL

GPU = "nvidia.com/gpu"
ZONE_LABEL = "topology.kubernetes.io/zone"
ZONES = ("zone-a", "zone-b", "zone-c")
LOST = ZONES[0]
GPUS_A_NODE = 8
CLIENTS = 8
FOREIGN = "foreign"
H200 = {
    "nvidia.com/gpu.product": "NVIDIA-H200",
    "nvidia.com/gpu.memory": "143771",
    "nvidia.com/gpu.count": str(GPUS_A_NODE),
}

Key = tuple[str, str]
"""Namespace and name of a DeepSeekDeployment."""


@dataclass(frozen=True)
class Size:
    """How large the fleet is and how much patience everybody has, in seconds."""

    num_nodes: int
    num_foreign_pods: int
    num_deployments: int
    num_tenants: int
    degrade_seconds: int
    promote_seconds: int
    node_grace_seconds: int
    node_lease_seconds: int
    steady_seconds: float
    """How long nothing may change once everything is served."""
    limit_seconds: float
    """How long a test waits for anything."""


SMALL = Size(99, 693, 48, 6, 5, 5, 12, 8, 8.0, 120.0)
FULL = Size(1000, 7000, 500, 50, 30, 60, 50, 40, 60.0, 600.0)


@dataclass(frozen=True)
class Service:
    """What serves a deployment: a tier with a Ready pod on a node that is there."""

    tier: str
    since: datetime


class SimulatedFleet:
    """The cluster and what is asked of it."""

    def __init__(
        self, plane: ControlPlane, server: Server, responder: Responder, size: Size
    ) -> None:
        self.server, self.responder, self.size = server, responder, size
        self._plane = plane

    # Filling it.

    def fill(self) -> None:
        """Nodes, pods of others, tenants and their namespaces."""
        self._create(NODE.path(None), map(self._node, range(self.size.num_nodes)))
        self._plane.start_zone(LOST)
        for name in ("deepseek-system", FOREIGN, *self._teams):
            self.server.namespace(name)
            account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
            self.until(lambda path=account: self.server.ask("GET", path).status_code == 200)
        self.until(lambda: not self.silent_nodes(""), "all nodes are Ready")
        self._create(POD.path(FOREIGN), self._foreign_pods())
        self.until(self._foreign_pods_run, "the pods of others run")
        self._create(DEEPSEEK_TENANT.path(None), map(self._tenant, self._teams))

    def serve(self) -> None:
        """All deployments; returns when each is served by its primary."""
        numbers = range(self.size.num_deployments)
        # Those that need two first, or others would sit where two are free.
        for needs_two in (True, False):
            chosen = [number for number in numbers if self._needs_two(number) is needs_two]
            with ThreadPoolExecutor(CLIENTS) as clients:
                list(clients.map(self._create_object, map(self._object, chosen)))
            self.until_all_are_on_their_primary()

    @property
    def _teams(self) -> list[str]:
        return [f"team-{number}" for number in range(self.size.num_tenants)]

    def _node(self, number: int) -> Manifest:
        zone = ZONES[number % len(ZONES)]
        name = f"node-{number}"
        amounts = {"cpu": "64", "memory": "1Ti", "pods": "110", GPU: str(GPUS_A_NODE)}
        labels = {"kubernetes.io/hostname": name, ZONE_LABEL: zone, **H200}
        # The zone that will be lost has a kwok of its own.
        played_by = zone if zone == LOST else "fake"
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "labels": labels,
                "annotations": {"kwok.x-k8s.io/node": played_by},
            },
            "status": {"capacity": amounts, "allocatable": amounts},
        }

    def _foreign_pods(self) -> Iterator[Manifest]:
        """One GPU each."""
        size = self.size
        num_pairs = sum(map(self._needs_two, range(size.num_deployments)))
        num_free = GPUS_A_NODE * size.num_nodes - size.num_foreign_pods
        free = itertools.chain(
            itertools.repeat(2, num_pairs),
            itertools.repeat(1, num_free - 2 * num_pairs),
            itertools.repeat(0),
        )
        nodes = (
            f"node-{number}"
            for number, left in zip(range(size.num_nodes), free, strict=False)
            for _ in range(GPUS_A_NODE - left)
        )
        for number, node in enumerate(nodes):
            container = {"name": "c", "image": "x", "resources": {"limits": {GPU: "1"}}}
            yield {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"foreign-{number}", "namespace": FOREIGN},
                "spec": {
                    "nodeName": node,
                    "automountServiceAccountToken": False,
                    "containers": [container],
                },
            }

    def _tenant(self, namespace: str) -> Manifest:
        share = 100 // self.size.num_tenants
        return {
            "apiVersion": DEEPSEEK_TENANT.api_version,
            "kind": DEEPSEEK_TENANT.kind,
            "metadata": {"name": namespace},
            "spec": {
                "namespaces": [namespace],
                "gpuMemory": {"minPercent": 0, "maxPercent": share},
            },
        }

    def _needs_two(self, number: int) -> bool:
        """Whether a deployment needs two GPUs on one node: three of ten of each tenant."""
        return number // self.size.num_tenants % 10 < 3

    def _object(self, number: int) -> Manifest:
        return {
            "apiVersion": DEEPSEEK_DEPLOYMENT.api_version,
            "kind": DEEPSEEK_DEPLOYMENT.kind,
            "metadata": {
                "name": f"chat-{number}",
                "namespace": self._teams[number % self.size.num_tenants],
            },
            "spec": {
                "model": {"source": "package://smollm2"},
                "gpu": {"count": 2 if self._needs_two(number) else 1},
                "fallbacks": [{"name": "small", "model": {"source": "package://tiny"}}],
                "degrade": {"afterSeconds": self.size.degrade_seconds},
                "promote": {"afterSeconds": self.size.promote_seconds},
            },
        }

    def _create_object(self, manifest: Manifest) -> None:
        path = DEEPSEEK_DEPLOYMENT.path(manifest["metadata"]["namespace"])
        self.server.must("POST", path, manifest)

    def _create(self, path: str, manifests: Iterable[Manifest]) -> None:
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(lambda manifest: self.server.must("POST", path, manifest), manifests))

    def _foreign_pods_run(self) -> bool:
        query = {"limit": "1", "fieldSelector": "status.phase!=Running"}
        return not self.server.must("GET", POD.path(FOREIGN), **query)["items"]

    # The zone.

    def lose_zone(self) -> set[Key]:
        """No heartbeats and no answers of the zone any more; the deployments with a pod there."""
        lost = self.nodes_of(LOST)
        pods = [pod for pod in self.workers() if pod["spec"].get("nodeName") in lost]
        for pod in pods:
            self.responder.nodes[pod["metadata"]["name"]] = LOST
        self._plane.stop_zone(LOST)
        self.responder.silent.add(LOST)
        return {key_of(pod) for pod in pods}

    def return_zone(self) -> None:
        """The zone's kubelets are back, with what they ran."""
        self.responder.silent.clear()
        self._plane.start_zone(LOST)

    # Looking.

    def until(self, check: Callable[[], Any], what: str = "") -> None:
        """Wait for something; looks often enough for the times that are told in seconds."""
        eventually(check, seconds=self.size.limit_seconds, what=what, every=1.0)

    def until_none(self, check: Callable[[], Mapping[Key, object]], what: str) -> None:
        """Wait until no deployment is left; those that are and why are in the message."""
        deadline = time.monotonic() + self.size.limit_seconds
        while left := check():
            if time.monotonic() > deadline:
                some = "; ".join(f"{key}: {words}" for key, words in sorted(left.items())[:3])
                raise AssertionError(f"{what}: {len(left)} are left: {some}")
            time.sleep(1.0)

    def nodes_of(self, zone: str) -> set[str]:
        """Names of a zone's nodes."""
        return {node["metadata"]["name"] for node in self._nodes(zone)}

    def _nodes(self, zone: str) -> list[Manifest]:
        query = {"labelSelector": f"{ZONE_LABEL}={zone}"} if zone else {}
        found: list[Manifest] = self.server.must("GET", NODE.path(None), **query)["items"]
        return found

    def silent_nodes(self, zone: str = LOST) -> dict[str, datetime]:
        """Nodes that are not Ready, and since when."""
        return {
            node["metadata"]["name"]: since
            for node in self._nodes(zone)
            for is_ready, since in [_readiness(node)]
            if not is_ready
        }

    def ready_nodes(self, zone: str = LOST) -> dict[str, datetime]:
        """Nodes that are Ready, and since when."""
        return {
            node["metadata"]["name"]: since
            for node in self._nodes(zone)
            for is_ready, since in [_readiness(node)]
            if is_ready
        }

    def workers(self) -> list[Manifest]:
        """The workers of all deployments, without those in quarantine."""
        query = {"labelSelector": f"{MANAGED_BY_SELECTOR},{DEPLOYMENT_LABEL}"}
        found: list[Manifest] = self.server.must("GET", POD.path(None), **query)["items"]
        return found

    def in_quarantine(self) -> list[Manifest]:
        """Pods in quarantine."""
        query = {"labelSelector": QUARANTINE_LABEL}
        found: list[Manifest] = self.server.must("GET", POD.path(None), **query)["items"]
        return found

    def served(self, without: set[str]) -> dict[Key, Service]:
        """What serves each deployment, of several tiers the one that came first.

        Args:
            without: Nodes whose pods do not count, whatever is said of them.
        """
        found: dict[Key, Service] = {}
        for pod in self.workers():
            if pod["spec"].get("nodeName") in {None, *without}:
                continue
            is_ready, since = _readiness(pod)
            new = Service(pod["metadata"]["labels"][TIER_LABEL], since)
            old = found.get(key_of(pod))
            if is_ready and (old is None or new.since < old.since):
                found[key_of(pod)] = new
        return found

    def statuses(self) -> dict[Key, Manifest]:
        """The status of each deployment."""
        items = self.server.must("GET", DEEPSEEK_DEPLOYMENT.path(None))["items"]
        return {
            (item["metadata"]["namespace"], item["metadata"]["name"]): item.get("status") or {}
            for item in items
        }

    def until_all_are_on_their_primary(self) -> None:
        """Wait until each deployment is Ready, not degraded, and has only its primary's pods."""

        def others() -> dict[Key, str]:
            found = {key: _reason(status) for key, status in self.statuses().items()}
            tiers = {key_of(pod): pod["metadata"]["labels"][TIER_LABEL] for pod in self.workers()}
            found |= {key: tier for key, tier in tiers.items() if tier != "primary"}
            return {key: words for key, words in found.items() if words != "PrimaryServing"}

        self.until_none(others, "all are on their primary")


def key_of(pod: Manifest) -> Key:
    """The deployment that a worker belongs to."""
    return pod["metadata"]["namespace"], pod["metadata"]["labels"][DEPLOYMENT_LABEL]


def _reason(status: Manifest) -> str:
    """Why a deployment is not as it should be, or `PrimaryServing`."""
    if not status:
        return "no status"
    ready, degraded = (condition(status, kind) for kind in ("Ready", "Degraded"))
    return str(degraded["reason"] if ready["status"] == "True" else ready["reason"])


def _readiness(manifest: Manifest) -> tuple[bool, datetime]:
    """Whether a node or pod is Ready, and since when."""
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    for found in status.get("conditions") or []:
        if found["type"] == "Ready":
            return found["status"] == "True", datetime.fromisoformat(found["lastTransitionTime"])
    return False, datetime.fromisoformat(metadata["creationTimestamp"])


@contextmanager
def simulated(name: str, size: Size) -> Iterator[SimulatedFleet]:
    """An empty fleet under a name of its own."""
    with (
        ControlPlane(
            name,
            components=("kube-controller-manager", "kube-scheduler", "kwok"),
            # Room for a Service of each object.
            network=Network(services="10.204.0.0/16", first_service="10.204.0.1"),
            node_grace_seconds=size.node_grace_seconds,
            node_lease_seconds=size.node_lease_seconds,
        ) as plane,
        Responder() as responder,
    ):
        server = connect(plane)
        install_crds(server, any_gpu_count=True)
        yield SimulatedFleet(plane, server, responder, size)
        server.client.close()
