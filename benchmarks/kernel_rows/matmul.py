"""Products with the weights of a 7B model, against cuBLAS in bf16 on as many distinct weights."""

from collections.abc import Callable, Sequence

import torch
from kernel_bench import Result, Row, Workload, sets_for
from kernel_bench import sets as sets_of
from torch import Tensor
from torch.nn import functional

from deepseek_kernels import (
    matmul,
    matmul_w4a16,
    matmul_w8a8,
    matmul_w8a16,
    quantize,
)
from deepseek_kernels.cost import Cost
from deepseek_kernels.matmul import reference as matmul_reference
from deepseek_kernels.matmul_w4a16 import reference as w4a16_reference
from deepseek_kernels.matmul_w8a8 import reference as w8a8_reference
from deepseek_kernels.matmul_w8a16 import reference as w8a16_reference
from deepseek_kernels.testing import assert_close

Product = tuple[Callable[[], Tensor], Callable[[], Tensor], int]
"""A product, its reference, and the bytes of its weight and scales."""

LAYER_7B = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
"""Query, key and value; attention output; gate and up; down. Rows and columns."""

LAYERS_7B = 28

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8


def activations(tokens: int, columns: int) -> Tensor:
    return torch.randn(tokens, columns, device="cuda", dtype=BF16)


