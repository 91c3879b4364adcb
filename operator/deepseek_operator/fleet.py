"""The cluster's nodes and what is left on them: allocatable units less the requests of all pods.

Pure: events in, numbers out. Units are whole numbers by resource name: devices such as
`nvidia.com/gpu` as they are, CPU in thousandths, memory in bytes. Of a node only what decides about
placement is kept, of a pod only its node, its namespace and its requests, and equal requests are
kept once, so that a thousand nodes and ten thousand pods take a few MiB.

In namespaced mode there are no rights on nodes: then nothing is fed in, `is_known` stays false, and
capacity shows only in what the scheduler says about pods.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias

from deepseek_operator.devices import HAMI_ANNOTATION
from deepseek_operator.drift import amount_of
from deepseek_operator.kinds import Manifest
from deepseek_operator.render import (
    DEPLOYMENT_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    TIER_LABEL,
)

Units: TypeAlias = Mapping[str, int]
"""Whole numbers by resource name."""

CPU = "cpu"
PODS = "pods"
FORGOTTEN_SHAPES = 1024
"""Requests that no pod has any more, of which so many are kept at most besides those in use."""
ENDED_PHASES = frozenset({"Succeeded", "Failed"})
"""Pods in these hold nothing any more."""
_REPELLING = frozenset({"NoSchedule", "NoExecute"})
_NOTHING: Units = MappingProxyType({})
_NO_NODES: Mapping[str, Units] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Taint:
    """A mark of a node that keeps pods away which do not tolerate it."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Node:
    """What decides whether a pod may run on a node."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    allocatable: Units
    is_ready: bool
    is_cordoned: bool
    register: str | None = None
    """HAMi's list of the node's cards."""

    @property
    def takes_pods(self) -> bool:
        """Whether a new pod could start here at all."""
        return self.is_ready and not self.is_cordoned


@dataclass(frozen=True, slots=True)
class Load:
    """What one pod asks for, bound to a node or not yet."""

    namespace: str
    node: str
    """Empty until the pod is bound."""
    requests: Units
    deployment: str = ""
    """The object whose worker this is; empty for pods of others."""
    tier: str = ""


@dataclass(frozen=True)
class Wish:
    """A pod that is to be placed."""

    requests: Units
    node_selector: Mapping[str, str] = field(default_factory=dict)
    node_affinity: tuple[Manifest, ...] = ()
    """Terms of the required node affinity, one of which must hold; none means any node."""
    tolerations: tuple[Manifest, ...] = ()


class Fleet:
    """All nodes and the requests of all pods, kept up with events."""

    def __init__(self) -> None:
        self.is_known = False
        """Whether nodes and pods have been listed."""
        self._nodes: dict[str, Node] = {}
        self._loads: dict[str, Load] = {}
        self._used: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._shapes: dict[tuple[tuple[str, int], ...], Units] = {}

    # Feeding.

    def notice_node(self, event_type: str | None, manifest: Manifest) -> bool:
        """Take in a node, and say whether what could be placed on it changed."""
        name = manifest["metadata"]["name"]
        old = self._nodes.get(name)
        if event_type == "DELETED":
            self._nodes.pop(name, None)
            return old is not None
        new = node_of(manifest)
        self._nodes[name] = new
        return new != old

    def notice_pod(self, event_type: str | None, manifest: Manifest) -> bool:
        """Take in a pod, and say whether units were taken or given back."""
        metadata = manifest["metadata"]
        key = f"{metadata['namespace']}/{metadata['name']}"
        old = self._loads.pop(key, None)
        new = None
        if event_type != "DELETED":
            new = self._load(manifest)
        if old is not None and old != new:
            self._count(old, -1)
        if new is not None:
            self._loads[key] = new
            if old != new:
                self._count(new, 1)
        return old != new

    def keep_nodes(self, names: Iterable[str]) -> bool:
        """Drop the nodes that a listing did not have, and say whether there were any."""
        gone = self._nodes.keys() - set(names)
        for name in gone:
            del self._nodes[name]
        return bool(gone)

    def keep_pods(self, keys: Iterable[str]) -> bool:
        """Drop the pods, as `namespace/name`, that a listing did not have."""
        gone = self._loads.keys() - set(keys)
        for key in gone:
            self._count(self._loads.pop(key), -1)
        return bool(gone)

    # Asking.

    @property
    def nodes(self) -> Mapping[str, Node]:
        """All nodes by name, whatever their state."""
        return self._nodes

    @property
    def loads(self) -> Iterable[Load]:
        """All pods."""
        return self._loads.values()

    def used(self, node: str) -> Units:
        """What the pods bound to a node ask for."""
        return self._used.get(node, _NOTHING)

    def is_bound(self, pod: str) -> bool:
        """Whether a pod, as `namespace/name`, is counted on a node."""
        load = self._loads.get(pod)
        return load is not None and bool(load.node)

    def free(self, node: str, resource: str) -> int:
        """Units of one resource that are left on a node; never below 0."""
        found = self._nodes.get(node)
        if found is None:
            return 0
        left = found.allocatable.get(resource, 0) - self.used(node).get(resource, 0)
        return max(0, left)

    def allocatable(self, resource: str) -> int:
        """Units of one resource on all nodes, ready or not."""
        return sum(node.allocatable.get(resource, 0) for node in self._nodes.values())

    def place(
        self,
        wish: Wish,
        taken: Mapping[str, Units] | None = None,
        given_back: Mapping[str, Units] | None = None,
    ) -> str | None:
        """A node that the pod fits on, or None.

        Of several, the one is taken that is left with the fewest of the scarcest units, so that a
        pod that needs more of them still fits elsewhere.

        Args:
            wish: The pod.
            taken: By node, units that are promised to others and that no pod asks for yet.
            given_back: By node, units to count as free although pods hold them.
        """
        # Devices first, and labels and taints last: on a busy fleet most nodes are full.
        needs = sorted(wish.requests.items(), key=lambda need: "/" not in need[0])
        needs.append((PODS, 1))
        best: tuple[int, str] | None = None
        for node in self._nodes.values():
            left = self._left(node, needs, taken or _NO_NODES, given_back or _NO_NODES)
            if left is None or (best is not None and (left, node.name) > best):
                continue
            if admits(node, wish):
                best = (left, node.name)
        return best[1] if best is not None else None

    def _left(
        self,
        node: Node,
        needs: Iterable[tuple[str, int]],
        taken: Mapping[str, Units],
        given_back: Mapping[str, Units],
    ) -> int | None:
        """Devices that would be left with the pod on the node; None where it does not fit."""
        used = self._used.get(node.name, _NOTHING)
        promised = taken.get(node.name, _NOTHING)
        returned = given_back.get(node.name, _NOTHING)
        devices = 0
        for resource, number in needs:
            if resource == PODS and PODS not in node.allocatable:
                continue
            free = (
                node.allocatable.get(resource, 0)
                - used.get(resource, 0)
                - promised.get(resource, 0)
                + returned.get(resource, 0)
                - number
            )
            if free < 0:
                return None
            if "/" in resource:
                devices += free
        return devices

    def _load(self, manifest: Manifest) -> Load | None:
        spec, status = manifest.get("spec") or {}, manifest.get("status") or {}
        if status.get("phase") in ENDED_PHASES:
            return None
        requests = self._shared(tuple(sorted({**requests_of(spec), PODS: 1}.items())))
        namespace = sys.intern(manifest["metadata"]["namespace"])
        labels = manifest["metadata"].get("labels") or {}
        is_ours = labels.get(MANAGED_BY_LABEL) == MANAGED_BY and TIER_LABEL in labels
        return Load(
            namespace,
            sys.intern(spec.get("nodeName") or ""),
            requests,
            sys.intern(labels.get(DEPLOYMENT_LABEL, "")) if is_ours else "",
            sys.intern(labels[TIER_LABEL]) if is_ours else "",
        )

    def _shared(self, shape: tuple[tuple[str, int], ...]) -> Units:
        """The same requests as those of other pods, kept once."""
        if shape not in self._shapes:
            if len(self._shapes) >= 2 * len(self._loads) + FORGOTTEN_SHAPES:
                used = (load.requests for load in self._loads.values())
                self._shapes = {tuple(requests.items()): requests for requests in used}
            self._shapes[shape] = MappingProxyType(dict(shape))
        return self._shapes[shape]

    def _count(self, load: Load, sign: int) -> None:
        if not load.node:
            return
        used = self._used[load.node]
        for resource, number in load.requests.items():
            used[resource] += sign * number
            if not used[resource]:
                del used[resource]
        if not used:
            del self._used[load.node]


def node_of(manifest: Manifest) -> Node:
    """What is kept of a node."""
    metadata = manifest["metadata"]
    spec, status = manifest.get("spec") or {}, manifest.get("status") or {}
    return Node(
        name=sys.intern(metadata["name"]),
        labels={
            sys.intern(key): sys.intern(value)
            for key, value in (metadata.get("labels") or {}).items()
        },
        taints=tuple(
            Taint(taint["key"], taint.get("value") or "", taint["effect"])
            for taint in spec.get("taints") or []
        ),
        allocatable={
            sys.intern(resource): units(resource, amount)
            for resource, amount in (status.get("allocatable") or {}).items()
        },
        is_ready=any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or []
        ),
        is_cordoned=bool(spec.get("unschedulable")),
        register=(metadata.get("annotations") or {}).get(HAMI_ANNOTATION),
    )


def wish_of(pod_spec: Manifest) -> Wish:
    """What the scheduler would look for a pod with this spec."""
    affinity = ((pod_spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    return Wish(
        requests=requests_of(pod_spec),
        node_selector=pod_spec.get("nodeSelector") or {},
        node_affinity=tuple(affinity.get("nodeSelectorTerms") or ()),
        tolerations=tuple(pod_spec.get("tolerations") or ()),
    )


def requests_of(pod_spec: Manifest) -> dict[str, int]:
    """What the scheduler sets aside for a pod."""
    total = _total(pod_spec, _requests)
    of_the_pod = (pod_spec.get("resources") or {}).get("requests") or {}
    for resource, amount in of_the_pod.items():
        total[resource] = units(resource, amount)
    for resource, amount in (pod_spec.get("overhead") or {}).items():
        total[resource] += units(resource, amount)
    return {sys.intern(resource): number for resource, number in total.items() if number > 0}


def charges_of(pod_spec: Manifest) -> dict[str, int]:
    """What ResourceQuotas count of a pod, by their keys."""
    requests = requests_of(pod_spec)
    return {
        **requests,
        **{f"requests.{resource}": number for resource, number in requests.items()},
        **{f"limits.{resource}": number for resource, number in limits_of(pod_spec).items()},
        PODS: 1,
        "count/pods": 1,
    }


def limits_of(pod_spec: Manifest) -> dict[str, int]:
    """What a pod may use at most, of the resources that have a limit."""
    total = {**_total(pod_spec, _limits), **_limits(pod_spec)}
    for resource, amount in (pod_spec.get("overhead") or {}).items():
        if resource in total:
            total[resource] += units(resource, amount)
    return total


def _total(pod_spec: Manifest, amounts_of: Callable[[Manifest], Units]) -> Counter[str]:
    """What the containers of a pod come to.

    Source: "Resource sharing within containers" of the Kubernetes documentation: containers add
    up, the largest init container counts where it needs more, sidecars count with both.
    """
    total: Counter[str] = Counter()
    for container in pod_spec.get("containers") or []:
        total.update(amounts_of(container))
    sidecars: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    for container in pod_spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":
            sidecars.update(amounts_of(container))
            peak |= sidecars
        else:
            peak |= sidecars + Counter(amounts_of(container))
    return (total + sidecars) | peak


def _requests(container: Manifest) -> Units:
    resources = container.get("resources") or {}
    # The API server copies a limit where there is no request.
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {resource: units(resource, amount) for resource, amount in amounts.items()}


def _limits(container: Manifest) -> Units:
    amounts = (container.get("resources") or {}).get("limits") or {}
    return {resource: units(resource, amount) for resource, amount in amounts.items()}


@lru_cache(maxsize=4096)
def _parsed(text: str, scale: int) -> int:
    return math.ceil(amount_of(text) * scale)


def units(resource: str, amount: Any) -> int:
    """A quantity as a whole number: thousandths of CPU, bytes of memory, whole devices."""
    return _parsed(str(amount), 1000 if resource == CPU else 1)


def admits(node: Node, wish: Wish) -> bool:
    """Whether a node is open for a pod, its free units aside."""
    return (
        node.takes_pods
        and all(node.labels.get(key) == value for key, value in wish.node_selector.items())
        and (not wish.node_affinity or any(_holds(term, node) for term in wish.node_affinity))
        and all(
            any(tolerates(toleration, taint) for toleration in wish.tolerations)
            for taint in node.taints
            if taint.effect in _REPELLING
        )
    )


def tolerates(toleration: Manifest, taint: Taint) -> bool:
    """Whether a pod's toleration covers a taint."""
    if toleration.get("effect") not in {None, "", taint.effect}:
        return False
    key = toleration.get("key") or ""
    if toleration.get("operator") == "Exists":
        return key in {"", taint.key}
    return bool(key == taint.key and (toleration.get("value") or "") == taint.value)


def _holds(term: Manifest, node: Node) -> bool:
    labels = [_matches(rule, node.labels) for rule in term.get("matchExpressions") or []]
    fields = [
        _matches(rule, {"metadata.name": node.name}) for rule in term.get("matchFields") or []
    ]
    # A term that says nothing holds for no node.
    return bool(labels or fields) and all((*labels, *fields))


def _matches(rule: Manifest, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(rule["key"]), rule.get("values") or []
    match rule["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return _compares(rule["operator"], value, values)
        case _:
            return False


def _compares(operator: str, value: str | None, values: list[str]) -> bool:
    try:
        ours, theirs = int(value or ""), int(values[0])
    except (ValueError, IndexError):
        return False
    return ours > theirs if operator == "Gt" else ours < theirs
