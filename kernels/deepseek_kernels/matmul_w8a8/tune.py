"""Candidates for `configs/matmul_w8a8.json`, `_blocks.json` and `_tiled.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.matmul import cost
from deepseek_kernels.matmul.tune import buckets, sizes, skinny_candidates
from deepseek_kernels.matmul_w8a8 import matmul_w8a8, quantize
from deepseek_kernels.matmul_w8a16 import quantize_weight, quantize_weight_blocks
from deepseek_kernels.tuning import Space


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    tokens, rows, columns = sizes(limits, most_tokens=2048)
    x, x_scale = quantize(torch.randn(tokens, columns, device="cuda"))
    weight, scale = quantize_weight(torch.randn(rows, columns, device="cuda"))
    return lambda: matmul_w8a8(x, x_scale, weight, scale), cost(x, weight).bytes


def _by_blocks(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    tokens, rows, columns = sizes(limits, most_tokens=2048)
    x, x_scale = quantize(torch.randn(tokens, columns, device="cuda"), group_columns=128)
    weight, scale = quantize_weight_blocks(torch.randn(rows, columns, device="cuda"))
    return lambda: matmul_w8a8(x, x_scale, weight, scale), cost(x, weight).bytes


def _tiled(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    """Products that the library does not take: of int8."""
    tokens, rows, columns = sizes(limits, most_tokens=2048)
    x, x_scale = quantize(torch.randn(tokens, columns, device="cuda"), dtype=torch.int8)
    weight, scale = quantize_weight(torch.randn(rows, columns, device="cuda"), torch.int8)
    return lambda: matmul_w8a8(x, x_scale, weight, scale), cost(x, weight).bytes


_CANDIDATES = (
    *skinny_candidates(
        (
            (64, 128, 1, 4, 6),
            (64, 128, 1, 4, 8),
            (64, 128, 2, 4, 4),
            (64, 128, 2, 4, 8),
            (64, 128, 3, 4, 6),
            (64, 128, 4, 4, 6),
            (64, 128, 6, 4, 4),
            (64, 256, 3, 4, 3),
        ),
        block_m=128,
    ),
    *skinny_candidates(((64, 128, 3, 4, 4), (64, 128, 2, 4, 6)), block_m=128, tokens_left=1),
    *skinny_candidates(((64, 128, 2, 4, 6),), block_m=64, tokens_left=1),
    {"library": 1},
)

_BLOCK_CANDIDATES = (
    *skinny_candidates(
        ((64, 128, 3, 4, 4), (64, 128, 4, 4, 6), (64, 128, 2, 4, 6)), block_m=64, tokens_left=0
    ),
    *skinny_candidates(
        (
            (64, 128, 3, 4, 4),
            (64, 128, 2, 4, 6),
            (64, 128, 1, 4, 6),
            (64, 128, 1, 4, 8),
            (128, 128, 1, 4, 6),
            (128, 128, 2, 8, 4),
        ),
        block_m=64,
        tokens_left=1,
    ),
    {"library": 1, **skinny_candidates(((64, 128, 2, 4, 4),), block_m=64, tokens_left=1)[0]},
)

_TILE_NAMES = (
    "block_m",
    "block_n",
    "block_k",
    "group_m",
    "num_warps",
    "num_stages",
    "per_sm",
    "halves",
)

_TILED_CANDIDATES = tuple(
    dict(zip(_TILE_NAMES, tile, strict=True))
    for tile in (
        (128, 256, 128, 16, 8, 3, 1, 0),
        (128, 256, 128, 8, 8, 4, 1, 1),
        (128, 128, 128, 8, 4, 3, 2, 1),
        (128, 128, 128, 16, 4, 3, 2, 1),
        (128, 128, 128, 16, 8, 3, 2, 1),
    )
)

_ONE_ROUND = ({"m": 256, "n": 4096, "k": 4096}, {"m": 256, "n": 4096})
"""Weights of so few rows that two tiles of tokens for each of their tiles all run at once."""

SPACES = (
    Space(
        op="matmul_w8a8",
        buckets=(*buckets((16, 32, 64, 128))[:-1], *_ONE_ROUND, {}),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
    Space(
        op="matmul_w8a8_blocks",
        buckets=buckets((16, 32, 64, 128)),
        candidates=lambda _limits: _BLOCK_CANDIDATES,
        workload=_by_blocks,
    ),
    Space(
        op="matmul_w8a8_tiled",
        buckets=({},),
        candidates=lambda _limits: _TILED_CANDIDATES,
        workload=_tiled,
    ),
)
