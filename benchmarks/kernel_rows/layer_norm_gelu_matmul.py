"""LayerNorm, GeLU and a product: against the product alone, and against the chain of three."""

from collections.abc import Callable

import torch
from kernel_bench import Result, Row, Workload, sets_for
from torch import Tensor
from torch.nn import functional

from deepseek_kernels import (
    fold_layer_norm,
    layer_norm_gelu_matmul,
    layer_norm_matmul_gelu,
)
from deepseek_kernels.layer_norm_gelu_matmul import cost, reference
from deepseek_kernels.testing import assert_close


def _tensor(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def _workload(tokens: int, columns: int, rows: int, *, gelu_last: bool) -> Workload:
    norm_weight, norm_bias, bias = _tensor(columns), _tensor(columns), _tensor(rows)
    sets = []
    for _ in range(sets_for(2 * (rows * columns + tokens * (rows + columns)), most=32)):
        x, weight = _tensor(tokens, columns), _tensor(rows, columns, scale=columns**-0.5)
        sets.append((x, weight, fold_layer_norm(weight, bias, norm_weight, norm_bias)))

    def last(x: Tensor, _weight: Tensor, folded: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return layer_norm_matmul_gelu(x, *folded, approximate="tanh")

    def first(x: Tensor, weight: Tensor, _folded: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return layer_norm_gelu_matmul(x, norm_weight, norm_bias, weight, bias, approximate="tanh")

    def chain(x: Tensor, weight: Tensor, _folded: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        normalised = functional.layer_norm(x, (columns,), norm_weight, norm_bias)
        if gelu_last:
            product = functional.linear(normalised, weight, bias)
            return functional.gelu(product, approximate="tanh")
        return functional.linear(functional.gelu(normalised, approximate="tanh"), weight, bias)

    fused = last if gelu_last else first

    def check() -> None:
        x, weight, folded = sets[0]
        if gelu_last:
            expected = reference.layer_norm_matmul_gelu(x, *folded, 1e-5, "tanh")
        else:
            expected = reference.layer_norm_gelu_matmul(
                x, norm_weight, norm_bias, weight, bias, 1e-5, "tanh"
            )
        assert_close("out", fused(x, weight, folded), expected)

    def calls(function: Callable[..., Tensor]) -> list[Callable[[], object]]:
        return [lambda one=one: function(*one) for one in sets]

    return Workload(
        candidate=calls(fused),
        cost=cost(*sets[0][:2]),
        check=check,
        baselines={
            "cuBLAS product alone": calls(lambda x, weight, _: functional.linear(x, weight)),
            "chain of three": calls(chain),
        },
        eager=tokens <= 64,
    )


def _peak_bytes(call: Callable[[], object], inputs: int) -> int:
    """Return the most memory that a call and its inputs take at one time."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + inputs


def _memory(tokens: int, columns: int, rows: int) -> Row:
    """Compare the memory of input, weight, intermediates and output with the chain's."""
    saved = 0.0

    def build() -> Workload:
        nonlocal saved
        workload = _workload(tokens, columns, rows, gelu_last=True)
        inputs = 2 * columns * (tokens + rows)
        fused = _peak_bytes(workload.candidate[0], inputs)
        chain = _peak_bytes(workload.baselines["chain of three"][0], inputs)
        saved = 1 - fused / chain
        return workload

    return Row(
        name=f"gelu(LN(x) W + b) {columns} to {rows} M={tokens}, memory",
        build=build,
        value=lambda _: saved,
        unit="less peak memory than the chain",
        bar=0.23,
        stretch=0.23,
        baseline="LayerNorm, cuBLAS and GeLU: input, weight, intermediates and output",
    )


def _product_over_fused(result: Result) -> float:
    return result.times_faster("cuBLAS product alone")


def _times_chain(result: Result) -> float:
    return result.times_faster("chain of three")


def _row(tokens: int, columns: int, rows: int, *, gelu_last: bool) -> Row:
    few = tokens <= 64
    bars = (0.92, 0.97) if gelu_last else (0.75, 0.85)
    bar, stretch = (1.3, 1.6) if few else bars
    formula = "gelu(LN(x) W + b)" if gelu_last else "gelu(LN(x)) W + b"
    return Row(
        name=f"{formula} {columns} to {rows} M={tokens}",
        build=lambda: _workload(tokens, columns, rows, gelu_last=gelu_last),
        value=_times_chain if few else _product_over_fused,
        unit="x the chain" if few else "product alone / fused",
        bar=bar,
        stretch=stretch,
        baseline="LayerNorm, cuBLAS and GeLU in a CUDA graph" if few else "cuBLAS, product alone",
    )


ROWS = [
    *(
        _row(tokens, columns, rows, gelu_last=gelu_last)
        for gelu_last in (True, False)
        for tokens, columns, rows in (
            (16, 4096, 4096),
            (64, 4096, 4096),
            (512, 4096, 16384),
            (2048, 4096, 16384),
            (8192, 4096, 4096),
        )
    ),
    _memory(2048, 4096, 16384),
]
