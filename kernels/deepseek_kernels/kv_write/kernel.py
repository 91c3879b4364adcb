"""One program takes some query heads of one token, all its keys and values, or both.

Of few tokens keys and values have a program of their own (`apart`), and so have MLA's latents.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._configs import pick
from deepseek_kernels._device import encode, overlaps, quantization_scale, take_turn

FLOAT = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT8 = tl.constexpr(2)

_MODES = {torch.float8_e4m3fn: 1, torch.int8: 2}


@triton.jit
def _angles(cos_sin_ptr, i_position, num_positions, ROTARY: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Load cosines and sines, `[1, BLOCK_HALF]`; NaN outside the table, 0 outside the row."""
    HALF: tl.constexpr = ROTARY // 2
    o_half = tl.arange(0, BLOCK_HALF)
    m_known = (i_position >= 0) & (i_position < num_positions)
    p_cos = cos_sin_ptr + i_position * ROTARY + o_half
    b_cos = tl.load(p_cos, mask=m_known & (o_half < HALF), other=float("nan"))
    b_sin = tl.load(p_cos + HALF, mask=m_known & (o_half < HALF), other=float("nan"))
    b_cos = tl.where(o_half < HALF, b_cos, 0.0)
    b_sin = tl.where(o_half < HALF, b_sin, 0.0)
    return b_cos[None, :], b_sin[None, :]


