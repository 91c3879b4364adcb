"""One program normalises `ROWS` whole rows, read once and kept in registers.

A long row of 16-bit numbers is kept as it came, in parts: half the registers, so that twice as
many rows load at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._backend import REGISTERS
from deepseek_kernels._configs import pick
from deepseek_kernels._device import encode, overlaps, quantization_scale, take_turn
from deepseek_kernels._quantize import MAXIMUM

SHIFT = tl.constexpr(8)
"""Columns whose mean stands for that of the row before it is known."""

SHORT_ROW = 8192
"""Up to here other rows load while one waits for its two sums in turn."""


@triton.jit
def norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    scale_ptr,
    num_rows,
    stride_x,
    stride_residual,
    stride_out,
    eps,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    ONE_PASS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Offsets are 64 bits wide from the row on: rows times stride passes 2^31.
    o_rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_columns = tl.arange(0, BLOCK_N)
    m_rows = o_rows < num_rows
    m_tile = m_rows[:, None] & (o_columns < N)[None, :]  # [ROWS, BLOCK_N]

    b_weight = tl.load(weight_ptr + o_columns, mask=o_columns < N, other=0.0).to(tl.float32)
    take_turn(OVERLAP)

    p_x = x_ptr + o_rows[:, None] * stride_x + o_columns[None, :]
    b_values = tl.load(p_x, mask=m_tile, other=0.0, cache_modifier=".cg").to(tl.float32)
    if HAS_RESIDUAL:
        p_residual = residual_ptr + o_rows[:, None] * stride_residual + o_columns[None, :]
        b_residual = tl.load(p_residual, mask=m_tile, other=0.0, cache_modifier=".cg")
        b_sum = b_values + b_residual.to(tl.float32)
        b_rounded = b_sum.to(residual_ptr.dtype.element_ty)
        tl.store(p_residual, b_rounded, mask=m_tile)
        b_values = b_rounded.to(tl.float32)

    if ONE_PASS:
        # Two sums that the warps wait for once, of a row shifted by the mean of its first
        # columns. Their spread is part of the row's, so that the square of mean minus shift is
        # at most N / SHIFT times the variance, and as many times fp32's rounding is far below
        # that of a 16-bit result.
        o_first = tl.arange(0, SHIFT)[None, :]
        p_first = x_ptr + o_rows[:, None] * stride_x + o_first
        m_first = m_rows[:, None] & (o_first < N)
        b_first = tl.load(p_first, mask=m_first, other=0.0).to(tl.float32)
        b_shift = tl.sum(b_first, 1) / min(N, SHIFT)
        b_values = tl.where(m_tile, b_values - b_shift[:, None], 0.0)
        b_mean = tl.sum(b_values, 1) / N
        b_square = tl.sum(b_values * b_values, 1) / N
        b_values = b_values - b_mean[:, None]
        b_variance = tl.maximum(b_square - b_mean * b_mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif CENTRED:
        b_mean = tl.sum(b_values, 1) / N
        b_values = tl.where(m_tile, b_values - b_mean[:, None], 0.0)
        b_variance = tl.sum(b_values * b_values, 1) / N
    else:
        b_variance = tl.sum(b_values * b_values, 1) / N
    b_inverse = tl.rsqrt(b_variance + eps)
    b_out = b_values * b_inverse[:, None] * b_weight[None, :]
    if HAS_BIAS:
        b_bias = tl.load(bias_ptr + o_columns, mask=o_columns < N, other=0.0).to(tl.float32)
        b_out += b_bias[None, :]

    p_out = out_ptr + o_rows[:, None] * stride_out + o_columns[None, :]
    if GROUP > 0:
        GROUPS: tl.constexpr = BLOCK_N // GROUP
        b_grouped = tl.reshape(b_out, [ROWS, GROUPS, GROUP])
        b_scale = quantization_scale(b_grouped, 2, MAXIMUM)
        b_codes = encode(tl.reshape(b_grouped * (1.0 / b_scale), [ROWS, BLOCK_N]), INTEGER)
        tl.store(p_out, b_codes, mask=m_tile)
        o_groups = tl.arange(0, GROUPS)
        p_scale = scale_ptr + o_rows[:, None] * tl.cdiv(N, GROUP) + o_groups[None, :]
        m_scale = m_rows[:, None] & (o_groups * GROUP < N)[None, :]
        tl.store(p_scale, tl.reshape(b_scale, [ROWS, GROUPS]), mask=m_scale)
    else:
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_tile)


@triton.jit
def kept_until(b_x, square, NATIVE: tl.constexpr):
    """Return 16-bit values that the compiler cannot have converted before a square is known."""
    if NATIVE:
        # No square is -1, which the compiler does not know.
        b_never = tl.zeros(b_x.shape, tl.int32) + (square == -1.0).to(tl.int32)
        b_x = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r", [b_x, b_never], b_x.dtype, is_pure=True, pack=2
        )
    return b_x


@triton.jit
def long_layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    stride_x,
    stride_out,
    eps,
    N: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_part = tl.arange(0, PART)
    take_turn(OVERLAP)
    p_x = x_ptr + i_row * stride_x
    # Jitted code takes no annotation for a tuple that grows.
    b_parts = ()
    for i in tl.static_range(PARTS):
        o_columns = i * PART + o_part
        b_part = tl.load(p_x + o_columns, mask=o_columns < N, other=0.0, cache_modifier=".cg")
        b_parts += (b_part,)  # type: ignore[assignment]
    # Both sums in one pass, as in `norm_kernel`.
    o_first = tl.arange(0, SHIFT)
    b_first = tl.load(p_x + o_first, mask=o_first < N, other=0.0).to(tl.float32)
    shift = tl.sum(b_first, 0) / min(N, SHIFT)
    b_sum = tl.zeros([PART], tl.float32)
    b_square = tl.zeros([PART], tl.float32)
    for i in tl.static_range(PARTS):
        b_values = tl.where(i * PART + o_part < N, b_parts[i].to(tl.float32) - shift, 0.0)
        b_sum += b_values
        b_square += b_values * b_values
    mean = tl.sum(b_sum, 0) / N
    square = tl.sum(b_square, 0) / N
    variance = tl.maximum(square - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.rsqrt(variance + eps)

    p_out = out_ptr + i_row * stride_out
    for i in tl.static_range(PARTS):
        o_columns = i * PART + o_part
        m_columns = o_columns < N
        b_values = kept_until(b_parts[i], square, NATIVE).to(tl.float32) - shift
        b_weight = tl.load(weight_ptr + o_columns, mask=m_columns, other=0.0).to(tl.float32)
        b_out = (b_values - mean) * inverse * b_weight
        if bias_ptr is not None:
            b_out += tl.load(bias_ptr + o_columns, mask=m_columns, other=0.0).to(tl.float32)
        tl.store(p_out + o_columns, b_out.to(out_ptr.dtype.element_ty), mask=m_columns)


def rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> Tensor:
    """Launch the kernel for `reference.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, residual, eps, out, None, centred=False)
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float
) -> Tensor:
    """Launch the kernel for `reference.layer_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, residual, eps, out, None, centred=True)
    return out


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    group_columns: int,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `reference.rms_norm_quantize`."""
    out, scale = _quantized(x, dtype, group_columns)
    _launch(x, weight, None, residual, eps, out, scale, centred=False)
    return out, scale


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    group_columns: int,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `reference.layer_norm_quantize`."""
    out, scale = _quantized(x, dtype, group_columns)
    _launch(x, weight, bias, residual, eps, out, scale, centred=True)
    return out, scale


