"""One program takes a block of new tokens of one sequence for one head.

The grid is the most blocks that so many tokens in so many sequences can make; programs find
their sequence by the starts on the device and the rest leave. The longest blocks, those of the
last tokens, start first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._backend import has_wgmma
from deepseek_kernels._configs import pick
from deepseek_kernels.paged_decode.kernel import (
    FP8,
    INT8,
    LOG2_E,
    MODES,
    dot_type,
    dynamic,
    locate,
    normalised,
    strides,
)
from deepseek_kernels.paged_prefill._device import specialized_prefill_kernel

_SPECIALIZED_DIMS = (64, 128)


@triton.jit
def _attend(
    b_query,
    b_max,
    b_sum,
    b_acc,
    p_table,
    p_keys,
    p_values,
    p_key_scale,
    p_value_scale,
    o_last,
    begin,
    end,
    length,
    score_scale,
    stride_key_page,
    stride_key_slot,
    stride_value_page,
    stride_value_slot,
    stride_key_scale_page,
    stride_key_scale_slot,
    stride_value_scale_page,
    stride_value_scale_slot,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    MODE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to the tokens `[begin, end)`; without `MASKED` every row sees them all."""
    o_d = tl.arange(0, BLOCK_D)
    for start in tl.range(begin, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            m_n = o_n < length
            b_page = tl.load(p_table + o_n // PAGE, mask=m_n, other=0).to(tl.int64)
        else:
            b_page = tl.load(p_table + o_n // PAGE).to(tl.int64)
        o_key = b_page * stride_key_page + (o_n % PAGE) * stride_key_slot
        o_value = o_key
        if not SAME_STRIDES:
            o_value = b_page * stride_value_page + (o_n % PAGE) * stride_value_slot
        p_key = p_keys + o_key[:, None] + o_d[None, :]
        p_value = p_values + o_value[:, None] + o_d[None, :]
        if MASKED:
            b_key = tl.load(p_key, mask=m_n[:, None] & (o_d < D)[None, :], other=0)
            b_value = tl.load(p_value, mask=m_n[:, None] & (o_d < D)[None, :], other=0)
        elif D == BLOCK_D:
            b_key = tl.load(p_key)
            b_value = tl.load(p_value)
        else:
            b_key = tl.load(p_key, mask=(o_d < D)[None, :], other=0)
            b_value = tl.load(p_value, mask=(o_d < D)[None, :], other=0)
        if MODE == FP8:
            b_key = b_key.to(tl.float8e4nv, bitcast=True)
            b_value = b_value.to(tl.float8e4nv, bitcast=True)
        b_scores = tl.dot(b_query, tl.trans(b_key.to(DOT)), input_precision="ieee")
        if MODE == INT8:
            o_scale = b_page * stride_key_scale_page + (o_n % PAGE) * stride_key_scale_slot
            b_key_scale = tl.load(p_key_scale + o_scale, mask=o_n < length, other=0.0)
            b_scores *= b_key_scale[None, :]
            o_scale = b_page * stride_value_scale_page + (o_n % PAGE) * stride_value_scale_slot
            b_value_scale = tl.load(p_value_scale + o_scale, mask=o_n < length, other=1.0)
            # Values' scales go into the exponent: weights stay at most 1 in fp16.
            b_scores = b_scores * score_scale + tl.log2(b_value_scale)[None, :]
            unit = 1.0
        else:
            unit = score_scale
        if MASKED:
            m_seen = (o_n[None, :] <= o_last[:, None]) & m_n[None, :]
            if WINDOW > 0:
                m_seen &= o_n[None, :] > o_last[:, None] - WINDOW
            b_scores = tl.where(m_seen, b_scores, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_scores, 1) * unit)
        b_safe = b_new
        if MASKED:
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weights = tl.exp2(b_scores * unit - b_safe[:, None])
        b_old = tl.exp2(b_max - b_safe)
        if MODE == INT8:
            b_sum = b_sum * b_old + tl.sum(b_weights * (1.0 / b_value_scale)[None, :], 1)
        else:
            b_sum = b_sum * b_old + tl.sum(b_weights, 1)
        b_max = b_new
        b_acc *= b_old[:, None]
        b_acc = tl.dot(b_weights.to(DOT), b_value.to(DOT), b_acc, input_precision="ieee")
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def paged_prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    num_tokens,
    num_sequences,
    scale_log2,
    stride_query_token,
    stride_query_head,
    stride_key_page,
    stride_key_slot,
    stride_key_head,
    stride_value_page,
    stride_value_slot,
    stride_value_head,
    stride_key_scale_page,
    stride_key_scale_slot,
    stride_key_scale_head,
    stride_value_scale_page,
    stride_value_scale_slot,
    stride_value_scale_head,
    stride_table,
    stride_starts,
    stride_length,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    MODE: tl.constexpr,
    HAS_KEY_SCALE: tl.constexpr,
    HAS_VALUE_SCALE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_block = tl.num_programs(1) - 1 - tl.program_id(1)
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)

    # The padding after the last sequence counts as one more, with nothing in its pages.
    o_sequence = tl.arange(0, BLOCK_SEQUENCES)
    m_sequence = o_sequence < num_sequences
    p_starts = starts_ptr + o_sequence * stride_starts
    b_begin = tl.load(p_starts, mask=o_sequence <= num_sequences, other=0)
    b_end = tl.load(p_starts + stride_starts, mask=m_sequence, other=num_tokens)
    b_counts = tl.where(o_sequence <= num_sequences, b_end - b_begin, 0)
    b_ends = tl.cumsum(tl.cdiv(b_counts, BLOCK_M), 0)
    if i_block >= tl.max(b_ends, 0):
        return
    i_sequence, first_block = locate(b_ends, i_block)
    begin = tl.load(starts_ptr + i_sequence * stride_starts)
    count = num_tokens - begin
    length = 0
    if i_sequence < num_sequences:
        count = tl.load(starts_ptr + (i_sequence + 1) * stride_starts) - begin
        length = tl.load(lengths_ptr + i_sequence * stride_length)

    o_token = (i_block - first_block) * BLOCK_M + o_m
    m_token = o_token < count
    o_last = length - count + o_token
    o_row = (begin + o_token).to(tl.int64)
    p_query = query_ptr + o_row[:, None] * stride_query_token + i_head * stride_query_head
    m_tile = m_token[:, None] & (o_d < D)[None, :]
    b_query = tl.load(p_query + o_d[None, :], mask=m_tile, other=0.0).to(DOT)

    i_kv = i_head // GROUP
    score_scale = scale_log2
    value_factor = 1.0
    if MODE == FP8:
        if HAS_KEY_SCALE:
            score_scale *= tl.load(key_scale_ptr + i_kv)
        if HAS_VALUE_SCALE:
            value_factor = tl.load(value_scale_ptr + i_kv)
    p_table = table_ptr + i_sequence.to(tl.int64) * stride_table
    p_keys = key_ptr + i_kv.to(tl.int64) * stride_key_head
    p_values = value_ptr + i_kv.to(tl.int64) * stride_value_head
    p_key_scale = key_scale_ptr
    p_value_scale = value_scale_ptr
    if MODE == INT8:
        p_key_scale += i_kv * stride_key_scale_head
        p_value_scale += i_kv * stride_value_scale_head

    # [lowest, full): every row sees it all (none under a window); [full, highest): masks.
    first_row = length - count + (i_block - first_block) * BLOCK_M
    highest = tl.minimum(length, first_row + BLOCK_M)
    lowest = 0
    full = tl.maximum(first_row + 1, 0) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        lowest = tl.maximum(first_row + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        full = lowest
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(0, 2):
        b_max, b_sum, b_acc = _attend(
            b_query,
            b_max,
            b_sum,
            b_acc,
            p_table,
            p_keys,
            p_values,
            p_key_scale,
            p_value_scale,
            o_last,
            full if MASKED else lowest,
            highest if MASKED else full,
            length,
            score_scale,
            stride_key_page,
            stride_key_slot,
            stride_value_page,
            stride_value_slot,
            stride_key_scale_page,
            stride_key_scale_slot,
            stride_value_scale_page,
            stride_value_scale_slot,
            MASKED,
            WINDOW,
            PAGE,
            D,
            MODE,
            SAME_STRIDES,
            DOT,
            BLOCK_N,
            BLOCK_D,
        )
    b_out = normalised(b_acc, b_sum) * value_factor
    p_out = out_ptr + (o_row * HEADS + i_head)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_tile)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    window: int | None,
) -> Tensor:
    """Launch the kernel for `reference.paged_prefill`."""
    tokens, heads, head_dim = query.shape
    sequences = page_table.shape[0]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    if window is None and _fits_specialized(query, key_cache, value_cache):
        _launch_specialized(
            query, key_cache, value_cache, page_table, query_starts, lengths, scale, out
        )
        return out
    mode = MODES.get(key_cache.dtype, 0)
    block_d = triton.next_power_of_2(head_dim)
    # A converted cache takes registers beside the room of its tile.
    config = pick(
        "paged_prefill",
        bytes=query.element_size() * (3 if mode else 2) // 2,
        columns=block_d,
        int8=int(mode == MODES[torch.int8]),
    )
    block_m = config["queries"]
    if mode:
        # A masked load of fp8 has no zero to put in place.
        key_cache, value_cache = key_cache.view(torch.int8), value_cache.view(torch.int8)
    # One block more for each sequence, and for the padding, than the tokens fill.
    blocks = triton.cdiv(tokens, block_m) + sequences
    paged_prefill_kernel[(heads, blocks)](
        query,
        key_cache,
        value_cache,
        key_scale,
        value_scale,
        page_table,
        query_starts,
        lengths,
        out,
        tokens,
        sequences,
        scale * LOG2_E,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *strides("", dynamic(key_scale), *"psh").values(),
        *strides("", dynamic(value_scale), *"psh").values(),
        page_table.stride(0),
        query_starts.stride(0),
        lengths.stride(0),
        WINDOW=window or 0,
        PAGE=key_cache.shape[1],
        HEADS=heads,
        GROUP=heads // key_cache.shape[2],
        D=head_dim,
        MODE=mode,
        HAS_KEY_SCALE=key_scale is not None,
        HAS_VALUE_SCALE=value_scale is not None,
        SAME_STRIDES=key_cache.stride() == value_cache.stride(),
        DOT=dot_type(query, mode),
        BLOCK_SEQUENCES=triton.next_power_of_2(sequences + 1),
        BLOCK_M=block_m,
        BLOCK_N=config["tokens"],
        BLOCK_D=block_d,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return out


def _fits_specialized(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Tell whether Hopper's asynchronous matrix products and 16-byte copies apply."""
    if triton.knobs.runtime.interpret or not has_wgmma(query.device):
        return False
    if query.dtype == torch.float32 or key_cache.dtype != query.dtype:
        return False
    strides = (*query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3])
    pointers = (query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr())
    aligned = not any(n % 16 for n in (*strides, *pointers))
    return aligned and query.shape[2] in _SPECIALIZED_DIMS and _page_step(key_cache) >= 16


def _page_step(cache: Tensor) -> int:
    """Return the largest power of two that divides a page's tokens, at most 64."""
    page_tokens = cache.shape[1]
    return min(page_tokens & -page_tokens, 64)


def _launch_specialized(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    tokens, heads, head_dim = query.shape
    sequences = page_table.shape[0]
    config = pick("paged_prefill_specialized", columns=head_dim)
    specialized_prefill_kernel[(heads, triton.cdiv(tokens, 128) + sequences)](
        query,
        key_cache,
        value_cache,
        page_table,
        query_starts,
        lengths,
        out,
        tokens,
        sequences,
        scale * LOG2_E,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        page_table.stride(0),
        query_starts.stride(0),
        lengths.stride(0),
        PAGE=key_cache.shape[1],
        STEP=min(_page_step(key_cache), config["tokens"]),
        HEADS=heads,
        GROUP=heads // key_cache.shape[2],
        D=head_dim,
        BLOCK_SEQUENCES=triton.next_power_of_2(sequences + 1),
        BLOCK_N=config["tokens"],
        STAGES=config["stages"],
        num_warps=4,
        # Twelve warps share the registers: loading warps give theirs to multiplying ones.
        maxnreg=168,
    )
