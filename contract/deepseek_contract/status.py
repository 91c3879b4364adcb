"""The status of the API's objects: conditions with their reasons, memory, recovery, history.

The operator builds these and writes them; `kubectl` and scripts read them. Reasons are a closed
set here and only shaped like words in the CRD, so that an operator and a CRD of different versions
can work together during an upgrade.
"""

from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field

from deepseek_contract.schema import ApiModel, keyed
from deepseek_contract.text import Bytes, Count

ConditionType = Literal[
    "Ready", "Progressing", "Degraded", "QuotaExceeded", "ScalingActive", "ModelCached", "Routed"
]

ReadyReason = Literal[
    "Available",
    "FallbackAvailable",
    "ScaledToZero",
    "InvalidSpec",
    "NameTaken",
    "ApplyRefused",
    "ModelNotCached",
    "SecretMissing",
    "ImageUnavailable",
    "Unschedulable",
    "VolumeUnavailable",
    "CreationRefused",
    "ModelLoading",
    "ModelUnusable",
    "ModelTooLarge",
    "PartitionUnavailable",
    "TenantLimit",
    "WorkerCrashing",
    "RolloutInProgress",
    "PodsNotReady",
]
ProgressingReason = Literal[
    "RolloutInProgress", "RolloutBlocked", "RolloutComplete", "InvalidSpec", "ApplyRefused"
]
DegradedReason = Literal[
    "PrimaryServing",
    "DegradePending",
    "FallbackStarting",
    "FallbackServing",
    "NoCapacity",
    "Pinned",
    "PromotionBlockedByFallback",
    "SwapInProgress",
    "Promoting",
]
QuotaExceededReason = Literal["WithinQuota", "CreationRefused", "TenantLimit"]
ScalingActiveReason = Literal[
    "FixedReplicas",
    "LeftToOthers",
    "Starting",
    "Scaling",
    "MetricUnavailable",
    "ProviderUnavailable",
    "ForeignAutoscaler",
    "ApplyRefused",
]
ModelCachedReason = Literal[
    "InWorkerImage",
    "InImageVolume",
    "OnVolume",
    "OnNode",
    "Downloaded",
    "Waiting",
    "Downloading",
    "DownloadFailed",
    "ChecksumMismatch",
    "DiskFull",
    "ModelNotFound",
    "AccessDenied",
    "SecretMissing",
    "ConfigMapMissing",
    "CreationRefused",
    "ClaimMissing",
    "ClaimPending",
    "SingleNodeVolume",
    "CacheForbidden",
    "ImageUnavailable",
]
RoutedReason = Literal[
    "Accepted", "NotAccepted", "Waiting", "GatewayApiMissing", "RetryUnsupported", "ApplyRefused"
]
ConditionReason = (
    ReadyReason
    | ProgressingReason
    | DegradedReason
    | QuotaExceededReason
    | ScalingActiveReason
    | ModelCachedReason
    | RoutedReason
)

REASONS: dict[ConditionType, tuple[str, ...]] = {
    "Ready": get_args(ReadyReason),
    "Progressing": get_args(ProgressingReason),
    "Degraded": get_args(DegradedReason),
    "QuotaExceeded": get_args(QuotaExceededReason),
    "ScalingActive": get_args(ScalingActiveReason),
    "ModelCached": get_args(ModelCachedReason),
    "Routed": get_args(RoutedReason),
}
EventReason = Literal["NodeSwitched", "NodeSwitchingUsedUp"]
"""Reasons of Kubernetes events about steps that are no condition."""
HISTORY_LENGTH = 10

TenantConditionType = Literal[
    "Ready",
    "OverQuota",
    "CapBelowOneUnit",
    "NamespaceTaken",
    "GuaranteesOvercommitted",
    "NodesContradict",
]
TenantReadyReason = Literal[
    "QuotaDealt",
    "InvalidSpec",
    "NoNamespaces",
    "NamespaceMissing",
    "PartitionUnavailable",
    "ApplyRefused",
]
TenantOverQuotaReason = Literal["WithinQuota", "GracePeriod", "Shrinking", "PodsOfOthers"]
TenantCapReason = Literal["CapHoldsUnits", "CapBelowOneUnit"]
TenantNamespaceReason = Literal["NamespacesAreFree", "NamespaceInTwoTenants"]
TenantGuaranteeReason = Literal[
    "GuaranteesFit", "GuaranteesExceedCluster", "GuaranteesExceedPartition", "GuaranteeBelowOneUnit"
]
TenantNodesReason = Literal["LabelsAgree", "ContradictoryLabels"]
TenantConditionReason = (
    TenantReadyReason
    | TenantOverQuotaReason
    | TenantCapReason
    | TenantNamespaceReason
    | TenantGuaranteeReason
    | TenantNodesReason
)
TENANT_REASONS: dict[TenantConditionType, tuple[str, ...]] = {
    "Ready": get_args(TenantReadyReason),
    "OverQuota": get_args(TenantOverQuotaReason),
    "CapBelowOneUnit": get_args(TenantCapReason),
    "NamespaceTaken": get_args(TenantNamespaceReason),
    "GuaranteesOvercommitted": get_args(TenantGuaranteeReason),
    "NodesContradict": get_args(TenantNodesReason),
}