def _quantized(x: Tensor, dtype: torch.dtype, group_columns: int) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    groups = columns // group_columns
    return out, torch.empty((rows, groups), dtype=torch.float32, device=x.device)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    out: Tensor,
    scale: Tensor | None,
    *,
    centred: bool,
) -> None:
    num_rows, columns = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(columns)
    overlap = overlaps(num_rows)
    config = pick("norm", centred=centred, tokens=num_rows, columns=columns)
    rows = config["rows"]
    group = 0
    if scale is not None:
        # One group of the whole row is padded with the row; zeros do not change its scale.
        group = columns // scale.shape[1]
        group = block if group == columns else group
    one_pass = centred and residual is None and x.element_size() == 2 and columns > SHORT_ROW
    parts = config.get("parts", 1)
    if one_pass and scale is None and parts > 1:
        long_layer_norm_kernel[(num_rows,)](
            x,
            weight,
            bias,
            out,
            x.stride(0),
            out.stride(0),
            eps,
            N=columns,
            PART=block // parts,
            PARTS=parts,
            NATIVE=not triton.knobs.runtime.interpret,
            OVERLAP=overlap,
            num_warps=config["num_warps"],
            # Four rows at once on a multiprocessor, where its registers suffice.
            maxnreg=max(64, REGISTERS // (4 * 32 * config["num_warps"])),
            launch_pdl=overlap,
        )
        return
    norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        bias,
        out,
        scale,
        num_rows,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        eps,
        N=columns,
        BLOCK_N=block,
        ROWS=rows,
        CENTRED=centred,
        ONE_PASS=one_pass,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        MAXIMUM=MAXIMUM.get(out.dtype, 0.0),
        GROUP=group,
        INTEGER=out.dtype == torch.int8,
        OVERLAP=overlap,
        num_warps=config["num_warps"],
        launch_pdl=overlap,
    )
