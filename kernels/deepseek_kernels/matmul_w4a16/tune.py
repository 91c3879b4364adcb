"""Candidates for `configs/matmul_w4a16.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.matmul.tune import NARROW_COLUMNS, NARROW_ROWS, buckets
from deepseek_kernels.matmul_w4a16 import cost, matmul_w4a16
from deepseek_kernels.tuning import Space

NARROWEST_ROWS = 4096
"""Up to here, tiles of 64 rows and all tokens of a large step run at once."""


def _sizes(limits: Mapping[str, int]) -> tuple[int, int, int]:
    """Return the tokens, rows and columns of a 7B's matrix that stand for a bucket."""
    tokens = limits.get("m", 1024)
    if "n" not in limits:
        return tokens, 37888, 3584
    if "k" not in limits:
        return tokens, 3584, 18944
    return tokens, 4608 if limits["n"] == NARROW_ROWS else 3584, 3584


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    tokens, rows, columns = _sizes(limits)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    tiles = (rows // 64, columns // 256)
    weight = torch.randint(0, 256, (*tiles, 8192), device="cuda", dtype=torch.uint8)
    scale = torch.rand(tiles[1], rows, 2, device="cuda").bfloat16()

    def call() -> object:
        return matmul_w4a16(x, weight, scale, out_features=rows)

    return call, cost(x, weight, scale, rows).bytes


_NAMES = ("block_n", "block_m", "per_sm", "num_warps", "num_stages", "scaled", "equal")

_CANDIDATES = (
    *(
        dict(zip(_NAMES, tile, strict=True))
        for tile in (
            (64, 16, 4, 4, 3, 0, 0),
            (64, 32, 3, 4, 3, 0, 0),
            (64, 64, 2, 4, 3, 0, 0),
            (64, 64, 2, 4, 3, 1, 0),
            (64, 64, 2, 4, 3, 1, 1),
            (64, 64, 3, 4, 2, 1, 0),
            (128, 32, 2, 8, 3, 1, 0),
            (128, 64, 1, 8, 3, 1, 0),
            (128, 64, 2, 8, 2, 1, 0),
            (128, 128, 1, 8, 3, 1, 0),
            (128, 128, 1, 8, 3, 1, 1),
        )
    ),
    {"library": 1},
)

_MANY_SHAPES: tuple[dict[str, int], ...] = (
    {"n": NARROWEST_ROWS, "k": NARROW_COLUMNS},
    {"n": NARROW_ROWS, "k": NARROW_COLUMNS},
    {"n": NARROW_ROWS},
    {},
)

SPACES = (
    Space(
        op="matmul_w4a16",
        buckets=(
            *buckets((16, 32, 64))[:-1],
            {"m": 96},
            *({"m": tokens} | shape for tokens in (128, 192, 256, 384) for shape in _MANY_SHAPES),
            {},
        ),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
)
