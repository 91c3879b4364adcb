"""Tenants at a real API server, with its scheduler and quota, on nodes that kwok plays.

The nodes list GPUs and carry the labels of GPU feature discovery; their pods run at once and hold
what they asked for until they are deleted.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real import (
    Killer,
    Operator,
    Server,
    connect,
    eventually,
    install_crds,
    log_end,
    replayed,
)
from test_controller import quiet

from cluster import ControlPlane
from deepseek_operator.kinds import (
    DEEPSEEK_DEPLOYMENT,
    DEEPSEEK_TENANT,
    DEPLOYMENT,
    POD,
    RESOURCE_QUOTA,
    Manifest,
)

pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(300)]

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.18gb"
H200 = {
    "nvidia.com/gpu.product": "NVIDIA-H200",
    "nvidia.com/gpu.memory": "143771",
    "nvidia.com/gpu.count": "8",
}
CARD_BYTES = 143771 * 2**20


@pytest.fixture(scope="module")
def plane() -> Iterator[Server]:
    components = ("kube-controller-manager", "kube-scheduler", "kwok")
    with ControlPlane("tenancy-tests", components=components) as control_plane:
        found = connect(control_plane)
        install_crds(found)
        yield found
        found.client.close()


class Site:
    """The cluster of one test, in the words that the tests need."""

    def __init__(self, server: Server, folder: Path, *, is_killed: bool = False) -> None:
        self.server = server
        self.folder = folder
        self.operators: list[Operator] = []
        self.is_killed = is_killed
        """Whether operators are killed again and again."""
        self._killers = contextlib.ExitStack()

    def picture(self) -> str:
        """For whoever reads of a failed test."""
        tenants = self.server.must("GET", DEEPSEEK_TENANT.path(None))["items"]
        spaces = self.server.must("GET", "/api/v1/namespaces")["items"]
        names = [space["metadata"]["name"] for space in spaces]
        return "".join(
            [
                *(f"{live['metadata']['name']}: {live.get('status')}\n" for live in tenants),
                *(self.server.picture_of(name) for name in names if name.startswith("t-")),
                *(log_end(log) for log in self.folder.glob("*.log")),
            ]
        )

    def node(self, name: str, labels: dict[str, str] | None = None, **units: str) -> None:
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "110"} | {
            {"gpu": GPU, "mig": MIG}[key]: number for key, number in units.items()
        }
        metadata = {
            "name": name,
            "labels": H200 if labels is None else labels,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        }
        self.server.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        self.server.must(
            "PATCH", f"/api/v1/nodes/{name}/status",
            {"status": {"allocatable": amounts, "capacity": amounts}},
            content_type="application/merge-patch+json",
        )  # fmt: skip

    def namespace(self, name: str) -> None:
        self.server.namespace(name)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        eventually(lambda: self.server.ask("GET", account).status_code == 200)

    def operator(self, identity: str = "one", **settings: str) -> Operator:
        # The workers here are kwok's and answer nobody.
        given = {"PROBE_SECONDS": "3600", **settings}
        operator = Operator(
            self.server, "deepseek-system", self.folder, identity, settings=given,
            cluster_wide=True,
        )  # fmt: skip
        operator.install()
        operator.start()
        self.operators.append(operator)
        operator.lead()
        if self.is_killed:
            self._killers.enter_context(Killer(operator, self.folder.name))
        return operator

    def tenant(self, name: str, least: int, most: int, *namespaces: str, **more: Any) -> None:
        memory = {"minPercent": least, "maxPercent": most}
        spec = {"namespaces": list(namespaces or (name,)), "gpuMemory": memory} | more
        self.server.apply(
            {
                "apiVersion": "deepseek.dev/v1alpha1",
                "kind": "DeepSeekTenant",
                "metadata": {"name": name},
                "spec": spec,
            }
        )

    def serve(self, namespace: str, name: str = "chat", **spec: Any) -> None:
        self.server.apply(
            {
                "apiVersion": "deepseek.dev/v1alpha1",
                "kind": "DeepSeekDeployment",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {"recovery": {"drainSeconds": 1}} | spec,
            }
        )

    def others(self, namespace: str, replicas: int, gpus: int = 1) -> None:
        """A Deployment of somebody else's."""
        labels = {"app": "other"}
        resources = {"limits": {GPU: str(gpus)}}
        container = {"name": "c", "image": "none", "resources": resources}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
        self.server.apply(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "other", "namespace": namespace},
                "spec": {
                    "replicas": replicas,
                    "selector": {"matchLabels": labels},
                    "template": template,
                },
            }
        )

    def status(self, tenant: str) -> Manifest:
        live = self.server.must("GET", DEEPSEEK_TENANT.path(None, tenant))
        found: Manifest = live.get("status") or {}
        return found

    def reason(self, tenant: str, kind: str) -> str:
        conditions = self.status(tenant)["conditions"]
        return next(str(c["reason"]) for c in conditions if c["type"] == kind)

    def hard(self, namespace: str, resource: str = GPU) -> int:
        quota = self.server.get(RESOURCE_QUOTA, namespace, "deepseek-tenant") or {}
        return int(quota["spec"]["hard"][f"requests.{resource}"])

    def held(self, namespace: str, *, running: bool = False) -> int:
        """GPUs that the pods of a namespace hold, by the API server's own count of pods."""
        total = 0
        for pod in self.server.list(POD, namespace):
            limits = pod["spec"]["containers"][0]["resources"].get("limits") or {}
            if not running or pod["status"].get("phase") == "Running":
                total += int(limits.get(GPU, 0))
        return total

    def condition(self, namespace: str, name: str, kind: str) -> Manifest:
        live = self.server.get(DEEPSEEK_DEPLOYMENT, namespace, name) or {}
        conditions = live["status"]["conditions"]
        found: Manifest = next(c for c in conditions if c["type"] == kind)
        return found

    def clear(self) -> None:
        self._killers.close()
        for operator in self.operators:
            if operator.process is not None and operator.process.poll() is None:
                operator.stop(signal.SIGKILL)
        self.server.must("DELETE", DEEPSEEK_TENANT.path(None))
        for name in self.own_namespaces():
            self.server.must("DELETE", f"/api/v1/namespaces/{name}")
        lease = "/apis/coordination.k8s.io/v1/namespaces/deepseek-system/leases"
        self.server.must("DELETE", lease)
        eventually(lambda: not self.own_namespaces(), what="the namespaces are gone")
        self.server.must("DELETE", "/api/v1/nodes")
        eventually(lambda: not self.server.must("GET", "/api/v1/nodes")["items"])

    def own_namespaces(self) -> list[str]:
        items = self.server.must("GET", "/api/v1/namespaces")["items"]
        names = [str(item["metadata"]["name"]) for item in items]
        return [name for name in names if name.startswith("t-")]


