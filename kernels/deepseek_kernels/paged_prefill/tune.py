"""Candidates for `configs/paged_prefill_specialized.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.paged_prefill import cost, paged_prefill
from deepseek_kernels.tuning import Space

_TOKENS, _PAGE_TOKENS, _HEADS, _KV_HEADS = 8192, 16, 32, 8


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    head_dim = limits.get("columns", 128)
    pages = _TOKENS // _PAGE_TOKENS
    shape = (2, pages, _PAGE_TOKENS, _KV_HEADS, head_dim)
    keys, values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(_TOKENS, _HEADS, head_dim, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda").int()[None]
    starts = torch.tensor([0, _TOKENS], device="cuda", dtype=torch.int32)
    pairs = _TOKENS * (_TOKENS + 1) // 2
    moved = cost(query, keys, _TOKENS, pairs).bytes
    return lambda: paged_prefill(query, keys, values, table, starts, starts[1:]), moved


_CANDIDATES = tuple(
    {"tokens": tokens, "stages": stages} for tokens, stages in ((128, 2), (64, 2), (64, 3), (64, 4))
)

SPACE = Space(
    op="paged_prefill_specialized",
    buckets=({"columns": 64}, {}),
    candidates=lambda _limits: _CANDIDATES,
    workload=_workload,
)
