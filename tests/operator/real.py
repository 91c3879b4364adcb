"""A real API server, and the operator as a process of its own with the rights of its role."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import crds
from cluster import ControlPlane, ports
from deepseek_operator.kinds import (
    DEEPSEEK_DEPLOYMENT,
    DEEPSEEK_TENANT,
    DEPLOYMENT,
    EVENT,
    KIND_OF,
    LEASE,
    POD,
    RESOURCE_QUOTA,
    Kind,
    Manifest,
)
from deepseek_operator.permissions import (
    GATEWAY_API,
    KEDA,
    OWN_NAMESPACE,
    SERVED_NAMESPACES,
    WHOLE_CLUSTER,
)
from deepseek_operator.settings import PREFIX

REPOSITORY = Path(__file__).resolve().parents[2]
T = TypeVar("T")
SHARE_THAT_WORKS = 0.7
"""Of the processes that a `Killer` starts, those that it lets get to work."""


def eventually(
    check: Callable[[], T], *, seconds: float = 120.0, what: str = "", every: float = 0.05
) -> T:
    """Call until the result is true; the last result or error is in the message.

    What the API server refuses may pass as well: for a moment it stores no objects of a CRD that
    changes, or is not up again.

    The time is for a machine that does many other things: an operator alone needs seconds.
    """
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = result = check()
            if result:
                return result
        except (
            AssertionError, KeyError, IndexError, TypeError, httpx.HTTPError, StopIteration,
        ) as error:  # fmt: skip
            last = repr(error)
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s: {what or check}; last: {last}")


@dataclass
class Server:
    """The API server, asked as administrator."""

    plane: ControlPlane
    client: httpx.Client

    def ask(self, verb: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        headers = {
            "Content-Type": options.pop("content_type", "application/json"),
            "Accept": options.pop("accept", "application/json"),
        }
        content = None if body is None else json.dumps(body)
        return self.client.request(verb, path, content=content, headers=headers, params=options)

    def must(self, verb: str, path: str, body: Any = None, **options: Any) -> Manifest:
        answer = self.ask(verb, path, body, **options)
        assert answer.status_code < 300, answer.text
        result: Manifest = answer.json()
        return result

    def apply(self, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        kind = KIND_OF.get(manifest["kind"]) or _kind_of(manifest)
        return self.must(
            "PATCH",
            kind.path(metadata.get("namespace"), metadata["name"]),
            manifest,
            content_type="application/apply-patch+yaml",
            fieldManager="test",
            force="true",
        )

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        answer = self.ask("GET", kind.path(namespace, name))
        if answer.status_code == 404:
            return None
        assert answer.status_code == 200, answer.text
        result: Manifest = answer.json()
        return result

    def list(self, kind: Kind, namespace: str) -> list[Manifest]:
        items: list[Manifest] = self.must("GET", kind.path(namespace))["items"]
        return items

    def patch(
        self, kind: Kind, namespace: str, name: str, changes: Manifest, subresource: str = ""
    ) -> Manifest:
        return self.must(
            "PATCH",
            kind.path(namespace, name, subresource),
            changes,
            content_type="application/merge-patch+json",
        )

    def delete(self, kind: Kind, namespace: str, name: str, **options: Any) -> None:
        answer = self.ask("DELETE", kind.path(namespace, name), **options)
        assert answer.status_code in {200, 202, 404}, answer.text

    def namespace(self, name: str, labels: dict[str, str] | None = None) -> None:
        metadata = {"name": name, "labels": labels or {}}
        self.must(
            "POST",
            "/api/v1/namespaces",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
        )

    def picture_of(self, namespace: str) -> str:
        """What is in a namespace and what was said there, for whoever reads of a failed test."""
        lines = [f"Namespace {namespace}:"]
        for kind in (DEEPSEEK_DEPLOYMENT, DEPLOYMENT, RESOURCE_QUOTA, POD):
            for live in self.list(kind, namespace):
                spec, status = live.get("spec") or {}, dict(live.get("status") or {})
                told = [
                    f"    {c['type']} {c['status']} {c.get('reason')}: {c.get('message')}"
                    for c in status.pop("conditions", None) or []
                ]
                told += [f"    before: {entry}" for entry in status.pop("history", None) or []]
                name = live["metadata"]["name"]
                size = spec.get("replicas", spec.get("nodeName", ""))
                lines += [f"  {kind.kind} {name} {size}: {json.dumps(status)}", *told]
        for event in self.list(EVENT, namespace):
            about = event["involvedObject"]
            lines.append(
                f"  {event['lastTimestamp']} {about['kind']} {about.get('name')}:"
                f" {event['reason']}: {event.get('message')}"
            )
        return "\n".join(lines) + "\n"

    def audit(self, user: str) -> Iterator[dict[str, Any]]:
        """What a service account asked, as the API server saw it."""
        for line in self.plane.audit_log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["user"]["username"] == user:
                    yield event


def _kind_of(manifest: Manifest) -> Kind:
    group, _, version = manifest["apiVersion"].rpartition("/")
    return Kind(group, version, manifest["kind"].lower() + "s", manifest["kind"])


def log_end(file: Path, num_lines: int = 40) -> str:
    """The end of an operator's log."""
    lines = file.read_text(errors="replace").splitlines()[-num_lines:]
    return "\n".join([f"{file.name} ends:", *lines]) + "\n"


