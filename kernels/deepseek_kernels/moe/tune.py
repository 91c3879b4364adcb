"""Candidates for `configs/moe_matmul.json`; `m` is the number of rows of a block."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.moe import cost, moe_group, moe_matmul
from deepseek_kernels.tuning import Space

_EXPERTS, _TOP_K = 128, 8


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    block_rows = limits.get("m", 128)
    tokens = _EXPERTS * block_rows // _TOP_K * (1 if block_rows < 128 else 4)
    x = torch.randn(tokens, 2048, device="cuda").bfloat16()
    weight = torch.randn(_EXPERTS, 1536, 2048, device="cuda").bfloat16()
    chosen = torch.randint(0, _EXPERTS, (tokens, _TOP_K), device="cuda").int()
    order, block_experts = moe_group(chosen, _EXPERTS, block_rows=block_rows)

    def call() -> object:
        return moe_matmul(x, weight, order, block_experts, top_k=_TOP_K)

    work = cost(x, weight, rows=tokens * _TOP_K, touched_experts=_EXPERTS)
    return call, work.bytes


_NAMES = ("block_n", "block_k", "group_m", "num_warps", "num_stages")

_CANDIDATES = tuple(
    dict(zip(_NAMES, tile, strict=True))
    for tile in (
        (64, 128, 1, 4, 3),
        (64, 64, 1, 4, 6),
        (128, 64, 2, 4, 4),
        (128, 64, 8, 4, 3),
        (128, 128, 1, 8, 3),
        (256, 64, 8, 8, 4),
    )
)

SPACES = (
    Space(
        op="moe_matmul",
        buckets=({"m": 32}, {"m": 64}, {}),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
)
