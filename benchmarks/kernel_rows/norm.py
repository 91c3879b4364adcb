"""Norms: against the copy ceiling, torch.compile, and a chain of three passes."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from kernel_bench import Result, Row, Workload, sets_for
from torch import Tensor
from torch.nn import functional

from deepseek_kernels import norm
from deepseek_kernels.testing import assert_close

CHECKED_ROWS = 999


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _added_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    added = x + residual
    return functional.rms_norm(added, (added.shape[-1],), weight, 1e-6), added


def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


def add_rms_norm(tokens: int, columns: int, *, compiled: bool = False) -> Workload:
    sets = sets_for(tokens * columns * 8)
    inputs = [(_random(tokens, columns), _random(tokens, columns)) for _ in range(sets)]
    weight = _random(columns)

    def check() -> None:
        x, residual = inputs[0][0][:CHECKED_ROWS], inputs[0][1][:CHECKED_ROWS].clone()
        again = residual.clone()
        out = norm.rms_norm(x, weight, residual=residual)
        assert_close("out", out, norm.reference.rms_norm(x, weight, again, 1e-6))
        assert_close("residual", residual, again)

    def separate(x: Tensor, residual: Tensor) -> Tensor:
        residual.add_(x)
        return functional.rms_norm(residual, (columns,), weight, 1e-6)

    baselines: dict[str, Sequence[Callable[[], object]]] = {
        "add, rms_norm": [lambda pair=pair: separate(*pair) for pair in inputs]
    }
    if compiled:
        fused = _compiled(_added_rms_norm)
        baselines["torch.compile"] = [lambda pair=pair: fused(*pair, weight) for pair in inputs]
    return Workload(
        candidate=[lambda p=p: norm.rms_norm(p[0], weight, residual=p[1]) for p in inputs],
        cost=norm.cost(inputs[0][0], residual=True),
        check=check,
        baselines=baselines,
        eager=True,
    )


def add_rms_norm_quantize(
    tokens: int, columns: int, dtype: torch.dtype, group_columns: int | None
) -> Workload:
    sets = sets_for(tokens * columns * 7)
    inputs = [(_random(tokens, columns), _random(tokens, columns)) for _ in range(sets)]
    weight = _random(columns)

    def call(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return norm.rms_norm_quantize(
            x, weight, residual=residual, dtype=dtype, group_columns=group_columns
        )

    def check() -> None:
        x, residual = inputs[0][0][:CHECKED_ROWS], inputs[0][1][:CHECKED_ROWS].clone()
        again = residual.clone()
        codes, scale = call(x, residual)
        expected = norm.reference.rms_norm_quantize(
            x, weight, again, 1e-6, dtype, group_columns or columns
        )
        assert_close("codes", codes, expected[0])
        assert_close("scale", scale, expected[1])

    return Workload(
        candidate=[lambda pair=pair: call(*pair) for pair in inputs],
        cost=norm.cost(inputs[0][0], residual=True, dtype=dtype),
        check=check,
    )


@triton.jit
def _mean_kernel(x_ptr, mean_ptr, N: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    b_x = tl.load(x_ptr + i_row * N + tl.arange(0, N)).to(tl.float32)
    tl.store(mean_ptr + i_row, tl.sum(b_x, 0) / N)


@triton.jit
def _centre_kernel(x_ptr, mean_ptr, centred_ptr, variance_ptr, N: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_columns = i_row * N + tl.arange(0, N)
    b_x = tl.load(x_ptr + o_columns).to(tl.float32) - tl.load(mean_ptr + i_row)
    tl.store(centred_ptr + o_columns, b_x.to(tl.bfloat16))
    tl.store(variance_ptr + i_row, tl.sum(b_x * b_x, 0) / N)


@triton.jit
def _scale_kernel(centred_ptr, variance_ptr, weight_ptr, bias_ptr, out_ptr, N: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_columns = tl.arange(0, N)
    b_x = tl.load(centred_ptr + i_row * N + o_columns).to(tl.float32)
    b_x *= tl.rsqrt(tl.load(variance_ptr + i_row) + 1e-5)
    b_out = b_x * tl.load(weight_ptr + o_columns).to(tl.float32)
    b_out += tl.load(bias_ptr + o_columns).to(tl.float32)
    tl.store(out_ptr + i_row * N + o_columns, b_out.to(tl.bfloat16))


def _three_passes(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise in three kernels of whole rows: 5 tensors of traffic instead of 2."""
    rows, columns = x.shape
    mean, variance = torch.empty((2, rows), device=x.device).unbind()
    centred, out = torch.empty_like(x), torch.empty_like(x)
    _mean_kernel[(rows,)](x, mean, columns, num_warps=8)
    _centre_kernel[(rows,)](x, mean, centred, variance, columns, num_warps=8)
    _scale_kernel[(rows,)](centred, variance, weight, bias, out, columns, num_warps=8)
    return out


