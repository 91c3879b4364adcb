"""Routing, grouping by expert without waiting for the host, products, and the weighted sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._configs import pick
from deepseek_kernels.matmul.kernel import is_compiled, release_successor, wait_for_predecessor
from deepseek_kernels.moe.reference import LOWEST, num_blocks

_LOWEST = tl.constexpr(LOWEST)


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    stride_logits,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_experts = tl.arange(0, BLOCK)
    m_experts = o_experts < EXPERTS
    p_logits = logits_ptr + i_token * stride_logits + o_experts
    b_logits = tl.load(p_logits, mask=m_experts, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        b_scores = tl.sigmoid(b_logits)
    else:
        b_largest = tl.max(tl.where(b_logits != b_logits, float("-inf"), b_logits), 0)
        b_exp = tl.exp(b_logits - b_largest)
        b_scores = b_exp / tl.sum(b_exp, 0)
    b_choice = b_scores
    if bias_ptr is not None:
        b_choice += tl.load(bias_ptr + o_experts, mask=m_experts, other=0.0)
    b_choice = tl.where(b_choice != b_choice, _LOWEST, tl.maximum(b_choice, _LOWEST))
    b_choice = tl.where(m_experts, b_choice, float("-inf"))

    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        o_groups = tl.arange(0, BLOCK_GROUPS)
        m_member = (o_experts // SIZE)[None, :] == o_groups[:, None]  # [groups, experts]
        b_member = tl.where(m_member, b_choice[None, :], float("-inf"))
        b_quality = tl.max(b_member, 1)
        if bias_ptr is not None:
            i_first = tl.argmax(b_member, 1)
            b_member = tl.where(o_experts[None, :] == i_first[:, None], float("-inf"), b_member)
            b_quality += tl.max(b_member, 1)
        b_quality = tl.where(o_groups < GROUPS, b_quality, float("-inf"))
        b_kept = tl.zeros([BLOCK_GROUPS], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            i_best = tl.argmax(b_quality, 0)
            b_kept = tl.where(o_groups == i_best, 1, b_kept)
            b_quality = tl.where(o_groups == i_best, float("-inf"), b_quality)
        b_eligible = tl.sum(tl.where(m_member, b_kept[:, None], 0), 0)
        b_choice = tl.where(b_eligible > 0, b_choice, float("-inf"))

    o_top = tl.arange(0, BLOCK_K)
    b_weights = tl.zeros([BLOCK_K], tl.float32)
    b_experts = tl.zeros([BLOCK_K], tl.int32)
    for i_top in tl.static_range(TOP_K):
        i_expert = tl.argmax(b_choice, 0)
        b_score = tl.sum(tl.where(o_experts == i_expert, b_scores, 0.0), 0)
        b_weights = tl.where(o_top == i_top, b_score, b_weights)
        b_experts = tl.where(o_top == i_top, i_expert, b_experts)
        b_choice = tl.where(o_experts == i_expert, float("-inf"), b_choice)
    if RENORMALIZE:
        b_weights /= tl.sum(b_weights, 0)
    o_out = i_token * TOP_K + o_top
    tl.store(weights_ptr + o_out, b_weights * scale, mask=o_top < TOP_K)
    tl.store(experts_ptr + o_out, b_experts, mask=o_top < TOP_K)


@triton.jit(do_not_specialize=["num_rows"])
def count_kernel(experts_ptr, counts_ptr, num_rows, BLOCK: tl.constexpr):
    """Count the rows of one expert."""
    i_expert = tl.program_id(0)
    b_counts = tl.zeros([BLOCK], tl.int32)
    for i_row in range(0, num_rows, BLOCK):
        o_rows = i_row + tl.arange(0, BLOCK)
        b_experts = tl.load(experts_ptr + o_rows, mask=o_rows < num_rows, other=-1)
        b_counts += (b_experts == i_expert).to(tl.int32)
    tl.store(counts_ptr + i_expert, tl.sum(b_counts, 0))


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def group_kernel(
    experts_ptr,
    counts_ptr,
    order_ptr,
    block_experts_ptr,
    num_rows,
    num_blocks,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the rows of one expert, in their order, to its blocks; the last one ends the list."""
    i_expert = tl.program_id(0)
    o_experts = tl.arange(0, BLOCK_EXPERTS)
    b_counts = tl.load(counts_ptr + o_experts, mask=o_experts < EXPERTS, other=0)
    b_used = (b_counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    # This expert owns the blocks [first, last).
    first = tl.sum(tl.where(o_experts < i_expert, b_used, 0), 0)
    last = first + tl.sum(tl.where(o_experts == i_expert, b_used, 0), 0)

    end = first * BLOCK_ROWS
    for i_row in range(0, num_rows, BLOCK):
        o_rows = i_row + tl.arange(0, BLOCK)
        b_experts = tl.load(experts_ptr + o_rows, mask=o_rows < num_rows, other=-1)
        b_mine = (b_experts == i_expert).to(tl.int32)
        o_slots = end + tl.cumsum(b_mine, 0) - b_mine
        tl.store(order_ptr + o_slots, o_rows, mask=b_mine == 1)
        end += tl.sum(b_mine, 0)
    o_padding = tl.arange(0, BLOCK_ROWS)
    tl.store(
        order_ptr + end + o_padding,
        tl.full([BLOCK_ROWS], 0, tl.int32) + num_rows,
        mask=end + o_padding < last * BLOCK_ROWS,
    )
    o_blocks = tl.arange(0, 128)
    for i_block in range(first, last, 128):
        p_blocks = block_experts_ptr + i_block + o_blocks
        tl.store(p_blocks, tl.full([128], 0, tl.int32) + i_expert, mask=i_block + o_blocks < last)
    if i_expert == EXPERTS - 1:
        for i_block in range(last, num_blocks, 128):
            m_blocks = i_block + o_blocks < num_blocks
            tl.store(block_experts_ptr + i_block + o_blocks, -1, mask=m_blocks)
            for i_padding in range(BLOCK_ROWS):
                p_padding = order_ptr + (i_block + o_blocks) * BLOCK_ROWS + i_padding
                tl.store(p_padding, num_rows, mask=m_blocks)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def grouped_kernel(
    x_ptr,
    w_ptr,
    order_ptr,
    block_experts_ptr,
    out_ptr,
    num_rows,
    num_blocks,
    N,
    K,
    stride_x,
    stride_expert,
    stride_w,
    ROWS_PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ROWS_LEFT: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # GROUP_M blocks of rows are walked together, so that they share the weight in the cache.
    num_n = tl.cdiv(N, BLOCK_N)
    i_group = tl.program_id(0) // (GROUP_M * num_n)
    group_m = min(num_blocks - i_group * GROUP_M, GROUP_M)
    i_m = i_group * GROUP_M + (tl.program_id(0) % (GROUP_M * num_n)) % group_m
    i_n = (tl.program_id(0) % (GROUP_M * num_n)) // group_m
    wait_for_predecessor(OVERLAP)
    i_expert = tl.load(block_experts_ptr + i_m).to(tl.int64)
    if i_expert < 0:
        return
    o_rows = tl.load(order_ptr + i_m * BLOCK_M + tl.arange(0, BLOCK_M))
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_rows = o_rows < num_rows
    m_n = o_n < N
    o_tokens = (o_rows // ROWS_PER_TOKEN).to(tl.int64)
    p_x = x_ptr + o_tokens[:, None] * stride_x + o_k[None, :]
    p_w = w_ptr + i_expert * stride_expert + o_n.to(tl.int64)[:, None] * stride_w + o_k[None, :]
    if ROWS_LEFT:
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            b_x = tl.load(p_x + i_k, mask=m_rows[:, None], other=0.0)
            b_w = tl.load(p_w + i_k)
        else:
            m_k = (o_k < K - i_k)[None, :]
            b_x = tl.load(p_x + i_k, mask=m_rows[:, None] & m_k, other=0.0)
            b_w = tl.load(p_w + i_k, mask=m_n[:, None] & m_k, other=0.0)
        if ROWS_LEFT:
            b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
        else:
            b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
    release_successor(OVERLAP)
    if not ROWS_LEFT:
        b_acc = tl.trans(b_acc)
    p_out = out_ptr + o_rows.to(tl.int64)[:, None] * N + o_n[None, :]
    tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=m_rows[:, None] & m_n[None, :])


@triton.jit
def combine_kernel(
    rows_ptr,
    weights_ptr,
    out_ptr,
    stride_rows,
    N,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_predecessor(OVERLAP)
    i_token = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    for i_top in tl.static_range(TOP_K):
        p_row = rows_ptr + (i_token * TOP_K + i_top) * stride_rows + o_n
        b_row = tl.load(p_row, mask=m_n, other=0.0).to(tl.float32)
        b_sum += b_row * tl.load(weights_ptr + i_token * TOP_K + i_top)
    release_successor(OVERLAP)
    tl.store(out_ptr + i_token * N + o_n, b_sum.to(out_ptr.dtype.element_ty), mask=m_n)


def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `reference.moe_route`."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            logits,
            bias,
            weights,
            chosen,
            logits.stride(0),
            scale,
            EXPERTS=experts,
            BLOCK=triton.next_power_of_2(experts),
            TOP_K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k),
            SIGMOID=scoring == "sigmoid",
            RENORMALIZE=renormalize,
            GROUPS=groups,
            BLOCK_GROUPS=triton.next_power_of_2(groups),
            TOP_GROUPS=top_groups,
            num_warps=1 if experts <= 256 else 4,
        )
    return weights, chosen


def moe_group(experts: Tensor, num_experts: int, block_rows: int) -> tuple[Tensor, Tensor]:
    """Launch the kernels for `reference.moe_group`."""
    rows = experts.numel()
    blocks = num_blocks(rows, num_experts, block_rows)
    order = torch.empty(blocks * block_rows, dtype=torch.int32, device=experts.device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=experts.device)
    if rows:
        counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
        block = min(4096, max(256, triton.next_power_of_2(rows)))
        count_kernel[(num_experts,)](experts, counts, rows, BLOCK=block, num_warps=4)
        group_kernel[(num_experts,)](
            experts,
            counts,
            order,
            block_experts,
            rows,
            blocks,
            EXPERTS=num_experts,
            BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
            BLOCK_ROWS=block_rows,
            BLOCK=block,
            num_warps=4,
        )
    return order, block_experts


def moe_matmul(
    x: Tensor, weight: Tensor, order: Tensor, block_experts: Tensor, rows: int
) -> Tensor:
    """Launch the kernel for `reference.moe_matmul`."""
    _, out_features, columns = weight.shape
    out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    blocks = block_experts.shape[0]
    block_rows = order.shape[0] // blocks
    config = pick("moe_matmul", m=block_rows, n=out_features, k=columns)
    block_n, block_k = config["block_n"], config["block_k"]
    overlap = is_compiled()
    grouped_kernel[(blocks * triton.cdiv(out_features, block_n),)](
        x,
        weight,
        order,
        block_experts,
        out,
        rows,
        blocks,
        out_features,
        columns,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        ROWS_PER_TOKEN=rows // x.shape[0],
        BLOCK_M=block_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=config["group_m"],
        ROWS_LEFT=block_rows >= 64,
        EVEN=out_features % block_n == 0 and columns % block_k == 0,
        STAGES=config["num_stages"],
        OVERLAP=overlap,
        num_warps=config["num_warps"],
        launch_pdl=overlap,
    )
    return out


def moe_combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Launch the kernel for `reference.moe_combine`."""
    tokens, top_k = weights.shape
    columns = rows.shape[1]
    out = torch.empty((tokens, columns), dtype=rows.dtype, device=rows.device)
    if tokens:
        block = min(2048, triton.next_power_of_2(columns))
        overlap = is_compiled()
        combine_kernel[(tokens, triton.cdiv(columns, block))](
            rows,
            weights,
            out,
            rows.stride(0),
            columns,
            TOP_K=top_k,
            BLOCK_N=block,
            OVERLAP=overlap,
            num_warps=4,
            launch_pdl=overlap,
        )
    return out