def connect(plane: ControlPlane) -> Server:
    folder = plane.state / "certificates"
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
    client = httpx.Client(base_url=plane.server, verify=context, timeout=30, trust_env=False)
    return Server(plane, client)


def free_port() -> int:
    return ports.choose(1)[0]


def install_crds(server: Server, *, any_gpu_count: bool = False) -> None:
    """Install the CRDs, and return when their objects are served.

    Args:
        server: Where.
        any_gpu_count: Whether a pod may ask for more than one GPU. Workers of this version compute
            on one; what the operator does with more is its own.
    """
    for resource in crds.ALL:
        definition = crds.custom_resource_definition(resource)
        if any_gpu_count:
            schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            schema["x-kubernetes-validations"] = [
                rule
                for rule in schema.get("x-kubernetes-validations", [])
                if rule.get("fieldPath") != ".spec.gpu.count"
            ]
        server.apply(definition)
    for kind in (DEEPSEEK_DEPLOYMENT, DEEPSEEK_TENANT):
        path = kind.path(None)
        eventually(lambda path=path: server.ask("GET", path).status_code == 200)


def peak_mib(pid: int) -> float:
    """The most memory a process has had, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


@dataclass
class Operator:
    """One installation of the operator, under its own role.

    It serves its own namespace, or with `cluster_wide` the whole cluster.
    """

    server: Server
    namespace: str
    folder: Path
    identity: str = "first"
    address: str = ""
    """The API server's, or that of a proxy before it."""
    settings: dict[str, str] = field(default_factory=dict)
    cluster_wide: bool = False
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:deepseek-operator"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def log_file(self) -> Path:
        """Of all its processes."""
        return self.folder / f"{self.identity}.log"

    def install(self) -> None:
        """Make service account, role and binding."""
        keda = KEDA if self.settings.get("KEDA") == "true" else ()
        gateway = GATEWAY_API if self.settings.get("GATEWAY_API") == "true" else ()
        cluster = WHOLE_CLUSTER if self.cluster_wide else ()
        served = (*SERVED_NAMESPACES, *keda, *gateway, *cluster, *OWN_NAMESPACE)
        rules = [rule.manifest() for rule in served]
        account = {"name": "deepseek-operator", "namespace": self.namespace}
        metadata = {"name": "deepseek-operator"} if self.cluster_wide else account
        scope = "Cluster" if self.cluster_wide else ""
        group = "rbac.authorization.k8s.io"
        start = {"apiVersion": f"{group}/v1", "metadata": metadata}
        self.server.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        self.server.apply({**start, "kind": f"{scope}Role", "rules": rules})
        self.server.apply(
            {
                **start,
                "kind": f"{scope}RoleBinding",
                "roleRef": {"apiGroup": group, "kind": f"{scope}Role", "name": "deepseek-operator"},
                "subjects": [{"kind": "ServiceAccount", **account}],
            }
        )

    def kubeconfig(self, account: str = "deepseek-operator") -> Path:
        """Credentials of the service account."""
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.server.must("POST", path, body)["status"]["token"]
        authority = (self.server.plane.state / "certificates/ca.crt").read_bytes()
        cluster: dict[str, Any] = {"server": self.address or self.server.plane.server}
        if cluster["server"].startswith("https"):
            cluster["certificate-authority-data"] = base64.b64encode(authority).decode()
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        target = self.folder / f"{self.identity}.kubeconfig"
        target.write_text(json.dumps(document))
        return target

    def start(self) -> None:
        """Start the process; does not wait."""
        self.port = free_port()
        settings = {
            "NAMESPACE": self.namespace,
            "WATCH_NAMESPACES": "" if self.cluster_wide else self.namespace,
            "IDENTITY": self.identity,
            "HTTP_PORT": str(self.port),
            # Short, so that a successor does not wait long; a busy machine may hold renewals up.
            "LEASE_DURATION_SECONDS": "10",
            **self.settings,
        }
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig()),
            **{PREFIX + name: value for name, value in settings.items()},
        }
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deepseek_operator.main", "run"],
                env=environment, stdout=log, stderr=log, cwd=REPOSITORY,
            )  # fmt: skip

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the process and return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def peak_mib(self) -> float:
        """The most memory the process has had, in MiB."""
        assert self.process is not None
        return peak_mib(self.process.pid)

    def ask(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=5, trust_env=False)

    def is_leader(self) -> bool:
        return bool(self.ask("/healthz").json()["leader"])

    def lead(self) -> None:
        """Wait until the process holds the Lease."""
        eventually(self.is_leader, what=f"{self.identity} leads")

    def requests(self) -> dict[tuple[str, str], int]:
        """How often each verb was used on each resource so far."""
        counted: dict[tuple[str, str], int] = {}
        for family in text_string_to_metric_families(self.ask("/metrics").text):
            if family.name == "deepseek_operator_api_requests":
                for sample in family.samples:
                    key = (sample.labels["verb"], sample.labels["resource"])
                    counted[key] = counted.get(key, 0) + int(sample.value)
        return counted

    def writes(self) -> dict[tuple[str, str], int]:
        """Requests that change something, without those of the Lease."""
        return {
            key: number
            for key, number in self.requests().items()
            if key[0] in {"create", "update", "patch", "delete"} and key[1] != LEASE.resource
        }


