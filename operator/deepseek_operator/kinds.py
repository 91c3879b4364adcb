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
    """A resource of the API server."""

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


DEEPSEEK_TENANT = Kind(GROUP, VERSION, "deepseektenants", "DeepSeekTenant")
DEEPSEEK_DEPLOYMENT = Kind(GROUP, VERSION, "deepseekdeployments", "DeepSeekDeployment")
DEPLOYMENT = Kind("apps", "v1", "deployments", "Deployment")
SERVICE = Kind("", "v1", "services", "Service")
SERVICE_ACCOUNT = Kind("", "v1", "serviceaccounts", "ServiceAccount")
SECRET = Kind("", "v1", "secrets", "Secret")
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")
POD = Kind("", "v1", "pods", "Pod")
NODE = Kind("", "v1", "nodes", "Node")
RESOURCE_QUOTA = Kind("", "v1", "resourcequotas", "ResourceQuota")
VOLUME_CLAIM = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
EVENT = Kind("", "v1", "events", "Event")
DISRUPTION_BUDGET = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
JOB = Kind("batch", "v1", "jobs", "Job")
AUTOSCALER = Kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
SCALED_OBJECT = Kind("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject")
"""KEDA's; it is there only where KEDA is installed."""
HTTP_ROUTE = Kind("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute")
"""The Gateway API's; it is there only where that is installed."""
API_SERVICE = Kind("apiregistration.k8s.io", "v1", "apiservices", "APIService")
"""Of the cluster, in no namespace."""
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
    AUTOSCALER,
)
"""What desired states are made of; watched by the label `managed-by`, like the pods."""

WATCHED_KINDS = (DEEPSEEK_DEPLOYMENT, *CHILD_KINDS, POD)


TENANT_KINDS = (DEEPSEEK_TENANT, RESOURCE_QUOTA)
"""Watched too where the whole cluster is served; quotas by the label `managed-by`."""


OPTIONAL_KINDS = (SCALED_OBJECT, HTTP_ROUTE)
"""Children whose CRDs may come later, or go."""


def optional_kinds(*, keda: bool, gateway_api: bool) -> tuple[Kind, ...]:
    """The kinds of others that an installation uses."""
    optional = ((SCALED_OBJECT, keda), (HTTP_ROUTE, gateway_api))
    return tuple(kind for kind, is_used in optional if is_used)


def watched_kinds(*, keda: bool, gateway_api: bool) -> tuple[Kind, ...]:
    """What is watched, with the kinds of others where those are used."""
    return (*WATCHED_KINDS, *optional_kinds(keda=keda, gateway_api=gateway_api))


KIND_OF: dict[str, Kind] = {kind.kind: kind for kind in (*WATCHED_KINDS, *OPTIONAL_KINDS)}


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


def is_owned_by(live: Manifest, uid: str) -> bool:
    """Whether an object says that it belongs to the object of this uid."""
    owners = live["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == uid for owner in owners)