@triton.jit
def _pairs(
    p_rows, m_rows, ROTARY: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load the rotary columns of rows at `p_rows`, `[rows, 1]`, as firsts and seconds of pairs."""
    HALF: tl.constexpr = ROTARY // 2
    o_half = tl.arange(0, BLOCK_HALF)[None, :]
    if INTERLEAVED:
        # Pairs are neighbours and ROTARY is a power of two: one load, then split.
        o_pairs = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        m_pairs = m_rows & (o_pairs < ROTARY)
        b_pairs = tl.load(p_rows + o_pairs, mask=m_pairs, other=0.0, cache_modifier=".cg")
        b_first, b_second = tl.split(tl.reshape(b_pairs, [b_pairs.shape[0], BLOCK_HALF, 2]))
    else:
        m_half = m_rows & (o_half < HALF)
        b_first = tl.load(p_rows + o_half, mask=m_half, other=0.0, cache_modifier=".cg")
        b_second = tl.load(p_rows + HALF + o_half, mask=m_half, other=0.0, cache_modifier=".cg")
    return b_first.to(tl.float32), b_second.to(tl.float32)


@triton.jit
def _rotated(b_first, b_second, b_cos, b_sin):
    return b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin


@triton.jit
def _larger(b_one, b_other):
    """Return the larger scale, or NaN if either is."""
    return tl.maximum(b_one, b_other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_values(p_out, m_out, b_values, MODE: tl.constexpr):
    """Store fp32 values, already divided by their scale, in the type of the target."""
    if MODE == FLOAT:
        tl.store(p_out, b_values.to(p_out.dtype.element_ty), mask=m_out)
    else:
        tl.store(p_out, encode(b_values, MODE == INT8), mask=m_out)


@triton.jit
def _store_rotated(
    p_rows,
    m_rows,
    b_first,
    b_second,
    ROTARY: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MODE: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        o_pairs = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        b_pairs = tl.reshape(tl.join(b_first, b_second), [b_first.shape[0], 2 * BLOCK_HALF])
        _store_values(p_rows + o_pairs, m_rows & (o_pairs < ROTARY), b_pairs, MODE)
    else:
        o_half = tl.arange(0, BLOCK_HALF)[None, :]
        m_half = m_rows & (o_half < HALF)
        _store_values(p_rows + o_half, m_half, b_first, MODE)
        _store_values(p_rows + HALF + o_half, m_half, b_second, MODE)


@triton.jit
def _static_scales(scale_ptr, o_heads, HEADS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Return the fp8 scales of heads, `[heads, 1]`."""
    if HAS_SCALE:
        return tl.load(scale_ptr + o_heads, mask=o_heads < HEADS, other=1.0)[:, None]
    return tl.full([o_heads.shape[0], 1], 1.0, tl.float32)


@triton.jit
def rope_kv_write_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    positions_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    key_scale_ptr,
    value_scale_ptr,
    num_positions,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_key_cache_page,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_page,
    stride_value_cache_slot,
    stride_value_cache_head,
    stride_key_scale_page,
    stride_key_scale_slot,
    stride_key_scale_head,
    stride_value_scale_page,
    stride_value_scale_slot,
    stride_value_scale_head,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_QUERY: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MODE: tl.constexpr,
    HAS_KEY_SCALE: tl.constexpr,
    HAS_VALUE_SCALE: tl.constexpr,
    APART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    # The compiler shall know where a token has one program.
    i_block = 0 if BLOCK_QUERY >= QUERY_HEADS and not APART else tl.program_id(1)
    # Apart, keys and values are taken by a program that has no query heads left.
    KV_BLOCK: tl.constexpr = (QUERY_HEADS + BLOCK_QUERY - 1) // BLOCK_QUERY if APART else 0
    # Positions and slots are older than the kernel before.
    i_position = tl.load(positions_ptr + i_token)
    i_slot = tl.load(slots_ptr + i_token)
    take_turn(OVERLAP)

    # Everything that does not need position or slot is loaded before what waits for them.
    o_queries = i_block * BLOCK_QUERY + tl.arange(0, BLOCK_QUERY)
    m_queries = (o_queries < QUERY_HEADS)[:, None]
    p_query = (query_ptr + i_token * stride_query_token) + (o_queries * stride_query_head)[:, None]
    b_query, b_query_second = _pairs(p_query, m_queries, ROTARY, BLOCK_HALF, INTERLEAVED)

    o_heads = tl.arange(0, BLOCK_KV)
    m_heads = (o_heads < KV_HEADS)[:, None] & (i_block == KV_BLOCK)
    o_rest = ROTARY + tl.arange(0, BLOCK_REST)[None, :]
    m_rest = m_heads & (o_rest < HEAD_DIM)
    o_dim = tl.arange(0, BLOCK_DIM)[None, :]
    m_dim = m_heads & (o_dim < HEAD_DIM)
    p_key = (key_ptr + i_token * stride_key_token) + (o_heads * stride_key_head)[:, None]
    p_value = (value_ptr + i_token * stride_value_token) + (o_heads * stride_value_head)[:, None]
    b_first, b_second = _pairs(p_key, m_heads, ROTARY, BLOCK_HALF, INTERLEAVED)
    b_rest = tl.zeros([BLOCK_KV, BLOCK_REST], tl.float32)
    if HEAD_DIM > ROTARY:
        b_rest = tl.load(p_key + o_rest, mask=m_rest, other=0.0, cache_modifier=".cg")
        b_rest = b_rest.to(tl.float32)
    b_value = tl.load(p_value + o_dim, mask=m_dim, other=0.0, cache_modifier=".cg")
    b_value = b_value.to(tl.float32)

    b_cos, b_sin = _angles(cos_sin_ptr, i_position, num_positions, ROTARY, BLOCK_HALF)
    b_query, b_query_second = _rotated(b_query, b_query_second, b_cos, b_sin)
    _store_rotated(
        p_query, m_queries, b_query, b_query_second, ROTARY, BLOCK_HALF, INTERLEAVED, FLOAT
    )
    if (i_block == KV_BLOCK) & (i_slot >= 0):
        b_first, b_second = _rotated(b_first, b_second, b_cos, b_sin)
        # 64 bits: a page of all layers is large, and so is its number times its stride.
        i_page = i_slot // PAGE_TOKENS
        i_offset = i_slot % PAGE_TOKENS
        p_key_cache = (
            key_cache_ptr + i_page * stride_key_cache_page + i_offset * stride_key_cache_slot
        ) + (o_heads * stride_key_cache_head)[:, None]
        p_value_cache = (
            value_cache_ptr + i_page * stride_value_cache_page + i_offset * stride_value_cache_slot
        ) + (o_heads * stride_value_cache_head)[:, None]

        if MODE == INT8:
            b_key_scale = _larger(
                quantization_scale(b_first, 1, 127.0), quantization_scale(b_second, 1, 127.0)
            )
            b_key_scale = _larger(b_key_scale, quantization_scale(b_rest, 1, 127.0))
            b_value_scale = quantization_scale(b_value, 1, 127.0)
            p_key_scale = (
                key_scale_ptr + i_page * stride_key_scale_page + i_offset * stride_key_scale_slot
            ) + (o_heads * stride_key_scale_head)[:, None]
            p_value_scale = (
                value_scale_ptr
                + i_page * stride_value_scale_page
                + i_offset * stride_value_scale_slot
            ) + (o_heads * stride_value_scale_head)[:, None]
            tl.store(p_key_scale, b_key_scale, mask=m_heads)
            tl.store(p_value_scale, b_value_scale, mask=m_heads)
        elif MODE == FP8:
            b_key_scale = _static_scales(key_scale_ptr, o_heads, KV_HEADS, HAS_KEY_SCALE)
            b_value_scale = _static_scales(value_scale_ptr, o_heads, KV_HEADS, HAS_VALUE_SCALE)
        if MODE != FLOAT:
            b_first = b_first * (1.0 / b_key_scale)
            b_second = b_second * (1.0 / b_key_scale)
            b_rest = b_rest * (1.0 / b_key_scale)
            b_value = b_value * (1.0 / b_value_scale)

        _store_rotated(
            p_key_cache, m_heads, b_first, b_second, ROTARY, BLOCK_HALF, INTERLEAVED, MODE
        )
        if HEAD_DIM > ROTARY:
            _store_values(p_key_cache + o_rest, m_rest, b_rest, MODE)
        _store_values(p_value_cache + o_dim, m_dim, b_value, MODE)


@triton.jit
def mla_rope_kv_write_kernel(
    query_ptr,
    latent_ptr,
    key_ptr,
    positions_ptr,
    cos_sin_ptr,
    cache_ptr,
    slots_ptr,
    scale_ptr,
    num_positions,
    stride_query_token,
    stride_query_head,
    stride_latent_token,
    stride_key_token,
    stride_cache_page,
    stride_cache_slot,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_QUERY: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MODE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    QUERY_BLOCKS: tl.constexpr = (HEADS + BLOCK_QUERY - 1) // BLOCK_QUERY
    i_token = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    i_position = tl.load(positions_ptr + i_token)

    # Everything that does not need the position is loaded before what waits for it.
    if i_block < QUERY_BLOCKS:
        o_heads = i_block * BLOCK_QUERY + tl.arange(0, BLOCK_QUERY)
        m_heads = (o_heads < HEADS)[:, None]
        p_rows = (query_ptr + i_token * stride_query_token) + (o_heads * stride_query_head)[:, None]
        b_first, b_second = _pairs(p_rows, m_heads, ROTARY, BLOCK_HALF, INTERLEAVED)
        b_cos, b_sin = _angles(cos_sin_ptr, i_position, num_positions, ROTARY, BLOCK_HALF)
        b_first, b_second = _rotated(b_first, b_second, b_cos, b_sin)
        _store_rotated(p_rows, m_heads, b_first, b_second, ROTARY, BLOCK_HALF, INTERLEAVED, FLOAT)
    else:
        i_slot = tl.load(slots_ptr + i_token)
        if i_slot >= 0:
            p_row = (
                cache_ptr
                + (i_slot // PAGE_TOKENS) * stride_cache_page
                + (i_slot % PAGE_TOKENS) * stride_cache_slot
            )
            o_latent = tl.arange(0, BLOCK_LATENT)
            m_latent = o_latent < LATENT
            p_latent = latent_ptr + i_token * stride_latent_token + o_latent
            b_latent = tl.load(p_latent, mask=m_latent, other=0.0).to(tl.float32)
            o_one = tl.arange(0, 1)[:, None]
            m_one = o_one < 1
            p_key = (key_ptr + i_token * stride_key_token) + o_one
            b_first, b_second = _pairs(p_key, m_one, ROTARY, BLOCK_HALF, INTERLEAVED)
            b_cos, b_sin = _angles(cos_sin_ptr, i_position, num_positions, ROTARY, BLOCK_HALF)
            b_first, b_second = _rotated(b_first, b_second, b_cos, b_sin)
            if HAS_SCALE:
                b_scale = tl.load(scale_ptr)
                b_latent = b_latent * (1.0 / b_scale)
                b_first = b_first * (1.0 / b_scale)
                b_second = b_second * (1.0 / b_scale)
            _store_values(p_row + o_latent, m_latent, b_latent, MODE)
            _store_rotated(
                p_row + LATENT + o_one,
                m_one,
                b_first,
                b_second,
                ROTARY,
                BLOCK_HALF,
                INTERLEAVED,
                MODE,
            )


def rope_kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    interleaved: bool,
) -> None:
    """Launch the kernel for `reference.rope_kv_write`."""
    tokens, query_heads, head_dim = query.shape
    if tokens == 0:
        return
    kv_heads, rotary = key.shape[1], cos_sin.shape[1]
    config = pick("kv_write", tokens=tokens)
    overlap = overlaps(tokens)
    apart = bool(config.get("apart"))
    block_query = min(config["block_query"], triton.next_power_of_2(query_heads))
    rope_kv_write_kernel[(tokens, triton.cdiv(query_heads, block_query) + apart)](
        query,
        key,
        value,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        slots,
        key_scale,
        value_scale,
        cos_sin.shape[0],
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *_scale_strides(key_scale),
        *_scale_strides(value_scale),
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY=rotary,
        PAGE_TOKENS=key_cache.shape[1],
        BLOCK_QUERY=block_query,
        BLOCK_KV=triton.next_power_of_2(kv_heads),
        BLOCK_HALF=triton.next_power_of_2(rotary // 2),
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - rotary)),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        INTERLEAVED=interleaved,
        MODE=_MODES.get(key_cache.dtype, 0),
        HAS_KEY_SCALE=key_scale is not None,
        HAS_VALUE_SCALE=value_scale is not None,
        APART=apart,
        OVERLAP=overlap,
        num_warps=config["num_warps"],
        launch_pdl=overlap,
    )


def mla_rope_kv_write(
    query_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    interleaved: bool,
) -> None:
    """Launch the kernel for `reference.mla_rope_kv_write`."""
    tokens, heads, rotary = query_rope.shape
    if tokens == 0:
        return
    config = pick("kv_write", tokens=tokens)
    block_query = min(config["block_query"], triton.next_power_of_2(heads))
    mla_rope_kv_write_kernel[(tokens, triton.cdiv(heads, block_query) + 1)](
        query_rope,
        latent,
        key_rope,
        positions,
        cos_sin,
        cache,
        slots,
        scale,
        cos_sin.shape[0],
        *query_rope.stride()[:2],
        latent.stride(0),
        key_rope.stride(0),
        *cache.stride()[:2],
        HEADS=heads,
        LATENT=latent.shape[1],
        ROTARY=rotary,
        PAGE_TOKENS=cache.shape[1],
        BLOCK_QUERY=block_query,
        BLOCK_HALF=triton.next_power_of_2(rotary // 2),
        BLOCK_LATENT=triton.next_power_of_2(latent.shape[1]),
        INTERLEAVED=interleaved,
        MODE=_MODES.get(cache.dtype, 0),
        HAS_SCALE=scale is not None,
        num_warps=config["num_warps"],
    )


def _scale_strides(scale: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if scale is None or scale.dim() < 3 else scale.stride()
