"""One program gates one block of columns of one row; a whole row where that has one scale."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._configs import pick
from deepseek_kernels._device import encode, quantization_scale
from deepseek_kernels._quantize import MAXIMUM


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
):
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_block = tl.program_id(0) % BLOCKS
    o_columns = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_columns = o_columns < N

    p_gate = gate_up_ptr + i_row * stride_gate_up + o_columns
    b_gate = tl.load(p_gate, mask=m_columns, other=0.0, eviction_policy="evict_first")
    b_up = tl.load(p_gate + N, mask=m_columns, other=0.0, eviction_policy="evict_first")
    b_gate = b_gate.to(tl.float32)
    b_out = b_gate * tl.sigmoid(b_gate) * b_up.to(tl.float32)

    p_out = out_ptr + i_row * stride_out + o_columns
    if GROUP > 0:
        GROUPS: tl.constexpr = BLOCK_N // GROUP
        b_grouped = tl.reshape(b_out, [GROUPS, GROUP])
        b_scale = quantization_scale(b_grouped, 1, MAXIMUM)
        b_codes = encode(tl.reshape(b_grouped / b_scale, [BLOCK_N]), INTEGER)
        tl.store(p_out, b_codes, mask=m_columns)
        o_groups = i_block * GROUPS + tl.arange(0, GROUPS)
        p_scale = scale_ptr + i_row * tl.cdiv(N, GROUP) + o_groups
        tl.store(p_scale, tl.reshape(b_scale, [GROUPS]), mask=o_groups * GROUP < N)
    else:
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_columns)


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
        # The row's group is padded with the row; zeros do not change its scale.
        block = triton.next_power_of_2(columns)
        _launch(gate_up, out, scale, block, block, max(4, min(16, block // 1024)))
    else:
        _launch(gate_up, out, scale, group_columns, max(group_columns, 1024), 4)
    return out, scale


def _launch(
    gate_up: Tensor, out: Tensor, scale: Tensor | None, group: int, block: int, num_warps: int
) -> None:
    tokens, columns = out.shape
    if tokens == 0:
        return
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
        num_warps=num_warps,
    )
