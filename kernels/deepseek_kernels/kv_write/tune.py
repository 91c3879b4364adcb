"""Candidates for `configs/kv_write.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.kv_write import cost, rope_kv_write
from deepseek_kernels.tuning import Space

_QUERY_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE_TOKENS = 32, 8, 128, 16


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    tokens = limits.get("tokens", 32768)
    heads = _QUERY_HEADS + 2 * _KV_HEADS
    projected = torch.randn(tokens, heads, _HEAD_DIM, device="cuda").bfloat16()
    query, rest = projected[:, :_QUERY_HEADS], projected[:, _QUERY_HEADS:]
    key, value = rest.chunk(2, dim=1)
    shape = (max(64, tokens // _PAGE_TOKENS), 2, _PAGE_TOKENS, _KV_HEADS, _HEAD_DIM)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    slots = torch.randperm(shape[0] * _PAGE_TOKENS, device="cuda")[:tokens]
    cos_sin = torch.randn(4096, _HEAD_DIM, device="cuda")
    arguments = (query, key, value, positions, cos_sin, cache[:, 0], cache[:, 1], slots)
    moved = cost(query, 2 * _KV_HEADS * _HEAD_DIM, _HEAD_DIM, cache.dtype).bytes
    return lambda: rope_kv_write(*arguments), moved


SPACES = (
    Space(
        op="kv_write",
        buckets=({"tokens": 128}, {"tokens": 1024}, {}),
        candidates=lambda _: tuple(
            {"block_query": block, "num_warps": warps, "apart": apart}
            for block, warps in ((4, 2), (8, 2), (8, 4), (16, 4), (32, 4), (32, 8))
            for apart in (0, 1)
        ),
        workload=_workload,
    ),
)
