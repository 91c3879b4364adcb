"""Candidates for `configs/layer_norm_matmul_gelu.json`."""

from collections.abc import Callable, Mapping

import torch

from deepseek_kernels.layer_norm_gelu_matmul import cost, layer_norm_matmul_gelu
from deepseek_kernels.matmul.tune import NARROW_ROWS, skinny_candidates
from deepseek_kernels.tuning import Space


def _workload(limits: Mapping[str, int]) -> tuple[Callable[[], object], int]:
    tokens, columns = limits.get("m", 4096), 4096
    rows = 4096 if "n" in limits else 16384
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight = torch.randn(rows, columns, device="cuda").bfloat16() / 64
    vector = torch.randn(rows, device="cuda")
    return lambda: layer_norm_matmul_gelu(x, weight, vector, vector), cost(x, weight).bytes


_NAMES = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "group_m", "halves")

_CANDIDATES = (
    *skinny_candidates(((64, 128, 1, 4, 6), (64, 64, 1, 4, 8), (64, 128, 3, 4, 3)), block_m=64),
    *skinny_candidates(((64, 64, 1, 4, 8),), block_m=64, tokens_left=1),
    *(
        dict(zip(_NAMES, tile, strict=True))
        for tile in (
            (128, 256, 64, 8, 3, 16, 0),
            (128, 256, 64, 8, 4, 16, 1),
            (128, 128, 64, 8, 4, 8, 0),
            (128, 128, 64, 4, 4, 8, 0),
        )
    ),
)

SPACES = (
    Space(
        op="layer_norm_matmul_gelu",
        buckets=(
            *({"m": count} | rows for count in (32, 64, 1024) for rows in ({"n": NARROW_ROWS}, {})),
            {},
        ),
        candidates=lambda _limits: _CANDIDATES,
        workload=_workload,
    ),
)
