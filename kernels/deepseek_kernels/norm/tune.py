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


def _candidates(limits: Mapping[str, int]) -> list[dict[str, int]]:
    """Give each thread 8 to 64 elements of one row, or of several short ones."""
    columns = limits.get("columns", 32768)
    return [
        {"rows": rows, "num_warps": warps}
        for rows in ((1, 2, 4, 8) if columns <= 1024 else (1,))
        for warps in (1, 2, 4, 8, 16, 32)
        if 8 <= rows * columns // (32 * warps) <= 64
    ]


SPACE = Space(
    op="norm",
    buckets=(*({"columns": n} for n in (256, 1024, 2048, 4096, 8192, 16384)), {}),
    candidates=_candidates,
    workload=_workload,
)
