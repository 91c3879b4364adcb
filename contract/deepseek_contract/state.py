"""What a worker says of itself at `GET /state`, and the operator reads.

The worker builds a `WorkerState`; the operator reads it with unknown fields left out, since the
two are of different versions during an upgrade. Reading needs the token of the object's
`-state-token` Secret, as `Authorization: Bearer TOKEN`.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from deepseek_contract.text import Bytes

STATE_VERSION = 1

Phase = Literal["loading", "ready", "draining", "failed"]
# Why a worker failed. The operator turns each into a reason of the condition Ready.
FailureReason = Literal[
    "ModelNotFound",
    "ModelUnusable",
    "ModelTooLarge",
    "OutOfMemory",
    "DeviceUnavailable",
    "DeviceFault",
    "MemoryHeld",
    "InternalError",
]
DEVICE_REASONS: frozenset[FailureReason] = frozenset(
    {"DeviceUnavailable", "DeviceFault", "MemoryHeld"}
)
"""Failures that another device may not have, and a restart on the same one will meet again."""
MemoryKind = Literal["weights", "kv_cache", "workspace", "context"]


class MemoryState(BaseModel):
    """Bytes by kind, predicted before loading and measured after."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    predicted_bytes: Annotated[dict[str, Bytes], Field(max_length=32)]
    """Bytes by `MemoryKind`, from the model's configuration."""
    measured_bytes: Annotated[dict[str, Bytes], Field(max_length=32)]
    """Bytes by `MemoryKind`; empty until the model is loaded."""
    limit_bytes: Bytes
    """What the worker may use."""


class WorkerState(BaseModel):
    """A worker at one moment."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    version: int = STATE_VERSION
    """Version of this document; it grows only when a field changes its meaning."""
    phase: Phase
    """`loading`, `ready`, `draining` (it ends and takes no requests) or `failed` (it will not
    recover by itself)."""
    reason: str | None = None
    """A `FailureReason`, in the phase `failed`."""
    message: str | None = None
    """For people: what is wrong, and what to do."""
    served_name: str
    """The name that requests ask for."""
    model_id: str
    """The model that answers."""
    device: str
    """`cpu` or `cuda`; `unknown` until the model is loaded."""
    started_at: float
    """When the process started, in seconds since 1970."""
    last_step_at: float | None = None
    """When the engine last finished a step, in seconds since 1970."""
    seconds_since_step: Annotated[float, Field(ge=0)] = 0.0
    """For how long the engine has had work and finished no step, by the worker's own clock."""
    is_stalled: bool = False
    """Whether that is longer than a step may take here."""
    requests_running: Annotated[int, Field(ge=0)] = 0
    """Requests that hold pages."""
    requests_waiting: Annotated[int, Field(ge=0)] = 0
    """Requests that wait for pages, for a place among the running ones, or for their turn."""
    pool_pages: Annotated[int, Field(ge=0)] = 0
    """All KV pages."""
    free_pages: Annotated[int, Field(ge=0)] = 0
    """Pages that hold nothing."""
    cached_pages: Annotated[int, Field(ge=0)] = 0
    """Pages that nobody holds and that are kept for a later request."""
    page_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens a page."""
    memory: MemoryState
    """Bytes by kind."""
    used_percent: Annotated[float, Field(ge=0)] = 0.0
    """Bytes in use over the bytes that the worker may use."""
    demand_percent: Annotated[float, Field(ge=0)] = 0.0
    """KV bytes that requests hold or wait for, over the pool; may exceed 100."""
    out_of_memory_retries: Annotated[int, Field(ge=0)] = 0
    """Batches that were tried again because memory ran out, since the start."""
    out_of_memory_failures: Annotated[int, Field(ge=0)] = 0
    """Requests that memory did not suffice for even alone, since the start."""
    is_exhausted: bool = False
    """Whether retrying is used up: the last such requests failed one after another, with none in
    between that could be computed."""
    loading_progress: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the weights that are loaded."""

    @classmethod
    def from_json(cls, body: bytes | str) -> Self:
        """Read the body of `GET /state`.

        Raises:
            pydantic.ValidationError: The body is not what a worker answers.
        """
        return cls.model_validate_json(body)
