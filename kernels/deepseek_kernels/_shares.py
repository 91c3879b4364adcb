"""Equal shares of a product for programs that run at once: tiles are cut where a share ends.

A unit is a block of columns of a tile of the output, and a share is a run of units. The last of
the programs that share a tile adds their parts in their order, so that the result is the same in
every run.
"""

import torch
import triton
import triton.language as tl

from deepseek_kernels._backend import multiprocessors

REGISTERS = 65536
"""Of a multiprocessor, 32 bits each."""


@triton.jit
def program_of(i_unit, num_units):
    """Return the program whose share holds a unit."""
    return (((i_unit + 1) * tl.num_programs(0).to(tl.int64) - 1) // num_units).to(tl.int32)


@triton.jit
def share_begin(i_program, num_units):
    """Return the first unit of a program's share; it ends where the next one's begins."""
    return (num_units.to(tl.int64) * i_program // tl.num_programs(0)).to(tl.int32)


@triton.jit
def part_of(i_program, is_begun, partial_ptr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return where a program keeps its part of a tile.

    A share has at most two tiles in part: one that begins before it and one that ends after it.
    """
    slot = 2 * i_program + is_begun.to(tl.int32)
    o_part = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return partial_ptr + slot.to(tl.int64) * (BLOCK_N * BLOCK_M) + o_part


@triton.jit
def add_shares(b_sum, partial_ptr, counter_ptr, i_tile, first, last, num_blocks, num_units):
    """Return the sum of a tile and true, or a part of it and false: another program adds it.

    `b_sum` is this program's sum over the blocks `[first, last)` of the tile's `num_blocks`.
    """
    BLOCK_N: tl.constexpr = b_sum.shape[0]
    BLOCK_M: tl.constexpr = b_sum.shape[1]
    is_sum = last - first == num_blocks
    if not is_sum:
        p_part = part_of(tl.program_id(0), first > 0, partial_ptr, BLOCK_N, BLOCK_M)
        tl.store(p_part, b_sum, cache_modifier=".cg")
        # Every thread's part is visible before the arrival is.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + i_tile, 1, sem="acq_rel")
        tile_begin = i_tile * num_blocks
        first_program = program_of(tile_begin, num_units)
        last_program = program_of(tile_begin + num_blocks - 1, num_units)
        is_sum = arrived == last_program - first_program
        if is_sum:
            tl.store(counter_ptr + i_tile, 0)
            b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for i_other in range(first_program, last_program + 1):
                is_begun = tile_begin < share_begin(i_other, num_units)
                p_part = part_of(i_other, is_begun, partial_ptr, BLOCK_N, BLOCK_M)
                b_sum += tl.load(p_part, cache_modifier=".cg")
    return b_sum, is_sum


def share_count(device: torch.device, units: int, per_sm: int) -> int:
    """Return how many programs to share units among, every one with two of them or more."""
    return max(1, min(per_sm * multiprocessors(device), units // 2))


def most_registers(per_sm: int, warps: int) -> int:
    """Return the registers of a thread with which `per_sm` programs run at once.

    If not all programs do, their shares are not equal in time.
    """
    return min(255, REGISTERS // (32 * warps * per_sm) // 8 * 8)