def layer_norm(
    tokens: int, columns: int, *, compiled: bool = False, three_passes: bool = False
) -> Workload:
    sets = sets_for(tokens * columns * 4)
    inputs = [_random(tokens, columns) for _ in range(sets)]
    weight, bias = _random(columns), _random(columns)

    def check() -> None:
        x = inputs[0][:CHECKED_ROWS]
        expected = norm.reference.layer_norm(x, weight, bias, None, 1e-5)
        assert_close("out", norm.layer_norm(x, weight, bias), expected)

    def torch_norm(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (columns,), weight, bias)

    baselines: dict[str, Sequence[Callable[[], object]]] = {
        "layer_norm": [lambda x=x: torch_norm(x) for x in inputs]
    }
    if compiled:
        fused = _compiled(torch_norm)
        baselines["torch.compile"] = [lambda x=x: fused(x) for x in inputs]
    if three_passes:
        baselines["three passes"] = [lambda x=x: _three_passes(x, weight, bias) for x in inputs]
    return Workload(
        candidate=[lambda x=x: norm.layer_norm(x, weight, bias) for x in inputs],
        cost=norm.cost(inputs[0]),
        check=check,
        baselines=baselines,
    )


def _of_copy(name: str, build: Callable[[], Workload], bar: float, stretch: float) -> Row:
    return Row(name, build, Result.of_copy, "of copy", bar, stretch, "copy_ of 4 GiB")


ROWS = [
    *(
        _of_copy(
            f"add+RMSNorm {tokens}x{columns}",
            lambda tokens=tokens, columns=columns: add_rms_norm(tokens, columns),
            0.92,
            0.95,
        )
        for tokens, columns in ((32768, 2048), (16384, 4096), (16384, 8192), (8192, 16384))
    ),
    *(
        _of_copy(
            f"LayerNorm {tokens}x{columns}",
            lambda tokens=tokens, columns=columns: layer_norm(tokens, columns),
            0.92,
            0.95,
        )
        for tokens, columns in ((65536, 2048), (32768, 4096), (16384, 8192), (8192, 16384))
    ),
    Row(
        "add+RMSNorm 16384x4096 beside torch.compile",
        lambda: add_rms_norm(16384, 4096, compiled=True),
        lambda result: result.times_faster("torch.compile"),
        "times faster",
        0.97,
        1.0,
        "torch.compile, max-autotune-no-cudagraphs",
    ),
    Row(
        "LayerNorm 32768x4096 beside torch.compile",
        lambda: layer_norm(32768, 4096, compiled=True),
        lambda result: result.times_faster("torch.compile"),
        "times faster",
        0.97,
        1.0,
        "torch.compile, max-autotune-no-cudagraphs",
    ),
    Row(
        "LayerNorm 32768x4096 beside three passes",
        lambda: layer_norm(32768, 4096, three_passes=True),
        lambda result: result.times_faster("three passes"),
        "times faster",
        2.3,
        2.5,
        "Triton passes: mean; centre and variance; scale and shift (5 tensors of traffic, not 2)",
    ),
    *(
        _of_copy(
            f"add+RMSNorm to {word} 16384x8192",
            lambda dtype=dtype, group=group: add_rms_norm_quantize(16384, 8192, dtype, group),
            0.85,
            0.92,
        )
        for word, dtype, group in (
            ("fp8 by row", torch.float8_e4m3fn, None),
            ("fp8 by 128", torch.float8_e4m3fn, 128),
            ("int8 by row", torch.int8, None),
        )
    ),
]
