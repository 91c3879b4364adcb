"""What GPU memory a node offers, in which units, from what its labels and annotations say.

Pure. A unit is one of a resource name: a whole card, a MIG slice, or a MiB of a card that HAMi
shares out. Sizes come from the labels of GPU feature discovery and from HAMi's annotation; a node
whose labels contradict each other offers nothing, and says why, until they agree.

Source: github.com/NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery and internal/lm;
github.com/Project-HAMi/HAMi, docs/develop/protocol.md.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepseek_contract.deployment import Gpu
from deepseek_contract.tenant import Partition

PREFIX = "nvidia.com/"
GPU = "nvidia.com/gpu"
GPU_SHARED = "nvidia.com/gpu.shared"
"""What time-sliced cards are called where the device plugin renames them."""
MIG_PREFIX = "nvidia.com/mig-"
VGPU_MEMORY = "nvidia.com/gpumem"
"""MiB a device, which HAMi counts; nodes do not list it."""
VGPU_MEMORY_PERCENT = "nvidia.com/gpumem-percentage"

PRODUCT_LABEL = "nvidia.com/gpu.product"
MEMORY_LABEL = "nvidia.com/gpu.memory"
SLICES_LABEL = "nvidia.com/gpu.slices.gi"
"""Of the MIG slices under the strategy single; whole cards have no such label."""
STRATEGY_LABEL = "nvidia.com/mig.strategy"
HAMI_ANNOTATION = "hami.io/node-nvidia-register"

WHOLE = "whole"
VGPU = "vgpu"
MIB = 2**20

_MIG_PRODUCT = re.compile(r"-MIG-(?P<profile>[^-]+)(-SHARED)?$")
_PRODUCT_SIZE = re.compile(r"(?<![0-9])([0-9]{1,4})GB", re.IGNORECASE)
_PROFILE_SIZE = re.compile(r"^[1-9][0-9]*g\.(?P<gigabytes>[0-9]+)gb")
# What a card or slice shows is a little less, sometimes a little more, than what its name says.
_LEAST_OF_NAME, _MOST_OF_NAME = 0.6, 1.15


@dataclass(frozen=True)
class Pool:
    """Units of one resource name on one node."""

    resource: str
    partition: str
    """`whole`, `vgpu`, or `mig:` and the profile."""
    count: int
    """Units that can be handed out."""
    unit_bytes: int
    card_bytes: int | None = None
    """Memory of the card that a unit is a part of, where it is known."""


@dataclass(frozen=True)
class NodeDevices:
    """The GPUs of one node."""

    pools: tuple[Pool, ...] = ()
    resources: frozenset[str] = frozenset()
    """All GPU resource names that the node lists, those of unknown size among them."""
    vgpu_slots: int = 0
    """How many pods HAMi lets share the node's cards."""
    problem: str = ""
    """What the labels contradict; the node offers nothing then."""


@dataclass(frozen=True)
class Stock:
    """Units of one partition in the whole cluster."""

    counts: Mapping[str, int]
    """Units by resource name."""
    unit_bytes: int
    """Of the largest unit: one name may be of several sizes on several nodes, and a quota, which
    counts units, must hold for the largest."""
    card_bytes: int | None = None
    """Of the largest card."""

    @property
    def count(self) -> int:
        """Units of all names."""
        return sum(self.counts.values())

    def without(self, held: Mapping[str, int]) -> Stock:
        """What is left of it where others hold so many units of each name."""
        left = {name: max(0, count - held.get(name, 0)) for name, count in self.counts.items()}
        return replace(self, counts=left)


@dataclass(frozen=True)
class Supply:
    """The GPU memory of the whole cluster."""

    total_bytes: int = 0
    stocks: Mapping[str, Stock] = field(default_factory=dict)
    """By partition."""
    resources: frozenset[str] = frozenset()
    vgpu_slots: int = 0
    problems: tuple[str, ...] = ()
    """One sentence for each node that is left out."""

    @property
    def profiles(self) -> tuple[str, ...]:
        """MIG profiles that some node offers."""
        return tuple(
            sorted(key.removeprefix("mig:") for key in self.stocks if key.startswith("mig:"))
        )

    def unit_bytes(self, resource: str) -> int:
        """Bytes of the largest unit of a name; 0 where none is known."""
        sizes = [stock.unit_bytes for stock in self.stocks.values() if resource in stock.counts]
        return max(sizes, default=0)


