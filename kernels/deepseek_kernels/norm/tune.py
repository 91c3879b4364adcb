"""Candidates for `configs/norm.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.norm import cost, rms_norm
from deepseek_kernels.tuning import Space

_TOTAL_ELEMENTS = 2**25


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    columns = limits.get("columns", 32768)
    x = torch.randn(_TOTAL_ELEMENTS // columns, columns, device="cuda").bfloat16()
    residual, weight = x.clone(), x[0].clone()
    return lambda: rms_norm(x, weight, residual=residual), cost(x, residual=True).bytes


SPACE = Space(
    op="norm",
    buckets=(
        {"columns": 256},
        {"columns": 1024},
        *({"columns": n} for n in (2048, 4096)),
        {"columns": 8192},
        {"columns": 16384},
        {},
    ),
    candidates=tuple(
        {"rows": rows, "num_warps": warps}
        for rows, warps in ((8, 4), (4, 4), (2, 4), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32))
    ),
    workload=_workload,
)
