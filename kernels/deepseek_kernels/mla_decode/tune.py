"""Candidates for `configs/mla_decode.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.mla_decode import cost, mla_decode
from deepseek_kernels.mla_decode._device import ROWS
from deepseek_kernels.mla_decode.reference import LATENT, ROPE
from deepseek_kernels.tuning import Space

_SEQUENCES, _LENGTH, _PAGE_TOKENS = 64, 4096, 16


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    dtype = torch.bfloat16 if limits else torch.float32
    heads = min(limits.get("heads", 128), 128) if limits else 16
    pages = _SEQUENCES * _LENGTH // _PAGE_TOKENS
    width = LATENT + ROPE
    cache = torch.randn(pages, _PAGE_TOKENS, width, device="cuda", dtype=dtype)
    if limits and heads > ROWS.value // 2:
        # Of the query's type it would go to the kernel that has nothing to tune.
        cache = cache.to(torch.float8_e4m3fn)
    query = torch.randn(_SEQUENCES, heads, width, device="cuda", dtype=dtype)
    table = torch.randperm(pages, device="cuda").int().view(_SEQUENCES, -1)
    lengths = torch.full((_SEQUENCES,), _LENGTH, device="cuda", dtype=torch.int32)
    moved = cost(query, cache, _SEQUENCES * _LENGTH).bytes
    return lambda: mla_decode(query, cache, table, lengths, scale=192**-0.5), moved


_CANDIDATES = tuple(
    {
        "programs": programs,
        "heads": heads,
        "tokens": tokens,
        "least_tiles": 1,
        "num_warps": warps,
        "num_stages": stages,
    }
    for programs, heads, tokens, warps, stages in (
        (1, 16, 64, 8, 3),
        (2, 16, 64, 8, 2),
        (2, 16, 32, 4, 3),
        (3, 16, 32, 8, 3),
        (1, 64, 64, 8, 2),
        (1, 64, 64, 8, 3),
        (1, 64, 32, 8, 4),
        (1, 16, 16, 4, 1),
    )
)

SPACES = (
    Space(
        op="mla_decode",
        buckets=({"bytes": 2, "heads": 32}, {"bytes": 2}, {}),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
)
