"""Programs share the KV tiles of all sequences evenly; what they split is added afterwards.

An item is one KV head of one sequence with its group of query heads. The tiles of all items lie
in one line, program `p` of `P` takes `[p * total / P, (p + 1) * total / P)`, whatever the
lengths, so one long sequence among short ones costs no more than its bytes. An item that one
program had alone is finished there. The others' parts are fp32 sums with their maxima, which
a second kernel adds in program order, or, where items are more than programs, the last program
to finish one. The grids depend on nothing that lives on the device.

Both are dependent launches: what a kernel before them may have written is read past the
first-level cache (`.cg`, and copies of 16 bytes to shared memory).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deepseek_kernels._backend import multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels._counters import counters

MODES = {torch.float8_e4m3fn: 1, torch.int8: 2}

FLOAT = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT8 = tl.constexpr(2)

LOG2_E = 1.4426950408889634

ADDED_ELEMENTS = 1024
"""Largest part of an item, query heads times columns, for which a program has registers left."""


@triton.jit
def first_tile(i_program, total, num_programs):
    """Return the first tile of a program; its last is before the next program's first."""
    whole, rest = total // num_programs, total % num_programs
    return i_program * whole + i_program * rest // num_programs


@triton.jit
def program_of(tile, total, num_programs):
    """Return the program that has a tile: the inverse of `first_tile`."""
    return (((tile + 1).to(tl.int64) * num_programs - 1) // total).to(tl.int32)


@triton.jit
def locate(b_ends, tile):
    """Return the row whose tiles hold `tile` and the row's first tile, from the rows' ends."""
    m_before = b_ends <= tile
    return tl.sum(m_before.to(tl.int32), 0), tl.max(tl.where(m_before, b_ends, 0), 0)


@triton.jit
def normalised(b_acc, b_sum):
    """Divide the weighted sum of values by the sum of weights; zeros where nothing was seen."""
    return tl.where(b_sum[:, None] == 0.0, 0.0, b_acc / b_sum[:, None])


@triton.jit
def half(b_pairs, ODD: tl.constexpr, MODE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the first or the second of the two 8-bit values in each 16-bit element, as fp16.

    Pairs reach the matrix units by the 16-bit transposing loads from shared memory, which
    single bytes cannot use. The assembly takes two elements at a time.
    """
    if ASSEMBLY and MODE == FP8:
        b_half = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, 0x4431; mov.b32 {l, h}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, l; }"
            if ODD
            else "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, 0x4420; mov.b32 {l, h}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, l; }",
            "=r,r",
            [b_pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    elif ASSEMBLY:
        # fp16 0x6400 is 1024; a byte of v + 128 in its mantissa makes it v + 1152 (0x6480).
        b_half = tl.inline_asm_elementwise(
            "{ .reg .b32 t, c; mov.b32 c, 0x64806480; prmt.b32 t, $1, 0, 0x4341; "
            "lop3.b32 t, t, 0x00ff00ff, c, 0x6a; sub.f16x2 $0, t, c; }"
            if ODD
            else "{ .reg .b32 t, c; mov.b32 c, 0x64806480; "
            "lop3.b32 t, $1, 0x00ff00ff, c, 0x6a; sub.f16x2 $0, t, c; }",
            "=r,r",
            [b_pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        b_byte = ((b_pairs >> 8 if ODD else b_pairs) & 0xFF).to(tl.uint8)
        if MODE == FP8:
            b_half = b_byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            b_half = b_byte.to(tl.int8, bitcast=True).to(tl.float16)
    return b_half


@triton.jit
def row_tiles(
    lengths_ptr,
    num_rows,
    stride_sequence,
    stride_head,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROW_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the lengths of rows and the ends of their tiles in the line of all tiles.

    A row is what has one length: a sequence with its KV heads, or one head of a sequence. An
    empty row has one tile, all masked, so that somebody writes its zeros.
    """
    o_row = tl.arange(0, BLOCK_ROWS)
    o_item = o_row * ROW_HEADS
    p_length = lengths_ptr + (o_item // KV_HEADS) * stride_sequence
    p_length += (o_item % KV_HEADS) * stride_head
    b_length = tl.load(p_length, mask=o_row < num_rows, other=0, cache_modifier=".cg")
    b_tiles = tl.cdiv(b_length, BLOCK_N)
    if WINDOW > 0:
        b_tiles -= tl.maximum(b_length - WINDOW, 0) // BLOCK_N
    b_tiles = tl.where(o_row < num_rows, tl.maximum(b_tiles, 1), 0)
    return b_length, tl.cumsum(b_tiles, 0) * ROW_HEADS


@triton.jit
def added_parts(
    p_part,
    p_stats,
    first_program,
    last_program,
    o_row,
    BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add the rows `o_row` of an item's parts in the order of their programs.

    The loads of `PARTS` parts are in flight at a time; a thread adds the same columns of all
    parts, in its registers. The pointers are to the slot of the item's program 0. An item's
    parts lie in neighbouring slots; where `BLOCKS` blocks of heads share one line of tiles, as
    in MLA, they alternate.
    """
    o_d = tl.arange(0, BLOCK_D)
    b_max = tl.full([o_row.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([o_row.shape[0]], tl.float32)
    b_acc = tl.zeros([o_row.shape[0], BLOCK_D], tl.float32)
    for i_first in range(first_program, last_program + 1, PARTS):
        # Jitted code takes no annotation for a tuple that grows.
        maxima, sums, values = (), (), ()
        for i_part in tl.static_range(PARTS):
            m_row = (o_row >= 0) & (i_first + i_part <= last_program)
            slot = tl.cast((i_first + i_part) * BLOCKS, tl.int64)
            p_maxima = p_stats + slot * (2 * BLOCK_G) + o_row
            p_values = p_part + (slot * BLOCK_G + o_row)[:, None] * BLOCK_D + o_d[None, :]
            b_maxima = tl.load(p_maxima, mask=m_row, other=float("-inf"), cache_modifier=".cg")
            b_sums = tl.load(p_maxima + BLOCK_G, mask=m_row, other=0.0, cache_modifier=".cg")
            b_values = tl.load(p_values, mask=m_row[:, None], other=0.0, cache_modifier=".cg")
            maxima += (b_maxima,)  # type: ignore[assignment]
            sums += (b_sums,)  # type: ignore[assignment]
            values += (b_values,)  # type: ignore[assignment]
        b_new = b_max
        for i_part in tl.static_range(PARTS):
            b_new = tl.maximum(b_new, maxima[i_part])
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_old = tl.exp2(b_max - b_safe)
        b_sum *= b_old
        b_acc *= b_old[:, None]
        b_max = b_new
        for i_part in tl.static_range(PARTS):
            b_weights = tl.exp2(maxima[i_part] - b_safe)
            b_sum += sums[i_part] * b_weights
            b_acc += values[i_part] * b_weights[:, None]
    return normalised(b_acc, b_sum)


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    part_ptr,
    stats_ptr,
    lengths_ptr,
    out_ptr,
    num_rows,
    num_programs,
    stride_length_sequence,
    stride_length_head,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROW_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add the parts of one query head of an item that programs have split."""
    i_item = tl.program_id(0)
    i_head = tl.program_id(1)
    # The lengths may be read before waiting: the kernel before waited for what made them
    # before it let this one start.
    _, b_ends = row_tiles(
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
    total = tl.max(b_ends, 0)
    num_programs = tl.minimum(num_programs, tl.cdiv(total, LEAST_TILES))
    o_row = tl.arange(0, BLOCK_ROWS)
    i_row = i_item // ROW_HEADS
    row_begin = tl.max(tl.where(o_row < i_row, b_ends, 0), 0)
    row_end = tl.max(tl.where(o_row <= i_row, b_ends, 0), 0)
    item_tiles = (row_end - row_begin) // ROW_HEADS
    item_begin = row_begin + (i_item % ROW_HEADS) * item_tiles
    first_program = program_of(item_begin, total, num_programs)
    last_program = program_of(item_begin + item_tiles - 1, total, num_programs)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if first_program == last_program:
        return

    slot = (i_item * BLOCKS + i_head // BLOCK_G).to(tl.int64)
    b_out = added_parts(
        part_ptr + slot * (BLOCK_G * BLOCK_D),
        stats_ptr + slot * (2 * BLOCK_G),
        first_program,
        last_program,
        i_head % BLOCK_G + tl.arange(0, 1),
        BLOCKS,
        BLOCK_G,
        BLOCK_D,
        PARTS,
    )
    o_d = tl.arange(0, BLOCK_D)[None, :]
    p_out = out_ptr + (i_item.to(tl.int64) * GROUP + i_head) * D
    tl.store(p_out + o_d, b_out.to(out_ptr.dtype.element_ty), mask=o_d < D)


@triton.jit(do_not_specialize=["num_rows"])
def paged_decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    part_ptr,
    stats_ptr,
    counter_ptr,
    num_rows,
    scale_log2,
    stride_query_sequence,
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
    stride_table_sequence,
    stride_table_head,
    stride_length_sequence,
    stride_length_head,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROW_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    MODE: tl.constexpr,
    HAS_KEY_SCALE: tl.constexpr,
    HAS_VALUE_SCALE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    # 8-bit caches are read as pairs, columns 2i and 2i + 1 in one 16-bit element.
    PAIRS: tl.constexpr = MODE != FLOAT
    COLUMNS: tl.constexpr = D // 2 if PAIRS else D
    BLOCK_C: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D
    STEP: tl.constexpr = 2 if PAIRS else 1
    if OVERLAP:
        gdc_wait()
        # The next kernel starts its programs only where these leave: all of them run at once.
        gdc_launch_dependents()
    o_m = tl.arange(0, BLOCK_M)
    o_c = tl.arange(0, BLOCK_C)
    o_d = tl.arange(0, BLOCK_D)
    m_m = o_m < GROUP
    m_c = o_c < COLUMNS

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
    num_programs = tl.minimum(tl.num_programs(0), tl.cdiv(total, LEAST_TILES))
    i_program = tl.program_id(0)
    tile = first_tile(tl.minimum(i_program, num_programs), total, num_programs)
    end = first_tile(tl.minimum(i_program + 1, num_programs), total, num_programs)

    while tile < end:
        i_row, row_begin = locate(b_ends, tile)
        i_sequence = ((i_row * ROW_HEADS) // KV_HEADS).to(tl.int64)
        row_head = (i_row * ROW_HEADS) % KV_HEADS
        length = tl.sum(tl.where(o_row == i_row, b_length, 0), 0)
        lowest = 0
        if WINDOW > 0:
            lowest = tl.maximum(length - WINDOW, 0)
        skipped = lowest // BLOCK_N
        item_tiles = tl.maximum(tl.cdiv(length, BLOCK_N) - skipped, 1)
        i_head = row_head + (tile - row_begin) // item_tiles
        item_begin = row_begin + (i_head - row_head) * item_tiles
        i_item = i_sequence.to(tl.int32) * KV_HEADS + i_head
        count = tl.minimum(end - tile, item_begin + item_tiles - tile)

        p_table = table_ptr + i_sequence * stride_table_sequence + i_head * stride_table_head
        first = (tile - item_begin + skipped) * BLOCK_N
        # The next tile's pages are loaded a tile ahead, so that its rows wait for nothing.
        o_n = first + tl.arange(0, BLOCK_N)
        b_next = tl.load(p_table + o_n // PAGE, mask=o_n < length, other=0, cache_modifier=".cg")

        p_query = query_ptr + i_sequence * stride_query_sequence
        p_query += (i_head * GROUP + o_m)[:, None] * stride_query_head + STEP * o_c[None, :]
        m_query = m_m[:, None] & m_c[None, :]
        b_query = tl.load(p_query, mask=m_query, other=0.0, cache_modifier=".cg").to(DOT)
        score_scale = scale_log2
        value_factor = 1.0
        if PAIRS:
            b_query_odd = tl.load(p_query + 1, mask=m_query, other=0.0, cache_modifier=".cg")
            b_query_odd = b_query_odd.to(DOT)
            b_acc_odd = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
            if MODE == FP8:
                if HAS_KEY_SCALE:
                    score_scale *= tl.load(key_scale_ptr + i_head)
                if HAS_VALUE_SCALE:
                    value_factor = tl.load(value_scale_ptr + i_head)
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        # Sums stay per column to the end: adding columns would make the warps wait each tile.
        b_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)

        p_keys = key_ptr + i_head.to(tl.int64) * stride_key_head
        p_values = value_ptr + i_head.to(tl.int64) * stride_value_head
        for start in tl.range(first, first + count * BLOCK_N, BLOCK_N):
            o_n = start + tl.arange(0, BLOCK_N)
            m_n = o_n < length
            if WINDOW > 0:
                m_n &= o_n >= lowest
            m_tile = m_n[:, None] if COLUMNS == BLOCK_C else m_n[:, None] & m_c[None, :]
            b_page = b_next.to(tl.int64)
            o_next = o_n + BLOCK_N
            b_next = tl.load(
                p_table + o_next // PAGE, mask=o_next < length, other=0, cache_modifier=".cg"
            )
            o_slot = o_n % PAGE
            o_key = b_page * stride_key_page + o_slot * stride_key_slot
            o_value = o_key
            if not SAME_STRIDES:
                o_value = b_page * stride_value_page + o_slot * stride_value_slot
            b_key = tl.load(p_keys + o_key[:, None] + o_c[None, :], mask=m_tile, other=0)
            b_value = tl.load(p_values + o_value[:, None] + o_c[None, :], mask=m_tile, other=0)

            if PAIRS:
                b_even = half(b_key, False, MODE, ASSEMBLY).to(DOT)
                b_odd = half(b_key, True, MODE, ASSEMBLY).to(DOT)
                b_scores = tl.dot(b_query, tl.trans(b_even), input_precision="ieee")
                b_scores = tl.dot(
                    b_query_odd, tl.trans(b_odd), acc=b_scores, input_precision="ieee"
                )
            else:
                b_scores = tl.dot(b_query, tl.trans(b_key), input_precision="ieee")
            b_scores *= score_scale
            if MODE == INT8:
                o_scale = b_page * stride_key_scale_page + o_slot * stride_key_scale_slot
                p_scale = key_scale_ptr + o_scale + i_head * stride_key_scale_head
                b_key_scale = tl.load(p_scale, mask=m_n, other=0.0, cache_modifier=".cg")
                b_scores *= b_key_scale[None, :]
                # Values' scales go into the exponent: weights stay at most 1 in fp16.
                o_scale = b_page * stride_value_scale_page + o_slot * stride_value_scale_slot
                p_scale = value_scale_ptr + o_scale + i_head * stride_value_scale_head
                b_value_scale = tl.load(p_scale, mask=m_n, other=1.0, cache_modifier=".cg")
                b_inverse_scale = 1.0 / b_value_scale
                b_scores += tl.log2(b_value_scale)[None, :]
            b_scores = tl.where(m_n[None, :], b_scores, float("-inf"))

            b_new = tl.maximum(b_max, tl.max(b_scores, 1))
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_old = tl.exp2(b_max - b_safe)
            b_weights = tl.exp2(b_scores - b_safe[:, None])
            if MODE == INT8:
                b_sums = b_sums * b_old[:, None] + b_weights * b_inverse_scale[None, :]
            else:
                b_sums = b_sums * b_old[:, None] + b_weights
            b_max = b_new
            b_weights = b_weights.to(DOT)
            b_acc *= b_old[:, None]
            if PAIRS:
                b_acc_odd *= b_old[:, None]
                b_even = half(b_value, False, MODE, ASSEMBLY).to(DOT)
                b_odd = half(b_value, True, MODE, ASSEMBLY).to(DOT)
                b_acc = tl.dot(b_weights, b_even, acc=b_acc, input_precision="ieee")
                b_acc_odd = tl.dot(b_weights, b_odd, acc=b_acc_odd, input_precision="ieee")
            else:
                b_acc = tl.dot(b_weights, b_value, acc=b_acc, input_precision="ieee")

        b_sum = tl.sum(b_sums, 1)
        if PAIRS:
            b_whole = tl.reshape(tl.join(b_acc, b_acc_odd), [BLOCK_M, BLOCK_D]) * value_factor
        else:
            b_whole = b_acc
        p_item = out_ptr + i_item.to(tl.int64) * (GROUP * D)
        if count == item_tiles:
            b_out = normalised(b_whole, b_sum).to(out_ptr.dtype.element_ty)
            p_out = p_item + o_m[:, None] * D + o_d[None, :]
            tl.store(p_out, b_out, mask=m_m[:, None] & (o_d < D)[None, :])
        else:
            slot = (i_program + i_item).to(tl.int64)
            p_part = part_ptr + slot * (BLOCK_G * BLOCK_D)
            p_part += o_m[:, None] * BLOCK_D + o_d[None, :]
            tl.store(p_part, b_whole, mask=(o_m < BLOCK_G)[:, None], cache_modifier=".cg")
            p_stats = stats_ptr + slot * (2 * BLOCK_G) + o_m
            tl.store(p_stats, b_max, mask=o_m < BLOCK_G, cache_modifier=".cg")
            tl.store(p_stats + BLOCK_G, b_sum, mask=o_m < BLOCK_G, cache_modifier=".cg")
            if PARTS > 0:
                first_program = program_of(item_begin, total, num_programs)
                last_program = program_of(item_begin + item_tiles - 1, total, num_programs)
                # Every thread's part is visible before the arrival is.
                tl.debug_barrier()
                arrived = tl.atomic_add(counter_ptr + i_item, 1, sem="acq_rel")
                if arrived == last_program - first_program:
                    tl.store(counter_ptr + i_item, 0)
                    o_g = tl.arange(0, BLOCK_G)
                    b_out = added_parts(
                        part_ptr + i_item.to(tl.int64) * (BLOCK_G * BLOCK_D),
                        stats_ptr + i_item.to(tl.int64) * (2 * BLOCK_G),
                        first_program,
                        last_program,
                        o_g,
                        1,
                        BLOCK_G,
                        BLOCK_D,
                        PARTS,
                    )
                    p_out = p_item + o_g[:, None] * D + o_d[None, :]
                    m_out = (o_g < GROUP)[:, None] & (o_d < D)[None, :]
                    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)
        tile += count


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    window: int | None,
) -> Tensor:
    """Launch the kernels for `reference.paged_decode`."""
    sequences, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    group = heads // kv_heads
    mode = MODES.get(key_cache.dtype, 0)
    per_head = lengths.dim() == 2
    block_g = triton.next_power_of_2(group)
    block_d = triton.next_power_of_2(head_dim)
    items = sequences * kv_heads
    config = pick("paged_decode", bytes=key_cache.element_size(), items=items)
    programs = config["programs"] * multiprocessors(query.device)
    # With many items few parts belong to one, and the last program to finish one adds them.
    adds_itself = items > programs and block_g * block_d <= ADDED_ELEMENTS
    arrivals = counters(query.device, items if adds_itself else 0)
    parts, stats = part_buffers(programs + items, block_g, block_d, query.device)
    compiled = not triton.knobs.runtime.interpret
    rows: dict[str, Any] = {
        "num_rows": items if per_head else sequences,
        "stride_length_sequence": lengths.stride(0),
        "stride_length_head": lengths.stride(1) if per_head else 0,
        "WINDOW": window or 0,
        "KV_HEADS": kv_heads,
        "ROW_HEADS": 1 if per_head else kv_heads,
        "BLOCK_ROWS": triton.next_power_of_2(items if per_head else sequences),
        "BLOCK_N": config["tokens"],
        "LEAST_TILES": config["least_tiles"],
    }
    if mode:
        key_cache, value_cache = key_cache.view(torch.int16), value_cache.view(torch.int16)
    paged_decode_kernel[(programs,)](
        query,
        key_cache,
        value_cache,
        key_scale,
        value_scale,
        page_table,
        lengths,
        out,
        parts,
        stats,
        arrivals,
        scale_log2=scale * LOG2_E,
        **strides("query", query, "sequence", "head"),
        **strides("key", key_cache, "page", "slot", "head"),
        **strides("value", value_cache, "page", "slot", "head"),
        **strides("key_scale", dynamic(key_scale), "page", "slot", "head"),
        **strides("value_scale", dynamic(value_scale), "page", "slot", "head"),
        stride_table_sequence=page_table.stride(0),
        stride_table_head=page_table.stride(1) if per_head else 0,
        PAGE=key_cache.shape[1],
        GROUP=group,
        D=head_dim,
        MODE=mode,
        HAS_KEY_SCALE=key_scale is not None,
        HAS_VALUE_SCALE=value_scale is not None,
        SAME_STRIDES=key_cache.stride() == value_cache.stride(),
        ASSEMBLY=compiled,
        OVERLAP=compiled,
        DOT=dot_type(query, mode),
        BLOCK_G=block_g,
        BLOCK_M=max(16, block_g),
        BLOCK_D=block_d,
        PARTS=4 if adds_itself else 0,
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        maxnreg=config["registers"],
        launch_pdl=compiled,
        **rows,
    )
    if adds_itself:
        return out
    combine_kernel[(items, group)](
        parts,
        stats,
        lengths,
        out,
        num_programs=programs,
        BLOCKS=1,
        GROUP=group,
        D=head_dim,
        OVERLAP=compiled,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        PARTS=max(1, 2048 // block_d),
        num_warps=1,
        launch_pdl=compiled,
        **rows,
    )
    return out


def part_buffers(
    slots: int, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return room for the parts of items and for their maxima and sums.

    Programs and items advance together, so `program + item` numbers every part differently.
    """
    parts = torch.empty((slots, rows, columns), dtype=torch.float32, device=device)
    return parts, torch.empty((slots, 2, rows), dtype=torch.float32, device=device)


def strides(name: str, tensor: Tensor | None, *dimensions: str) -> dict[str, int]:
    """Return the arguments `stride_NAME_DIMENSION` of a kernel; zeros for no tensor."""
    return {
        f"stride_{name}_{dimension}": 0 if tensor is None else tensor.stride(index)
        for index, dimension in enumerate(dimensions)
    }


def dynamic(scale: Tensor | None) -> Tensor | None:
    """Return scales that each token has of its own; those of heads alone have no strides."""
    return scale if scale is not None and scale.dim() == 3 else None


def dot_type(query: Tensor, mode: int) -> tl.dtype:
    """Return what the matrix units multiply: 8-bit values convert to fp16 exactly and fast."""
    if query.dtype == torch.float32:
        return tl.float32
    return tl.float16 if mode or query.dtype == torch.float16 else tl.bfloat16