def codes(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if dtype == INT8:
        return torch.randint(-127, 128, (rows, columns), device="cuda", dtype=INT8)
    return (torch.randn(rows, columns, device="cuda", dtype=BF16) * 100).to(FP8)


def scales(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda") * 1e-3 + 1e-3


def plain(tokens: int, rows: int, columns: int) -> Product:
    x, weight = activations(tokens, columns), activations(rows, columns)
    return (
        lambda: matmul(x, weight),
        lambda: matmul_reference.matmul(x, weight, None),
        2 * rows * columns,
    )


def w4a16(tokens: int, rows: int, columns: int) -> Product:
    x = activations(tokens, columns)
    tiles = (-(-rows // 64), -(-columns // 256))
    weight = torch.randint(0, 256, (*tiles, 8192), device="cuda", dtype=torch.uint8)
    scale = scales(tiles[1], tiles[0] * 64, 2).bfloat16()
    return (
        lambda: matmul_w4a16(x, weight, scale, out_features=rows),
        lambda: w4a16_reference.matmul_w4a16(x, weight, scale, None, None, rows),
        weight.numel() + 2 * scale.numel(),
    )


def w8a16(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> Product:
    x, weight, scale = activations(tokens, columns), codes(rows, columns, dtype), scales(rows)
    return (
        lambda: matmul_w8a16(x, weight, scale),
        lambda: w8a16_reference.matmul_w8a16(x, weight, scale, None),
        weight.numel() + 4 * rows,
    )


def w8a8(
    tokens: int, rows: int, columns: int, dtype: torch.dtype, group: int | None = None
) -> Product:
    x, x_scale = quantize(activations(tokens, columns), dtype=dtype, group_columns=group)
    weight = codes(rows, columns, dtype)
    scale = scales(rows) if group is None else scales(-(-rows // 128), -(-columns // 128))
    return (
        lambda: matmul_w8a8(x, x_scale, weight, scale),
        lambda: w8a8_reference.matmul_w8a8(x, x_scale, weight, scale, None, BF16),
        weight.numel() + 4 * scale.numel(),
    )


def fp8(tokens: int, rows: int, columns: int) -> Product:
    """Keep the activations in bf16 for one token: reading the weight is all that counts."""
    if tokens == 1:
        return w8a16(tokens, rows, columns, FP8)
    return w8a8(tokens, rows, columns, FP8)


def products(
    make: Callable[[int, int, int], Product],
    tokens: int,
    shapes: Sequence[tuple[int, int]],
    sets: int,
) -> Workload:
    """Call one product for each shape in turn; every set has its own weights."""
    ours = [[make(tokens, *shape) for shape in shapes] for _ in range(sets)]
    theirs = [
        [(activations(tokens, columns), activations(rows, columns)) for rows, columns in shapes]
        for _ in range(sets)
    ]

    def check() -> None:
        for layer in (ours[0], ours[-1]):
            for product, reference, _ in layer:
                assert_close("product", product(), reference())

    def call(layer: Sequence[Product]) -> Callable[[], object]:
        return lambda: [product() for product, _, _ in layer]

    def baseline(layer: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        return lambda: [functional.linear(x, weight) for x, weight in layer]

    outside = sum(2 * tokens * (rows + columns) for rows, columns in shapes)
    return Workload(
        candidate=[call(layer) for layer in ours],
        cost=Cost(
            sum(size for _, _, size in ours[0]) + outside,
            sum(2 * tokens * rows * columns for rows, columns in shapes),
        ),
        check=check,
        baselines={"cuBLAS bf16": [baseline(layer) for layer in theirs]},
    )


def _times_cublas(result: Result) -> float:
    return result.times_faster("cuBLAS bf16")


def row(
    name: str,
    make: Callable[[int, int, int], Product],
    tokens: int,
    bar: float,
    stretch: float,
    *,
    shapes: Sequence[tuple[int, int]] = LAYER_7B,
    sets: int = LAYERS_7B,
    note: str = "",
) -> Row:
    return Row(
        name=f"{name} M={tokens}",
        build=lambda: products(make, tokens, shapes, sets_of(sets)),
        value=_times_cublas,
        unit="x cuBLAS bf16",
        bar=bar,
        stretch=stretch,
        baseline=f"cuBLAS bf16 on {sets} distinct weights{note}",
    )


ON_7B = "on the four 7B matrices"
QUANTIZED = "; activations quantised before"
LIBRARY = QUANTIZED + "; the candidate dispatches to torch's scaled_mm"


def by_blocks(tokens: int, rows: int, columns: int) -> Product:
    return w8a8(tokens, rows, columns, FP8, group=128)


def int8_weight(tokens: int, rows: int, columns: int) -> Product:
    return w8a16(tokens, rows, columns, INT8)


def int8_both(tokens: int, rows: int, columns: int) -> Product:
    return w8a8(tokens, rows, columns, INT8)


ROWS = [
    *(
        row(
            f"W4A16 g128 {size}x{size}",
            w4a16,
            tokens,
            2.0,
            2.6,
            shapes=((size, size),),
            sets=sets_for(size * size // 2),
        )
        for size in (8192, 16384)
        for tokens in (1, 16)
    ),
    *(
        row(f"W4A16 g128 {ON_7B}", w4a16, tokens, bar, stretch)
        for tokens, bar, stretch in (
            (1, 2.2, 2.6),
            (16, 2.2, 2.6),
            (32, 1.8, 2.2),
            (64, 1.2, 1.5),
            (128, 0.75, 0.85),
            (256, 0.65, 0.8),
        )
    ),
    *(
        row(f"FP8 {ON_7B}", fp8, tokens, bar, stretch, note="" if tokens == 1 else QUANTIZED)
        for tokens, bar, stretch in (
            (1, 1.9, 2.1),
            (16, 1.8, 2.0),
            (32, 1.7, 1.9),
            (64, 1.55, 1.75),
        )
    ),
    row(f"bf16 {ON_7B}", plain, 1, 1.08, 1.15),
    *(row(f"W8A16 int8 {ON_7B}", int8_weight, tokens, 1.6, 1.8) for tokens in (1, 16)),
    *(
        row(f"FP8 by blocks {ON_7B}", by_blocks, tokens, 1.6, 1.8, note=QUANTIZED)
        for tokens in (16, 64)
    ),
    *(
        row(f"FP8 per token and channel {ON_7B}", fp8, tokens, 1.5, 1.75, sets=2, note=LIBRARY)
        for tokens in (2048, 8192)
    ),
    *(
        row(f"W8A8 int8 {ON_7B}", int8_both, tokens, 1.5, 1.75, sets=2, note=QUANTIZED)
        for tokens in (2048, 8192)
    ),
    *(
        row(f"FP8 by blocks {ON_7B}", by_blocks, tokens, 1.2, 1.45, sets=2, note=LIBRARY)
        for tokens in (2048, 8192)
    ),
]
