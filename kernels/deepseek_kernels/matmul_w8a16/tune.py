"""Candidates for `configs/matmul_w8a16.json` and `matmul_w8a16_gemv.json`.

Two warps use the old matrix instruction, which was faster up to 32 tokens; four share the
asynchronous one.
"""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.matmul import cost
from deepseek_kernels.matmul.tune import buckets, gemv_candidates, sizes, skinny_candidates
from deepseek_kernels.matmul_w8a16 import matmul_w8a16, quantize_weight
from deepseek_kernels.tuning import Space


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    return _product(*sizes(limits, most_tokens=2048))


def _product(tokens: int, rows: int, columns: int) -> tuple[Callable[[], object], int]:
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight, scale = quantize_weight(torch.randn(rows, columns, device="cuda"), torch.int8)
    return lambda: matmul_w8a16(x, weight, scale), cost(x, weight).bytes


_CANDIDATES = (
    *skinny_candidates(
        (
            (64, 128, 4, 2, 4),
            (64, 128, 8, 2, 3),
            (32, 128, 8, 2, 4),
            (64, 128, 3, 4, 3),
            (64, 128, 6, 4, 3),
        ),
        block_m=64,
    ),
    *skinny_candidates(
        ((64, 128, 3, 4, 3), (64, 128, 4, 4, 3), (64, 64, 4, 4, 4), (128, 128, 1, 8, 4)),
        block_m=128,
    ),
    {"library": 1},
)

SPACES = (
    Space(
        op="matmul_w8a16",
        buckets=(
            *buckets((16, 32))[:-1],
            *({"m": tokens} for tokens in (64, 128, 192, 512, 1024)),
            {},
        ),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
    Space(
        op="matmul_w8a16_gemv",
        buckets=({},),
        candidates=gemv_candidates,
        workload=lambda limits: _product(1, *sizes(limits, most_tokens=1)[1:]),
    ),
)
