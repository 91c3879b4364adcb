"""What the end-to-end tests do to the cluster, in the words of a person at a terminal."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx

from cluster import Cluster
from cluster.errors import ClusterError
from demo import SYSTEM_NAMESPACE, Target

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
DSD = "deepseekdeployments.deepseek.dev"
DST = "deepseektenants.deepseek.dev"
OPERATOR = "deployment/deepseek-deepseek-operator"
PATIENCE_SECONDS = 240
"""For whatever has to come: a minute is enough on a machine that does nothing else."""


def eventually(look: Callable[[], T | None], what: str, *, seconds: float = PATIENCE_SECONDS) -> T:
    """Look until something is seen.

    What is not there yet, such as the conditions of a pod that was made this moment, is looked for
    again.

    Raises:
        AssertionError: It was not seen in time; the message has what failed last.
    """
    deadline = time.monotonic() + seconds
    last: object = None
    while True:
        try:
            seen = look()
            if seen:
                return seen
            last = seen
        except (
            ClusterError, AssertionError, OSError, httpx.HTTPError, LookupError, StopIteration,
        ) as error:  # fmt: skip
            last = repr(error)
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s; last seen: {last}"
        time.sleep(0.3)


@dataclass(frozen=True)
class Site:
    """The local cluster with the chart installed."""

    cluster: Cluster
    target: Target

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self.cluster.control_plane.kubectl(*words, stdin=stdin)

    def helm(self, *words: str) -> str:
        return self.target.run("helm", *words)

    def in_namespace(self, name: str) -> "Namespace":
        return Namespace(self, name)

    @contextmanager
    def place(self, name: str) -> Iterator["Namespace"]:
        """A new namespace under restricted pod security, which goes afterwards."""
        self.kubectl("create", "namespace", name)
        self.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        try:
            yield self.in_namespace(name)
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")

    @property
    def system(self) -> "Namespace":
        """The operator's namespace."""
        return self.in_namespace(SYSTEM_NAMESPACE)

    def chart_at(self, revision: str, folder: Path) -> Path:
        """The chart as a commit has it, below a folder."""
        archive = subprocess.run(
            ["git", "archive", revision, "charts/deepseek-operator"],
            cwd=ROOT, check=True, capture_output=True,
        ).stdout  # fmt: skip
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return folder / "charts/deepseek-operator"


@dataclass(frozen=True)
class Namespace:
    """One namespace of the site."""

    site: Site
    name: str
    kind: ClassVar[str] = DSD

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self.site.kubectl("-n", self.name, *words, stdin=stdin)

    def apply(self, *manifests: dict[str, Any]) -> None:
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=document)

    def serve(self, name: str = "smollm2", **spec: Any) -> str:
        """Apply a deployment of the embedded model on CPUs, changed by `spec`; its name."""
        self.apply(
            {
                "apiVersion": "deepseek.dev/v1alpha1",
                "kind": "DeepSeekDeployment",
                "metadata": {"name": name},
                "spec": {"model": {"source": "package://smollm2"}, "gpu": {"mode": "cpu"}} | spec,
            }
        )
        return name

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def items(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        words = ["-l", selector] if selector else []
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *words, "-o", "json"))[
            "items"
        ]
        return found

    def condition(self, name: str, type_: str = "Ready") -> dict[str, Any]:
        """A condition of a deployment; empty when it has none of that type."""
        for condition in self.get(self.kind, name).get("status", {}).get("conditions", []):
            if condition["type"] == type_:
                return dict(condition)
        return {}

    def wait_ready(self, name: str, seconds: float = PATIENCE_SECONDS) -> None:
        def is_ready() -> bool:
            found = self.get(DSD, name)
            condition = self.condition(name)
            assert condition.get("status") == "True", condition
            return bool(condition["observedGeneration"] == found["metadata"]["generation"])

        eventually(is_ready, f"{name} is Ready", seconds=seconds)

    def wait_replicas(self, name: str, number: int, seconds: float = PATIENCE_SECONDS) -> None:
        eventually(
            lambda: self.get(DSD, name)["status"].get("readyReplicas", 0) == number,
            f"{number} pods of {name} are ready",
            seconds=seconds,
        )

    def wait_reason(
        self, name: str, reason: str, type_: str = "Ready", seconds: float = PATIENCE_SECONDS
    ) -> str:
        """Wait until a condition has a reason; its message."""

        def has_reason() -> str:
            condition = self.condition(name, type_)
            assert condition.get("reason") == reason, condition
            return str(condition["message"])

        return eventually(has_reason, f"{type_} of {name} is {reason}", seconds=seconds)

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The worker pods of a deployment that are not being deleted."""
        found = self.items(
            "pods", f"deepseek.dev/deployment={name},app.kubernetes.io/name=deepseek-worker"
        )
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def url(self, name: str) -> str:
        """The base of the API at the deployment's Service, as this machine reaches it."""
        return f"http://{self.get('service', name)['spec']['clusterIP']}/v1"


class Tenants(Namespace):
    """The cluster's tenants, which are in no namespace, and their conditions."""

    kind = DST