def partition_of(wanted: Gpu | Partition) -> str:
    """The partition that an object or a tenant names."""
    if wanted.mode == "mig":
        return f"mig:{wanted.mig_profile}"
    return wanted.mode


def mig_resource(profile: str) -> str:
    """The resource name of a profile under the strategy mixed: `+` may not stand in a name."""
    return MIG_PREFIX + profile.replace("+", ".")


def resource_of(gpu: Gpu, supply: Supply | None, live: Collection[str] = ()) -> str:
    """The name of the units that a pod asks for; empty on a CPU.

    Under the MIG strategy single a slice is called `nvidia.com/gpu`, under mixed it has a name of
    its own. Where nodes of both kinds offer the profile, or none does, what runs is left alone.

    Args:
        gpu: What the object wants.
        supply: What nodes offer; None where the operator sees no nodes.
        live: The names that the pods ask for as they are.
    """
    if gpu.mode == "cpu":
        return ""
    if gpu.mode == "vgpu":
        return VGPU_MEMORY
    if gpu.mode != "mig":
        return GPU
    own = mig_resource(gpu.mig_profile or "")
    stock = supply.stocks.get(partition_of(gpu)) if supply is not None else None
    offered = set(stock.counts) if stock is not None else {own, GPU}
    known = [name for name in (own, GPU) if name in offered]
    kept = [name for name in known if name in live]
    return (kept or known)[0]


def requests_of(gpu: Gpu, resource: str) -> dict[str, int]:
    """What a pod asks for, by resource name."""
    if gpu.mode == "cpu":
        return {}
    if gpu.mode == "vgpu":
        return {GPU: 1, VGPU_MEMORY: units_of(gpu)}
    return {resource: units_of(gpu)}


def units_of(gpu: Gpu) -> int:
    """Units of its partition that a pod asks for."""
    if gpu.mode == "cpu":
        return 0
    return 1024 * (gpu.memory_gib or 0) if gpu.mode == "vgpu" else gpu.count


def requested(deployment: dict[str, Any] | None) -> tuple[str, ...]:
    """The resource names that a Deployment's pods ask for."""
    if deployment is None:
        return ()
    containers = deployment["spec"]["template"]["spec"].get("containers") or []
    return tuple(
        name
        for container in containers
        for name in ((container.get("resources") or {}).get("limits") or {})
    )


def node_requirements(gpu: Gpu, resource: str) -> list[dict[str, Any]]:
    """Conditions on a node's labels, where the resource name alone does not tell the device.

    They name what the profile is and not the products that have it, so that a new kind of node
    does not change the pods of every deployment.
    """
    if gpu.mode == "whole":
        # Under the MIG strategy single, slices are called nvidia.com/gpu too.
        return [{"key": SLICES_LABEL, "operator": "DoesNotExist"}]
    if gpu.mode != "mig" or resource != GPU:
        return []
    profile = gpu.mig_profile or ""
    mebibytes = _gigabytes(profile) * 1024
    found = [
        {"key": STRATEGY_LABEL, "operator": "In", "values": ["single"]},
        {"key": SLICES_LABEL, "operator": "In", "values": [profile.partition("g.")[0]]},
        {"key": MEMORY_LABEL, "operator": "Gt", "values": [str(int(mebibytes * 0.88))]},
        {"key": MEMORY_LABEL, "operator": "Lt", "values": [str(int(mebibytes * 1.05))]},
    ]
    if profile.endswith("+me"):
        found.append({"key": f"{GPU}.engines.ofa", "operator": "Gt", "values": ["0"]})
    return found


def unavailable(gpu: Gpu, supply: Supply | None) -> str | None:
    """Why no node of the cluster can ever run such a pod, or None."""
    if supply is None or gpu.mode not in {"mig", "vgpu"}:
        return None
    stock = supply.stocks.get(partition_of(gpu))
    if gpu.mode == "mig":
        if stock is not None:
            return None
        offered = ", ".join(supply.profiles) or "none"
        return (
            f"No node offers the MIG profile {gpu.mig_profile}; offered are: {offered}. Change"
            " spec.gpu.migProfile, or cut cards so."
        )
    if stock is None:
        return (
            "No node's cards are shared out by HAMi, which the mode vgpu needs: no node has the"
            f" annotation {HAMI_ANNOTATION}. Install HAMi, or change spec.gpu.mode."
        )
    largest = (stock.card_bytes or 0) // 2**30
    if (gpu.memory_gib or 0) > largest:
        return (
            f"spec.gpu.memoryGiB is {gpu.memory_gib}, and the largest card that HAMi shares out"
            f" has {largest} GiB."
        )
    return None


