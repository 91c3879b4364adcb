"""`DeepSeekTenant`: whose namespaces may use which share of the cluster's GPU memory.

The source of the CRD and of its reference page. An operator that serves the whole cluster deals
tenants' shares out into ResourceQuotas; one that serves single namespaces knows no tenants.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deepseek_contract.schema import ApiModel, Rule, keyed, section
from deepseek_contract.status import Condition, Metadata, StatusModel
from deepseek_contract.text import Bytes, LabelName, Percent, Seconds

KIND = "DeepSeekTenant"
PLURAL = "deepseektenants"

Duration = Annotated[str, Field(pattern="^[1-9][0-9]{0,4}(s|m|h|d)$", max_length=8)]


class GpuMemory(ApiModel):
    """A share of the cluster's allocatable GPU memory."""

    min_percent: Annotated[int, Field(ge=0, le=100)] = 0
    """What the tenant gets back within `dynamic.graceSeconds` when it needs it."""
    max_percent: Percent
    """What the tenant never gets more of."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.minPercent <= self.maxPercent",
            holds=lambda memory: memory.min_percent <= memory.max_percent,
            message="minPercent may not be above maxPercent",
            field_path=".minPercent",
        ),
    )


class Partition(ApiModel):
    """Which kind of device the tenant's pods may use; all others get a quota of 0."""

    mode: Literal["whole", "mig", "vgpu"] = "whole"
    """`whole` GPUs, `mig` slices, or `vgpu` shares of a GPU's memory that HAMi deals out."""
    mig_profile: (
        Annotated[str, Field(pattern=r"^[1-7]g\.[1-9][0-9]{0,2}gb(\+me|\+gfx)?$", max_length=16)]
        | None
    ) = None
    """The MIG profile, with the mode `mig`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.mode == 'mig') == has(self.migProfile)",
            holds=lambda partition: (
                (partition.mode == "mig") == (partition.mig_profile is not None)
            ),
            message="migProfile belongs to the mode mig, and that mode needs it; mode is {mode}",
            field_path=".migProfile",
        ),
    )


class Dynamic(ApiModel):
    """How quota moves with use."""

    enabled: bool = True
    """Whether it moves at all; if not, the tenant always has what it would get if everybody asked
    for all that they may."""
    half_life: Duration = "24h"
    """After which time past use counts half; who used memory until lately finds it there when they
    come back."""
    interval: Duration = "1m"
    """How often the shares are computed at least: changes of nodes, pods and tenants are looked at
    when they happen."""
    grace_seconds: Seconds = 120
    """For how long pods beyond a share that became smaller may go on; then they have ended."""


class DeepSeekTenantSpec(ApiModel):
    """What the tenant may use."""

    namespaces: Annotated[
        list[LabelName],
        Field(min_length=1, max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ]
    """The tenant's namespaces; a namespace belongs to one tenant."""
    gpu_memory: GpuMemory
    """The tenant's share of the cluster's GPU memory."""
    max_percent_per_card: Percent | None = None
    """The most of one card that one pod may take, for cards that are shared: a deployment that
    asks for more gets no pods."""
    weight: Annotated[int, Field(ge=1, le=1000)] = 100
    """How spare memory is divided among those who want it."""
    partition: Partition = section(Partition)
    """Which kind of device the tenant's pods may use."""
    dynamic: Dynamic = section(Dynamic)
    """How quota moves with use."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=None,
            holds=lambda spec: len(set(spec.namespaces)) == len(spec.namespaces),
            message="namespaces names a namespace twice",
        ),
    )


class Share(StatusModel):
    """An amount of GPU memory."""

    memory_bytes: Annotated[Bytes, Field(alias="bytes")] = 0
    """In bytes."""
    percent: Annotated[int, Field(ge=0, le=100)] = 0
    """Of the cluster's allocatable GPU memory."""


class DeepSeekTenantStatus(StatusModel):
    """What the tenant has."""

    observed_generation: Annotated[int, Field(ge=0, le=2**62)] | None = None
    """The generation of the object that this is about."""
    conditions: Annotated[list[Condition], keyed("type", max_items=16)] | None = None
    """Ready, OverQuota, CapBelowOneUnit, NamespaceTaken, GuaranteesOvercommitted and
    NodesContradict."""
    quota: Share | None = None
    """What the tenant may use now."""
    used: Share | None = None
    """What its pods on nodes hold now."""
    past_used: Share | None = None
    """Past use, decayed: what shares go by. It is written when it changed by 5 points."""
    past_used_time: Annotated[str, Field(max_length=32)] | None = None
    """When `pastUsed` was that, in RFC 3339 form; a restarted operator goes on from there."""


class DeepSeekTenant(ApiModel):
    """A tenant: namespaces that share GPU memory between a guarantee and a cap."""

    api_version: Literal["deepseek.dev/v1alpha1"]
    """Version of this API."""
    kind: Literal["DeepSeekTenant"]
    """Kind of the object."""
    metadata: Metadata
    """Name and so on."""
    spec: DeepSeekTenantSpec
    """What the tenant may use."""
    status: DeepSeekTenantStatus | None = None
    """What the tenant has."""
