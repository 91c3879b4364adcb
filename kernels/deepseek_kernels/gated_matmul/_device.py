"""The product of many tokens on Hopper with specialised warps: one loads tiles, eight multiply.

A program of each multiprocessor takes every so many-th tile of 128 tokens by `BLOCK_N` columns.
Two groups of four warps have 64 of the tokens each and share the tiles of the gate's and the up
projection's rows that the copy engine brings to shared memory; it is ahead by up to `STAGES`
steps, and into the next tile while this one is gated and stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

TOKENS = gl.constexpr(64)
"""Of one group of multiplying warps."""

BLOCK_M = gl.constexpr(128)
"""Tokens of a tile."""


@gluon.jit
def _place(i_tile, num_m, num_n, GROUP_M: gl.constexpr):
    """Return where a tile is; `GROUP_M` rows of tiles are walked together and share their reads."""
    i_group = i_tile // (GROUP_M * num_n)
    group_m = gl.minimum(num_m - i_group * GROUP_M, GROUP_M)
    i_rest = i_tile % (GROUP_M * num_n)
    return i_group * GROUP_M + i_rest % group_m, i_rest // group_m


@gluon.jit
def _load(
    x_desc,
    w_desc,
    first_smem,
    second_smem,
    gate_smem,
    up_smem,
    full,
    empty,
    num_m,
    num_n,
    N,
    num_steps,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy what the steps of all tiles multiply, as stages become empty."""
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_shape[1]
    STEP_BYTES: gl.constexpr = 2 * (x_desc.block_type.nbytes + w_desc.block_type.nbytes)
    turn = 0
    for i_tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        i_m, i_n = _place(i_tile, num_m, num_n, GROUP_M)
        token, row = i_m * BLOCK_M, i_n * BLOCK_N
        for i_step in range(num_steps):
            stage = turn % STAGES
            ready = full.index(stage)
            column = i_step * BLOCK_K
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(ready, STEP_BYTES)
            tma.async_copy_global_to_shared(x_desc, [token, column], ready, first_smem.index(stage))
            tma.async_copy_global_to_shared(w_desc, [row, column], ready, gate_smem.index(stage))
            tma.async_copy_global_to_shared(w_desc, [N + row, column], ready, up_smem.index(stage))
            tma.async_copy_global_to_shared(
                x_desc, [token + TOKENS, column], ready, second_smem.index(stage)
            )
            turn += 1


@gluon.jit
def _multiply(
    out_desc,
    x_smem,
    gate_smem,
    up_smem,
    out_smem,
    full,
    empty,
    num_m,
    num_n,
    num_steps,
    first_token,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Gate the products of 64 tokens of each tile, those from `first_token` on."""
    BLOCK_N: gl.constexpr = out_desc.block_shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    turn = 0
    for i_tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        i_m, i_n = _place(i_tile, num_m, num_n, GROUP_M)
        b_gate = gl.full([TOKENS, BLOCK_N], 0.0, gl.float32, layout)
        b_up = gl.full([TOKENS, BLOCK_N], 0.0, gl.float32, layout)
        for i_step in range(num_steps):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), turn // STAGES & 1)
            b_x = x_smem.index(stage)
            b_gate = hopper.warpgroup_mma(
                b_x, gate_smem.index(stage).permute([1, 0]), b_gate, is_async=True
            )
            b_up = hopper.warpgroup_mma(
                b_x, up_smem.index(stage).permute([1, 0]), b_up, is_async=True
            )
            # The two products of the step before are done, and its stage is read.
            b_gate, b_up = hopper.warpgroup_mma_wait(2, deps=[b_gate, b_up])
            if i_step > 0:
                gl.thread_barrier()
                mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
            turn += 1
        b_gate, b_up = hopper.warpgroup_mma_wait(0, deps=[b_gate, b_up])
        gl.thread_barrier()
        mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)

        # A square of 1 / sqrt takes two instructions where a division takes six.
        b_root = gl.rsqrt(1.0 + gl.exp(-b_gate))
        b_out = b_gate * (b_root * b_root) * b_up
        tma.store_wait(0)
        gl.thread_barrier()
        out_smem.store(b_out.to(out_desc.dtype))
        hopper.fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(
            out_desc, [i_m * BLOCK_M + first_token, i_n * BLOCK_N], out_smem
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens"])
def gated_matmul_kernel(
    x_desc,
    w_desc,
    out_desc,
    num_tokens,
    N,
    K,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    kind: gl.constexpr = x_desc.dtype
    BLOCK_N: gl.constexpr = w_desc.block_shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_shape[1]
    num_m = gl.cdiv(num_tokens, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    num_steps = gl.cdiv(K, BLOCK_K)

    first_smem = gl.allocate_shared_memory(kind, [STAGES, TOKENS, BLOCK_K], x_desc.layout)
    second_smem = gl.allocate_shared_memory(kind, [STAGES, TOKENS, BLOCK_K], x_desc.layout)
    gate_smem = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    up_smem = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    out_smem = gl.allocate_shared_memory(kind, [2, TOKENS, BLOCK_N], out_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        # Each group of multiplying warps arrives once.
        mbarrier.init(empty.index(stage), count=2)
    gl.thread_barrier()

    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_desc,
                    first_smem,
                    gate_smem,
                    up_smem,
                    out_smem.index(0),
                    full,
                    empty,
                    num_m,
                    num_n,
                    num_steps,
                    0,
                    GROUP_M,
                    STAGES,
                ),
            ),
            (
                _multiply,
                (
                    out_desc,
                    second_smem,
                    gate_smem,
                    up_smem,
                    out_smem.index(1),
                    full,
                    empty,
                    num_m,
                    num_n,
                    num_steps,
                    TOKENS,
                    GROUP_M,
                    STAGES,
                ),
            ),
            (
                _load,
                (
                    x_desc,
                    w_desc,
                    first_smem,
                    second_smem,
                    gate_smem,
                    up_smem,
                    full,
                    empty,
                    num_m,
                    num_n,
                    N,
                    num_steps,
                    GROUP_M,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
