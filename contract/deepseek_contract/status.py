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
    "Ready", "Progressing", "Degraded", "QuotaExceeded", "ScalingActive", "ModelCached"
]

ReadyReason = Literal[
    "Available",
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
    "WorkerCrashing",
    "RolloutInProgress",
    "PodsNotReady",
]
ProgressingReason = Literal[
    "RolloutInProgress", "RolloutBlocked", "RolloutComplete", "InvalidSpec", "ApplyRefused"
]
DegradedReason = Literal[
    "PrimaryServing", "FallbackServing", "NoCapacity", "PromotionBlockedByFallback"
]
QuotaExceededReason = Literal["WithinQuota", "CreationRefused"]
ScalingActiveReason = Literal[
    "FixedReplicas", "Scaling", "MetricUnavailable", "ProviderUnavailable"
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
    "ClaimMissing",
    "ClaimPending",
    "SingleNodeVolume",
    "CacheForbidden",
    "ImageUnavailable",
    "ApplyRefused",
]
ConditionReason = (
    ReadyReason
    | ProgressingReason
    | DegradedReason
    | QuotaExceededReason
    | ScalingActiveReason
    | ModelCachedReason
)

REASONS: dict[ConditionType, tuple[str, ...]] = {
    "Ready": get_args(ReadyReason),
    "Progressing": get_args(ProgressingReason),
    "Degraded": get_args(DegradedReason),
    "QuotaExceeded": get_args(QuotaExceededReason),
    "ScalingActive": get_args(ScalingActiveReason),
    "ModelCached": get_args(ModelCachedReason),
}
HISTORY_LENGTH = 10


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


class RecoveryStatus(StatusModel):
    """How far the recovery ladder has been climbed."""

    level: Annotated[int, Field(ge=0, le=3)] = 0
    """0: nothing is wrong; 1: batches are retried; 2: pods change node; 3: a fallback serves."""
    batch_retries: Count = 0
    """Batches retried after running out of memory."""
    node_switches: Count = 0
    """Pods moved to another node."""
    degradations: Count = 0
    """Times that a fallback took over."""
    last_change_time: Annotated[str, Field(max_length=32)] | None = None
    """When the level last changed."""


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
    """Ready, Progressing, Degraded, QuotaExceeded, ScalingActive and ModelCached."""
    active_model: Annotated[str, Field(max_length=2048)] | None = None
    """Source of the model that answers; absent while none does."""
    replicas: Count | None = None
    """Pods there are."""
    ready_replicas: Count | None = None
    """Pods of the current generation that answer."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the pods, for `/scale`."""
    memory: MemoryStatus | None = None
    """Memory of a pod."""
    recovery: RecoveryStatus | None = None
    """The recovery ladder."""
    history: Annotated[list[Transition], Field(max_length=HISTORY_LENGTH)] | None = None
    """The last ten changes, newest first."""
