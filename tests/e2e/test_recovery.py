"""Nodes that are lost and engines that hang: clients do not notice, and pods change node."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from site_under_test import DSD, OPERATOR, Namespace, Site, eventually

pytestmark = pytest.mark.e2e

Record = Callable[[str, object], None]

ATTEMPT_SECONDS = 5.0
"""How long the client waits for one attempt: a lost node refuses nothing, it is silent. The pod
that is left shares its processors with the one that starts, so it may take a while to answer."""
# The pods take turns on few processors, so each is small.
SMALL = {"resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "1"}}}
SPREAD = {"topologySpread": [{"topologyKey": "kubernetes.io/hostname"}]}


@dataclass
class Attempts(httpx.BaseTransport):
    """Kept-alive connections, and a note of every attempt that failed."""

    failed: list[tuple[float, str]] = field(default_factory=list)
    """When each began, and why it failed."""

    def __post_init__(self) -> None:
        self._inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        began = time.monotonic()
        try:
            answer = self._inner.handle_request(request)
        except httpx.HTTPError as error:
            self.failed.append((began, type(error).__name__))
            raise
        if answer.status_code >= 500:
            self.failed.append((began, f"HTTP {answer.status_code}"))
        return answer

    def close(self) -> None:
        self._inner.close()


@dataclass
class Client:
    """Asks once every 200 ms from two threads, over connections that it keeps."""

    base_url: str
    model: str
    attempts: Attempts = field(default_factory=Attempts)
    answers: int = 0
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def asking(self) -> Iterator[None]:
        ended = threading.Event()
        with OpenAI(
            base_url=self.base_url,
            api_key="none",
            max_retries=6,
            timeout=ATTEMPT_SECONDS,
            http_client=httpx.Client(transport=self.attempts),
        ) as client:
            threads = [threading.Thread(target=self._ask, args=(client, ended)) for _ in range(2)]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                ended.set()
                for thread in threads:
                    thread.join()

    def _ask(self, client: OpenAI, ended: threading.Event) -> None:
        while not ended.wait(0.2):
            try:
                client.completions.create(model=self.model, prompt="Hello", max_tokens=1)
                self.answers += 1
            except Exception as error:
                self.failures.append(repr(error))


@pytest.fixture(scope="module")
def steady(site: Site) -> str:
    """The operator is on node1, so that node2 can be lost; the name of that one."""
    site.kubectl("cordon", "node2")
    try:
        site.system.kubectl("rollout", "restart", OPERATOR)
        site.system.kubectl("rollout", "status", OPERATOR, "--timeout=240s")
    finally:
        site.kubectl("uncordon", "node2")
    return "node2"


def spread(namespace: Namespace, name: str, **spec: Any) -> None:
    """Serve with a Ready pod on each of the two nodes."""
    namespace.serve(name, replicas=2, pod=SMALL | SPREAD, **spec)
    namespace.wait_ready(name)
    namespace.wait_replicas(name, 2)
    nodes = {pod["spec"]["nodeName"] for pod in namespace.pods(name)}
    assert nodes == {"node1", "node2"}
    eventually(lambda: namespace.get(DSD, name)["status"].get("memory"), "they are asked")


def endpoints(namespace: Namespace, name: str) -> set[str]:
    """Pods that the Service sends requests to."""
    return {
        endpoint["targetRef"]["name"]
        for found in namespace.items("endpointslices", f"kubernetes.io/service-name={name}")
        for endpoint in found.get("endpoints") or []
        if endpoint["conditions"]["ready"]
    }


def on(namespace: Namespace, name: str, node: str) -> dict[str, Any]:
    """The pod on a node."""
    return next(p for p in namespace.pods(name) if p["spec"].get("nodeName") == node)


def processes_of(pod: str) -> list[int]:
    """Process ids, seen from this machine, of a pod's worker."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                folder.name.isdecimal()
                and f"HOSTNAME={pod}\0".encode() in (folder / "environ").read_bytes()
                and b"deepseek_worker" in (folder / "cmdline").read_bytes()
            ):
                found.append(int(folder.name))
    return found


