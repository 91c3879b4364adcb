"""One program gates one block of columns of one row, or, for one scale a row, row after row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._backend import multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels._device import encode, overlaps, quantization_scale, take_turn
from deepseek_kernels._quantize import MAXIMUM

PIPELINE_BYTES = 200 * 1024
"""Shared memory of a multiprocessor that rows in flight may take."""


@triton.jit
def _gated(p_row, o_columns, N: tl.constexpr, OVERLAP: tl.constexpr):
    """Return the gated columns of a row, zero beyond its end."""
    m_columns = o_columns < N
    p_gate = p_row + o_columns
    if OVERLAP:
        b_gate = tl.load(p_gate, mask=m_columns, other=0.0, cache_modifier=".cg")
        b_up = tl.load(p_gate + N, mask=m_columns, other=0.0, cache_modifier=".cg")
    else:
        b_gate = tl.load(p_gate, mask=m_columns, other=0.0, eviction_policy="evict_first")
        b_up = tl.load(p_gate + N, mask=m_columns, other=0.0, eviction_policy="evict_first")
    b_gate = b_gate.to(tl.float32)
    # A square of 1 / sqrt takes two instructions where a division takes six.
    b_root = tl.rsqrt(1.0 + tl.exp(-b_gate))
    return b_gate * (b_root * b_root) * b_up.to(tl.float32)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    stride_gate_up,
    stride_out,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAXIMUM: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_block = tl.program_id(0) % BLOCKS
    o_columns = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_columns = o_columns < N

    take_turn(OVERLAP)
    b_out = _gated(gate_up_ptr + i_row * stride_gate_up, o_columns, N, OVERLAP)
    p_out = out_ptr + i_row * stride_out + o_columns
    if GROUP > 0:
        GROUPS: tl.constexpr = BLOCK_N // GROUP
        b_grouped = tl.reshape(b_out, [GROUPS, GROUP])
        b_scale = quantization_scale(b_grouped, 1, MAXIMUM)
        b_codes = encode(tl.reshape(b_grouped * (1.0 / b_scale), [BLOCK_N]), INTEGER)
        tl.store(p_out, b_codes, mask=m_columns)
        o_groups = i_block * GROUPS + tl.arange(0, GROUPS)
        p_scale = scale_ptr + i_row * tl.cdiv(N, GROUP) + o_groups
        tl.store(p_scale, tl.reshape(b_scale, [GROUPS]), mask=o_groups * GROUP < N)
    else:
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_columns)


@triton.jit(do_not_specialize=["num_rows"])
def silu_mul_row_kernel(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    num_rows,
    stride_gate_up,
    stride_out,
    N: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    MAXIMUM: tl.constexpr,
    INTEGER: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # A row in two blocks wastes less than one padded to a power of two: [0, MAIN), [MAIN, N).
    # The loop lets loads of the next row run beside the work on this one.
    o_main = tl.arange(0, MAIN)
    o_rest = MAIN + tl.arange(0, REST)
    take_turn(OVERLAP)
    for i_row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=STAGES):
        i_wide = tl.full([], 0, tl.int64) + i_row
        p_row = gate_up_ptr + i_wide * stride_gate_up
        p_out = out_ptr + i_wide * stride_out
        b_main = _gated(p_row, o_main, N, OVERLAP)
        b_rest = _gated(p_row, o_rest, N, OVERLAP)
        b_scale = tl.maximum(
            tl.sum(quantization_scale(b_main, 0, MAXIMUM), 0),
            tl.sum(quantization_scale(b_rest, 0, MAXIMUM), 0),
            propagate_nan=tl.PropagateNan.ALL,
        )
        b_inverse = 1.0 / b_scale
        tl.store(p_out + o_main, encode(b_main * b_inverse, INTEGER), mask=o_main < N)
        tl.store(p_out + o_rest, encode(b_rest * b_inverse, INTEGER), mask=o_rest < N)
        tl.store(scale_ptr + i_wide, b_scale)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Launch the kernel for `reference.silu_mul`."""
    tokens, twice = gate_up.shape
    out = torch.empty((tokens, twice // 2), dtype=gate_up.dtype, device=gate_up.device)
    config = pick("gate", columns=twice // 2)
    block = min(config["block"], triton.next_power_of_2(twice // 2))
    _launch(gate_up, out, None, 0, block, config["num_warps"])
    return out


def silu_mul_quantize(
    gate_up: Tensor, dtype: torch.dtype, group_columns: int
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `reference.silu_mul_quantize`."""
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, columns), dtype=dtype, device=gate_up.device)
    groups = columns // group_columns
    scale = torch.empty((tokens, groups), dtype=torch.float32, device=gate_up.device)
    if group_columns == columns:
        _launch_rows(gate_up, out, scale)
    else:
        _launch(gate_up, out, scale, group_columns, max(group_columns, 1024), 4)
    return out, scale


def _launch_rows(gate_up: Tensor, out: Tensor, scale: Tensor) -> None:
    tokens, columns = out.shape
    if tokens == 0:
        return
    main = max(triton.next_power_of_2(columns) // 2, 1)
    rest = triton.next_power_of_2(max(columns - main, 1))
    row_bytes = 2 * (main + rest) * gate_up.element_size()
    resident = min(8, PIPELINE_BYTES // (2 * row_bytes))
    programs = multiprocessors(gate_up.device) * max(1, resident)
    # Rows that all run at once have no next one to load: two share a multiprocessor.
    at_once = tokens <= 2 * multiprocessors(gate_up.device)
    overlap = overlaps(tokens)
    silu_mul_row_kernel[(tokens if at_once else min(tokens, programs),)](
        gate_up,
        out,
        scale,
        tokens,
        gate_up.stride(0),
        out.stride(0),
        N=columns,
        MAIN=main,
        REST=rest,
        MAXIMUM=MAXIMUM[out.dtype],
        INTEGER=out.dtype == torch.int8,
        STAGES=3 if resident and not at_once else 1,
        OVERLAP=overlap,
        num_warps=max(4, min(16, main // 1024)),
        launch_pdl=overlap,
    )


def _launch(
    gate_up: Tensor, out: Tensor, scale: Tensor | None, group: int, block: int, num_warps: int
) -> None:
    tokens, columns = out.shape
    if tokens == 0:
        return
    overlap = overlaps(tokens)
    silu_mul_kernel[(tokens * triton.cdiv(columns, block),)](
        gate_up,
        out,
        scale,
        gate_up.stride(0),
        out.stride(0),
        N=columns,
        BLOCK_N=block,
        MAXIMUM=MAXIMUM.get(out.dtype, 0.0),
        GROUP=group,
        INTEGER=out.dtype == torch.int8,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )
