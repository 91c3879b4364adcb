"""What the worker is told at start: three frozen models, parsed once from the command line.

`main.py` derives the flags from the field names (`max_context_tokens` is
`--max-context-tokens`), so a field here is a flag and its docstring is the flag's help.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
WeightFormat = Literal["auto", "bf16", "fp8", "int8", "int4"]
KvCacheFormat = Literal["auto", "bf16", "fp8", "int8"]


class Frozen(BaseModel):
    """Unknown options are errors, and nothing changes after the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineConfig(Frozen):
    """The model and the memory and batch limits it is served within."""

    model: Path
    """Folder with config.json and safetensors, or a .gguf file, or a folder with one."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes random weights from config.json alone, to measure speed."""
    device: Device = "auto"
    """`auto` takes the first GPU if there is one."""
    weights: WeightFormat = "auto"
    """Precision of the weights in memory; `auto` keeps the checkpoint's own."""
    kv_cache: KvCacheFormat = "auto"
    """Precision of the KV cache; `auto` follows `dtype`."""
    dtype: DType = "auto"
    """Precision of the activations; `auto` is float32 on a CPU and the model's own on a GPU."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and answer together; the model's own limit by default, and never
    more than the page pool holds."""
    page_tokens: int = Field(default=16, ge=1, le=1024)
    """Tokens that one KV page holds."""
    max_running_requests: int = Field(default=256, ge=1)
    """Requests computed in one step."""
    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens computed in one step; 256 on a CPU and 8192 on a GPU by default."""
    max_queued_requests: int = Field(default=1024, ge=0)
    """Requests that may wait beside `max_running_requests`; more are refused with 429."""
    memory_limit_bytes: int | None = Field(default=None, ge=1)
    """Memory this worker may use; by default a percentage of what the device has."""
    memory_limit_percent: int = Field(default=90, ge=1, le=100)
    """Share of the device's memory when `memory_limit_bytes` is absent."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Size of the page pool; by default what the limit leaves, at most 2 GiB on a CPU."""
    prefix_cache: bool = True
    """Keep the KV of finished prompts for later requests that start alike."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of requests that bring none, mixed with their order of arrival."""

    @model_validator(mode="after")
    def _formats_that_exist(self) -> Self:
        if self.weights not in ("auto", "bf16"):
            raise ValueError(
                f"weights={self.weights!r} is not served yet; use 'auto' or 'bf16', which keep "
                "the checkpoint's precision"
            )
        if self.kv_cache not in ("auto", "bf16"):
            raise ValueError(f"kv_cache={self.kv_cache!r} is not served yet; use 'auto' or 'bf16'")
        return self


class ServerConfig(Frozen):
    """The HTTP side of `deepseek-worker serve`."""

    served_model_name: str | None = None
    """Name that clients ask for; the model's file or folder name by default."""
    model_id: str | None = None
    """Name that answers carry in `model`; the served name by default."""
    host: str = "0.0.0.0"  # noqa: S104 - a pod serves on every interface
    port: int = Field(default=8000, ge=0, le=65535)
    connection_max_requests: int = Field(default=64, ge=1)
    """A connection is closed after this many requests, so that clients spread over new pods."""
    connection_max_seconds: float = Field(default=30.0, gt=0)
    """The first answer that begins later than this closes its connection."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long SIGTERM waits for running requests before they are aborted."""
    stall_seconds: float = Field(default=60.0, gt=0)
    """How long the engine may take for one step before /health/live says 503."""
    state_token_file: Path | None = None
    """File with the bearer token of GET /state; without it /state is not served."""
    api_key_file: Path | None = None
    """File with one accepted API key a line; without it every client is accepted."""
    log_format: Literal["json", "text"] = "json"


class LoadConfig(Frozen):
    """`deepseek-worker load`: one model, downloaded once."""

    source: str
    """`hf://ORGANISATION/NAME[@REVISION]` or `https://...#sha256=HEX`."""
    destination: Path
    """Folder that receives the files; complete only when the download is."""
    hf_endpoint: str | None = None
    """Base address of the Hugging Face hub or of a mirror."""
    token_file: Path | None = None
    """File with the hub's access token."""
