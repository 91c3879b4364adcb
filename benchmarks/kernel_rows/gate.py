"""The gate of an MLP, against the copy ceiling, and with the product before it."""

from collections.abc import Callable

import torch
from kernel_bench import Result, Row, Workload, sets_for
from torch import Tensor
from torch.nn import functional

from deepseek_kernels import gate as op
from deepseek_kernels import gated_matmul
from deepseek_kernels.gated_matmul import cost as product_cost
from deepseek_kernels.gated_matmul import reference as product_reference
from deepseek_kernels.testing import assert_close

CHECKED_ROWS = 99
APART = "cuBLAS, SiLU-mul"


def _random(tokens: int, columns: int) -> list[Tensor]:
    return [
        torch.randn(tokens, 2 * columns, device="cuda", dtype=torch.bfloat16)
        for _ in range(sets_for(tokens * columns * 6))
    ]


def _separate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gate(tokens: int, columns: int) -> Workload:
    inputs = _random(tokens, columns)

    def check() -> None:
        some = inputs[0][:CHECKED_ROWS]
        assert_close("out", op.silu_mul(some), op.reference.silu_mul(some))

    return Workload(
        candidate=[lambda x=x: op.silu_mul(x) for x in inputs],
        cost=op.cost(inputs[0]),
        check=check,
        baselines={"silu, mul": [lambda x=x: _separate(x) for x in inputs]},
    )


def gate_quantize(
    tokens: int, columns: int, dtype: torch.dtype, group_columns: int | None
) -> Workload:
    inputs = _random(tokens, columns)

    def call(gate_up: Tensor) -> tuple[Tensor, Tensor]:
        return op.silu_mul_quantize(gate_up, dtype=dtype, group_columns=group_columns)

    def check() -> None:
        some = inputs[0][:CHECKED_ROWS]
        expected = op.reference.silu_mul_quantize(some, dtype, group_columns or columns)
        for name, out, ref in zip(("codes", "scale"), call(some), expected, strict=True):
            assert_close(name, out, ref)

    return Workload(
        candidate=[lambda x=x: call(x) for x in inputs],
        cost=op.cost(inputs[0], dtype=dtype),
        check=check,
    )


def gated_product(tokens: int, rows: int, columns: int) -> Workload:
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    weights = [
        torch.randn(2 * rows, columns, device="cuda", dtype=torch.bfloat16) / 64
        for _ in range(sets_for(4 * rows * columns))
    ]

    def check() -> None:
        expected = product_reference.gated_matmul(x, weights[0])
        assert_close("out", gated_matmul(x, weights[0]), expected)

    return Workload(
        candidate=[lambda w=w: gated_matmul(x, w) for w in weights],
        cost=product_cost(x, weights[0]),
        check=check,
        baselines={
            APART: [lambda w=w: op.silu_mul(functional.linear(x, w)) for w in weights],
        },
    )


def _of_copy(name: str, build: Callable[[], Workload], bar: float, stretch: float) -> Row:
    return Row(name, build, Result.of_copy, "of copy", bar, stretch, "copy_ of 4 GiB")


ROWS = [
    *(
        _of_copy(
            f"SiLU-mul {tokens}x{columns}",
            lambda tokens=tokens, columns=columns: gate(tokens, columns),
            0.93,
            0.95,
        )
        for tokens, columns in ((32768, 4096), (8192, 14336), (8192, 18944))
    ),
    *(
        _of_copy(
            f"SiLU-mul to {word} 8192x18944",
            lambda dtype=dtype, group=group: gate_quantize(8192, 18944, dtype, group),
            0.85,
            0.92,
        )
        for word, dtype, group in (
            ("fp8 by row", torch.float8_e4m3fn, None),
            ("fp8 by 128", torch.float8_e4m3fn, 128),
            ("int8 by row", torch.int8, None),
        )
    ),
    *(
        Row(
            f"gated product 3584 to 18944 M={tokens}",
            lambda tokens=tokens: gated_product(tokens, 18944, 3584),
            lambda result: result.times_faster(APART),
            "times faster",
            1.0,
            1.07,
            "cuBLAS's product and SiLU-mul after it",
        )
        for tokens in (1024, 2048, 8192)
    ),
]
