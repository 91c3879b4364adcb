"""Candidates for `configs/norm.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.norm import cost, layer_norm, rms_norm
from deepseek_kernels.tuning import Space

_TOTAL_ELEMENTS = 2**26


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    columns = limits.get("columns", 32768)
    tokens = limits.get("tokens", 64 * _TOTAL_ELEMENTS) // 8
    x = torch.randn(min(tokens, _TOTAL_ELEMENTS // columns), columns, device="cuda").bfloat16()
    residual, weight = x.clone(), x[0].clone()
    if limits.get("centred", 1):
        return lambda: layer_norm(x, weight, weight), cost(x).bytes
    return lambda: rms_norm(x, weight, residual=residual), cost(x, residual=True).bytes


def _candidates(limits: Mapping[str, int]) -> list[dict[str, int]]:
    """Give each thread 8 to 64 elements of one row, or of several short ones."""
    columns = limits.get("columns", 32768)
    return [
        {"rows": rows, "num_warps": warps, "parts": parts}
        for parts in ((1, 4, 8) if columns == 16384 and limits.get("centred", 1) else (1,))
        for rows in ((1, 2, 4) if columns <= 256 else (1,))
        for warps in (1, 2, 4, 8, 16, 32)
        if 8 <= rows * columns // (32 * warps) <= 64
    ]


def _limits(**limits: int) -> list[dict[str, int]]:
    few = [{"columns": 1024}, {"columns": 4096}, {}]
    many = [{"columns": 2**exponent} for exponent in (8, 10, 11, 12, 13, 14)]
    return [
        *({**limits, "tokens": 256, **one} for one in few),
        *({**limits, **one} for one in (*many, {})),
    ]


SPACES = (
    Space(
        op="norm",
        buckets=(*_limits(centred=0), *_limits()),
        candidates=_candidates,
        workload=_workload,
    ),
)
