"""What the worker is told at start: three frozen models, parsed once from the command line.

`main.py` derives the flags from the field names (`max_context_tokens` is
`--max-context-tokens`), so a field here is a flag and its docstring is the flag's help.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deepseek_contract.model import ServedName

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
WeightFormat = Literal["auto", "bf16", "fp8", "int8", "int4"]
ActivationFormat = Literal["auto", "16bit", "8bit"]
Rounding = Literal["nearest", "calibrated"]
KvCacheFormat = Literal["auto", "bf16", "fp8", "int8"]


class Frozen(BaseModel):
    """Unknown options are errors, and nothing changes after the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LoraAdapter(Frozen):
    """A LoRA adapter and the name that requests ask for it by; `NAME=PATH` on the command line."""

    name: ServedName
    path: Path

    @model_validator(mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        name, equals, path = given.partition("=")
        if not (name and equals and path):
            raise ValueError("expected NAME=PATH, with the path of a PEFT adapter")
        return {"name": name, "path": path}


class EngineConfig(Frozen):
    """The model and the memory and batch limits it is served within."""

    model: Path
    """Folder with config.json and safetensors, or a .gguf file, or a folder with one."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes random weights from config.json alone, to measure speed."""
    lora: tuple[LoraAdapter, ...] = ()
    """`NAME=PATH` of a LoRA adapter that requests may ask for as their model: a folder with PEFT's
    adapter_config.json and adapter_model.safetensors, or that file. Once for each adapter."""
    device: Device = "auto"
    """`auto` takes the first GPU if there is one."""
    weights: WeightFormat = "auto"
    """Precision of the weights in memory; `auto` keeps the checkpoint's own. Others are made while
    loading, see `rounding`."""
    rounding: Rounding = "nearest"
    """How weights are rounded while loading: each to the `nearest` code, or `calibrated`, so that
    products keep right for the inputs of a text; that takes longer."""
    activations: ActivationFormat = "auto"
    """What quantized weights are multiplied with: inputs in 16 bits, or quantized to 8 for each
    token. `auto` does what the checkpoint asks for, 8 bits with fp8 and 16 otherwise."""
    kv_cache: KvCacheFormat = "auto"
    """Precision of the KV cache. `auto` is int8 on a GPU, but `dtype` in layers whose keys have
    outliers; with random weights and on a CPU it is `dtype`."""
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
    """Tokens computed in one step; by default 256 on a CPU, and on a GPU as many as are efficient
    for the model, 512 to 8192."""
    max_queued_requests: int = Field(default=1024, ge=0)
    """Requests that may wait beside `max_running_requests`; more are refused with 429."""
    retries_per_batch: int = Field(default=3, ge=0, le=10)
    """How often a batch that memory does not suffice for is halved and tried again, before its
    requests are tried one by one."""
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
    def _adapters_are_told_apart(self) -> Self:
        names = [adapter.name for adapter in self.lora]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"--lora names two adapters '{name}'; give each its own name")
        return self


class ServerConfig(Frozen):
    """The HTTP side of `deepseek-worker serve`."""

    served_model_name: str | None = None
    """Name that clients ask for; the model's file or folder name by default."""
    model_id: str | None = None
    """Name that answers carry in `model`; the served name by default."""
    instead_of: str | None = None
    """Name of a larger model that this one serves instead of. The header x-deepseek-degraded says
    so, and errors about what this model cannot take."""
    host: str = "0.0.0.0"  # noqa: S104 - a pod serves on every interface
    port: int = Field(default=8000, ge=0, le=65535)
    api_processes: int | None = Field(default=None, ge=1, le=64)
    """Processes for HTTP, tokenizing and text beside the engine's; by default one for every 4
    processors, at most 4."""
    connection_max_requests: int = Field(default=64, ge=1)
    """A connection is closed after this many requests, so that clients spread over new pods."""
    connection_max_seconds: float = Field(default=30.0, gt=0)
    """The first answer that begins later than this closes its connection."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long SIGTERM waits for running requests before they are aborted."""
    stall_seconds: float | None = Field(default=None, gt=0)
    """How long the engine may take for one step before /health/live and /health/ready say 503
    and /state says that it is stalled; 10 on a GPU and 60 on a CPU by default."""
    state_token_file: Path | None = None
    """File with the bearer token of GET /state; without it /state is not served."""
    api_key_file: Path | None = None
    """File with one accepted API key a line; without it every client is accepted."""
    metrics_aliases: Literal["none", "vllm"] = "none"
    """Names that GET /metrics shows values under beside its own, for dashboards made for them."""
    log_format: Literal["json", "text"] = "json"


def served_name(engine: EngineConfig, server: ServerConfig) -> str:
    """The name that clients ask for."""
    return server.served_model_name or engine.model.resolve().stem


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
