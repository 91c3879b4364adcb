"""Candidates for `configs/matmul.json` and `matmul_gemv.json`, and what all products share.

The buckets stand for the weights of a 7B model: rows up to 8192 are query, key, value and both
projections back; more are gate and up. Columns up to 4096 are the model's width.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from deepseek_kernels.matmul import cost, matmul
from deepseek_kernels.tuning import Space

NARROW_ROWS = 8192
NARROW_COLUMNS = 4096


def buckets(tokens: Sequence[int]) -> tuple[dict[str, int], ...]:
    """Return the limits of a table for these numbers of tokens, and of all others."""
    shapes: tuple[dict[str, int], ...] = (
        {"n": NARROW_ROWS, "k": NARROW_COLUMNS},
        {"n": NARROW_ROWS},
        {},
    )
    return (*({"m": count} | shape for count in tokens for shape in shapes), {})


def sizes(limits: Mapping[str, int], *, most_tokens: int) -> tuple[int, int, int]:
    """Return the tokens, rows and columns that stand for a bucket."""
    rows = 3584 if "n" in limits else 37888
    columns = 3584 if "k" in limits or "n" not in limits else 18944
    return limits.get("m", most_tokens), rows, columns


def skinny_candidates(
    tiles: Sequence[tuple[int, int, int, int, int]], *, block_m: int, tokens_left: int = 0
) -> tuple[dict[str, int], ...]:
    """Return configurations of `skinny`: `block_n`, `block_k`, `per_sm`, warps and stages."""
    names = ("block_n", "block_k", "per_sm", "num_warps", "num_stages")
    fixed = {"block_m": block_m} | ({"tokens_left": tokens_left} if tokens_left else {})
    return tuple(dict(zip(names, tile, strict=True)) | fixed for tile in tiles)


def gemv_candidates(limits: Mapping[str, int]) -> tuple[dict[str, int], ...]:
    """Return configurations of `gemv`."""
    del limits
    names = ("block_n", "block_k", "num_warps", "num_stages")
    tiles = ((8, 256, 2, 4), (4, 512, 1, 4), (4, 512, 2, 4), (8, 512, 4, 3), (16, 256, 4, 3))
    return tuple(dict(zip(names, tile, strict=True)) for tile in tiles)


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    return _product(*sizes(limits, most_tokens=64))


def _product(tokens: int, rows: int, columns: int) -> tuple[Callable[[], object], int]:
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight = torch.randn(rows, columns, device="cuda").bfloat16()
    return lambda: matmul(x, weight), cost(x, weight).bytes


_CANDIDATES = (
    *skinny_candidates(
        ((64, 64, 3, 4, 6), (64, 64, 4, 4, 6), (64, 128, 2, 4, 4), (64, 128, 3, 4, 3)),
        block_m=32,
    ),
    {"library": 1},
)

SPACES = (
    Space(
        op="matmul",
        buckets=buckets((16, 32)),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
    Space(
        op="matmul_gemv",
        buckets=({},),
        candidates=gemv_candidates,
        workload=lambda limits: _product(1, *sizes(limits, most_tokens=1)[1:]),
    ),
)
