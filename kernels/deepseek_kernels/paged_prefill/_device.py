"""Prefill on Hopper with specialised warps: four load tiles, twice four multiply.

Two groups of four warps take 64 rows each and share the tiles of keys and values that the
loading warps copy to shared memory, so that one group's softmax runs beside the other's matrix
products; within a group the next scores run beside the current sum of values. Tensors of one
thread group never meet the other's: they speak through barriers in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from deepseek_kernels._gluon import add, exp2

ROWS = gl.constexpr(64)
"""Of one group of multiplying warps."""


@gluon.jit
def _pages(p_table, start, length, PAGE: gl.constexpr, STEP: gl.constexpr, BLOCK_N: gl.constexpr):
    """Load where the tokens `[start, start + BLOCK_N)` lie: a page for every `STEP` of them."""
    # Jitted code takes no annotation for a tuple that grows.
    pages = ()
    for step in gl.static_range(BLOCK_N // STEP):
        token = start + step * STEP
        pages += (gl.load(p_table + token // PAGE, mask=token < length, other=0),)  # type: ignore[assignment]
    return pages


@gluon.jit
def _copy_tile(
    smem,
    p_cache,
    pages,
    start,
    length,
    stride_page,
    stride_slot,
    PAGE: gl.constexpr,
    STEP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
):
    """Start the copy of the tokens `[start, start + BLOCK_N)`; those past `length` are zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_step = gl.arange(0, STEP, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    offsets = gl.expand_dims(o_step * stride_slot, 1) + gl.expand_dims(o_d, 0)
    if start + BLOCK_N <= length:
        for step in gl.static_range(BLOCK_N // STEP):
            token = start + step * STEP
            p_step = p_cache + pages[step].to(gl.int64) * stride_page
            pointers = p_step + (token % PAGE) * stride_slot + offsets
            async_copy.async_copy_global_to_shared(smem.slice(step * STEP, STEP), pointers)
    else:
        for step in gl.static_range(BLOCK_N // STEP):
            token = start + step * STEP
            p_step = p_cache + pages[step].to(gl.int64) * stride_page
            pointers = p_step + (token % PAGE) * stride_slot + offsets
            mask = gl.expand_dims(token + o_step < length, 1)
            part = smem.slice(step * STEP, STEP)
            async_copy.async_copy_global_to_shared(part, pointers, mask=mask)


@gluon.jit
def _load(
    key_smem,
    value_smem,
    key_full,
    key_empty,
    value_full,
    value_empty,
    p_keys,
    p_values,
    p_table,
    tiles,
    length,
    stride_key_page,
    stride_key_slot,
    stride_value_page,
    stride_value_slot,
    PAGE: gl.constexpr,
    STEP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy keys and values tile by tile; a tile's values come after the next tile's keys."""
    for i_tile in range(tiles + 1):
        if i_tile < tiles:
            stage = i_tile % STAGES
            pages = _pages(p_table, i_tile * BLOCK_N, length, PAGE, STEP, BLOCK_N)
            mbarrier.wait(key_empty.index(stage), (i_tile // STAGES & 1) ^ 1)
            _copy_tile(
                key_smem.index(stage),
                p_keys,
                pages,
                i_tile * BLOCK_N,
                length,
                stride_key_page,
                stride_key_slot,
                PAGE,
                STEP,
                BLOCK_N,
                D,
            )
            async_copy.mbarrier_arrive(key_full.index(stage), increment_count=False)
        if i_tile > 0:
            previous = i_tile - 1
            stage = previous % STAGES
            pages = _pages(p_table, previous * BLOCK_N, length, PAGE, STEP, BLOCK_N)
            mbarrier.wait(value_empty.index(stage), (previous // STAGES & 1) ^ 1)
            _copy_tile(
                value_smem.index(stage),
                p_values,
                pages,
                previous * BLOCK_N,
                length,
                stride_value_page,
                stride_value_slot,
                PAGE,
                STEP,
                BLOCK_N,
                D,
            )
            async_copy.mbarrier_arrive(value_full.index(stage), increment_count=False)


@gluon.jit
def _weights(b_scores, b_max, b_sum, o_last, first_row, start, scale_log2, BLOCK_N: gl.constexpr):
    """Return the weights of a tile, the new maxima and sums, and the factor of earlier sums."""
    layout: gl.constexpr = b_scores.type.layout
    if start + BLOCK_N - 1 > first_row:
        o_n = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        m_seen = gl.expand_dims(o_n, 0) <= gl.expand_dims(o_last, 1)
        b_scores = gl.where(m_seen, b_scores, float("-inf"))
    b_new = gl.maximum(b_max, gl.max(b_scores, 1) * scale_log2)
    b_safe = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_weights = exp2(b_scores * scale_log2 - gl.expand_dims(b_safe, 1))
    b_old = exp2(b_max - b_safe)
    b_sum = b_sum * b_old + gl.sum(b_weights, 1)
    return b_weights, b_new, b_sum, b_old


@gluon.jit
def _multiply(
    key_smem,
    value_smem,
    key_full,
    key_empty,
    value_full,
    value_empty,
    query_smem,
    query_ptr,
    out_ptr,
    stride_query_token,
    first_token,
    count,
    length,
    begin,
    tiles,
    scale_log2,
    HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend from 64 rows, the tokens from `first_token` of a sequence on, to all tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    kind: gl.constexpr = query_smem.dtype

    o_token = first_token + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
    o_row = (begin + o_token).to(gl.int64) * stride_query_token
    p_query = query_ptr + (gl.expand_dims(o_row, 1) + gl.expand_dims(o_d, 0))
    m_query = gl.expand_dims(o_token < count, 1)
    query_smem.store(gl.load(p_query, mask=m_query, other=0.0))
    hopper.fence_async_shared()
    gl.thread_barrier()

    first_row = length - count + first_token
    o_last = first_row + gl.arange(0, ROWS, layout=rows)
    b_max = gl.full([ROWS], float("-inf"), gl.float32, rows)
    b_sum = gl.full([ROWS], 0.0, gl.float32, rows)
    b_acc = gl.full([ROWS, D], 0.0, gl.float32, out_layout)
    b_none = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout)

    mbarrier.wait(key_full.index(0), 0)
    b_scores = hopper.warpgroup_mma(
        query_smem, key_smem.index(0).permute([1, 0]), b_none, use_acc=False, is_async=True
    )
    b_scores = hopper.warpgroup_mma_wait(0, deps=[b_scores])
    gl.thread_barrier()
    mbarrier.arrive(key_empty.index(0), count=1)
    b_weights, b_max, b_sum, b_old = _weights(
        b_scores, b_max, b_sum, o_last, first_row, 0, scale_log2, BLOCK_N
    )
    b_left = gl.convert_layout(b_weights.to(kind), weights_layout)
    for i_tile in range(1, tiles):
        stage = i_tile % STAGES
        mbarrier.wait(key_full.index(stage), i_tile // STAGES & 1)
        b_scores = hopper.warpgroup_mma(
            query_smem, key_smem.index(stage).permute([1, 0]), b_none, use_acc=False, is_async=True
        )
        previous = i_tile - 1
        value_stage = previous % STAGES
        mbarrier.wait(value_full.index(value_stage), previous // STAGES & 1)
        b_acc = hopper.warpgroup_mma(b_left, value_smem.index(value_stage), b_acc, is_async=True)
        b_scores = hopper.warpgroup_mma_wait(1, deps=[b_scores])
        gl.thread_barrier()
        mbarrier.arrive(key_empty.index(stage), count=1)
        b_weights, b_max, b_sum, b_old = _weights(
            b_scores, b_max, b_sum, o_last, first_row, i_tile * BLOCK_N, scale_log2, BLOCK_N
        )
        # In machine code this wait stands before the softmax, which the assembler moves down: the
        # softmax runs beside the other group's products, and not beside those of its own.
        b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
        gl.thread_barrier()
        mbarrier.arrive(value_empty.index(value_stage), count=1)
        b_acc *= gl.expand_dims(gl.convert_layout(b_old, gl.SliceLayout(1, out_layout)), 1)
        b_left = gl.convert_layout(b_weights.to(kind), weights_layout)
    previous = tiles - 1
    mbarrier.wait(value_full.index(previous % STAGES), previous // STAGES & 1)
    b_acc = hopper.warpgroup_mma(b_left, value_smem.index(previous % STAGES), b_acc, is_async=True)
    b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])

    b_total = gl.expand_dims(gl.convert_layout(b_sum, gl.SliceLayout(1, out_layout)), 1)
    b_out = gl.where(b_total == 0.0, 0.0, b_acc / b_total).to(kind)
    o_token = first_token + gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, out_layout))
    o_row = (begin + o_token).to(gl.int64) * (HEADS * D)
    p_out = out_ptr + (gl.expand_dims(o_row, 1) + gl.expand_dims(o_d, 0))
    gl.store(p_out, b_out, mask=gl.expand_dims(o_token < count, 1))


@gluon.jit(do_not_specialize=["num_tokens", "num_sequences"])
def specialized_prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
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
    stride_table,
    stride_starts,
    stride_length,
    PAGE: gl.constexpr,
    STEP: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SEQUENCES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    BLOCK_M: gl.constexpr = 2 * ROWS
    i_head = gl.program_id(0)
    i_block = gl.num_programs(1) - 1 - gl.program_id(1)

    # The padding after the last sequence counts as one more, with nothing in its pages.
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_sequence = gl.arange(0, BLOCK_SEQUENCES, layout=line)
    p_starts = starts_ptr + o_sequence * stride_starts
    b_begin = gl.load(p_starts, mask=o_sequence <= num_sequences, other=0)
    b_end = gl.load(p_starts + stride_starts, mask=o_sequence < num_sequences, other=num_tokens)
    b_counts = gl.where(o_sequence <= num_sequences, b_end - b_begin, 0)
    b_ends = gl.associative_scan((b_counts + BLOCK_M - 1) // BLOCK_M, 0, add)
    if i_block < gl.max(b_ends, 0):
        m_before = b_ends <= i_block
        i_sequence = gl.sum(m_before.to(gl.int32), 0)
        first_block = gl.max(gl.where(m_before, b_ends, 0), 0)
        begin = gl.load(starts_ptr + i_sequence * stride_starts)
        count = num_tokens - begin
        length = 0
        if i_sequence < num_sequences:
            count = gl.load(starts_ptr + (i_sequence + 1) * stride_starts) - begin
            length = gl.load(lengths_ptr + i_sequence * stride_length)
        first_token = (i_block - first_block) * BLOCK_M
        highest = gl.minimum(length, length - count + first_token + BLOCK_M)
        # One tile at least: where there is nothing to see, its weights are zeros.
        tiles = gl.maximum((highest + BLOCK_N - 1) // BLOCK_N, 1)

        i_kv = (i_head // GROUP).to(gl.int64)
        p_query = query_ptr + i_head * stride_query_head
        p_out = out_ptr + i_head * D
        p_keys = key_ptr + i_kv * stride_key_head
        p_values = value_ptr + i_kv * stride_value_head
        p_table = table_ptr + i_sequence.to(gl.int64) * stride_table

        kind: gl.constexpr = query_ptr.dtype.element_ty
        tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], kind)
        half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], kind)
        query_smem = gl.allocate_shared_memory(kind, [2, ROWS, D], half)
        key_smem = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, D], tile)
        value_smem = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, D], tile)
        barrier: gl.constexpr = mbarrier.MBarrierLayout()
        key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        for stage in gl.static_range(STAGES):
            # Every loading thread arrives when its copies are done; a group arrives once.
            mbarrier.init(key_full.index(stage), count=128)
            mbarrier.init(value_full.index(stage), count=128)
            mbarrier.init(key_empty.index(stage), count=2)
            mbarrier.init(value_empty.index(stage), count=2)
        gl.thread_barrier()

        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        key_smem,
                        value_smem,
                        key_full,
                        key_empty,
                        value_full,
                        value_empty,
                        query_smem.index(0),
                        p_query,
                        p_out,
                        stride_query_token,
                        first_token,
                        count,
                        length,
                        begin,
                        tiles,
                        scale_log2,
                        HEADS,
                        BLOCK_N,
                        D,
                        STAGES,
                    ),
                ),
                (
                    _multiply,
                    (
                        key_smem,
                        value_smem,
                        key_full,
                        key_empty,
                        value_full,
                        value_empty,
                        query_smem.index(1),
                        p_query,
                        p_out,
                        stride_query_token,
                        first_token + ROWS,
                        count,
                        length,
                        begin,
                        tiles,
                        scale_log2,
                        HEADS,
                        BLOCK_N,
                        D,
                        STAGES,
                    ),
                ),
                (
                    _load,
                    (
                        key_smem,
                        value_smem,
                        key_full,
                        key_empty,
                        value_full,
                        value_empty,
                        p_keys,
                        p_values,
                        p_table,
                        tiles,
                        length,
                        stride_key_page,
                        stride_key_slot,
                        stride_value_page,
                        stride_value_slot,
                        PAGE,
                        STEP,
                        BLOCK_N,
                        D,
                        STAGES,
                    ),
                ),
            ],
            [4, 4],
            [232, 40],
        )
