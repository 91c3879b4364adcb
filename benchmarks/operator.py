"""Speed, quiet and memory of the operator on a real control plane with simulated nodes.

`python benchmarks/operator.py` starts etcd, API server, controller manager, scheduler and kwok on
this machine, which all share its cores with the operator, and writes its rows of
`benchmarks/results/cpu/operator.json`; those of a lost zone come from `make test-long`. Times are
taken from outside, by asking the API server for the children, and include making the objects. The
ceiling is how many server-side applies a second the same API server takes from a client that does
nothing else.
"""

import argparse
import asyncio
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_kube_config
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[1]
# This folder would put this file before the standard library's module of its name.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests/operator")]

from figures import RESULTS, origin, record, row, verdict  # noqa: E402
from real import connect, eventually, free_port, install_crds, peak_mib  # noqa: E402

from cluster import ControlPlane, programs  # noqa: E402 - after the path
from cluster.control_plane import Network  # noqa: E402
from deepseek_operator.api import Api  # noqa: E402
from deepseek_operator.kinds import (  # noqa: E402
    DEEPSEEK_DEPLOYMENT,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    POD,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Manifest,
)
from deepseek_operator.settings import Settings  # noqa: E402

NUM_SINGLE = 20
NUM_AT_ONCE = 500
NUM_NODES = 1000
NUM_FIRST_NODES = 10
NUM_FOREIGN_PODS = 6500
IDLE_SECONDS = 60
NUM_APPLIES = 1000
CLIENTS = 16
GIVE_UP_SECONDS = 600
CHILDREN = (SECRET, SERVICE_ACCOUNT, SERVICE, DISRUPTION_BUDGET, NETWORK_POLICY, DEPLOYMENT)
WRITES = frozenset({"create", "update", "patch", "delete"})