def devices_of(
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    allocatable: Mapping[str, int],
) -> NodeDevices:
    """The GPUs of one node.

    Args:
        name: Of the node, for messages.
        labels: Its labels.
        annotations: Its annotations.
        allocatable: Whole units by resource name; others than NVIDIA's are not looked at.
    """
    counts = {
        key: count
        for key, count in allocatable.items()
        if key in {GPU, GPU_SHARED} or key.startswith(MIG_PREFIX)
    }
    names = frozenset(counts)
    offered = {key: count for key, count in counts.items() if count > 0}
    try:
        if HAMI_ANNOTATION in annotations:
            return _shared_out(annotations[HAMI_ANNOTATION], offered.get(GPU, 0))
        pools = [
            _slices(resource, count, labels)
            if resource.startswith(MIG_PREFIX)
            else _cards(resource, count, labels)
            for resource, count in sorted(offered.items())
        ]
    except _ContradictionError as error:
        return NodeDevices(resources=names, problem=f"Node {name}: {error}")
    return NodeDevices(tuple(pools), names)


def supply_of(nodes: Iterable[NodeDevices]) -> Supply:
    """All nodes together.

    Nodes count while they exist, whether they are ready or not: an outage must not make quotas
    smaller, and with them what is left running.
    """
    total = slots = 0
    counts: dict[str, dict[str, int]] = {}
    sizes: dict[str, int] = {}
    cards: dict[str, int] = {}
    resources: set[str] = set()
    problems: list[str] = []
    for node in nodes:
        resources |= node.resources
        slots += node.vgpu_slots
        if node.problem:
            problems.append(node.problem)
        for pool in node.pools:
            total += pool.count * pool.unit_bytes
            names = counts.setdefault(pool.partition, {})
            names[pool.resource] = names.get(pool.resource, 0) + pool.count
            sizes[pool.partition] = max(sizes.get(pool.partition, 0), pool.unit_bytes)
            if pool.card_bytes is not None:
                cards[pool.partition] = max(cards.get(pool.partition, 0), pool.card_bytes)
    # A name that two partitions share counts with the larger unit in both: a quota cannot tell
    # on which node a pod will land.
    largest: dict[str, int] = {}
    for partition, names in counts.items():
        for resource in names:
            largest[resource] = max(largest.get(resource, 0), sizes[partition])
    stocks = {
        partition: Stock(
            dict(sorted(names.items())),
            max(largest[resource] for resource in names),
            cards.get(partition),
        )
        for partition, names in sorted(counts.items())
    }
    return Supply(
        total_bytes=total,
        stocks=stocks,
        resources=frozenset(resources),
        vgpu_slots=slots,
        problems=tuple(sorted(problems)),
    )


class _ContradictionError(Exception):
    """Labels of one node that cannot all be true."""


