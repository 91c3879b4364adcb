"""What the operator may do in the cluster: exactly the calls that it makes.

The chart's roles are made from this list, and tests compare it with the API server's audit log.
Server-side apply of an object that does not exist asks for `create` besides `patch`.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_operator.autoscale import EXTERNAL_METRICS
from deepseek_operator.kinds import Manifest


@dataclass(frozen=True)
class Rule:
    """Verbs on one resource, which may be a subresource such as `deepseekdeployments/status`."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()
    """The only objects that it is about; empty, all."""

    def manifest(self) -> Manifest:
        """The entry of a role."""
        names = {"resourceNames": [*self.names]} if self.names else {}
        return {
            "apiGroups": [self.group],
            "resources": [self.resource],
            **names,
            "verbs": [*self.verbs],
        }


_CHILD = ("create", "list", "patch", "watch")

SERVED_NAMESPACES: tuple[Rule, ...] = (
    Rule("deepseek.dev", "deepseekdeployments", ("list", "watch")),
    Rule("deepseek.dev", "deepseekdeployments/status", ("patch",)),
    Rule("apps", "deployments", (*_CHILD, "delete")),
    Rule("", "services", _CHILD),
    Rule("", "serviceaccounts", _CHILD),
    Rule("", "secrets", _CHILD),
    Rule("", "persistentvolumeclaims", _CHILD),
    Rule("policy", "poddisruptionbudgets", _CHILD),
    Rule("networking.k8s.io", "networkpolicies", _CHILD),
    Rule("batch", "jobs", ("create", "delete", "list", "watch")),
    Rule("autoscaling", "horizontalpodautoscalers", (*_CHILD, "delete")),
    Rule("", "pods", ("delete", "list", "patch", "watch")),
    Rule("", "configmaps", ("list",)),
    Rule("", "events", ("create", "list")),
)
"""Needed in every namespace that is served: by a ClusterRole, or by a Role in each."""

KEDA: tuple[Rule, ...] = (Rule("keda.sh", "scaledobjects", (*_CHILD, "delete")),)
"""Needed in every namespace that is served, where KEDA is installed."""

GATEWAY_API: tuple[Rule, ...] = (
    Rule("gateway.networking.k8s.io", "httproutes", (*_CHILD, "delete")),
)
"""Needed in every namespace that is served, where the Gateway API is installed."""

WHOLE_CLUSTER: tuple[Rule, ...] = (
    Rule("", "nodes", ("list", "watch")),
    Rule("apiregistration.k8s.io", "apiservices", ("get",), (EXTERNAL_METRICS,)),
    Rule("deepseek.dev", "deepseektenants", ("list", "watch")),
    Rule("deepseek.dev", "deepseektenants/status", ("patch",)),
    Rule("", "resourcequotas", ("create", "delete", "list", "patch", "watch")),
)
"""Needed beside these where every namespace is served: by the ClusterRole. Where the operator has
Roles only, it does without."""

OWN_NAMESPACE: tuple[Rule, ...] = (
    Rule("coordination.k8s.io", "leases", ("create", "get", "update")),
)
"""Needed where the operator runs."""