class Operator:
    """The operator as a process, serving the whole cluster."""

    def __init__(self, plane: ControlPlane) -> None:
        self.port = free_port()
        self._log = (plane.state / "operator.log").open("ab")
        environment = {
            **os.environ,
            "KUBECONFIG": str(plane.kubeconfig),
            "DEEPSEEK_OPERATOR__HTTP_PORT": str(self.port),
            "DEEPSEEK_OPERATOR__NAMESPACE": "default",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deepseek_operator.main", "run"],
            cwd=ROOT, env=environment, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        eventually(lambda: self.requests().get(("watch", "pods")), seconds=120)

    def requests(self) -> dict[tuple[str, str], int]:
        """How often each verb was used on each resource."""
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", trust_env=False, timeout=30).text
        return {
            (sample.labels["verb"], sample.labels["resource"]): int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "deepseek_operator_api_requests_total"
        }

    def writes(self) -> dict[str, int]:
        """Requests that change something, by resource; the answers' codes are summed up."""
        counted: dict[str, int] = {}
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", trust_env=False, timeout=30).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "deepseek_operator_api_requests_total" and (
                    sample.labels["verb"] in WRITES
                ):
                    resource = sample.labels["resource"]
                    counted[resource] = counted.get(resource, 0) + int(sample.value)
        return counted

    def peak_mib(self) -> float:
        """The most memory the process has had, in MiB."""
        return peak_mib(self.process.pid)

    def cpu_seconds(self) -> float:
        """Processor time used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it as a rollout would."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        self._log.close()


def dsd(namespace: str, name: str) -> Manifest:
    return {
        "apiVersion": "deepseek.dev/v1alpha1",
        "kind": "DeepSeekDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"gpu": {"mode": "cpu"}},
    }


def node(number: int) -> Manifest:
    name = f"fake-{number}"
    amounts = {"cpu": "32", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "type": "kwok"},
        },
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def foreign_pod(number: int) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"foreign-{number}", "namespace": "foreign", "labels": {"app": "x"}},
        "spec": {
            "nodeName": f"fake-{number % NUM_NODES}",
            "automountServiceAccountToken": False,
            "containers": [{"name": "c", "image": "x"}],
        },
    }


class Client:
    """A light client of the same API server: what it uses of the cores, the operator lacks."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._turns = asyncio.Semaphore(CLIENTS)

    async def create(self, kind: Kind, manifest: Manifest) -> None:
        """Create one object, when it is its turn."""
        async with self._turns:
            namespace = manifest["metadata"].get("namespace")
            await self._api.request("POST", kind.path(namespace), body=manifest)

    async def create_all(self, kind: Kind, manifests: Iterable[Manifest]) -> None:
        """Create objects, `CLIENTS` at a time."""
        await asyncio.gather(*(self.create(kind, manifest) for manifest in manifests))

    async def count(self, kind: Kind, namespace: str) -> int:
        """Objects of a kind, without reading them: the rest of a list of one."""
        answer = await self._api.request("GET", kind.path(namespace), query={"limit": "1"})
        return len(answer["items"]) + int(answer["metadata"].get("remainingItemCount", 0))

    async def apply(self, number: int) -> None:
        """Apply a new object as large as a child."""
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"c{number}", "namespace": "ceiling", "labels": {"a": "b"}},
            "data": {str(key): "x" * 40 for key in range(20)},
        }
        async with self._turns:
            await self._api.apply(Kind("", "v1", "configmaps", "ConfigMap"), manifest)

    async def applies_per_second(self) -> float:
        """What the API server can take from a client that does nothing else."""
        started = time.perf_counter()
        await asyncio.gather(*map(self.apply, range(NUM_APPLIES)))
        return NUM_APPLIES / (time.perf_counter() - started)

    async def seconds_to_children(self, number: int) -> float:
        """From asking for one object until all its children are there."""
        name = f"one-{number}"
        names = {SECRET: f"{name}-state-token", DEPLOYMENT: f"{name}-primary"}
        started = time.perf_counter()
        await self.create(DEEPSEEK_DEPLOYMENT, dsd("single", name))
        missing = list(CHILDREN)
        while missing:
            kind = missing[0]
            if await self._api.get(kind, "single", names.get(kind, name)) is not None:
                missing.pop(0)
            else:
                await asyncio.sleep(0.005)
        return time.perf_counter() - started

    async def seconds_for_many(self) -> float:
        """From the first of many objects until the last child of all is there."""
        # Each namespace comes with a ServiceAccount.
        before = {kind: await self.count(kind, "fleet") for kind in CHILDREN}
        started = time.perf_counter()
        objects = [dsd("fleet", f"many-{number}") for number in range(NUM_AT_ONCE)]
        await self.create_all(DEEPSEEK_DEPLOYMENT, objects)
        print(f"  {time.perf_counter() - started:5.1f} s: all objects are created")
        while True:
            found = {kind: await self.count(kind, "fleet") - before[kind] for kind in CHILDREN}
            elapsed = time.perf_counter() - started
            if all(number >= NUM_AT_ONCE for number in found.values()):
                return elapsed
            if elapsed > GIVE_UP_SECONDS:
                raise RuntimeError(f"not all children after {elapsed:.0f} s: {found}")
            print(f"  {elapsed:5.1f} s: {sum(found.values())} of {6 * NUM_AT_ONCE} children")
            await asyncio.sleep(1)

    async def wait_for_pods(self, namespace: str) -> None:
        """Until kwok has every pod of the namespace running."""
        while True:
            query = {"limit": "1", "fieldSelector": "status.phase!=Running"}
            answer = await self._api.request("GET", POD.path(namespace), query=query)
            if not answer["items"]:
                return
            await asyncio.sleep(2)

    async def wait_until_quiet(self, operator: Operator) -> None:
        """Until every object of the fleet is Ready and nothing is written for some seconds."""
        started = time.monotonic()
        while await self._num_ready() < NUM_AT_ONCE:
            if time.monotonic() - started > GIVE_UP_SECONDS:
                raise RuntimeError(f"only {await self._num_ready()} objects became Ready")
            await asyncio.sleep(2)
        last: dict[str, int] = {}
        while (now := without_lease(operator.writes())) != last:
            last = now
            await asyncio.sleep(5)

    async def _num_ready(self) -> int:
        number = 0
        async for items, _ in self._api.chunks(DEEPSEEK_DEPLOYMENT, "fleet"):
            number += sum(
                condition["type"] == "Ready" and condition["status"] == "True"
                for item in items
                for condition in (item.get("status") or {}).get("conditions", [])
            )
        return number


def without_lease(writes: dict[str, int]) -> dict[str, int]:
    """What was written besides the Lease."""
    return {resource: n for resource, n in writes.items() if not resource.startswith("leases")}


async def idle_writes(operator: Operator) -> tuple[dict[str, int], int]:
    """Writes by resource in a minute of nothing, and those of the Lease."""
    before = operator.writes()
    await asyncio.sleep(IDLE_SECONDS)
    new = {
        resource: number - before.get(resource, 0)
        for resource, number in operator.writes().items()
        if number > before.get(resource, 0)
    }
    others = without_lease(new)
    return others, sum(new.values()) - sum(others.values())


