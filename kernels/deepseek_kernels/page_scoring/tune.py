"""Candidates for `configs/page_scores.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.page_scoring import cost, page_scores
from deepseek_kernels.tuning import Space

_SEQUENCES, _PAGES, _PAGE_TOKENS, _HEADS, _KV_HEADS, _HEAD_DIM = 8, 2048, 16, 32, 8, 128


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    dtype = torch.bfloat16 if limits else torch.float32
    pages = _SEQUENCES * _PAGES
    bounds = torch.randn(pages, _KV_HEADS, 2, _HEAD_DIM, device="cuda", dtype=dtype)
    query = torch.randn(_SEQUENCES, _HEADS, _HEAD_DIM, device="cuda", dtype=dtype)
    table = torch.randperm(pages, device="cuda").int().view(_SEQUENCES, -1)
    lengths = torch.full((_SEQUENCES,), _PAGES * _PAGE_TOKENS, device="cuda", dtype=torch.int32)

    def call() -> object:
        return page_scores(query, bounds, table, lengths, page_tokens=_PAGE_TOKENS)

    return call, cost(query, bounds, pages).bytes


_CANDIDATES = tuple(
    {"pages": pages, "num_warps": warps} for pages in (32, 64, 128) for warps in (4, 8)
)

SPACES = (
    Space(
        op="page_scores",
        buckets=({"bytes": 2}, {}),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
)