@pytest.fixture
def site(plane: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    found = Site(plane, tmp_path, is_killed=getattr(request, "param", False))
    if plane.ask("GET", "/api/v1/namespaces/deepseek-system").status_code == 404:
        found.namespace("deepseek-system")
    yield found
    found.clear()


def over(seconds: float, check: Callable[[], bool]) -> None:
    """Hold for a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert check()
        time.sleep(0.2)


@replayed("site")
def test_a_cap_holds_under_a_storm_of_pods(site: Site) -> None:
    site.node("node1", gpu="8")
    site.node("node2", gpu="8")
    site.namespace("t-a")
    site.namespace("t-b")
    site.tenant("a", 0, 65, "t-a", "t-b")
    site.operator()
    eventually(lambda: site.hard("t-a") + site.hard("t-b") == 10, what="65 percent of 16 cards")

    for namespace in ("t-a", "t-b"):
        site.serve(namespace, replicas=12)
        site.others(namespace, replicas=30)

    eventually(lambda: site.held("t-a") + site.held("t-b") == 10, what="the cap is used up")
    over(8, lambda: site.held("t-a") + site.held("t-b") <= 10)
    assert site.hard("t-a") + site.hard("t-b") <= 10
    quota = site.server.get(RESOURCE_QUOTA, "t-a", "deepseek-tenant") or {}
    assert all(key.startswith("requests.nvidia.com/") for key in quota["spec"]["hard"])
    eventually(lambda: site.status("a")["quota"] == {"bytes": 10 * CARD_BYTES, "percent": 63})


@replayed("site")
def test_a_borrower_is_shrunk_within_the_grace_period_and_the_owners_pods_run(site: Site) -> None:
    site.node("node1", gpu="8")
    site.namespace("t-owner")
    site.namespace("t-borrower")
    dynamic = {"graceSeconds": 30, "interval": "5s"}
    site.tenant("owner", 50, 65, "t-owner", dynamic=dynamic)
    site.tenant("borrower", 0, 100, "t-borrower", dynamic=dynamic)
    site.operator()
    site.serve("t-borrower", "low", replicas=4, priority=-1)
    site.serve("t-borrower", "high", replicas=3, priority=1)
    eventually(lambda: site.held("t-borrower", running=True) == 7, what="all but one unit is lent")

    site.serve("t-owner", replicas=4)
    asked_at = time.monotonic()

    eventually(lambda: site.reason("borrower", "OverQuota") == "GracePeriod")
    assert site.held("t-borrower", running=True) == 7
    eventually(lambda: site.held("t-owner", running=True) == 4, what="the owner's pods run")
    # What ends and starts here takes no time, and the machine may be busy.
    assert site.is_killed or time.monotonic() - asked_at < 30 + 15
    assert site.held("t-borrower") == 4
    low = site.server.get(DEPLOYMENT, "t-borrower", "low-primary") or {}
    high = site.server.get(DEPLOYMENT, "t-borrower", "high-primary") or {}
    assert (low["spec"]["replicas"], high["spec"]["replicas"]) == (1, 3)
    limited = site.condition("t-borrower", "low", "QuotaExceeded")
    assert (limited["status"], limited["reason"]) == ("True", "TenantLimit")
    assert "Tenant borrower may use 4 units" in limited["message"]
    eventually(lambda: site.reason("borrower", "OverQuota") == "WithinQuota")

    site.serve("t-owner", replicas=0)

    eventually(lambda: site.held("t-borrower", running=True) == 7, what="it is lent again")


def test_the_quota_moves_as_use_shifts_and_a_restart_changes_nothing(site: Site) -> None:
    site.node("node1", gpu="8")
    for name in ("t-one", "t-other"):
        site.namespace(name)
        site.tenant(name, 0, 100, name, dynamic={"halfLife": "5s", "interval": "1s"})
    site.serve("t-one", replicas=6)
    operator = site.operator()
    eventually(lambda: site.held("t-one", running=True) == 6)
    eventually(lambda: site.hard("t-one") == 7)

    site.serve("t-one", replicas=0)
    eventually(lambda: site.held("t-one") == 0)
    site.serve("t-other", replicas=1)
    eventually(lambda: site.held("t-other", running=True) == 1)

    # What is told of past use, and with it the quota, moves once a minute.
    def told() -> tuple[int, int]:
        one, other = site.status("t-one"), site.status("t-other")
        return one["pastUsed"]["percent"], other["pastUsed"]["percent"]

    # One card of eight, or as good as.
    eventually(lambda: told() in {(0, 12), (0, 13)}, seconds=150, what="past use shifted")
    eventually(lambda: site.hard("t-other") == 4, seconds=70, what="the quota moved")
    assert site.hard("t-one") == 4
    before = site.status("t-other")["pastUsed"], site.hard("t-one"), site.hard("t-other")
    operator.stop(signal.SIGKILL)
    site.operator("two")
    over(5, lambda: before == (
        site.status("t-other")["pastUsed"], site.hard("t-one"), site.hard("t-other"),
    ))  # fmt: skip


def test_at_idle_nothing_is_written(site: Site) -> None:
    site.node("node1", gpu="8")
    site.namespace("t-a")
    site.tenant("a", 25, 65, "t-a", dynamic={"interval": "1s"})
    site.serve("t-a", replicas=2)
    operator = site.operator()
    eventually(lambda: site.held("t-a", running=True) == 2)
    eventually(lambda: site.reason("a", "Ready") == "QuotaDealt")

    before = quiet(operator)
    time.sleep(10)

    assert operator.writes() == before


def test_faults_are_conditions_and_heal(site: Site) -> None:
    site.node("node1", gpu="8")
    site.namespace("t-a")
    site.namespace("t-c")
    site.tenant("a", 0, 50, "t-a", "t-missing")
    time.sleep(1.1)  # the older of two is told by seconds
    site.tenant("b", 0, 50, "t-a", "t-b")
    site.tenant("c", 0, 5, "t-c")
    site.server.apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "deepseek-tenant", "namespace": "t-c"},
            "spec": {"hard": {f"requests.{GPU}": "3"}},
        }
    )
    site.operator()

    eventually(lambda: site.reason("a", "Ready") == "NamespaceMissing")
    eventually(lambda: site.reason("b", "NamespaceTaken") == "NamespaceInTwoTenants")
    eventually(lambda: site.reason("c", "CapBelowOneUnit") == "CapBelowOneUnit")
    eventually(lambda: site.reason("c", "Ready") == "ApplyRefused")
    assert site.hard("t-c") == 3  # somebody else's stays
    assert site.hard("t-a") == 2  # the share of a is dealt to both of its namespaces

    site.namespace("t-missing")
    site.namespace("t-b")
    site.server.delete(RESOURCE_QUOTA, "t-c", "deepseek-tenant")
    site.tenant("a", 0, 50, "t-missing")
    site.node("node1", H200 | {"nvidia.com/gpu.memory": "40000"}, gpu="8")

    eventually(lambda: site.reason("a", "Ready") == "QuotaDealt")
    eventually(lambda: site.reason("b", "NamespaceTaken") == "NamespacesAreFree")
    eventually(lambda: site.reason("c", "Ready") == "QuotaDealt")
    assert site.hard("t-c") == 0
    # A size that the product's name does not contradict is believed: the cluster shrank.
    eventually(lambda: site.status("a")["quota"]["bytes"] == 4 * 40000 * 2**20)
    site.node("node1", H200 | {"nvidia.com/gpu.memory": "much"}, gpu="8")
    eventually(lambda: site.reason("a", "NodesContradict") == "ContradictoryLabels")
    # What the node last offered goes on to count.
    assert site.status("a")["quota"]["percent"] == 50
    assert site.hard("t-missing") == 4


def test_a_tenant_that_goes_takes_its_quotas_with_it(site: Site) -> None:
    site.node("node1", gpu="8")
    site.namespace("t-a")
    site.namespace("t-b")
    site.tenant("a", 0, 50, "t-a", "t-b")
    site.operator()
    eventually(lambda: site.hard("t-a") == 2)

    site.tenant("a", 0, 50, "t-b")
    eventually(lambda: site.server.get(RESOURCE_QUOTA, "t-a", "deepseek-tenant") is None)
    eventually(lambda: site.hard("t-b") == 4)
    site.server.must("DELETE", DEEPSEEK_TENANT.path(None, "a"))

    eventually(lambda: site.server.get(RESOURCE_QUOTA, "t-b", "deepseek-tenant") is None)


def test_slices_are_scheduled_and_counted_under_both_strategies(site: Site) -> None:
    single = {
        "nvidia.com/mig.strategy": "single",
        "nvidia.com/gpu.product": "NVIDIA-H200-MIG-1g.18gb",
        "nvidia.com/gpu.memory": "16384",
        "nvidia.com/gpu.count": "7",
        "nvidia.com/gpu.slices.gi": "1",
    }
    mixed = {
        "nvidia.com/mig.strategy": "mixed",
        "nvidia.com/mig-1g.18gb.memory": "16384",
        "nvidia.com/mig-1g.18gb.count": "7",
    }
    site.namespace("t-a")
    site.node("single", single, gpu="7")
    site.node("whole", gpu="1")
    site.tenant("a", 0, 60, "t-a", partition={"mode": "mig", "migProfile": "1g.18gb"})
    site.operator()
    slice_ = {"mode": "mig", "migProfile": "1g.18gb"}
    site.serve("t-a", "one", gpu=slice_)
    site.serve("t-a", "none", gpu={"mode": "mig", "migProfile": "7g.141gb"})

    # A name that cards and slices share is counted with the larger: nothing fits under the cap.
    eventually(lambda: site.reason("a", "CapBelowOneUnit") == "CapHoldsUnits")
    eventually(lambda: pod_nodes(site, "one") == {"single"}, what="a slice is called a GPU")
    # A card of the same name, which would take the quota of the next slice.
    site.serve("t-a", "card", gpu={"mode": "whole"})
    eventually(lambda: site.condition("t-a", "card", "QuotaExceeded")["reason"] == "TenantLimit")
    card = site.server.get(DEPLOYMENT, "t-a", "card-primary") or {}
    assert card["metadata"]["generation"] == 1  # it never was to have a pod
    assert card["spec"]["replicas"] == 0
    eventually(lambda: site.condition("t-a", "none", "QuotaExceeded")["reason"] == "TenantLimit")
    site.server.must("DELETE", "/api/v1/nodes/single")
    site.node("mixed", mixed, mig="7")

    eventually(lambda: pod_nodes(site, "one") == {"mixed"}, what="a slice has a name of its own")
    eventually(lambda: site.hard("t-a", MIG) > 0)
    assert site.hard("t-a", GPU) == 0


def test_pods_outside_the_partition_end_within_the_grace_period(site: Site) -> None:
    """Of a tenant that comes later, where cards and slices have one name."""
    site.namespace("t-a")
    site.node("whole", gpu="2")
    site.serve("t-a", "card", gpu={"mode": "whole"})
    site.operator()
    eventually(lambda: pod_nodes(site, "card") == {"whole"})

    partition = {"mode": "mig", "migProfile": "1g.18gb"}
    # Pods have drained when it is over: 14 s, and 15 s to spare.
    dynamic = {"graceSeconds": 40, "interval": "1s"}
    site.tenant("a", 0, 60, "t-a", partition=partition, dynamic=dynamic)

    eventually(lambda: site.reason("a", "OverQuota") == "GracePeriod")
    assert pod_nodes(site, "card") == {"whole"}
    eventually(lambda: not pod_nodes(site, "card"), what="its grace period is over")
    eventually(lambda: site.reason("a", "OverQuota") == "WithinQuota")


def pod_nodes(site: Site, name: str) -> set[str]:
    return {
        pod["spec"].get("nodeName", "")
        for pod in site.server.list(POD, "t-a")
        if pod["metadata"]["labels"].get("deepseek.dev/deployment") == name
        and "deletionTimestamp" not in pod["metadata"]
    }
