"""A real API server with the CRDs installed, asked by dry runs."""

import json
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "tools"), str(REPOSITORY / "tests/contract")]

import crds  # noqa: E402
from cluster import ControlPlane  # noqa: E402


@dataclass(frozen=True)
class Answer:
    """What the API server said to one document."""

    status: int
    body: dict[str, Any]

    @property
    def is_accepted(self) -> bool:
        return self.status in {200, 201}

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))


@dataclass(frozen=True)
class ApiServer:
    """A client that creates and replaces nothing for good unless told to."""

    client: httpx.Client

    def install(self, definition: dict[str, Any], version: str = "v1alpha1") -> None:
        """Apply a CRD and wait until it is served."""
        name = definition["metadata"]["name"]
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        answer = self.client.patch(
            path,
            params={"fieldManager": "test", "force": "true"},
            content=json.dumps(definition),
            headers={"Content-Type": "application/apply-patch+yaml"},
        )
        assert answer.status_code in {200, 201}, answer.text
        group, plural = definition["spec"]["group"], definition["spec"]["names"]["plural"]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.client.get(f"/apis/{group}/{version}/{plural}").status_code == 200:
                return
            time.sleep(0.05)
        raise AssertionError(f"{name} is not served after 60 s")

    def create(self, path: str, document: dict[str, Any], *, dry_run: bool = True) -> Answer:
        """POST with strict field validation."""
        return self._send("POST", path, document, dry_run)

    def replace(self, path: str, document: dict[str, Any], *, dry_run: bool = True) -> Answer:
        """PUT with strict field validation."""
        return self._send("PUT", path, document, dry_run)

    def _send(self, verb: str, path: str, document: dict[str, Any], dry_run: bool) -> Answer:
        params = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        answer = self.client.request(
            verb,
            path,
            params=params,
            content=json.dumps(document),
            headers={"Content-Type": "application/json"},
        )
        return Answer(answer.status_code, answer.json())


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    with ControlPlane("contract-tests", components=()) as control_plane:
        folder = control_plane.state / "certificates"
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
        with httpx.Client(
            base_url=control_plane.server, verify=context, timeout=30, trust_env=False
        ) as client:
            server = ApiServer(client)
            for resource in crds.ALL:
                server.install(crds.custom_resource_definition(resource))
            # Dry runs need the namespace, which the server makes a moment after its start.
            server.create(
                "/api/v1/namespaces",
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}},
                dry_run=False,
            )
            yield server
