"""Bytes by kind: predicted before anything is loaded, measured after.

The prediction is the contract's; what the ledger adds is the size of the page pool and the
comparison with what was really allocated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepseek_contract.sizing import (
    CPU_PROCESS_BYTES,
    CUDA_CONTEXT_BYTES,
    KvFormat,
    ModelShape,
    Prediction,
    kv_page_bytes,
    workspace_bytes,
)
from deepseek_worker.errors import ModelTooLarge
from deepseek_worker.models.config import ModelConfig

GIB = 2**30
# A CPU's memory is shared with everything else on the machine.
MAX_DEFAULT_CPU_POOL_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """What LoRA adapters take beside their model."""

    weights: int
    workspace: int
    """Of one product, at most."""


NO_ADAPTERS = AdapterBytes(0, 0)


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What the pool's size follows from."""

    limit_bytes: int
    kv_cache_bytes: int | None
    weight_bytes: int
    kv_cache: Sequence[KvFormat]
    """Of each layer."""
    activation_bytes: int
    page_tokens: int
    max_context_tokens: int
    max_running_requests: int
    max_batch_tokens: int
    is_cpu: bool
    packs_tied_head: bool
    """Whether a tied output matrix is kept a second time, packed."""
    adapters: AdapterBytes = NO_ADAPTERS
    """LoRA adapters, which are weights too."""
    graph_bytes: int = 0
    """What the driver keeps of captured steps, beside what torch allocates."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many pages there will be, and what everything is predicted to take."""

    num_pages: int
    page_bytes: int
    limit_bytes: int
    predicted_bytes: Mapping[str, int]


def shape_of(config: ModelConfig) -> ModelShape:
    """The sizes that the contract counts with."""
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        qkv_bias=config.qkv_bias,
        output_bias=config.o_bias,
        mlp_bias=config.mlp_bias,
    )


def plan_memory(shape: ModelShape, request: MemoryRequest) -> MemoryPlan:
    """Divide the limit between weights, workspace and pages.

    Raises:
        ModelTooLarge: not even one page is left; the message says how much is missing.
    """
    page_bytes = kv_page_bytes(shape, request.kv_cache, request.page_tokens)
    workspace = workspace_bytes(
        shape,
        num_tokens=request.max_batch_tokens,
        num_logit_rows=request.max_running_requests,
        activation_bytes=request.activation_bytes,
    )
    if request.packs_tied_head:
        workspace += shape.vocab_size * shape.hidden_size * request.activation_bytes
    workspace += request.adapters.workspace + request.graph_bytes
    prediction = Prediction(
        limit_bytes=request.limit_bytes,
        weight_bytes=request.weight_bytes + request.adapters.weights,
        workspace_bytes=workspace,
        context_bytes=CPU_PROCESS_BYTES if request.is_cpu else CUDA_CONTEXT_BYTES,
        page_bytes=page_bytes,
    )
    num_wanted = _wanted_pages(request, page_bytes, prediction.num_pages)
    needed = {**prediction.bytes_by_kind, "kv_cache": max(1, num_wanted) * page_bytes}
    if not 0 < num_wanted <= prediction.num_pages:
        kinds = ", ".join(f"{kind} {_mib(size)}" for kind, size in needed.items())
        raise ModelTooLarge(
            f"the model needs {_mib(sum(needed.values()))} ({kinds}), and this worker may use "
            f"{_mib(request.limit_bytes)}; give it more memory, a smaller model or lower "
            "precision, or lower max_running_requests and max_batch_tokens"
        )
    return MemoryPlan(
        num_pages=num_wanted,
        page_bytes=page_bytes,
        limit_bytes=request.limit_bytes,
        predicted_bytes={str(kind): size for kind, size in needed.items()},
    )


def _wanted_pages(request: MemoryRequest, page_bytes: int, num_possible: int) -> int:
    if request.kv_cache_bytes is not None:
        return request.kv_cache_bytes // page_bytes
    pages_per_request = -(-request.max_context_tokens // request.page_tokens)
    num_useful = pages_per_request * request.max_running_requests
    if request.is_cpu:
        num_useful = min(num_useful, MAX_DEFAULT_CPU_POOL_BYTES // page_bytes)
    return min(num_possible, num_useful)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
