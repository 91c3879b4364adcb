"""Candidates for `configs/paged_decode.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.paged_decode import cost, paged_decode
from deepseek_kernels.tuning import Space

_DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
_TOKENS, _PAGE_TOKENS, _HEADS, _KV_HEADS, _HEAD_DIM = 2**18, 16, 28, 4, 128


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    dtype = _DTYPES[limits.get("bytes", 4)]
    sequences = 256 if limits == {"bytes": 2} else 16
    pages = _TOKENS // _PAGE_TOKENS
    shape = (2, pages, _PAGE_TOKENS, _KV_HEADS, _HEAD_DIM)
    keys, values = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)
    query = torch.randn(sequences, _HEADS, _HEAD_DIM, device="cuda")
    query = query.to(torch.float32 if dtype == torch.float32 else torch.bfloat16)
    table = torch.randperm(pages, device="cuda").int().view(sequences, -1)
    lengths = torch.full((sequences,), _TOKENS // sequences, device="cuda", dtype=torch.int32)
    moved = cost(query, keys, _TOKENS).bytes
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
        (3, 32, 4, 3, 168),
        (3, 64, 4, 2, 168),
        (4, 32, 4, 3, 128),
        (2, 64, 4, 3, 255),
        (2, 64, 8, 3, 128),
        (4, 64, 4, 3, 128),
        (4, 64, 2, 3, 200),
        (6, 32, 2, 3, 168),
        (2, 32, 4, 2, 255),
    )
)

SPACES = (
    Space(
        op="paged_decode",
        buckets=({"bytes": 1}, {"bytes": 2, "items": 512}, {"bytes": 2}, {}),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
)
