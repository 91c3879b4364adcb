"""MLA decode on Hopper with specialised warps, for blocks of 64 query heads.

A tile of 64 tokens lies in shared memory once and serves as keys and as values. Four groups of
four warps pass it on:

    loading     copies tiles, each half of the latents' 512 columns on its own
    scoring     turns a tile into weights, and the weights' maxima into a factor of earlier sums
    adding 0    sums the columns [0, 256) by the weights
    adding 1    sums the columns [256, 512)

so that the softmax of a tile runs beside the sums of the tile before it, and no group holds
more sums than its registers do. Tensors of one group never meet another's: they speak through
barriers in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from deepseek_kernels._gluon import add, exp2

ROWS = gl.constexpr(64)
"""Query heads of a block."""

TOKENS = gl.constexpr(64)
"""Of a tile. Queries and two tiles fill the shared memory."""

STAGES = gl.constexpr(2)

GRANULE = gl.constexpr(32)
"""Tokens that an adding group frees, and the loading group copies, together."""

GRANULES = gl.constexpr(2)

HALF = gl.constexpr(256)
"""Latent columns of an adding group: 128 registers of a thread."""

ROPE = gl.constexpr(64)


@gluon.jit
def _item(p_length, item_begin, tile, end):
    """Return an item's length, its tiles, and how many from `tile` on are before `end`."""
    length = gl.load(p_length)
    item_tiles = gl.maximum((length + TOKENS - 1) // TOKENS, 1)
    return length, item_tiles, gl.minimum(end, item_begin + item_tiles) - tile


@gluon.jit
def _pointers(
    p_columns,
    p_table,
    start,
    length,
    stride_page,
    PAGE: gl.constexpr,
    SLOT: gl.constexpr,
    D: gl.constexpr,
):
    """Return where `D` columns of the tokens `[start, start + GRANULE)` lie.

    A warp takes tokens of one page, so that its threads have one address and the rest follow.
    """
    STEP: gl.constexpr = GRANULE // 4
    lanes: gl.constexpr = D // 8
    flat: gl.constexpr = gl.BlockedLayout(
        [STEP * lanes // 32, 8], [32 // lanes, lanes], [4, 1], [1, 0]
    )
    layout: gl.constexpr = gl.BlockedLayout(
        [1, STEP * lanes // 32, 8], [1, 32 // lanes, lanes], [4, 1, 1], [2, 1, 0]
    )
    steps: gl.constexpr = gl.SliceLayout(2, layout)
    o_step = start + STEP * gl.arange(0, 4, layout=gl.SliceLayout(1, steps))
    o_slot = gl.arange(0, STEP, layout=gl.SliceLayout(0, steps))
    b_page = gl.load(p_table + o_step // PAGE, mask=o_step < length, other=0)
    o_first = b_page.to(gl.int64) * stride_page + (o_step % PAGE) * SLOT
    o_row = gl.expand_dims(o_first, 1) + gl.expand_dims(o_slot * SLOT, 0)
    o_row = gl.convert_layout(gl.reshape(o_row, [GRANULE]), gl.SliceLayout(1, flat))
    o_row = gl.multiple_of(o_row, [8])
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, flat))
    return p_columns + (gl.expand_dims(o_row, 1) + gl.expand_dims(o_d, 0))


@gluon.jit
def _load(
    latent_smem,
    rope_smem,
    latent_full,
    latent_empty,
    cache_ptr,
    table_ptr,
    lengths_ptr,
    i_item,
    item_begin,
    tile,
    end,
    stride_page,
    stride_table,
    stride_length,
    PAGE: gl.constexpr,
    SLOT: gl.constexpr,
):
    """Copy the latents of the items tile by tile; the rotary part comes with the second half."""
    wide: gl.constexpr = gl.BlockedLayout([GRANULE // 4, 8], [1, 32], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([GRANULE // 16, 8], [4, 8], [4, 1], [1, 0])
    o_wide = gl.arange(0, GRANULE, layout=gl.SliceLayout(1, wide))
    o_narrow = gl.arange(0, GRANULE, layout=gl.SliceLayout(1, narrow))
    i_tile = 0
    while tile < end:
        p_length = lengths_ptr + i_item * stride_length
        length, item_tiles, count = _item(p_length, item_begin, tile, end)
        p_table = table_ptr + i_item.to(gl.int64) * stride_table
        first = (tile - item_begin) * TOKENS
        for start in range(first, first + count * TOKENS, TOKENS):
            stage = i_tile % STAGES
            phase = (i_tile // STAGES & 1) ^ 1
            # Jitted code takes no annotation for a tuple that grows.
            pointers = ()
            rope_pointers = ()
            for granule in gl.static_range(GRANULES):
                token = start + granule * GRANULE
                page = (p_table, token, length, stride_page, PAGE, SLOT)
                pointers += (_pointers(cache_ptr, *page, HALF),)  # type: ignore[assignment]
                rope_pointers += (_pointers(cache_ptr + 2 * HALF, *page, ROPE),)  # type: ignore[assignment]
            for granule in gl.static_range(GRANULES):
                left = length - (start + granule * GRANULE)
                m_wide = gl.expand_dims(o_wide < left, 1)
                m_narrow = gl.expand_dims(o_narrow < left, 1)
                for half in gl.static_range(2):
                    place = 2 * stage + half
                    mbarrier.wait(latent_empty.index(place * GRANULES + granule), phase)
                    async_copy.async_copy_global_to_shared(
                        latent_smem.index(place).slice(granule * GRANULE, GRANULE),
                        pointers[granule] + half * HALF,
                        mask=m_wide,
                    )
                    if half == 1:
                        async_copy.async_copy_global_to_shared(
                            rope_smem.index(stage).slice(granule * GRANULE, GRANULE),
                            rope_pointers[granule],
                            mask=m_narrow,
                        )
                    if granule == GRANULES - 1:
                        async_copy.mbarrier_arrive(latent_full.index(place), increment_count=False)
            i_tile += 1
        tile += count
        item_begin += item_tiles
        i_item += 1


@gluon.jit
def _copy_query(smem, p_query, heads, stride_head, D: gl.constexpr):
    """Copy `D` columns of the block's queries; those from `heads` on are zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    pointers = p_query + (gl.expand_dims(o_row * stride_head, 1) + gl.expand_dims(o_d, 0))
    smem.store(gl.load(pointers, mask=gl.expand_dims(o_row < heads, 1), other=0.0))


@gluon.jit
def _score(
    query_smem,
    query_rope_smem,
    latent_smem,
    rope_smem,
    weights_smem,
    factor_smem,
    latent_full,
    weights_full,
    weights_empty,
    query_ptr,
    stats_ptr,
    lengths_ptr,
    i_block,
    i_program,
    i_item,
    item_begin,
    tile,
    end,
    scale_log2,
    stride_query_sequence,
    stride_query_head,
    stride_length,
    HEADS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Hand on the weights of tile after tile, and what earlier sums are multiplied by."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    b_none = gl.full([ROWS, TOKENS], 0.0, gl.float32, layout)
    o_n = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))

    i_tile = 0
    while tile < end:
        p_length = lengths_ptr + i_item * stride_length
        length, item_tiles, count = _item(p_length, item_begin, tile, end)
        first = (tile - item_begin) * TOKENS

        b_max = gl.full([ROWS], float("-inf"), gl.float32, rows)
        b_sum = gl.full([ROWS], 0.0, gl.float32, rows)
        p_query = query_ptr + i_item.to(gl.int64) * stride_query_sequence
        p_query += i_block * ROWS * stride_query_head
        heads = HEADS - i_block * ROWS
        # Every thread is past the scores of the item before.
        gl.thread_barrier()
        for half in gl.static_range(2):
            smem = query_smem.index(half)
            _copy_query(smem, p_query + half * HALF, heads, stride_query_head, HALF)
        _copy_query(query_rope_smem, p_query + 2 * HALF, heads, stride_query_head, ROPE)
        hopper.fence_async_shared()
        gl.thread_barrier()
        for start in range(first, first + count * TOKENS, TOKENS):
            stage = i_tile % STAGES
            phase = i_tile // STAGES & 1
            mbarrier.wait(latent_full.index(2 * stage), phase)
            hopper.fence_async_shared()
            b_scores = hopper.warpgroup_mma(
                query_smem.index(0),
                latent_smem.index(2 * stage).permute([1, 0]),
                b_none,
                use_acc=False,
                is_async=True,
            )
            mbarrier.wait(latent_full.index(2 * stage + 1), phase)
            hopper.fence_async_shared()
            b_scores = hopper.warpgroup_mma(
                query_smem.index(1),
                latent_smem.index(2 * stage + 1).permute([1, 0]),
                b_scores,
                is_async=True,
            )
            b_scores = hopper.warpgroup_mma(
                query_rope_smem, rope_smem.index(stage).permute([1, 0]), b_scores, is_async=True
            )
            b_scores = hopper.warpgroup_mma_wait(0, deps=[b_scores])

            if start + TOKENS > length:
                b_scores = gl.where(
                    gl.expand_dims(start + o_n < length, 0), b_scores, float("-inf")
                )
            b_new = gl.maximum(b_max, gl.max(b_scores, 1) * scale_log2)
            b_safe = gl.where(b_new == float("-inf"), 0.0, b_new)
            b_weights = exp2(b_scores * scale_log2 - gl.expand_dims(b_safe, 1))
            b_old = exp2(b_max - b_safe)
            b_sum = b_sum * b_old + gl.sum(b_weights, 1)
            b_max = b_new

            mbarrier.wait(weights_empty, i_tile & 1 ^ 1)
            weights_smem.store(b_weights.to(weights_smem.dtype))
            factor_smem.index(0).store(b_old)
            factor_smem.index(1).store(b_sum)
            hopper.fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(weights_full, count=1)
            i_tile += 1

        if count < item_tiles:
            part = ((i_program + i_item) * BLOCKS + i_block).to(gl.int64)
            p_stats = stats_ptr + part * (2 * ROWS) + gl.arange(0, ROWS, layout=rows)
            gl.store(p_stats, b_max)
            gl.store(p_stats + ROWS, b_sum)
        tile += count
        item_begin += item_tiles
        i_item += 1


@gluon.jit
def _add(
    latent_smem,
    weights_smem,
    factor_smem,
    latent_empty,
    weights_full,
    weights_empty,
    out_ptr,
    part_ptr,
    lengths_ptr,
    i_block,
    i_program,
    i_item,
    item_begin,
    tile,
    end,
    stride_length,
    I_HALF: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Sum half of the latents' columns by the weights, and write an item's sums."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 2, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    WIDTH: gl.constexpr = 2 * HALF
    o_row = gl.arange(0, ROWS, layout=rows)
    o_d = I_HALF * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    o_place = gl.expand_dims(o_row * WIDTH, 1) + gl.expand_dims(o_d, 0)

    i_tile = 0
    while tile < end:
        p_length = lengths_ptr + i_item * stride_length
        length, item_tiles, count = _item(p_length, item_begin, tile, end)

        b_acc = gl.full([ROWS, HALF], 0.0, gl.float32, layout)
        b_sum = gl.full([ROWS], 0.0, gl.float32, rows)
        for _ in range(count):
            stage = i_tile % STAGES
            mbarrier.wait(weights_full, i_tile & 1)
            b_old = factor_smem.index(0).load(rows)
            b_sum = factor_smem.index(1).load(rows)
            b_acc *= gl.expand_dims(b_old, 1)
            values = latent_smem.index(2 * stage + I_HALF)
            for granule in gl.static_range(GRANULES):
                b_acc = hopper.warpgroup_mma(
                    weights_smem.slice(granule * GRANULE, GRANULE, dim=1),
                    values.slice(granule * GRANULE, GRANULE),
                    b_acc,
                    is_async=True,
                )
            for granule in gl.static_range(GRANULES):
                b_acc = hopper.warpgroup_mma_wait(GRANULES - 1 - granule, deps=[b_acc])
                gl.thread_barrier()
                place = (2 * stage + I_HALF) * GRANULES + granule
                mbarrier.arrive(latent_empty.index(place), count=1)
            mbarrier.arrive(weights_empty, count=1)
            i_tile += 1

        if count == item_tiles:
            b_total = gl.expand_dims(b_sum, 1)
            b_out = gl.where(b_total == 0.0, 0.0, b_acc / b_total).to(out_ptr.dtype.element_ty)
            p_out = out_ptr + (i_item.to(gl.int64) * HEADS + i_block * ROWS) * WIDTH
            gl.store(p_out + o_place, b_out, mask=gl.expand_dims(i_block * ROWS + o_row < HEADS, 1))
        else:
            part = ((i_program + i_item) * BLOCKS + i_block).to(gl.int64)
            gl.store(part_ptr + part * (ROWS * WIDTH) + o_place, b_acc)
        tile += count
        item_begin += item_tiles
        i_item += 1


@gluon.jit(do_not_specialize=["num_rows"])
def specialized_mla_decode_kernel(
    query_ptr,
    cache_ptr,
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
    stride_table,
    stride_length,
    PAGE: gl.constexpr,
    SLOT: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCKS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
):
    i_block = gl.program_id(0)
    i_program = gl.program_id(1)

    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_line = gl.arange(0, BLOCK_ROWS, layout=line)
    m_line = o_line < num_rows
    b_length = gl.load(lengths_ptr + o_line * stride_length, mask=m_line, other=0)
    b_tiles = gl.where(m_line, gl.maximum((b_length + TOKENS - 1) // TOKENS, 1), 0)
    b_ends = gl.associative_scan(b_tiles, 0, add)
    total = gl.max(b_ends, 0)
    num_programs = gl.minimum(gl.num_programs(1), total)
    i_first = gl.minimum(i_program, num_programs)
    tile = (i_first.to(gl.int64) * total // num_programs).to(gl.int32)
    i_next = gl.minimum(i_program + 1, num_programs)
    end = (i_next.to(gl.int64) * total // num_programs).to(gl.int32)
    m_before = b_ends <= tile
    i_item = gl.sum(m_before.to(gl.int32), 0)
    item_begin = gl.max(gl.where(m_before, b_ends, 0), 0)

    kind: gl.constexpr = query_ptr.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], kind)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROPE], kind)
    tile_wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HALF], kind)
    tile_narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, ROPE], kind)
    # Swizzled within granules, so that each is a matrix of its own.
    scores: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, GRANULE], kind)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query_smem = gl.allocate_shared_memory(kind, [2, ROWS, HALF], wide)
    query_rope_smem = gl.allocate_shared_memory(kind, [ROWS, ROPE], narrow)
    latent_smem = gl.allocate_shared_memory(kind, [2 * STAGES, TOKENS, HALF], tile_wide)
    rope_smem = gl.allocate_shared_memory(kind, [STAGES, TOKENS, ROPE], tile_narrow)
    weights_smem = gl.allocate_shared_memory(kind, [ROWS, TOKENS], scores)
    factor_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], plain)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    latent_full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], barrier)
    latent_empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES * GRANULES, 1], barrier)
    weights_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    weights_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    # Every loading thread arrives when its copies are done; other groups arrive once.
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(latent_full.index(i), count=128)
    for i in gl.static_range(2 * STAGES * GRANULES):
        # Whoever adds a half was given weights, so its scores are done.
        mbarrier.init(latent_empty.index(i), count=1)
    mbarrier.init(weights_full, count=1)
    mbarrier.init(weights_empty, count=2)
    gl.thread_barrier()

    gl.warp_specialize(
        [
            (
                _score,
                (
                    query_smem,
                    query_rope_smem,
                    latent_smem,
                    rope_smem,
                    weights_smem,
                    factor_smem,
                    latent_full,
                    weights_full,
                    weights_empty,
                    query_ptr,
                    stats_ptr,
                    lengths_ptr,
                    i_block,
                    i_program,
                    i_item,
                    item_begin,
                    tile,
                    end,
                    scale_log2,
                    stride_query_sequence,
                    stride_query_head,
                    stride_length,
                    HEADS,
                    BLOCKS,
                ),
            ),
            (
                _add,
                (
                    latent_smem,
                    weights_smem,
                    factor_smem,
                    latent_empty,
                    weights_full,
                    weights_empty,
                    out_ptr,
                    part_ptr,
                    lengths_ptr,
                    i_block,
                    i_program,
                    i_item,
                    item_begin,
                    tile,
                    end,
                    stride_length,
                    0,
                    HEADS,
                    BLOCKS,
                ),
            ),
            (
                _add,
                (
                    latent_smem,
                    weights_smem,
                    factor_smem,
                    latent_empty,
                    weights_full,
                    weights_empty,
                    out_ptr,
                    part_ptr,
                    lengths_ptr,
                    i_block,
                    i_program,
                    i_item,
                    item_begin,
                    tile,
                    end,
                    stride_length,
                    1,
                    HEADS,
                    BLOCKS,
                ),
            ),
            (
                _load,
                (
                    latent_smem,
                    rope_smem,
                    latent_full,
                    latent_empty,
                    cache_ptr,
                    table_ptr,
                    lengths_ptr,
                    i_item,
                    item_begin,
                    tile,
                    end,
                    stride_page,
                    stride_table,
                    stride_length,
                    PAGE,
                    SLOT,
                ),
            ),
        ],
        [4, 4, 4],
        [168, 168, 48],
    )
