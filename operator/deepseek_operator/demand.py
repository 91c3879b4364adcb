"""What is asked of the cluster's GPUs and what is held: the workloads that shares are dealt to.

Pure. Pods are told by their requests: workers of a tier together, pods of others by namespace and
resource name. Bytes are those of the node that a pod is on; where it is on none yet, the quota
counts it and memory is not held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from deepseek_contract.deployment import Autoscaling, DeepSeekDeploymentSpec
from deepseek_operator.devices import (
    GPU,
    GPU_SHARED,
    MIG_PREFIX,
    VGPU,
    VGPU_MEMORY,
    NodeDevices,
    Supply,
    partition_of,
    requested,
    resource_of,
    units_of,
)
from deepseek_operator.fleet import Load
from deepseek_operator.kinds import Manifest
from deepseek_operator.quota import Workload, WorkloadKey
from deepseek_operator.render import ENDPOINT_SECONDS, EXIT_SECONDS
from deepseek_operator.tiers import tiers_of


@dataclass(frozen=True)
class Holdings:
    """What pods hold, by namespace."""

    used_bytes: Mapping[str, int]
    """Of pods on nodes."""
    workers: Mapping[WorkloadKey, int]
    """Pods of each tier."""
    others: Mapping[tuple[str, str], int]
    """Units that pods of others have, by namespace and resource name."""
    on_nodes: Mapping[tuple[str, str], int]
    """Units that all pods on nodes have, by namespace and resource name."""

    def outside(self, namespaces: Collection[str]) -> dict[str, int]:
        """Units on nodes by resource name that pods of other namespaces than these have."""
        found: Counter[str] = Counter()
        for (namespace, resource), units in self.on_nodes.items():
            if namespace not in namespaces:
                found[resource] += units
        return dict(found)


def holdings_of(loads: Iterable[Load], devices: Mapping[str, NodeDevices]) -> Holdings:
    """What all pods hold.

    Args:
        loads: All pods that have not ended.
        devices: Of each node.
    """
    sizes = {
        name: {pool.resource: pool.unit_bytes for pool in node.pools}
        for name, node in devices.items()
    }
    used: Counter[str] = Counter()
    workers: Counter[WorkloadKey] = Counter()
    others: Counter[tuple[str, str]] = Counter()
    on_nodes: Counter[tuple[str, str]] = Counter()
    for load in loads:
        if load.deployment:
            workers[load.namespace, load.deployment, load.tier] += 1
        node = devices.get(load.node)
        for resource, units in _held(load, node).items():
            if not load.deployment:
                others[load.namespace, resource] += units
            if node is not None:
                used[load.namespace] += units * sizes[load.node].get(resource, 0)
                on_nodes[load.namespace, resource] += units
    return Holdings(used, workers, others, on_nodes)


def _held(load: Load, node: NodeDevices | None) -> dict[str, int]:
    """Units of a pod by the resource name that tells memory."""
    devices = load.requests.get(GPU, 0)
    memory = load.requests.get(VGPU_MEMORY, 0)
    if memory:
        # HAMi gives so much of each device of the pod.
        return {VGPU_MEMORY: memory * max(1, devices)}
    shared = next((pool for pool in node.pools if pool.partition == VGPU), None) if node else None
    if devices and shared is not None and shared.card_bytes is not None:
        # Without an amount HAMi gives whole cards.
        return {VGPU_MEMORY: devices * shared.card_bytes // shared.unit_bytes}
    return {
        resource: units
        for resource, units in load.requests.items()
        if resource in {GPU, GPU_SHARED} or resource.startswith(MIG_PREFIX)
    }


def workloads_of_others(holdings: Holdings, namespaces: Collection[str]) -> list[Workload]:
    """Pods of some namespaces that are not of deployments."""
    return [
        Workload(namespace, "", resource, units=1, wanted=0, running=units)
        for (namespace, resource), units in sorted(holdings.others.items())
        if namespace in namespaces
    ]


def workloads_of(
    owner: Manifest,
    spec: DeepSeekDeploymentSpec,
    *,
    live: Mapping[str, Manifest],
    holdings: Holdings,
    supply: Supply,
    wishes: Mapping[str, int],
    held_at: Mapping[str, int],
) -> list[Workload]:
    """The tiers of one object.

    Args:
        owner: The object.
        spec: Its spec.
        live: The Deployments that there are, by tier.
        holdings: What pods hold.
        supply: What nodes offer, which decides what a slice is called.
        wishes: By tier, the pods that the object's plan would have if no tenant's share were a
            limit; none before its first plan.
        held_at: By tier, the number of pods that an autoscaler was held at so far.
    """
    metadata = owner["metadata"]
    found = []
    for tier in tiers_of(spec):
        units = units_of(tier.gpu)
        if not units:
            continue
        deployment = live.get(tier.name)
        key = (metadata["namespace"], metadata["name"], tier.name)
        found.append(
            Workload(
                namespace=metadata["namespace"],
                name=metadata["name"],
                resource=resource_of(tier.gpu, supply, requested(deployment)),
                units=units,
                wanted=(
                    _scaled(spec.autoscaling, deployment, held_at.get(tier.name))
                    if tier.is_primary and spec.autoscaling is not None
                    else wishes.get(tier.name, tier.replicas)
                ),
                running=holdings.workers.get(key, 0),
                priority=spec.priority or 0,
                created=str(metadata.get("creationTimestamp", "")),
                tier=tier.name,
                drain_seconds=float(ENDPOINT_SECONDS + spec.recovery.drain_seconds + EXIT_SECONDS),
                partition=partition_of(tier.gpu),
            )
        )
    return found


def _scaled(scaling: Autoscaling, deployment: Manifest | None, held_at: int | None) -> int:
    """Pods that an autoscaler would have if nothing limited it."""
    replicas = int(deployment["spec"].get("replicas") or 0) if deployment is not None else 0
    if held_at is not None and replicas >= held_at:
        # One that stands at its limit would have more; how much more it does not say.
        replicas = held_at + 1
    return min(scaling.max_replicas, max(scaling.min_replicas, replicas))
