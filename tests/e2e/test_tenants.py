"""A tenant on the real cluster: its quotas come, hold, move and go."""

import json

import pytest

from cluster.errors import ClusterError
from site_under_test import DST, Namespace, Tenants, eventually

pytestmark = pytest.mark.e2e

GPU = "nvidia.com/gpu"
LABELS = (
    f"{GPU}.product=NVIDIA-H200", f"{GPU}.memory=143771", f"{GPU}.count=8", f"{GPU}.replicas=1",
)  # fmt: skip


def test_a_tenants_cap_holds_and_moves_with_its_namespaces(namespace: Namespace) -> None:
    site, tenants = namespace.site, Tenants(namespace.site, namespace.name)
    node = json.loads(site.kubectl("get", "nodes", "-o", "json"))["items"][0]["metadata"]["name"]
    offer_gpus(namespace, node, "8")
    try:
        give(namespace, most=50, namespaces=[namespace.name, "nobodys"])
        tenants.wait_reason("e2e", "NamespaceMissing")
        give(namespace, most=50, namespaces=[namespace.name])
        tenants.wait_reason("e2e", "QuotaDealt")
        eventually(lambda: quota(namespace) == "4", "half of eight cards")

        namespace.serve("five", gpu={"mode": "whole"}, replicas=5)

        message = namespace.wait_reason("five", "TenantLimit", type_="QuotaExceeded")
        assert "may use 4 units now" in message
        eventually(lambda: len(namespace.pods("five")) == 4, "four of five pods")
        with pytest.raises(ClusterError, match="allows at most 65"):
            give(namespace, most=66, namespaces=[namespace.name])

        give(namespace, most=50, namespaces=["nobodys"])

        eventually(lambda: quota(namespace) == "", "the quota goes with the namespace")
    finally:
        namespace.kubectl("delete", DST, "e2e", "--ignore-not-found")
        offer_gpus(namespace, node, None)


def give(namespace: Namespace, *, most: int, namespaces: list[str]) -> None:
    namespace.apply(
        {
            "apiVersion": "deepseek.dev/v1alpha1",
            "kind": "DeepSeekTenant",
            "metadata": {"name": "e2e"},
            "spec": {"namespaces": namespaces, "gpuMemory": {"maxPercent": most}},
        }
    )


def quota(namespace: Namespace) -> str:
    """How many cards the tenant's quota of the namespace allows; empty without one."""
    for found in namespace.items("resourcequotas", "deepseek.dev/tenant=e2e"):
        return str(found["spec"]["hard"][f"requests.{GPU}"])
    return ""


def offer_gpus(namespace: Namespace, node: str, number: str | None) -> None:
    """Let a node list GPUs, as a device plugin and GPU feature discovery would."""
    amounts = {GPU: number}
    changes = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
    namespace.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", changes)
    labels = LABELS if number is not None else [f"{label.partition('=')[0]}-" for label in LABELS]
    namespace.kubectl("label", "node", node, "--overwrite", *labels)
