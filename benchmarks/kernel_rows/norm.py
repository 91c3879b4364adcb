"""Norms: against the copy ceiling, the separate operations of torch, and torch.compile."""

from collections.abc import Callable

import torch
from kernel_bench import Result, Row, Workload, sets_for
from torch import Tensor
from torch.nn import functional

from deepseek_kernels import norm
from deepseek_kernels.testing import assert_close


def _compiled(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    added = x + residual
    return functional.rms_norm(added, (added.shape[-1],), weight, 1e-6), added


def add_rms_norm(tokens: int, columns: int, *, compile_baseline: bool = False) -> Workload:
    sets = sets_for(tokens * columns * 8)
    inputs = [
        (
            torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16),
            torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(sets)
    ]
    weight = torch.randn(columns, device="cuda", dtype=torch.bfloat16)

    def check() -> None:
        x, residual = inputs[0][0][:999], inputs[0][1][:999].clone()
        again = residual.clone()
        assert_close(
            "out",
            norm.rms_norm(x, weight, residual=residual),
            norm.reference.rms_norm(x, weight, again, 1e-6),
        )
        assert_close("residual", residual, again)

    def separate(x: Tensor, residual: Tensor) -> Callable[[], object]:
        def call() -> object:
            residual.add_(x)
            return functional.rms_norm(residual, (columns,), weight, 1e-6)

        return call

    baselines = {"add, F.rms_norm": [separate(*pair) for pair in inputs]}
    if compile_baseline:
        compiled = torch.compile(_compiled, mode="max-autotune-no-cudagraphs", dynamic=False)
        baselines["torch.compile"] = [
            lambda x=x, residual=residual: compiled(x, residual, weight) for x, residual in inputs
        ]
    return Workload(
        candidate=[
            lambda x=x, residual=residual: norm.rms_norm(x, weight, residual=residual)
            for x, residual in inputs
        ],
        cost=norm.cost(inputs[0][0], residual=True),
        check=check,
        baselines=baselines,
        eager=tokens <= 64,
    )


def _of_copy(result: Result) -> float:
    return result.of_copy()


ROWS = [
    *(
        Row(
            name=f"add+RMSNorm bf16 {tokens}x{columns}",
            build=lambda tokens=tokens, columns=columns: add_rms_norm(
                tokens, columns, compile_baseline=columns == 4096
            ),
            value=_of_copy,
            unit="of copy",
            bar=0.92,
            stretch=0.95,
            baseline="copy_ of 4 GiB",
        )
        for tokens, columns in ((32768, 2048), (16384, 4096), (16384, 8192), (8192, 16384))
    ),
]
