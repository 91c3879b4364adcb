"""Candidates for `configs/gated_matmul.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.gated_matmul import cost, gated_matmul
from deepseek_kernels.tuning import Space


def _workload(_limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    x = torch.randn(8192, 3584, device="cuda").bfloat16()
    weight = torch.randn(37888, 3584, device="cuda").bfloat16() / 64
    return lambda: gated_matmul(x, weight), cost(x, weight).bytes


SPACES = (
    Space(
        op="gated_matmul",
        buckets=({},),
        candidates=lambda _limits: tuple(
            {"block_n": 128, "block_k": 64, "stages": 4, "group_m": group_m}
            for group_m in (4, 8, 16, 32)
        ),
        workload=_workload,
    ),
)
