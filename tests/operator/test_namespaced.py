"""The chart in namespaced mode: Roles only, on a real API server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real import REPOSITORY, Operator, Server, eventually, free_port
from test_controller import complete, dsd, pods, reason, serve, status_of

from cluster import programs
from deepseek_operator.kinds import DEPLOYMENT, POD, Kind, Manifest
from deepseek_operator.settings import PREFIX

pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(300)]

CHART = REPOSITORY / "charts/deepseek-operator"
NAME = "deepseek-deepseek-operator"


@dataclass
class Installed(Operator):
    """The operator as the chart installs it, run by hand: there is no kubelet here."""

    def user_name(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{NAME}"

    def start(self) -> None:
        deployment = self.server.get(DEPLOYMENT, self.namespace, NAME) or {}
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        given = {
            variable["name"]: variable["value"]
            for variable in container["env"]
            if "value" in variable
        }
        self.port = free_port()
        own = {"NAMESPACE": self.namespace, "IDENTITY": "it", "HTTP_PORT": str(self.port)}
        environment = {
            **os.environ,
            **given,
            **{PREFIX + name: value for name, value in own.items()},
            "KUBECONFIG": str(self.kubeconfig(NAME)),
        }
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deepseek_operator.main", "run"],
                env=environment, stdout=log, stderr=log, cwd=REPOSITORY,
            )  # fmt: skip


@pytest.fixture
def installed(server: Server, namespace: str, tmp_path: Path) -> Iterator[Installed]:
    """The chart with a Role in the test's namespace and no right on the cluster."""
    values = {
        "scope": "namespaced",
        "settings": {"watchNamespaces": [namespace]},
        "crds": {"enabled": False},
        "rbac": {"aggregate": False},
    }
    (tmp_path / "values.json").write_text(json.dumps(values))
    programs.ensure(["helm"])
    subprocess.run(
        [programs.path("helm"), "install", "deepseek", CHART, "--namespace", namespace,
         "--values", tmp_path / "values.json"],
        env={**os.environ, "KUBECONFIG": str(server.plane.kubeconfig)},
        check=True, capture_output=True,
    )  # fmt: skip
    operator = Installed(server, namespace, tmp_path)
    operator.start()
    yield operator
    if operator.process is not None and operator.process.poll() is None:
        operator.stop()


def of_the_cluster(server: Server, namespace: str) -> list[str]:
    """Objects outside the namespace that the release made."""
    found = []
    rbac = "rbac.authorization.k8s.io"
    for kind in (
        Kind(rbac, "v1", "clusterroles", "ClusterRole"),
        Kind(rbac, "v1", "clusterrolebindings", "ClusterRoleBinding"),
        Kind("admissionregistration.k8s.io", "v1", "validatingadmissionpolicies", "Policy"),
    ):
        for item in server.must("GET", kind.path(None))["items"]:
            release = (item["metadata"].get("annotations") or {}).get(
                "meta.helm.sh/release-namespace"
            )
            if release == namespace:
                found.append(f"{kind.plural}/{item['metadata']['name']}")
    return found


def test_a_role_is_enough(server: Server, namespace: str, installed: Installed) -> None:
    """Case A24, with the chart."""
    installed.lead()

    server.apply(dsd(namespace))
    complete(server, namespace)
    serve(server, namespace)

    assert of_the_cluster(server, namespace) == []
    asked = list(server.audit(installed.user_name()))
    refused = [event for event in asked if event["responseStatus"]["code"] == 403]
    assert refused == []
    # It does not even look beyond its namespace.
    targets = [event["objectRef"] for event in asked if "resource" in event.get("objectRef", {})]
    assert {target.get("namespace") for target in targets} == {namespace}
    assert not installed.requests().get(("list", "nodes"))


def test_that_capacity_lacks_is_told_from_pods_alone(
    server: Server, namespace: str, installed: Installed
) -> None:
    installed.lead()
    server.apply(dsd(namespace))
    (pod,) = eventually(lambda: workers_of(server, namespace))

    condition = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient cpu.",
    }  # fmt: skip
    changes = {"status": {"conditions": [condition]}}
    server.patch(POD, namespace, pod["metadata"]["name"], changes, "status")

    eventually(lambda: reason(server, namespace) == "Unschedulable")
    (ready,) = (c for c in status_of(server, namespace)["conditions"] if c["type"] == "Ready")
    assert "3 Insufficient cpu" in ready["message"]


def workers_of(server: Server, namespace: str) -> list[Manifest]:
    """The worker pods; the operator's own is there too, and nobody runs it."""
    label = "deepseek.dev/deployment"
    found: list[Any] = pods(server, namespace)
    return [pod for pod in found if label in pod["metadata"].get("labels", {})]
