"""Two products of each row, with the weights of its own adapter.

The rows of a block share one turn for each adapter that occurs among them: a prompt's rows one
turn, 16 decoding rows as many as they have adapters. A block without adapters ends at once. The
first product is split over the columns of `x` where there are few blocks; its parts are added, in
their order, when the second one reads them.

Launch configurations are not measured: there is no table for them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels.lora import BLOCK_ROWS, PROGRAMS

LEAST_COLUMNS = 512
"""Of `x`, that a program of the first product reads."""

MAX_SPLITS = 16
MANY_TOKENS = 512
"""From here on blocks have many rows."""


@triton.jit
def _next_adapter(b_adapters, i_adapter, last):
    """Return the lowest adapter of the block above `i_adapter`; above `last` when none is left."""
    return tl.min(tl.where(b_adapters > i_adapter, b_adapters, last + 1), 0)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    adapters_ptr,
    inner_ptr,
    num_tokens,
    num_splits,
    stride_x,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_part = tl.program_id(1)
    i_split = tl.program_id(2)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, BLOCK_R)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m < num_tokens
    m_r = o_r < RANK
    b_adapters = tl.load(adapters_ptr + o_m, mask=m_m, other=-1)
    last = tl.max(b_adapters, 0)
    if last < 0:
        return
    # This program sums the columns [first, end).
    per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), num_splits) * BLOCK_K
    first = i_split * per_split
    end = min(first + per_split, K)
    p_x = x_ptr + o_m.to(tl.int64)[:, None] * stride_x + o_k[None, :]
    p_a = a_ptr + (i_part * RANK + o_r)[:, None] * K + o_k[None, :]

    b_inner = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    i_adapter = _next_adapter(b_adapters, -1, last)
    while i_adapter <= last:
        m_mine = b_adapters == i_adapter
        p_mine = p_a + i_adapter.to(tl.int64) * (PARTS * RANK * K)
        b_acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for i_k in tl.range(first, end, BLOCK_K, num_stages=STAGES):
            m_k = (o_k < K - i_k)[None, :]
            b_x = tl.load(p_x + i_k, mask=m_mine[:, None] & m_k, other=0.0)
            b_a = tl.load(p_mine + i_k, mask=m_r[:, None] & m_k, other=0.0)
            b_acc = tl.dot(b_x, tl.trans(b_a), b_acc, input_precision="ieee")
        # Chosen, not added: what is not finite in one adapter stays in its rows.
        b_inner = tl.where(m_mine[:, None], b_acc, b_inner)
        i_adapter = _next_adapter(b_adapters, i_adapter, last)

    o_row = (i_split.to(tl.int64) * num_tokens + o_m) * PARTS + i_part
    p_inner = inner_ptr + o_row[:, None] * RANK + o_r[None, :]
    tl.store(p_inner, b_inner, mask=m_m[:, None] & m_r[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def expand_kernel(
    out_ptr,
    b_ptr,
    adapters_ptr,
    inner_ptr,
    num_tokens,
    num_splits,
    stride_out,
    N: tl.constexpr,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Part i_part makes the columns [start, start + width).
    i_part = tl.program_id(2)
    start = 0
    width = WIDTH_0
    if i_part == 1:
        start = WIDTH_0
        width = WIDTH_1
    if i_part == 2:
        start = WIDTH_0 + WIDTH_1
        width = WIDTH_2
    if tl.program_id(1) * BLOCK_N >= width:
        return
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_r = tl.arange(0, BLOCK_R)
    m_n = o_n < width
    m_r = o_r < RANK
    b_adapters = tl.load(adapters_ptr + o_m, mask=o_m < num_tokens, other=-1)
    last = tl.max(b_adapters, 0)
    if last < 0:
        return
    m_rows = b_adapters >= 0

    b_inner = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for i_split in range(num_splits):
        o_row = (tl.full([], 0, tl.int64) + i_split) * num_tokens + o_m
        p_inner = inner_ptr + (o_row * PARTS + i_part)[:, None] * RANK + o_r[None, :]
        b_inner += tl.load(p_inner, mask=m_rows[:, None] & m_r[None, :], other=0.0)
    b_left = b_inner.to(out_ptr.dtype.element_ty)

    p_b = b_ptr + (start + o_n)[:, None] * RANK + o_r[None, :]
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    i_adapter = _next_adapter(b_adapters, -1, last)
    while i_adapter <= last:
        p_mine = p_b + i_adapter.to(tl.int64) * (N * RANK)
        b_b = tl.load(p_mine, mask=m_n[:, None] & m_r[None, :], other=0.0)
        b_product = tl.dot(b_left, tl.trans(b_b), input_precision="ieee")
        b_sum = tl.where((b_adapters == i_adapter)[:, None], b_product, b_sum)
        i_adapter = _next_adapter(b_adapters, i_adapter, last)

    p_out = out_ptr + o_m.to(tl.int64)[:, None] * stride_out + (start + o_n)[None, :]
    m_out = m_rows[:, None] & m_n[None, :]
    b_out = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32) + b_sum
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)


def lora_add(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, widths: Sequence[int]
) -> None:
    """Launch the kernels for `reference.lora_add`."""
    tokens, columns = out.shape
    num_adapters, parts, rank, in_features = a.shape
    if tokens == 0 or num_adapters == 0:
        return
    block_m = BLOCK_ROWS[tokens >= MANY_TOKENS]
    block_r = max(16, triton.next_power_of_2(rank))
    num_warps = 4 if block_r <= 64 else 8
    blocks = triton.cdiv(tokens, block_m)
    splits = min(MAX_SPLITS, in_features // LEAST_COLUMNS, PROGRAMS // (blocks * parts))
    splits = max(1, splits)
    inner = torch.empty((splits, tokens, parts, rank), dtype=torch.float32, device=out.device)
    shrink_kernel[(blocks, parts, splits)](
        x,
        a,
        adapters,
        inner,
        tokens,
        splits,
        x.stride(0),
        K=in_features,
        PARTS=parts,
        RANK=rank,
        BLOCK_M=block_m,
        BLOCK_R=block_r,
        BLOCK_K=128 if block_r <= 64 else 64,
        STAGES=3,
        num_warps=num_warps,
    )
    block_n = 128 if block_r <= 64 else 64
    wide = (*widths, 0, 0)
    expand_kernel[(blocks, triton.cdiv(max(widths), block_n), parts)](
        out,
        b,
        adapters,
        inner,
        tokens,
        splits,
        out.stride(0),
        N=columns,
        WIDTH_0=wide[0],
        WIDTH_1=wide[1],
        WIDTH_2=wide[2],
        PARTS=parts,
        RANK=rank,
        BLOCK_M=block_m,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
