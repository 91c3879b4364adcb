"""Programs share the tiles of all sequences evenly, as in `paged_decode`, per block of heads.

Programs that take the same tiles for different heads run side by side, so that the second
finds the latents in the L2 cache. One tile of latents serves as keys and as values. With many
heads Hopper has a kernel of its own for them, which splits and numbers parts the same way.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_kernels._backend import has_wgmma, multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels.mla_decode._device import ROWS, TOKENS, specialized_mla_decode_kernel
from deepseek_kernels.mla_decode.reference import LATENT, ROPE
from deepseek_kernels.paged_decode.kernel import (
    FP8,
    LOG2_E,
    combine_kernel,
    dot_type,
    first_tile,
    half,
    locate,
    normalised,
    part_buffers,
    row_tiles,
)

_SPECIALIZED = {
    "programs": 1,
    "heads": ROWS.value,
    "tokens": TOKENS.value,
    "least_tiles": 1,
}
"""Shared memory leaves nothing to choose."""


@triton.jit(do_not_specialize=["num_rows"])
def mla_decode_kernel(
    query_ptr,
    cache_ptr,
    cache_scale_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    part_ptr,
    stats_ptr,
    num_rows,
    scale_log2,
    stride_query_sequence,
    stride_query_head,
    stride_page,
    stride_slot,
    stride_table,
    stride_length_sequence,
    stride_length_head,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROW_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST_TILES: tl.constexpr,
):
    # With few heads there are registers to load pages a tile ahead, so that rows wait for
    # nothing, and to add weights per column, so that the warps meet only after the last tile.
    FEW: tl.constexpr = BLOCK_H < 64
    # An 8-bit cache is read as pairs, columns 2i and 2i + 1 in one 16-bit element.
    STEP: tl.constexpr = 2 if PAIRS else 1
    BLOCK_C: tl.constexpr = LATENT // STEP
    BLOCK_R: tl.constexpr = ROPE // STEP
    if OVERLAP:
        gdc_wait()
    i_block = tl.program_id(0)
    i_program = tl.program_id(1)
    num_blocks = tl.num_programs(0)
    o_head = i_block * BLOCK_H + tl.arange(0, BLOCK_H)
    o_c = tl.arange(0, BLOCK_C)
    o_r = tl.arange(0, BLOCK_R)
    m_head = o_head < HEADS

    b_length, b_ends = row_tiles(
        lengths_ptr,
        num_rows,
        stride_length_sequence,
        stride_length_head,
        WINDOW,
        KV_HEADS,
        ROW_HEADS,
        BLOCK_ROWS,
        BLOCK_N,
    )
    o_row = tl.arange(0, BLOCK_ROWS)
    total = tl.max(b_ends, 0)
    num_programs = tl.minimum(tl.num_programs(1), tl.cdiv(total, LEAST_TILES))
    tile = first_tile(tl.minimum(i_program, num_programs), total, num_programs)
    end = first_tile(tl.minimum(i_program + 1, num_programs), total, num_programs)

    while tile < end:
        i_item, item_begin = locate(b_ends, tile)
        i_sequence = i_item.to(tl.int64)
        length = tl.sum(tl.where(o_row == i_item, b_length, 0), 0)
        item_tiles = tl.maximum(tl.cdiv(length, BLOCK_N), 1)
        count = tl.minimum(end, item_begin + item_tiles) - tile

        p_query = query_ptr + i_sequence * stride_query_sequence
        p_query += o_head[:, None] * stride_query_head
        p_rope = p_query + LATENT + STEP * o_r[None, :]
        p_query += STEP * o_c[None, :]
        b_query = tl.load(p_query, mask=m_head[:, None], other=0.0, cache_modifier=".cg").to(DOT)
        b_rope = tl.load(p_rope, mask=m_head[:, None], other=0.0, cache_modifier=".cg").to(DOT)
        factor = 1.0
        if PAIRS:
            b_query_odd = tl.load(
                p_query + 1, mask=m_head[:, None], other=0.0, cache_modifier=".cg"
            ).to(DOT)
            b_rope_odd = tl.load(
                p_rope + 1, mask=m_head[:, None], other=0.0, cache_modifier=".cg"
            ).to(DOT)
            b_acc_odd = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
            if HAS_SCALE:
                factor = tl.load(cache_scale_ptr)
        b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        b_sums = tl.zeros([BLOCK_H, BLOCK_N if FEW else 1], tl.float32)
        b_acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)

        p_table = table_ptr + i_sequence * stride_table
        first = (tile - item_begin) * BLOCK_N
        o_n = first + tl.arange(0, BLOCK_N)
        b_page = tl.load(p_table + o_n // PAGE, mask=o_n < length, other=0, cache_modifier=".cg")
        for start in tl.range(first, first + count * BLOCK_N, BLOCK_N):
            o_n = start + tl.arange(0, BLOCK_N)
            m_n = o_n < length
            if not FEW:
                b_page = tl.load(p_table + o_n // PAGE, mask=m_n, other=0, cache_modifier=".cg")
            o_token = b_page.to(tl.int64) * stride_page + (o_n % PAGE) * stride_slot
            p_row = cache_ptr + o_token[:, None]
            if FEW:
                o_next = o_n + BLOCK_N
                b_page = tl.load(
                    p_table + o_next // PAGE, mask=o_next < length, other=0, cache_modifier=".cg"
                )
            b_latent = tl.load(p_row + o_c[None, :], mask=m_n[:, None], other=0)
            b_key = tl.load(p_row + BLOCK_C + o_r[None, :], mask=m_n[:, None], other=0)

            if PAIRS:
                b_even = half(b_latent, False, FP8, ASSEMBLY).to(DOT)
                b_odd = half(b_latent, True, FP8, ASSEMBLY).to(DOT)
                b_key_even = half(b_key, False, FP8, ASSEMBLY).to(DOT)
                b_key_odd = half(b_key, True, FP8, ASSEMBLY).to(DOT)
                b_scores = tl.dot(b_query, tl.trans(b_even), input_precision="ieee")
                b_scores = tl.dot(b_query_odd, tl.trans(b_odd), b_scores, input_precision="ieee")
                b_scores = tl.dot(b_rope, tl.trans(b_key_even), b_scores, input_precision="ieee")
                b_scores = tl.dot(b_rope_odd, tl.trans(b_key_odd), b_scores, input_precision="ieee")
            else:
                b_scores = tl.dot(b_query, tl.trans(b_latent), input_precision="ieee")
                b_scores = tl.dot(b_rope, tl.trans(b_key), b_scores, input_precision="ieee")
            b_scores = tl.where(m_n[None, :], b_scores * (scale_log2 * factor), float("-inf"))

            b_new = tl.maximum(b_max, tl.max(b_scores, 1))
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_old = tl.exp2(b_max - b_safe)
            b_weights = tl.exp2(b_scores - b_safe[:, None])
            b_added = b_weights if FEW else tl.sum(b_weights, 1, keep_dims=True)
            b_sums = b_sums * b_old[:, None] + b_added
            b_max = b_new
            b_weights = b_weights.to(DOT)
            b_acc *= b_old[:, None]
            if PAIRS:
                b_acc_odd *= b_old[:, None]
                b_acc = tl.dot(b_weights, b_even, b_acc, input_precision="ieee")
                b_acc_odd = tl.dot(b_weights, b_odd, b_acc_odd, input_precision="ieee")
            else:
                b_acc = tl.dot(b_weights, b_latent, b_acc, input_precision="ieee")

        if OVERLAP:
            if tile + count >= end:
                gdc_launch_dependents()
        b_sum = tl.sum(b_sums, 1)
        o_d = tl.arange(0, LATENT)
        o_h = tl.arange(0, BLOCK_H)
        if PAIRS:
            b_whole = tl.reshape(tl.join(b_acc, b_acc_odd), [BLOCK_H, LATENT]) * factor
        else:
            b_whole = b_acc
        p_item = out_ptr + (i_sequence * HEADS + i_block * BLOCK_H) * LATENT
        if count == item_tiles:
            b_out = normalised(b_whole, b_sum).to(out_ptr.dtype.element_ty)
            p_out = p_item + o_h[:, None] * LATENT + o_d[None, :]
            tl.store(p_out, b_out, mask=m_head[:, None])
        else:
            slot = ((i_program + i_item) * num_blocks + i_block).to(tl.int64)
            p_part = part_ptr + slot * (BLOCK_H * LATENT) + o_h[:, None] * LATENT + o_d[None, :]
            tl.store(p_part, b_whole)
            p_stats = stats_ptr + slot * (2 * BLOCK_H) + o_h
            tl.store(p_stats, b_max)
            tl.store(p_stats + BLOCK_H, b_sum)
        tile += count


def mla_decode(
    query: Tensor,
    cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    cache_scale: Tensor | None,
) -> Tensor:
    """Launch the kernels for `reference.mla_decode`."""
    sequences, heads, _ = query.shape
    out = torch.empty((sequences, heads, LATENT), dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    pairs = cache.element_size() == 1
    specialized = fits_specialized(query, cache)
    config = _SPECIALIZED
    if not specialized:
        config = pick("mla_decode", bytes=query.element_size(), heads=heads)
    block_h = config["heads"]
    blocks = triton.cdiv(heads, block_h)
    programs = max(1, config["programs"] * multiprocessors(query.device) // blocks)
    if specialized:
        programs = whole_programs(programs, sequences)
    parts, stats = part_buffers((programs + sequences) * blocks, block_h, LATENT, query.device)
    compiled = not triton.knobs.runtime.interpret
    rows: dict[str, Any] = {
        "num_rows": sequences,
        "stride_length_sequence": lengths.stride(0),
        "stride_length_head": 0,
        "WINDOW": 0,
        "KV_HEADS": 1,
        "ROW_HEADS": 1,
        "BLOCK_ROWS": triton.next_power_of_2(sequences),
        "BLOCK_N": config["tokens"],
        "LEAST_TILES": config["least_tiles"],
    }
    if specialized:
        specialized_mla_decode_kernel[(blocks, programs)](
            query,
            cache,
            page_table,
            lengths,
            out,
            parts,
            stats,
            sequences,
            scale * LOG2_E,
            *query.stride()[:2],
            cache.stride(0),
            page_table.stride(0),
            lengths.stride(0),
            PAGE=cache.shape[1],
            SLOT=cache.stride(1),
            HEADS=heads,
            BLOCKS=blocks,
            BLOCK_ROWS=rows["BLOCK_ROWS"],
            num_warps=4,
            # Sixteen warps share the registers: loading warps give theirs to adding ones.
            maxnreg=128,
        )
    else:
        if pairs:
            cache = cache.view(torch.int16)
        mla_decode_kernel[(blocks, programs)](
            query,
            cache,
            cache_scale,
            page_table,
            lengths,
            out,
            parts,
            stats,
            scale_log2=scale * LOG2_E,
            stride_query_sequence=query.stride(0),
            stride_query_head=query.stride(1),
            stride_page=cache.stride(0),
            stride_slot=cache.stride(1),
            stride_table=page_table.stride(0),
            PAGE=cache.shape[1],
            HEADS=heads,
            PAIRS=pairs,
            HAS_SCALE=cache_scale is not None,
            ASSEMBLY=compiled,
            OVERLAP=compiled,
            DOT=dot_type(query, int(pairs)),
            LATENT=LATENT,
            ROPE=ROPE,
            BLOCK_H=block_h,
            num_warps=config["num_warps"],
            num_stages=config["num_stages"],
            launch_pdl=compiled,
            **rows,
        )
    combine_kernel[(sequences, heads)](
        parts,
        stats,
        lengths,
        out,
        num_programs=programs,
        BLOCKS=blocks,
        GROUP=heads,
        D=LATENT,
        OVERLAP=compiled,
        BLOCK_G=block_h,
        BLOCK_D=LATENT,
        PARTS=4,
        num_warps=1,
        launch_pdl=compiled,
        **rows,
    )
    return out


def fits_specialized(query: Tensor, cache: Tensor) -> bool:
    """Tell whether Hopper's asynchronous matrix products and 16-byte copies apply."""
    if triton.knobs.runtime.interpret or not has_wgmma(query.device):
        return False
    if query.dtype == torch.float32 or cache.dtype != query.dtype:
        return False
    strides = (*query.stride()[:2], *cache.stride()[:2])
    pointers = (query.data_ptr(), cache.data_ptr())
    aligned = not any(n % 16 for n in (*strides, *pointers))
    return aligned and query.shape[1] > ROWS.value // 2 and cache.shape[1] % 16 == 0


def whole_programs(programs: int, sequences: int) -> int:
    """Return `programs`, or up to a sixteenth less where that splits equal sequences evenly."""
    fewer = range(programs, programs * 15 // 16, -1)
    even = (count for count in fewer if sequences % count == 0 or count % sequences == 0)
    return next(even, programs)
