"""The kinds of objects that the operator reads and writes, and their addresses.

Pure: the plan names children by kind, the cluster turns them into requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Manifest: TypeAlias = dict[str, Any]
"""A Kubernetes object as JSON. Its structure is the API server's, so it is not typed here."""

GROUP = "deepseek.dev"
VERSION = "v1alpha1"
FIELD_MANAGER = "deepseek-operator"


@dataclass(frozen=True)
class Kind:
    """A namespaced resource of the API server."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """As manifests spell it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """As roles and kubectl spell it, e.g. `deployments.apps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The URL path of a collection, an object or its subresource."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = ["namespaces", namespace] if namespace else []
        return "/".join([root, *place, self.plural, *filter(None, (name, subresource))])


DEEPSEEK_DEPLOYMENT = Kind(GROUP, VERSION, "deepseekdeployments", "DeepSeekDeployment")
DEPLOYMENT = Kind("apps", "v1", "deployments", "Deployment")
SERVICE = Kind("", "v1", "services", "Service")
SERVICE_ACCOUNT = Kind("", "v1", "serviceaccounts", "ServiceAccount")
SECRET = Kind("", "v1", "secrets", "Secret")
POD = Kind("", "v1", "pods", "Pod")
VOLUME_CLAIM = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
EVENT = Kind("", "v1", "events", "Event")
DISRUPTION_BUDGET = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
JOB = Kind("batch", "v1", "jobs", "Job")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")

CHILD_KINDS = (
    DEPLOYMENT,
    SERVICE,
    SERVICE_ACCOUNT,
    SECRET,
    VOLUME_CLAIM,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    JOB,
)
"""What desired states are made of; watched by the label `managed-by`, like the pods."""

WATCHED_KINDS = (DEEPSEEK_DEPLOYMENT, *CHILD_KINDS, POD)

KIND_OF: dict[str, Kind] = {kind.kind: kind for kind in WATCHED_KINDS}


@dataclass(frozen=True, order=True)
class Reference:
    """One object by kind, namespace and name."""

    kind: str
    namespace: str
    name: str


def reference(manifest: Manifest) -> Reference:
    """The reference of a manifest."""
    metadata = manifest["metadata"]
    return Reference(manifest["kind"], metadata["namespace"], metadata["name"])
