"""Bounds by program for a written token and head, scores for a block of pages, choice for a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._configs import pick
from deepseek_kernels.paged_decode.kernel import FP8, INT8, MODES, dot_type, dynamic, strides


@triton.jit(do_not_specialize=["num_tokens"])
def update_page_bounds_kernel(
    key_ptr,
    bounds_ptr,
    slots_ptr,
    key_scale_ptr,
    num_tokens,
    stride_key_page,
    stride_key_slot,
    stride_key_head,
    stride_bounds_page,
    stride_bounds_head,
    stride_bounds_side,
    stride_scale_page,
    stride_scale_slot,
    stride_scale_head,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    MODE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_token = tl.program_id(0)
    i_head = tl.program_id(1)
    slot = tl.load(slots_ptr + i_token)
    following = tl.load(slots_ptr + i_token + 1, mask=i_token + 1 < num_tokens, other=-1)
    if slot < 0:
        return
    if (following >= 0) & (following // PAGE == slot // PAGE):
        return
    page = slot // PAGE
    count = (slot % PAGE + 1).to(tl.int32)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_n = o_n < count
    p_key = key_ptr + page * stride_key_page + i_head * stride_key_head
    p_key += o_n[:, None] * stride_key_slot + o_d[None, :]
    b_key = tl.load(p_key, mask=m_n[:, None] & (o_d < D)[None, :], other=0)
    if MODE == FP8:
        b_key = b_key.to(tl.float8e4nv, bitcast=True)
    b_key = b_key.to(tl.float32)
    if HAS_SCALE:
        if MODE == INT8:
            p_scale = key_scale_ptr + page * stride_scale_page + i_head * stride_scale_head
            b_key *= tl.load(p_scale + o_n * stride_scale_slot, mask=m_n, other=1.0)[:, None]
        else:
            b_key *= tl.load(key_scale_ptr + i_head)
    # A column with a value that is no number has no bound.
    b_bad = tl.max(((b_key != b_key) & m_n[:, None]).to(tl.int32), 0) > 0
    b_least = tl.min(tl.where(m_n[:, None], b_key, float("inf")), 0)
    b_most = tl.max(tl.where(m_n[:, None], b_key, float("-inf")), 0)
    p_bounds = bounds_ptr + page * stride_bounds_page + i_head * stride_bounds_head + o_d
    kind = bounds_ptr.dtype.element_ty
    b_least = tl.where(b_bad, float("nan"), b_least).to(kind)
    b_most = tl.where(b_bad, float("nan"), b_most).to(kind)
    tl.store(p_bounds, b_least, mask=o_d < D)
    tl.store(p_bounds + stride_bounds_side, b_most, mask=o_d < D)


@triton.jit
def page_scores_kernel(
    query_ptr,
    bounds_ptr,
    table_ptr,
    lengths_ptr,
    scores_ptr,
    stride_query_sequence,
    stride_query_head,
    stride_bounds_page,
    stride_bounds_head,
    stride_bounds_side,
    stride_table,
    stride_length,
    num_pages,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_block = tl.program_id(0)
    i_head = tl.program_id(1)
    i_sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + i_sequence * stride_length)
    count = tl.cdiv(length, PAGE)
    o_p = i_block * BLOCK_P + tl.arange(0, BLOCK_P)
    p_scores = scores_ptr + (i_sequence * tl.num_programs(1) + i_head) * num_pages + o_p
    if i_block * BLOCK_P >= count:
        b_none = tl.full([BLOCK_P], float("-inf"), tl.float32)
        tl.store(p_scores, b_none, mask=o_p < num_pages)
        return
    m_p = o_p < count
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    b_page = tl.load(table_ptr + i_sequence * stride_table + o_p, mask=m_p, other=0).to(tl.int64)
    p_bounds = bounds_ptr + (b_page * stride_bounds_page)[:, None] + o_d[None, :]
    p_bounds += i_head.to(tl.int64) * stride_bounds_head
    m_bounds = m_p[:, None] & (o_d < D)[None, :]
    b_least = tl.load(p_bounds, mask=m_bounds, other=0.0)
    b_most = tl.load(p_bounds + stride_bounds_side, mask=m_bounds, other=0.0)
    p_query = query_ptr + i_sequence * stride_query_sequence
    p_query += (i_head * GROUP + o_m)[:, None] * stride_query_head + o_d[None, :]
    m_query = (o_m < GROUP)[:, None] & (o_d < D)[None, :]
    b_query = tl.load(p_query, mask=m_query, other=0.0).to(tl.float32)
    b_positive = tl.maximum(b_query, 0.0).to(DOT)
    b_negative = tl.minimum(b_query, 0.0).to(DOT)
    b_scores = tl.dot(b_positive, tl.trans(b_most), input_precision="ieee")
    b_scores = tl.dot(b_negative, tl.trans(b_least), b_scores, input_precision="ieee")
    b_scores = tl.where(b_scores != b_scores, float("inf"), b_scores)
    b_scores = tl.where((o_m < GROUP)[:, None], b_scores, float("-inf"))
    b_score = tl.where(m_p, tl.max(b_scores, 0), float("-inf"))
    tl.store(p_scores, b_score, mask=o_p < num_pages)


@triton.jit
def select_pages_kernel(
    scores_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    kept_lengths_ptr,
    stride_table,
    stride_length,
    num_pages,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_KEEP: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_sequence = i_row // KV_HEADS
    length = tl.load(lengths_ptr + i_sequence * stride_length)
    count = tl.cdiv(length, PAGE)
    keep = tl.minimum(count, KEEP)
    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < count
    b_score = tl.load(scores_ptr + i_row * num_pages + o_p, mask=m_p, other=float("-inf"))

    # Order-preserving keys: 0 for no page, the largest for the last page.
    b_bits = b_score.to(tl.uint32, bitcast=True)
    b_key = tl.where(b_bits >> 31 != 0, b_bits ^ 0xFFFFFFFF, b_bits | 0x80000000)
    b_key = tl.where(o_p == count - 1, 0xFFFFFFFF, b_key).to(tl.uint32)
    b_key = tl.where(m_p, b_key, 0).to(tl.uint32)
    # The largest key that at least `keep` keys reach, bit by bit.
    least = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        candidate = least | bit
        reached = tl.sum((b_key >= candidate).to(tl.int32), 0)
        least = tl.where(reached >= keep, candidate, least)
        bit = bit >> 1
    m_above = b_key > least
    m_equal = (b_key == least) & m_p
    room = keep - tl.sum(m_above.to(tl.int32), 0)
    m_kept = m_above | (m_equal & (tl.cumsum(m_equal.to(tl.int32), 0) <= room))
    o_out = tl.cumsum(m_kept.to(tl.int32), 0) - 1

    p_out = out_ptr + i_row * KEEP
    b_page = tl.load(table_ptr + i_sequence * stride_table + o_p, mask=m_kept, other=0)
    tl.store(p_out + o_out, b_page, mask=m_kept)
    o_keep = tl.arange(0, BLOCK_KEEP)
    b_rest = tl.zeros([BLOCK_KEEP], tl.int32)
    tl.store(p_out + o_keep, b_rest, mask=(o_keep >= keep) & (o_keep < KEEP))
    tl.store(kept_lengths_ptr + i_row, length - (count - keep) * PAGE)


def update_page_bounds(
    key_cache: Tensor, bounds: Tensor, slots: Tensor, key_scale: Tensor | None
) -> None:
    """Launch the kernel for `reference.update_page_bounds`."""
    tokens = slots.shape[0]
    _, page_tokens, kv_heads, head_dim = key_cache.shape
    if tokens == 0 or kv_heads == 0:
        return
    mode = MODES.get(key_cache.dtype, 0)
    if mode:
        # A masked load of fp8 has no zero to put in place.
        key_cache = key_cache.view(torch.int8)
    update_page_bounds_kernel[(tokens, kv_heads)](
        key_cache,
        bounds,
        slots,
        key_scale,
        tokens,
        *key_cache.stride()[:3],
        *bounds.stride()[:3],
        *strides("", dynamic(key_scale), *"psh").values(),
        PAGE=page_tokens,
        D=head_dim,
        MODE=mode,
        HAS_SCALE=key_scale is not None,
        BLOCK_N=triton.next_power_of_2(page_tokens),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def page_scores(
    query: Tensor, bounds: Tensor, page_table: Tensor, lengths: Tensor, page_tokens: int
) -> Tensor:
    """Launch the kernel for `reference.page_scores`."""
    sequences, heads, head_dim = query.shape
    kv_heads = bounds.shape[1]
    pages = page_table.shape[1]
    scores = torch.empty((sequences, kv_heads, pages), dtype=torch.float32, device=query.device)
    if scores.numel() == 0:
        return scores
    group = heads // kv_heads
    config = pick("page_scores", bytes=query.element_size())
    page_scores_kernel[(triton.cdiv(pages, config["pages"]), kv_heads, sequences)](
        query,
        bounds,
        page_table,
        lengths,
        scores,
        *query.stride()[:2],
        *bounds.stride()[:3],
        page_table.stride(0),
        lengths.stride(0),
        pages,
        PAGE=page_tokens,
        GROUP=group,
        D=head_dim,
        DOT=dot_type(query, 0),
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_P=config["pages"],
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=config["num_warps"],
    )
    return scores


def select_pages(
    scores: Tensor, page_table: Tensor, lengths: Tensor, pages: int, page_tokens: int
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `reference.select_pages`."""
    sequences, kv_heads, num_pages = scores.shape
    shape = (sequences, kv_heads)
    table = torch.empty((*shape, pages), dtype=torch.int32, device=scores.device)
    kept_lengths = torch.empty(shape, dtype=torch.int32, device=scores.device)
    if kept_lengths.numel() == 0:
        return table, kept_lengths
    block = max(16, triton.next_power_of_2(num_pages))
    select_pages_kernel[(sequences * kv_heads,)](
        scores,
        page_table,
        lengths,
        table,
        kept_lengths,
        page_table.stride(0),
        lengths.stride(0),
        num_pages,
        KV_HEADS=kv_heads,
        PAGE=page_tokens,
        KEEP=pages,
        BLOCK_KEEP=triton.next_power_of_2(pages),
        BLOCK_P=block,
        num_warps=min(32, max(4, block // 512)),
    )
    return table, kept_lengths
