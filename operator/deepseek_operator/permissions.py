"""What the operator may do in the cluster: exactly the calls that it makes.

The chart's roles are made from this list, and tests compare it with the API server's audit log.
Server-side apply of an object that does not exist asks for `create` besides `patch`.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_operator.kinds import Manifest


@dataclass(frozen=True)
class Rule:
    """Verbs on one resource, which may be a subresource such as `deepseekdeployments/status`."""

    group: str
    resource: str
    verbs: tuple[str, ...]

    def manifest(self) -> Manifest:
        """The entry of a role."""
        return {"apiGroups": [self.group], "resources": [self.resource], "verbs": [*self.verbs]}


_CHILD = ("create", "list", "patch", "watch")

SERVED_NAMESPACES: tuple[Rule, ...] = (
    Rule("deepseek.dev", "deepseekdeployments", ("list", "watch")),
    Rule("deepseek.dev", "deepseekdeployments/status", ("patch",)),
    Rule("apps", "deployments", _CHILD),
    Rule("", "services", _CHILD),
    Rule("", "serviceaccounts", _CHILD),
    Rule("", "secrets", _CHILD),
    Rule("", "persistentvolumeclaims", _CHILD),
    Rule("policy", "poddisruptionbudgets", _CHILD),
    Rule("networking.k8s.io", "networkpolicies", _CHILD),
    Rule("batch", "jobs", ("create", "delete", "list", "watch")),
    Rule("", "pods", ("list", "watch")),
    Rule("", "events", ("create",)),
)
"""Needed in every namespace that is served: by a ClusterRole, or by a Role in each."""

OWN_NAMESPACE: tuple[Rule, ...] = (
    Rule("coordination.k8s.io", "leases", ("create", "get", "update")),
)
"""Needed where the operator runs."""