def _cards(resource: str, count: int, labels: Mapping[str, str]) -> Pool:
    """`nvidia.com/gpu`: whole cards, parts of them in time, or slices under `single`."""
    product = labels.get(PRODUCT_LABEL, "")
    strategy = labels.get(STRATEGY_LABEL, "none")
    if product.endswith("-MIG-INVALID"):
        raise _ContradictionError(
            f"{PRODUCT_LABEL} is {product}: its cards are not all cut alike, as the MIG strategy"
            " single needs."
        )
    memory = _number(labels, MEMORY_LABEL)
    if not memory:
        raise _ContradictionError(
            f"it lists {count} {resource} and has no label {MEMORY_LABEL}, so that their size is"
            " unknown; GPU feature discovery sets it."
        )
    replicas = max(1, _number(labels, f"{GPU}.replicas") or 1)
    known = _number(labels, f"{GPU}.count")
    if known is not None and count > known * replicas:
        raise _ContradictionError(
            f"it lists {count} {resource}, and {GPU}.count is {known}"
            + (f" with {replicas} replicas each." if replicas > 1 else ".")
        )
    found = _MIG_PRODUCT.search(product)
    if found is None:
        size = _PRODUCT_SIZE.search(product)
        if size is not None:
            _agree(MEMORY_LABEL, memory, int(size[1]), f"{PRODUCT_LABEL} {product}")
        card_bytes = memory * MIB
        return Pool(resource, WHOLE, count, card_bytes // replicas, card_bytes)
    if strategy != "single":
        raise _ContradictionError(
            f"{PRODUCT_LABEL} is {product}, and {STRATEGY_LABEL} is {strategy}, under which"
            f" {GPU} are whole cards."
        )
    profile = _profile(found["profile"])
    _agree(MEMORY_LABEL, memory, _gigabytes(profile), f"{PRODUCT_LABEL} {product}")
    return Pool(resource, f"mig:{profile}", count, memory * MIB // replicas)


def _slices(resource: str, count: int, labels: Mapping[str, str]) -> Pool:
    """`nvidia.com/mig-…`: slices under `mixed`."""
    strategy = labels.get(STRATEGY_LABEL, "mixed")
    if strategy != "mixed":
        raise _ContradictionError(
            f"it lists {resource}, and {STRATEGY_LABEL} is {strategy}, which has no such name."
        )
    profile = _profile(resource.removeprefix(MIG_PREFIX))
    gigabytes = _gigabytes(profile)
    memory = _number(labels, f"{resource}.memory")
    if memory is None:
        # The name promises no less than there is.
        memory = gigabytes * 1024
    _agree(f"{resource}.memory", memory, gigabytes, f"the profile {profile}")
    known = _number(labels, f"{resource}.count")
    if known is not None and count > known:
        raise _ContradictionError(f"it lists {count} {resource}, and {resource}.count is {known}.")
    card = _number(labels, MEMORY_LABEL)
    return Pool(resource, f"mig:{profile}", count, memory * MIB, card * MIB if card else None)


def _shared_out(register: str, slots: int) -> NodeDevices:
    """A node whose cards HAMi shares out by memory."""
    sizes = _registered_mebibytes(register)
    pool = Pool(VGPU_MEMORY, VGPU, sum(sizes), MIB, max(sizes, default=0) * MIB)
    names = frozenset({GPU, VGPU_MEMORY, VGPU_MEMORY_PERCENT})
    return NodeDevices((pool,) if pool.count else (), names, vgpu_slots=slots)


def _registered_mebibytes(register: str) -> list[int]:
    """MiB of each healthy card, from both forms of HAMi's annotation: JSON and the older one."""
    with contextlib.suppress(ValueError, LookupError, TypeError, OverflowError, RecursionError):
        if register.lstrip().startswith("["):
            sizes = [int(card["devmem"]) for card in json.loads(register) if card["health"]]
        else:
            cards = [text.split(",") for text in register.split(":") if text.strip()]
            # id, share count, MiB, cores, type, numa, health
            sizes = [int(card[2]) for card in cards if card[6].strip() == "true"]
        if all(size >= 0 for size in sizes):
            return sizes
    raise _ContradictionError(
        f"its annotation {HAMI_ANNOTATION} is not understood: {register[:80]!r}."
    )


def _profile(text: str) -> str:
    """A profile as people write it: `1g.10gb.me` of a resource name is `1g.10gb+me`."""
    head, _, attribute = text.replace("+", ".").partition("gb.")
    return f"{head}gb+{attribute}" if attribute else text


def _gigabytes(profile: str) -> int:
    found = _PROFILE_SIZE.match(profile)
    if found is None:
        raise _ContradictionError(f"{profile!r} is no MIG profile such as 1g.18gb.")
    return int(found["gigabytes"])


def _number(labels: Mapping[str, str], key: str) -> int | None:
    text = labels.get(key)
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,15}", text):
        raise _ContradictionError(f"the label {key} is {text!r}, which is no number.")
    return int(text)


def _agree(label: str, mebibytes: int, gigabytes: int, named_by: str) -> None:
    named = gigabytes * 1024
    if not 0 < named * _LEAST_OF_NAME <= mebibytes <= named * _MOST_OF_NAME:
        raise _ContradictionError(
            f"{label} is {mebibytes} MiB, and {named_by} says {gigabytes} GB."
        )
