"""One program normalises `ROWS` whole rows, read once and kept in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    NARROW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Offsets are 64 bits wide from the row on: rows times stride passes 2^31.
    o_rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_columns = tl.arange(0, BLOCK_N)
    m_rows = o_rows < num_rows
    m_tile = m_rows[:, None] & (o_columns < N)[None, :]  # [ROWS, BLOCK_N]

    if not NARROW:
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
    if NARROW:
        # Only now are there registers for it.
        tl.debug_barrier()
        b_weight = tl.load(weight_ptr + o_columns, mask=o_columns < N, other=0.0).to(tl.float32)
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
    # Twice the warps with half the registers each: as many rows, and more loads under way.
    # Scales would not fit.
    narrow = one_pass and scale is None and bool(config.get("narrow"))
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
        NARROW=narrow,
        OVERLAP=overlap,
        num_warps=config["num_warps"] * (2 if narrow else 1),
        maxnreg=64 if narrow else None,
        launch_pdl=overlap,
    )
