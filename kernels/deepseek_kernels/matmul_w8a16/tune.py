"""Candidates for `configs/matmul_w8a16.json` and `matmul_w8a16_gemv.json`.

Two warps only for the first: four would take the asynchronous matrix unit, whose operands in
registers Triton 3.6 may overwrite too early.
"""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.matmul import cost
from deepseek_kernels.matmul.tune import buckets, gemv_candidates, sizes, skinny_candidates
from deepseek_kernels.matmul_w8a16 import matmul_w8a16, quantize_weight
from deepseek_kernels.tuning import Space


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    return _product(*sizes(limits, most_tokens=256))


def _product(tokens: int, rows: int, columns: int) -> tuple[Callable[[], object], int]:
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight, scale = quantize_weight(torch.randn(rows, columns, device="cuda"), torch.int8)
    return lambda: matmul_w8a16(x, weight, scale), cost(x, weight).bytes


_CANDIDATES = (
    *skinny_candidates(
        (
            (64, 128, 4, 2, 4),
            (64, 128, 4, 2, 6),
            (64, 128, 8, 2, 3),
            (32, 128, 8, 2, 4),
            (64, 128, 3, 2, 6),
            (64, 256, 3, 2, 3),
        ),
        block_m=64,
    ),
    {"library": 1},
)

SPACES = (
    Space(
        op="matmul_w8a16",
        buckets=buckets((16, 64)),
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
