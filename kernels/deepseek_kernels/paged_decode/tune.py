"""Candidates for `configs/paged_decode.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.paged_decode import cost, paged_decode
from deepseek_kernels.tuning import Space

_DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
_SEQUENCES, _LENGTH, _PAGE_TOKENS, _HEADS, _KV_HEADS, _HEAD_DIM = 32, 4096, 16, 28, 4, 128


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    dtype = _DTYPES[limits.get("bytes", 4)]
    pages = _SEQUENCES * _LENGTH // _PAGE_TOKENS
    shape = (2, pages, _PAGE_TOKENS, _KV_HEADS, _HEAD_DIM)
    keys, values = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)
    query = torch.randn(_SEQUENCES, _HEADS, _HEAD_DIM, device="cuda")
    query = query.to(torch.float32 if dtype == torch.float32 else torch.bfloat16)
    table = torch.randperm(pages, device="cuda").int().view(_SEQUENCES, -1)
    lengths = torch.full((_SEQUENCES,), _LENGTH, device="cuda", dtype=torch.int32)
    moved = cost(query, keys, _SEQUENCES * _LENGTH).bytes
    return lambda: paged_decode(query, keys, values, table, lengths), moved


_CANDIDATES = tuple(
    {
        "programs": programs,
        "tokens": tokens,
        "least_tiles": 1,
        "num_warps": warps,
        "num_stages": stages,
        "registers": registers,
    }
    for programs, tokens, warps, stages, registers in (
        (3, 32, 4, 3, 128),
        (4, 32, 4, 3, 128),
        (2, 32, 4, 4, 128),
        (2, 64, 4, 3, 168),
        (3, 64, 4, 3, 168),
        (4, 64, 4, 3, 128),
        (4, 64, 2, 3, 200),
        (6, 32, 2, 3, 168),
        (2, 32, 4, 2, 255),
    )
)

SPACE = Space(
    op="paged_decode",
    buckets=({"bytes": 1}, {"bytes": 2}, {}),
    candidates=lambda _limits: _CANDIDATES,
    workload=_workload,
)