class Metadata(ApiModel):
    """What is read of an object's metadata; Kubernetes itself checks the rest."""

    model_config = ConfigDict(extra="ignore")

    name: str
    """Name."""
    namespace: str | None = None
    """Namespace."""
    uid: str | None = None
    """Unique id."""
    generation: int | None = None
    """Counts changes of the spec."""
    resource_version: str | None = None
    """Counts changes of the object."""
    deletion_timestamp: str | None = None
    """When its deletion was asked for."""
    labels: dict[str, str] | None = None
    """Labels."""
    annotations: dict[str, str] | None = None
    """Annotations."""


class StatusModel(ApiModel):
    """A part of the status: what a newer operator adds is read over."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """One thing that can be true of the object, in the form that `kubectl wait` reads."""

    type: Annotated[str, Field(pattern="^[A-Za-z]+$", max_length=64)]
    """Which thing."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is true."""
    reason: Annotated[str, Field(pattern="^[A-Za-z]+$", max_length=64)]
    """Why, as one word of a fixed set."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, for people, and what to do."""
    last_transition_time: Annotated[str, Field(max_length=32)]
    """When `status` last changed, in RFC 3339 form."""
    observed_generation: Annotated[int, Field(ge=0, le=2**62)] | None = None
    """The generation of the object that this is about."""


class MemoryStatus(StatusModel):
    """Bytes a pod by kind: what was predicted before it started and what was measured."""

    predicted_bytes: Annotated[dict[str, Bytes], Field(max_length=32)] | None = None
    """Predicted from the model's configuration."""
    measured_bytes: Annotated[dict[str, Bytes], Field(max_length=32)] | None = None
    """Measured by the worker that uses most."""
    limit_bytes: Bytes | None = None
    """What a worker may use."""
    used_percent: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Bytes in use over the limit, of the worker that uses most."""


class NodeSwitch(StatusModel):
    """A pod that was moved to another node."""

    time: Annotated[str, Field(max_length=32)]
    """When, in RFC 3339 form."""
    pod: Annotated[str, Field(max_length=253)]
    """The pod that was quarantined."""
    node: Annotated[str, Field(max_length=253)]
    """The node that it left."""
    cause: Annotated[str, Field(pattern="^[A-Za-z]+$", max_length=64)]
    """Why: `NodeSilent`, `EngineStalled`, `DeviceFault` or `MemoryExhausted`."""


class RecoveryStatus(StatusModel):
    """How far the recovery ladder has been climbed."""

    level: Annotated[int, Field(ge=0, le=3)] = 0
    """0: nothing is wrong; 1: batches are retried; 2: pods change node; 3: a fallback serves
    or is needed."""
    batch_retries: Count = 0
    """Batches retried after running out of memory."""
    node_switches: Count = 0
    """Pods moved to another node."""
    degradations: Count = 0
    """Times that a fallback took over."""
    message: Annotated[str, Field(max_length=1024)] | None = None
    """Why the ladder stands on level 2 or 3, for people."""
    last_change_time: Annotated[str, Field(max_length=32)] | None = None
    """When the level last changed."""
    switches: Annotated[list[NodeSwitch], Field(max_length=60)] | None = None
    """The switches of the last hour, the oldest first: what the budget counts."""


class DegradeStatus(StatusModel):
    """What the operator has to remember while a fallback serves; everything else it can see."""

    phase: Annotated[str, Field(max_length=32)]
    """`primary`, `degraded`, `blocked` (the primary fits only on the fallback's units) or
    `swapping` (the fallback was drained for the primary)."""
    since: Annotated[str, Field(max_length=32)] | None = None
    """When the phase began, in RFC 3339 form."""
    fallback: Annotated[str, Field(max_length=63)] | None = None
    """The fallback that was started last."""
    attempts: Count = 0
    """Refused primaries or failed swaps in a row."""
    next_attempt_time: Annotated[str, Field(max_length=32)] | None = None
    """Until when the primary is not tried again."""
    next_step_time: Annotated[str, Field(max_length=32)] | None = None
    """Until when the fallback gets no more pods and no better one is tried beside it."""
    generation: Annotated[int, Field(ge=0, le=2**62)] = 0
    """The object's generation when the primary was last refused."""
    degradations: Count = 0
    """How often a fallback took over."""


class Transition(StatusModel):
    """One change of state, in words."""

    time: Annotated[str, Field(max_length=32)]
    """When, in RFC 3339 form."""
    message: Annotated[str, Field(max_length=512)]
    """What changed."""


class DeepSeekDeploymentStatus(StatusModel):
    """What is."""

    observed_generation: Annotated[int, Field(ge=0, le=2**62)] | None = None
    """The generation of the object that this is about."""
    conditions: Annotated[list[Condition], keyed("type", max_items=16)] | None = None
    """Ready, Progressing, Degraded, QuotaExceeded, ScalingActive and ModelCached; Routed where the
    object asks for an HTTPRoute."""
    active_model: Annotated[str, Field(max_length=2048)] | None = None
    """Source of the model that answers; absent while none does."""
    replicas: Count | None = None
    """Pods there are."""
    wanted_replicas: Count | None = None
    """Pods that there are to be: `spec.replicas`, or what an autoscaler has set."""
    ready_replicas: Count | None = None
    """Pods of the current generation that answer."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the pods, for `/scale`."""
    memory: MemoryStatus | None = None
    """Memory of a pod."""
    recovery: RecoveryStatus | None = None
    """The recovery ladder."""
    degrade: DegradeStatus | None = None
    """Degrading and promoting."""
    history: Annotated[list[Transition], Field(max_length=HISTORY_LENGTH)] | None = None
    """The last ten changes, newest first."""