def are_replaced(namespace: Namespace, name: str, gone: str, node: str) -> bool:
    """Whether two pods answer, none of them the lost one, and a new one on the other node."""
    pods = namespace.pods(name)
    ready = [
        pod
        for pod in pods
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
    ]
    return (
        len(ready) == 2
        and gone not in {pod["metadata"]["name"] for pod in ready}
        and all(pod["spec"]["nodeName"] == node for pod in ready)
    )


def lose_a_node(site: Site, namespace: Namespace, node: str) -> tuple[float, float]:
    """Lose a node under load; seconds to the last failed attempt and to the replacement."""
    spread(namespace, "lost")
    lost = on(namespace, "lost", node)["metadata"]["name"]
    client = Client(namespace.url("lost"), "lost")
    with client.asking():
        eventually(lambda: client.answers > 10, "answers")
        before = len(client.attempts.failed)
        began = time.monotonic()
        site.cluster.stop_node(node)
        try:
            eventually(lambda: are_replaced(namespace, "lost", lost, "node1"), "the replacement")
            replaced = time.monotonic() - began
            answered = client.answers
            eventually(lambda: client.answers > answered + 10, "answers after that")
        finally:
            site.cluster.start_node(node)
    failed = [at - began for at, _ in client.attempts.failed[before:]]
    last = max(failed, default=0.0)
    assert client.failures == []
    recovery = namespace.get(DSD, "lost")["status"]["recovery"]
    assert recovery["switches"][0]["cause"] == "NodeSilent"
    assert recovery["switches"][0]["node"] == node
    gone = "deepseek.dev/quarantine=lost"
    eventually(lambda: not namespace.items("pods", gone), "the lost pod is deleted")
    return last, replaced


def hang_an_engine(namespace: Namespace) -> tuple[float, float]:
    """Stop a worker's processes; seconds until it gets no requests, and until it is replaced."""
    spread(namespace, "hung")
    hung = on(namespace, "hung", "node2")["metadata"]["name"]
    processes = processes_of(hung)
    assert processes
    client = Client(namespace.url("hung"), "hung")
    with client.asking():
        eventually(lambda: client.answers > 10, "answers")
        eventually(lambda: hung in endpoints(namespace, "hung"), "it gets requests")
        began = time.monotonic()
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        eventually(lambda: hung not in endpoints(namespace, "hung"), "it gets no requests")
        left = time.monotonic() - began
        eventually(lambda: are_replaced(namespace, "hung", hung, "node1"), "the replacement")
        replaced = time.monotonic() - began
    assert client.failures == []
    eventually(
        lambda: not namespace.items("pods", "deepseek.dev/quarantine=hung"),
        "the hung pod is deleted",
    )
    return left, replaced


def test_a_lost_node_is_not_noticed_by_clients(
    site: Site, namespace: Namespace, steady: str, record_property: Record
) -> None:
    last_failed, replaced = lose_a_node(site, namespace, steady)

    record_property("seconds until no attempt failed", round(last_failed, 1))
    record_property("seconds until the replacement answered", round(replaced, 1))


def test_a_hung_engine_is_not_noticed_by_clients(
    namespace: Namespace, steady: str, record_property: Record
) -> None:
    assert steady == "node2"

    left, replaced = hang_an_engine(namespace)

    record_property("seconds until it got no requests", round(left, 1))
    record_property("seconds until the replacement answered", round(replaced, 1))
    assert namespace.get(DSD, "hung")["status"]["recovery"]["nodeSwitches"] == 1


@pytest.mark.long
class TestOnAnIdleMachine:
    """The same with the times that are promised, which a busy machine could not keep."""

    def test_a_lost_node(self, site: Site, namespace: Namespace, steady: str) -> None:
        last_failed, replaced = lose_a_node(site, namespace, steady)

        assert last_failed < 10
        assert replaced < 40

    def test_a_hung_engine(self, namespace: Namespace, steady: str) -> None:
        assert steady == "node2"

        left, replaced = hang_an_engine(namespace)

        assert left < 15
        assert replaced < 60
