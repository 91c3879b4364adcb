"""Candidates for `configs/page_copy.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.page_copy import cost, gather_pages
from deepseek_kernels.tuning import Space

_TOTAL_WORDS = 2**26


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    words = limits.get("words", 2**19)
    pool = torch.randint(0, 2**31 - 1, (_TOTAL_WORDS // words, words), device="cuda").int()
    page_ids = torch.randperm(pool.shape[0], device="cuda").int()
    return lambda: gather_pages(pool, page_ids), cost(pool, pool.shape[0]).bytes


SPACES = (
    Space(
        op="page_copy",
        buckets=({},),
        candidates=lambda _: tuple(
            {"block": block, "num_warps": warps}
            for block, warps in ((1024, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
        ),
        workload=_workload,
    ),
)