async def measure(plane: ControlPlane) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """All figures, in one run."""
    server = connect(plane)
    install_crds(server)
    for name in ("single", "fleet", "foreign", "ceiling"):
        server.namespace(name)
    server.client.close()
    configuration = Configuration()
    await load_kube_config(str(plane.kubeconfig), client_configuration=configuration)
    api = Api(configuration, Settings(api_retries=10), lambda _what, _code: None)
    client = Client(api)

    print("the ceiling: server-side applies a second")
    ceilings = {"api_applies_per_second": round(await client.applies_per_second(), 1)}
    print(f"  {ceilings}")
    operator = Operator(plane)
    print(f"{NUM_SINGLE} objects, one after the other")
    # The first one warms connections and caches up, as any operator in use has them.
    singles = [await client.seconds_to_children(n) for n in range(NUM_SINGLE + 1)][1:]
    print(f"  median {statistics.median(singles):.3f} s")

    # Enough nodes for the pods of all objects.
    nodes = list(map(node, range(NUM_NODES)))
    await client.create_all(Kind("", "v1", "nodes", "Node"), nodes[:NUM_FIRST_NODES])
    await client.wait_for_pods("single")
    print(f"{NUM_AT_ONCE} objects at once")
    cpu_before = operator.cpu_seconds()
    many = await client.seconds_for_many()
    cpu_many = operator.cpu_seconds() - cpu_before
    print(f"  {many:.1f} s")

    print(f"{NUM_NODES} nodes and {NUM_FOREIGN_PODS} pods of others")
    await client.create_all(Kind("", "v1", "nodes", "Node"), nodes[NUM_FIRST_NODES:])
    await client.create_all(POD, map(foreign_pod, range(NUM_FOREIGN_PODS)))
    await client.wait_for_pods("foreign")
    await client.wait_until_quiet(operator)
    print(f"{IDLE_SECONDS} s of nothing")
    idle, lease = await idle_writes(operator)
    print(f"  {idle or 'nothing'} besides the Lease's {lease}")
    peak = operator.peak_mib()
    operator.stop()

    print("a restart among all of that")
    operator = Operator(plane)
    await asyncio.sleep(15)
    restart_peak = operator.peak_mib()
    restart_writes = sum(without_lease(operator.writes()).values())
    operator.stop()
    await api.close()
    rows = [
        row(
            "create_to_children", "median time from create to all children applied, nothing else"
            " going on", statistics.median(singles), "s", 0.5,
            min=round(min(singles), 3), max=round(max(singles), 3), objects=NUM_SINGLE,
        ),
        row(
            "children_of_500", f"{NUM_AT_ONCE} deployments created at once: time until all"
            " children are applied", many, "s", 25.0, operator_cpu_seconds=round(cpu_many, 1),
        ),
        row(
            "idle_writes", f"API writes in {IDLE_SECONDS} s at idle with {NUM_AT_ONCE}"
            " deployments, besides the Lease", sum(idle.values()), "requests", 0,
            lease_writes=lease,
        ),
        row(
            "peak_memory", f"peak memory of the operator with {NUM_AT_ONCE} deployments,"
            f" {NUM_NODES} nodes and {NUM_FOREIGN_PODS} foreign pods", max(peak, restart_peak),
            "MiB", 300.0, while_creating=round(peak, 1), after_restart=round(restart_peak, 1),
        ),
        row(
            "restart_writes", f"API writes after a restart with {NUM_AT_ONCE} deployments,"
            " besides the Lease", restart_writes, "requests", 0,
        ),
    ]  # fmt: skip
    return ceilings, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    components = ("kube-controller-manager", "kube-scheduler", "kwok")
    # Room for a Service of each object.
    network = Network(services="10.202.0.0/16", first_service="10.202.0.1")
    # On a busy machine simulated nodes are late; kwok does not make their pods ready again.
    with ControlPlane(
        "benchmark-operator",
        components=components,
        network=network,
        node_grace_seconds=3600,
        # Kubernetes' own limits: in a real cluster the controllers have cores of their own.
        controller_manager_flags=("--kube-api-qps=20", "--kube-api-burst=30"),
    ) as plane:
        ceilings, rows = asyncio.run(measure(plane))
    versions = {
        "python": platform.python_version(),
        "kopf": version("kopf"),
        "kubernetes": programs.version(programs.PROGRAMS["kube-apiserver"]).removeprefix("v"),
    }
    about = {"gpu": None, **origin(load_before), "versions": versions, "ceilings": ceilings}
    record(rows, arguments.output, **about)
    for entry in rows:
        print(verdict(entry))
    return 0 if all(entry["met"] for entry in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
