"""Candidates for `configs/gate.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.gate import cost, silu_mul
from deepseek_kernels.tuning import Space

_TOTAL_ELEMENTS = 2**25


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    columns = limits.get("columns", 18944)
    gate_up = torch.randn(_TOTAL_ELEMENTS // columns, 2 * columns, device="cuda").bfloat16()
    return lambda: silu_mul(gate_up), cost(gate_up).bytes


SPACES = (
    Space(
        op="gate",
        buckets=({"columns": 2048}, {"columns": 8192}, {}),
        candidates=lambda _: tuple(
            {"block": block, "num_warps": warps}
            for block, warps in (
                (512, 2),
                (1024, 2),
                (1024, 4),
                (2048, 4),
                (2048, 8),
                (4096, 8),
                (4096, 16),
                (8192, 16),
            )
        ),
        workload=_workload,
    ),
)
