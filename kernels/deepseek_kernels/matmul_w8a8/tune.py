"""Candidates for `configs/matmul_w8a8.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.matmul import cost
from deepseek_kernels.matmul.tune import buckets, sizes, skinny_candidates
from deepseek_kernels.matmul_w8a8 import matmul_w8a8, quantize
from deepseek_kernels.matmul_w8a16 import quantize_weight
from deepseek_kernels.tuning import Space


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    tokens, rows, columns = sizes(limits, most_tokens=2048)
    x, x_scale = quantize(torch.randn(tokens, columns, device="cuda"))
    weight, scale = quantize_weight(torch.randn(rows, columns, device="cuda"))
    return lambda: matmul_w8a8(x, x_scale, weight, scale), cost(x, weight).bytes


_CANDIDATES = (
    *skinny_candidates(
        (
            (64, 128, 1, 4, 6),
            (64, 128, 1, 4, 8),
            (64, 128, 2, 4, 8),
            (64, 128, 3, 4, 6),
            (64, 128, 4, 4, 6),
            (64, 128, 6, 4, 4),
            (64, 256, 3, 4, 3),
        ),
        block_m=128,
    ),
    *skinny_candidates(((64, 128, 3, 4, 4), (64, 128, 2, 4, 6)), block_m=128, tokens_left=1),
    {"library": 1},
)

SPACE = Space(
    op="matmul_w8a8",
    buckets=buckets((16, 32, 64, 128)),
    candidates=lambda _limits: _CANDIDATES,
    workload=_workload,
)
