"""Candidates for `configs/paged_prefill.json` and `paged_prefill_specialized.json`."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from deepseek_kernels.paged_prefill import cost, paged_prefill
from deepseek_kernels.tuning import Space

_TOKENS, _PAGE_TOKENS, _HEADS, _KV_HEADS = 8192, 16, 32, 8


def _specialized(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    return _workload(limits.get("columns", 128), torch.bfloat16, torch.bfloat16, None)


def _general(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    """What the specialised kernel does not take: windows, 8-bit caches, fp32."""
    columns = limits.get("columns", 256)
    if limits.get("bytes") == 2:
        return _workload(columns, torch.bfloat16, torch.bfloat16, 4096)
    if limits.get("bytes") == 3:
        kind = torch.float8_e4m3fn if "int8" in limits else torch.int8
        return _workload(columns, torch.bfloat16, kind, None)
    return _workload(128, torch.float32, torch.float32, None)


def _workload(
    head_dim: int, query_type: torch.dtype, cache_type: torch.dtype, window: int | None
) -> tuple[Callable[[], object], int]:
    pages = _TOKENS // _PAGE_TOKENS
    shape = (2, pages, _PAGE_TOKENS, _KV_HEADS, head_dim)
    keys, values = torch.randn(shape, device="cuda").to(cache_type)
    scale = torch.rand(2, *shape[1:-1], device="cuda")
    key_scale, value_scale = scale if cache_type == torch.int8 else (None, None)
    query = torch.randn(_TOKENS, _HEADS, head_dim, device="cuda").to(query_type)
    table = torch.randperm(pages, device="cuda").int()[None]
    starts = torch.tensor([0, _TOKENS], device="cuda", dtype=torch.int32)
    pairs = _TOKENS * (_TOKENS + 1) // 2
    moved = cost(query, keys, _TOKENS, pairs).bytes

    def call() -> Tensor:
        return paged_prefill(
            query,
            keys,
            values,
            table,
            starts,
            starts[1:],
            key_scale=key_scale,
            value_scale=value_scale,
            window=window,
        )

    return call, moved


_CANDIDATES = tuple(
    {"tokens": tokens, "stages": stages} for tokens, stages in ((128, 2), (64, 2), (64, 3), (64, 4))
)

_NAMES = ("queries", "tokens", "num_warps", "num_stages")

_GENERAL_CANDIDATES = tuple(
    dict(zip(_NAMES, one, strict=True))
    for one in (
        (128, 128, 8, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (64, 64, 8, 2),
        (64, 64, 4, 3),
        (32, 32, 4, 1),
    )
)

SPACES = (
    Space(
        op="paged_prefill_specialized",
        buckets=({"columns": 64}, {}),
        candidates=lambda _limits: _CANDIDATES,
        workload=_specialized,
    ),
    Space(
        op="paged_prefill",
        buckets=(
            {"bytes": 2, "columns": 128},
            {"bytes": 2},
            {"bytes": 3, "columns": 128, "int8": 0},
            {"bytes": 3, "columns": 128},
            {"bytes": 3},
            {},
        ),
        candidates=lambda _limits: _GENERAL_CANDIDATES,
        workload=_general,
    ),
)
