"""A real API server, and the operator as a process of its own with the rights of its role."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster import ControlPlane
from deepseek_operator.kinds import KIND_OF, LEASE, Kind, Manifest
from deepseek_operator.permissions import OWN_NAMESPACE, SERVED_NAMESPACES
from deepseek_operator.settings import PREFIX

REPOSITORY = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def eventually(
    check: Callable[[], T], *, seconds: float = 60.0, what: str = "", every: float = 0.05
) -> T:
    """Call until the result is true; the last result or error is in the message.

    The time is for a machine that does ten other things: an operator alone needs seconds.
    """
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = result = check()
            if result:
                return result
        except (KeyError, IndexError, TypeError, httpx.HTTPError, StopIteration) as error:
            last = repr(error)
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s: {what or check}; last: {last}")


@dataclass
class Server:
    """The API server, asked as administrator."""

    plane: ControlPlane
    client: httpx.Client

    def ask(self, verb: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        headers = {"Content-Type": options.pop("content_type", "application/json")}
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


def connect(plane: ControlPlane) -> Server:
    folder = plane.state / "certificates"
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
    client = httpx.Client(base_url=plane.server, verify=context, timeout=30, trust_env=False)
    return Server(plane, client)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Operator:
    """One installation of the operator that serves its own namespace, under its own role."""

    server: Server
    namespace: str
    folder: Path
    identity: str = "first"
    address: str = ""
    """The API server's, or that of a proxy before it."""
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:deepseek-operator"

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    @property
    def _log_file(self) -> Path:
        return self.folder / f"{self.identity}.log"

    def install(self) -> None:
        """Make service account, role and binding."""
        rules = [rule.manifest() for rule in (*SERVED_NAMESPACES, *OWN_NAMESPACE)]
        metadata = {"name": "deepseek-operator", "namespace": self.namespace}
        rbac = "rbac.authorization.k8s.io"
        self.server.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        self.server.apply(
            {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": rules}
        )
        self.server.apply(
            {
                "apiVersion": f"{rbac}/v1",
                "kind": "RoleBinding",
                "metadata": metadata,
                "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "deepseek-operator"},
                "subjects": [{"kind": "ServiceAccount", **metadata}],
            }
        )

    def kubeconfig(self) -> Path:
        """Credentials of the service account."""
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/deepseek-operator/token"
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
            "WATCH_NAMESPACES": self.namespace,
            "IDENTITY": self.identity,
            "HTTP_PORT": str(self.port),
            "LEASE_DURATION_SECONDS": "5",
            **self.settings,
        }
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig()),
            **{PREFIX + name: value for name, value in settings.items()},
        }
        with self._log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deepseek_operator.main", "run"],
                env=environment, stdout=log, stderr=log, cwd=REPOSITORY,
            )  # fmt: skip

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the process and return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)

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
