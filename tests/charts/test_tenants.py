"""The policies over tenants, rendered by helm and asked at a real API server."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import crds
from cluster import ControlPlane

PLURAL = "/apis/deepseek.dev/v1alpha1/deepseektenants"
POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
NAMESPACED = ("--set=scope=namespaced", "--set=settings.watchNamespaces={team-a}")

Answer = tuple[int, str]


class Server:
    """The API server with the chart's policies."""

    def __init__(self, plane: ControlPlane, client: httpx.Client) -> None:
        self.plane = plane
        self.client = client

    def send(self, verb: str, path: str, body: Any, *, dry_run: bool = True) -> Answer:
        answer = self.client.request(
            verb, path, json=body, params={"dryRun": "All"} if dry_run else {}
        )
        return answer.status_code, str(answer.json().get("message", ""))

    def tenant(self, most: int, *, dry_run: bool = True, **more: Any) -> Answer:
        return self.send("POST", PLURAL, tenant(most, **more), dry_run=dry_run)

    def pod(self, namespace: str, before: dict[str, str] | None = None, **limits: str) -> Answer:
        """A pod of two containers; what asks is one of them, or an init container like `before`."""
        named = {f"nvidia.com/{key}": value for key, value in limits.items()}
        asking: Any = {"name": "c", "image": "none", "resources": {"limits": named}}
        spec: Any = {"containers": [{"name": "side", "image": "none"}]}
        if before is None:
            spec["containers"].append(asking)
        else:
            spec["initContainers"] = [asking | before]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
        return self.send("POST", f"/api/v1/namespaces/{namespace}/pods", pod)


def tenant(most: int, name: str = "a", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "deepseek.dev/v1alpha1",
        "kind": "DeepSeekTenant",
        "metadata": {"name": name},
        "spec": {"namespaces": [name], "gpuMemory": {"maxPercent": most}} | spec,
    }


def eventually(check: Any) -> None:
    """Policies take effect a moment after they were made."""
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def server(chart: Any) -> Iterator[Server]:
    with ControlPlane("chart-tenants", components=()) as plane:
        folder = plane.state / "certificates"
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
        for resource in crds.ALL:
            plane.apply(crds.custom_resource_definition(resource))
        with httpx.Client(
            base_url=plane.server, verify=context, timeout=30, trust_env=False
        ) as client:
            found = Server(plane, client)
            eventually(lambda: client.get(PLURAL).status_code == 200)
            for name in ("shared", "plain"):
                plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
                account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {
                    "name": "default", "namespace": name,
                }}  # fmt: skip
                plane.apply(account)
            for manifest in chart.render():
                if manifest["kind"] in POLICIES:
                    plane.apply(manifest)
            yield found


@pytest.mark.control_plane
@pytest.mark.timeout(300)
def test_the_ceiling_and_the_shared_cards_are_guarded(server: Server) -> None:
    server.tenant(65, name="old", dry_run=False)
    eventually(lambda: server.tenant(66)[0] == 422)

    status, message = server.tenant(80)
    assert status == 422
    assert "gpuMemory.maxPercent is 80, and this installation allows at most 65" in message
    assert "tenants.maxPercent" in message
    assert server.tenant(65)[0] == 201
    live = server.client.get(f"{PLURAL}/old").json()
    higher = live | {"spec": live["spec"] | {"gpuMemory": {"maxPercent": 66}}}
    assert server.send("PUT", f"{PLURAL}/old", higher)[0] == 422
    other = live | {"spec": live["spec"] | {"weight": 7}}
    assert server.send("PUT", f"{PLURAL}/old", other)[0] == 200

    server.tenant(50, name="shared", partition={"mode": "vgpu"}, dry_run=False)
    server.tenant(50, name="plain", dry_run=False)
    eventually(lambda: server.pod("shared", gpu="1")[0] == 422)

    assert "says how much nvidia.com/gpumem" in server.pod("shared", gpu="1")[1]
    assert server.pod("shared", gpu="2", gpumem="2048")[0] == 422
    assert server.pod("shared", gpu="1", gpumem="2048")[0] == 201
    assert server.pod("shared")[0] == 201
    assert server.pod("plain", gpu="2")[0] == 201
    sidecar = {"restartPolicy": "Always"}
    for more in ({}, sidecar):
        assert server.pod("shared", before=more, gpu="1")[0] == 422
        assert server.pod("shared", before=more, gpu="1", gpumem="2048")[0] == 201
    assert server.pod("plain", before=sidecar, gpu="2")[0] == 201


def kinds(manifests: list[dict[str, Any]]) -> list[str]:
    return [manifest["kind"] for manifest in manifests]


def test_what_is_of_the_whole_cluster_is_left_out_of_namespaces(chart: Any) -> None:
    assert kinds(chart.render()).count("ValidatingAdmissionPolicy") == 2
    assert not set(kinds(chart.render(*NAMESPACED))) & set(POLICIES)
    alone = kinds(chart.render("--set=tenants.vgpuPodsNameMemory=false"))
    assert alone.count("ValidatingAdmissionPolicy") == 1


@pytest.mark.parametrize("ceiling", [0, 101, "half"])
def test_a_ceiling_that_is_no_percent_is_refused(chart: Any, ceiling: Any) -> None:
    assert "/tenants/maxPercent" in chart.refusal(f"--set=tenants.maxPercent={ceiling}")


def test_the_ceiling_can_be_changed(chart: Any) -> None:
    text = json.dumps(chart.render("--set=tenants.maxPercent=100"))

    assert "object.spec.gpuMemory.maxPercent <= 100" in text
