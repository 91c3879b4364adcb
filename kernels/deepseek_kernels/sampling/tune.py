"""Candidates for `configs/sampling.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.sampling import cost, sample
from deepseek_kernels.tuning import Space

_VOCABULARY = 151_936
_SPREAD = 2.5
"""Standard deviation of logits, about a model's: top-p 0.95 keeps some thousands."""


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    rows = {8: 1, 64: 64}.get(limits.get("rows", 0), 256)
    logits = (torch.randn(rows, _VOCABULARY, device="cuda") * _SPREAD).bfloat16()
    keep_all = torch.zeros(rows, dtype=torch.int32, device="cuda")
    one = torch.ones(rows, device="cuda")
    positions = torch.arange(rows, device="cuda")
    arguments = (0.8 * one, keep_all, 0.95 * one, 0.0 * one, positions, positions)
    return lambda: sample(logits, *arguments), cost(logits).bytes


_NAMES = ("levels", "pivots", "block", "programs")

_CANDIDATES = tuple(
    dict(zip(_NAMES, one, strict=True))
    for one in (
        (2, 16, 256, 1),
        (2, 32, 128, 1),
        (2, 32, 256, 1),
        (3, 16, 256, 1),
        (2, 32, 512, 4),
        (3, 16, 512, 4),
        (3, 16, 512, 8),
        (3, 16, 1024, 4),
    )
)

SPACES = (
    Space(
        op="sampling",
        buckets=({"rows": 8}, {"rows": 64}, {}),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
)