def replayed(fixture: str, *, killed_always: bool = False) -> pytest.MarkDecorator:
    """Run a test twice: its operator left alone, and killed again and again.

    Args:
        fixture: Takes as its parameter whether the operator is killed.
        killed_always: Whether the second run belongs to the short tests too.
    """
    marks = [] if killed_always else [pytest.mark.long]
    runs = [
        pytest.param(False, id="left alone"),
        pytest.param(True, id="killed again and again", marks=marks),
    ]
    return pytest.mark.parametrize(fixture, runs, indirect=True)


class Killer:
    """Kills an operator at random and starts it again, as a kubelet does, for as long as it lasts.

    Most processes get to work and then have `between` seconds to live, a number at random; the
    others have them from their start. So the operator gets on on a machine that is busy too. The
    seed is the test's, so that a run can be repeated as far as the machine's timing lets it.
    """

    def __init__(
        self, operator: Operator, seed: object, between: tuple[float, float] = (0.5, 6.0)
    ) -> None:
        self.num_kills = 0
        self._operator = operator
        self._random = random.Random(str(seed))
        self._between = between
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _kill(self) -> None:
        while not self._is_over.is_set():
            if self._random.random() < SHARE_THAT_WORKS:
                self._until_it_leads()
            if self._is_over.wait(self._random.uniform(*self._between)):
                return
            self._operator.stop(signal.SIGKILL)
            self._operator.start()
            self.num_kills += 1

    def _until_it_leads(self) -> None:
        while not self._is_over.wait(0.2):
            with contextlib.suppress(httpx.HTTPError):
                if self._operator.is_leader():
                    return
