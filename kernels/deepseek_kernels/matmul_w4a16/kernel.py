"""Products of tokens with a 4-bit weight, decoded in the registers of the matrix unit.

The weight is the left operand and its tiles are stored as the threads hold them, so that codes
go from memory to arithmetic without being rearranged; see `reference` for the order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._backend import REGISTERS, multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels._counters import counters
from deepseek_kernels.gate.kernel import silu_mul
from deepseek_kernels.gated_matmul.kernel import gated_matmul
from deepseek_kernels.matmul.kernel import (
    is_compiled,
    prefetch,
    release_successor,
    settle,
    split_count,
    wait_for_predecessor,
)
from deepseek_kernels.matmul_w4a16.reference import TILE_COLUMNS, TILE_ROWS

GROUP = tl.constexpr(128)
TILE = tl.constexpr(8192)
# 128 + code is the bf16 number with the code in its last bits; what a code of zero stands for,
# 128 + zero point, is subtracted exactly.
_DECODE = """
.reg .b32 w;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
shr.u32 w, $4, 8;
lop3.b32 $1, w, 0x000F000F, 0x43004300, 0xEA;
shr.u32 w, $4, 4;
lop3.b32 $2, w, 0x000F000F, 0x43004300, 0xEA;
shr.u32 w, $4, 12;
lop3.b32 $3, w, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 $0, $0, $5;
sub.bf16x2 $1, $1, $6;
sub.bf16x2 $2, $2, $7;
sub.bf16x2 $3, $3, $8;
"""
_SCALE = """
mul.bf16x2 $0, $0, $9;
mul.bf16x2 $1, $1, $10;
mul.bf16x2 $2, $2, $11;
mul.bf16x2 $3, $3, $12;
"""
_DECODE_ONLY = tl.constexpr("{" + _DECODE + "}")
_DECODE_AND_SCALE = tl.constexpr("{" + _DECODE + _SCALE + "}")


@triton.jit
def in_rows(b_flat, ROWS: tl.constexpr):
    """Turn the bytes of tiles into `[ROWS, 128]`, which moves nothing between threads.

    A quarter of every tile is followed by the same quarter of the next tile.
    """
    # Bits of column p and row r: p65, tile, r54, r210, p21, p43, r3, p0.
    b_bits = tl.reshape(b_flat, [4, ROWS // 64, 4, 8, 4, 4, 2, 2])
    b_bits = tl.permute(b_bits, [1, 2, 6, 3, 0, 5, 4, 7])
    return tl.reshape(b_bits, [ROWS, 128])


@triton.jit
def swap_middle(o_bytes):
    """Return the offset at which a byte is stored: of every four the middle two are swapped."""
    return o_bytes // 4 * 4 + o_bytes % 2 * 2 + o_bytes // 2 % 2


@triton.jit
def first_half(b_pairs, dtype: tl.constexpr):
    """Return the first of two 16-bit numbers in each word."""
    return (b_pairs & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def second_half(b_pairs, dtype: tl.constexpr):
    """Return the second of two 16-bit numbers in each word."""
    return ((b_pairs >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def decode(
    b_bytes,
    b_low_zero,
    b_high_zero,
    b_low_scale,
    b_high_scale,
    dtype: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return the values of both halves of a tile, `[rows, 128]`, each one group."""
    if NATIVE:
        b_low_zero = (b_low_zero + 128.0).to(tl.bfloat16)[:, None]
        b_high_zero = (b_high_zero + 128.0).to(tl.bfloat16)[:, None]
        if SCALED:
            b_low, b_high = tl.inline_asm_elementwise(
                _DECODE_AND_SCALE,
                "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
                [
                    b_bytes,
                    b_low_zero,
                    b_high_zero,
                    b_low_scale.to(tl.bfloat16)[:, None],
                    b_high_scale.to(tl.bfloat16)[:, None],
                ],
                (tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            b_low, b_high = tl.inline_asm_elementwise(
                _DECODE_ONLY,
                "=&r,=&r,=&r,=&r,r,r,r,r,r",
                [b_bytes, b_low_zero, b_high_zero],
                (tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
    else:
        b_low = (b_bytes & 15).to(tl.float32) - b_low_zero[:, None]
        b_high = (b_bytes >> 4).to(tl.float32) - b_high_zero[:, None]
        if SCALED:
            b_low *= b_low_scale.to(tl.float32)[:, None]
            b_high *= b_high_scale.to(tl.float32)[:, None]
        b_low = b_low.to(dtype)
        b_high = b_high.to(dtype)
    return b_low, b_high


@triton.jit
def prefetch_tile(
    w_ptr, i_n, first, last, num_blocks, padded_rows, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr
):
    """Fetch the first two blocks of columns, which lie one behind the other, into L2."""
    if OVERLAP:
        TILES: tl.constexpr = BLOCK_N // 64
        o_lines = tl.arange(0, TILES * 2 * TILE // 128) * 128
        o_line_tile = i_n.to(tl.int64) * TILES + o_lines // (2 * TILE)
        p_lines = w_ptr + (o_line_tile * num_blocks + first) * TILE + o_lines % (2 * TILE)
        m_lines = (o_line_tile * 64 < padded_rows) & (first + o_lines % (2 * TILE) // TILE < last)
        prefetch(tl.where(m_lines, p_lines, w_ptr))


@triton.jit
def multiply_blocks(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    i_n,
    i_m,
    first,
    last,
    num_tokens,
    K,
    num_blocks,
    padded_rows,
    stride_x,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return the sum over the blocks `[first, last)` of columns for a tile of the output."""
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, GROUP)
    o_bytes = tl.arange(0, BLOCK_N // 64 * TILE)
    m_m = o_m < num_tokens
    # Tiles are stored along the columns. A quarter of every tile of 64 rows is followed by the
    # same quarter of the next: four warps hold 64 rows, eight hold 128.
    TILES: tl.constexpr = BLOCK_N // 64
    o_tile = i_n.to(tl.int64) * TILES + o_bytes // 2048 % TILES
    o_byte = o_bytes // (2048 * TILES) * 2048 + o_bytes % 2048
    if not NATIVE:
        o_byte = swap_middle(o_byte)
    p_w = w_ptr + o_tile * num_blocks * TILE + o_byte
    m_w = o_tile * 64 < padded_rows
    p_x = x_ptr + o_m.to(tl.int64)[None, :] * stride_x + o_k[:, None]
    m_n = o_n < padded_rows
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_zeros = tl.full([BLOCK_N], 0x0808, tl.int16)
    # The scales of a tile are loaded one turn ahead.
    m_next = m_n & (first < last)
    b_scales = tl.load(scale_ptr + first * padded_rows + o_n, mask=m_next, other=0)
    if zero_ptr is not None:
        b_zeros = tl.load(zero_ptr + first * padded_rows + o_n, mask=m_next, other=0)
    for i_block in tl.range(first, last, num_stages=STAGES):
        i_k = i_block * (2 * GROUP)
        if EVEN:
            b_bytes = tl.load(p_w + i_block * TILE)
            b_low_x = tl.load(p_x + i_k, mask=m_m[None, :], other=0.0)
            b_high_x = tl.load(p_x + i_k + GROUP, mask=m_m[None, :], other=0.0)
        else:
            b_bytes = tl.load(p_w + i_block * TILE, mask=m_w, other=0)
            m_low = (o_k < K - i_k)[:, None] & m_m[None, :]
            m_high = (o_k < K - i_k - GROUP)[:, None] & m_m[None, :]
            b_low_x = tl.load(p_x + i_k, mask=m_low, other=0.0)
            b_high_x = tl.load(p_x + i_k + GROUP, mask=m_high, other=0.0)
        b_low_scale = first_half(b_scales, SCALE_TYPE)
        b_high_scale = second_half(b_scales, SCALE_TYPE)
        b_low_zero = (b_zeros & 255).to(tl.float32)
        b_high_zero = ((b_zeros >> 8) & 255).to(tl.float32)
        m_next = m_n & (i_block + 1 < last)
        o_next = (i_block + 1) * padded_rows + o_n
        b_scales = tl.load(scale_ptr + o_next, mask=m_next, other=0)
        if zero_ptr is not None:
            b_zeros = tl.load(zero_ptr + o_next, mask=m_next, other=0)
        b_low, b_high = decode(
            in_rows(b_bytes, BLOCK_N),
            b_low_zero,
            b_high_zero,
            b_low_scale,
            b_high_scale,
            b_low_x.dtype,
            SCALED,
            NATIVE,
        )
        if SCALED:
            b_acc = tl.dot(b_low, b_low_x, b_acc, input_precision="ieee")
            b_acc = tl.dot(b_high, b_high_x, b_acc, input_precision="ieee")
            b_acc = settle(b_acc, NATIVE)
        else:
            b_part = tl.dot(b_low, b_low_x, input_precision="ieee")
            b_acc += b_part * b_low_scale.to(tl.float32)[:, None]
            b_part = tl.dot(b_high, b_high_x, input_precision="ieee")
            b_acc += b_part * b_high_scale.to(tl.float32)[:, None]
    return b_acc


@triton.jit
def store_tile(
    b_acc,
    bias_ptr,
    out_ptr,
    i_n,
    i_m,
    num_tokens,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store a tile of the output `[BLOCK_N, BLOCK_M]`, its bias added."""
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_out = o_n < N
    if bias_ptr is not None:
        b_acc += tl.load(bias_ptr + o_n, mask=m_out, other=0.0).to(tl.float32)[:, None]
    p_out = out_ptr + o_m.to(tl.int64)[None, :] * N + o_n[:, None]
    m_tile = m_out[:, None] & (o_m < num_tokens)[None, :]
    tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["num_tokens"])
def w4a16_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_tokens,
    N,
    K,
    padded_rows,
    stride_x,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply by tiles: each program sums a tile of the output, or one of equal parts of it."""
    # Tiles of tokens are neighbours, so that the weight is read from memory once.
    i_tile = tl.program_id(0)
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    i_n = i_tile // num_m
    i_m = i_tile % num_m
    i_split = tl.program_id(1)
    num_blocks = tl.cdiv(K, 2 * GROUP)
    per_split = tl.cdiv(num_blocks, SPLITS)
    first = i_split * per_split
    last = min(first + per_split, num_blocks)
    prefetch_tile(w_ptr, i_n, first, last, num_blocks, padded_rows, BLOCK_N, OVERLAP)
    wait_for_predecessor(OVERLAP)
    b_acc = multiply_blocks(
        x_ptr,
        w_ptr,
        scale_ptr,
        zero_ptr,
        i_n,
        i_m,
        first,
        last,
        num_tokens,
        K,
        num_blocks,
        padded_rows,
        stride_x,
        BLOCK_N,
        BLOCK_M,
        SCALE_TYPE,
        SCALED,
        EVEN,
        STAGES,
        NATIVE,
    )
    release_successor(OVERLAP)

    if SPLITS > 1:
        o_part = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        p_part = partial_ptr + i_tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M) + o_part
        tl.store(p_part + i_split * (BLOCK_N * BLOCK_M), b_acc, cache_modifier=".cg")
        # Every thread's part is visible before the arrival is.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + i_tile, 1, sem="acq_rel")
        if arrived != SPLITS - 1:
            return
        tl.store(counter_ptr + i_tile, 0)
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i_part in tl.static_range(SPLITS):
            b_acc += tl.load(p_part + i_part * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    store_tile(b_acc, bias_ptr, out_ptr, i_n, i_m, num_tokens, N, BLOCK_N, BLOCK_M)


@triton.jit
def program_of(i_unit, num_units):
    """Return the program whose share holds a unit."""
    return (((i_unit + 1) * tl.num_programs(0).to(tl.int64) - 1) // num_units).to(tl.int32)


@triton.jit
def share_begin(i_program, num_units):
    """Return the first unit of a program's share; it ends where the next one's begins."""
    return (num_units.to(tl.int64) * i_program // tl.num_programs(0)).to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens"])
def w4a16_shares_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_tokens,
    N,
    K,
    padded_rows,
    stride_x,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply by equal shares, where tiles would leave many multiprocessors idle at the end.

    A unit is a block of columns of a tile, a share a run of units: a program begins inside one
    tile, may do others as a whole, and ends inside another. The last of the programs that share
    a tile adds their parts in their order.
    """
    i_program = tl.program_id(0)
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_blocks = tl.cdiv(K, 2 * GROUP)
    num_units = tl.cdiv(N, BLOCK_N) * num_m * num_blocks
    begin = share_begin(i_program, num_units)
    end = share_begin(i_program + 1, num_units)
    first_tile = begin // num_blocks
    last_tile = (end - 1) // num_blocks
    first = begin % num_blocks
    last = min(end - first_tile * num_blocks, num_blocks)
    i_n = first_tile // num_m
    prefetch_tile(w_ptr, i_n, first, last, num_blocks, padded_rows, BLOCK_N, OVERLAP)
    wait_for_predecessor(OVERLAP)

    o_part = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    for i_tile in tl.range(first_tile, last_tile + 1, num_stages=1):
        i_n = i_tile // num_m
        i_m = i_tile % num_m
        tile_begin = i_tile * num_blocks
        first = max(begin - tile_begin, 0)
        last = min(end - tile_begin, num_blocks)
        b_acc = multiply_blocks(
            x_ptr,
            w_ptr,
            scale_ptr,
            zero_ptr,
            i_n,
            i_m,
            first,
            last,
            num_tokens,
            K,
            num_blocks,
            padded_rows,
            stride_x,
            BLOCK_N,
            BLOCK_M,
            SCALE_TYPE,
            SCALED,
            EVEN,
            STAGES,
            NATIVE,
        )
        is_whole = last - first == num_blocks
        if not is_whole:
            # A share has at most two tiles in part: where it begins and where it ends. Adding
            # them in a function of its own took 8 % longer at 256 tokens.
            slot = 2 * i_program + (tile_begin < begin).to(tl.int32)
            p_part = partial_ptr + slot.to(tl.int64) * (BLOCK_N * BLOCK_M) + o_part
            tl.store(p_part, b_acc, cache_modifier=".cg")
            # Every thread's part is visible before the arrival is.
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + i_tile, 1, sem="acq_rel")
            first_program = program_of(tile_begin, num_units)
            last_program = program_of(tile_begin + num_blocks - 1, num_units)
            is_whole = arrived == last_program - first_program
            if is_whole:
                tl.store(counter_ptr + i_tile, 0)
                b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for i_other in range(first_program, last_program + 1):
                    is_begun = tile_begin < share_begin(i_other, num_units)
                    slot = 2 * i_other + is_begun.to(tl.int32)
                    p_part = partial_ptr + slot.to(tl.int64) * (BLOCK_N * BLOCK_M) + o_part
                    b_acc += tl.load(p_part, cache_modifier=".cg")
        if is_whole:
            store_tile(b_acc, bias_ptr, out_ptr, i_n, i_m, num_tokens, N, BLOCK_N, BLOCK_M)
    release_successor(OVERLAP)


@triton.jit
def dequantize_kernel(
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    padded_rows,
    num_blocks,
    SCALE_TYPE: tl.constexpr,
):
    i_tile = tl.program_id(0).to(tl.int64)
    i_n = i_tile // num_blocks
    i_block = i_tile % num_blocks
    o_bytes = swap_middle(tl.arange(0, TILE))
    b_bytes = in_rows(tl.load(w_ptr + i_tile * TILE + o_bytes), 64)
    o_n = i_n * 64 + tl.arange(0, 64)
    o_k = i_block * (2 * GROUP) + tl.arange(0, GROUP)
    b_scales = tl.load(scale_ptr + i_block * padded_rows + o_n)
    b_zeros = tl.full([64], 0x0808, tl.int16)
    if zero_ptr is not None:
        b_zeros = tl.load(zero_ptr + i_block * padded_rows + o_n)
    b_low, b_high = decode(
        b_bytes,
        (b_zeros & 255).to(tl.float32),
        ((b_zeros >> 8) & 255).to(tl.float32),
        first_half(b_scales, SCALE_TYPE),
        second_half(b_scales, SCALE_TYPE),
        out_ptr.dtype.element_ty,
        True,
        False,
    )
    p_out = out_ptr + o_n[:, None] * K + o_k[None, :]
    m_n = (o_n < N)[:, None]
    tl.store(p_out, b_low, mask=m_n & (o_k < K)[None, :])
    tl.store(p_out + GROUP, b_high, mask=m_n & (o_k + GROUP < K)[None, :])


def matmul_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    out_features: int,
) -> Tensor:
    """Launch the kernel for `reference.matmul_w4a16`.

    From the tokens on at which decoding once is cheaper, the weight is decoded to the type of
    `x` and the library multiplies.
    """
    tokens, columns = x.shape
    config = _config(x, out_features)
    if config.get("library"):
        values = dequantize(weight, scale, zero_point, x.dtype, out_features, columns)
        return torch.nn.functional.linear(x, values, None if bias is None else bias.to(x.dtype))
    out = torch.empty((tokens, out_features), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_n = config["block_n"]
    block_m = min(max(16, triton.next_power_of_2(tokens)), config["block_m"])
    tiles = triton.cdiv(out_features, block_n) * triton.cdiv(tokens, block_m)
    blocks = triton.cdiv(columns, TILE_COLUMNS)
    per_sm, warps = config["per_sm"], config["num_warps"]
    padded_rows = weight.shape[0] * TILE_ROWS
    overlap = is_compiled()
    options: dict[str, Any] = {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "SCALE_TYPE": tl.bfloat16 if scale.dtype == torch.bfloat16 else tl.float16,
        "SCALED": bool(config.get("scaled")),
        "EVEN": padded_rows % block_n == 0 and columns % TILE_COLUMNS == 0,
        "STAGES": config["num_stages"],
        "NATIVE": overlap and x.dtype == torch.bfloat16,
        "OVERLAP": overlap,
        "num_warps": warps,
        "launch_pdl": overlap,
    }
    if config.get("equal"):
        programs = min(per_sm * multiprocessors(x.device), max(1, tiles * blocks // 2))
        kernel, num_parts = w4a16_shares_kernel[(programs,)], 2 * programs
        # All programs have to run at once, or their shares are not equal in time.
        options["maxnreg"] = min(255, REGISTERS // (32 * warps * per_sm) // 8 * 8)
    else:
        splits = split_count(x.device, tiles, blocks, per_sm)
        kernel, num_parts = w4a16_kernel[(tiles, splits)], tiles * splits if splits > 1 else 0
        options["SPLITS"] = splits
    partial = counter = None
    if num_parts:
        elements = num_parts * block_n * block_m
        partial = torch.empty(elements, dtype=torch.float32, device=x.device)
        counter = counters(x.device, tiles)
    kernel(
        x,
        weight,
        scale.view(torch.int32),
        None if zero_point is None else zero_point.view(torch.int16),
        bias,
        out,
        partial,
        counter,
        tokens,
        out_features,
        columns,
        padded_rows,
        x.stride(0),
        **options,
    )
    return out


def gated_matmul_w4a16(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, out_features: int
) -> Tensor:
    """Launch the kernels for `reference.gated_matmul_w4a16`.

    A weight that is decoded once is multiplied and gated as a plain one.
    """
    rows = 2 * out_features
    if _config(x, rows).get("library"):
        values = dequantize(weight, scale, zero_point, x.dtype, rows, x.shape[1])
        return gated_matmul(x, values)
    return silu_mul(matmul_w4a16(x, weight, scale, zero_point, None, rows))


def _config(x: Tensor, out_features: int) -> dict[str, int]:
    return pick("matmul_w4a16", m=x.shape[0], n=out_features, k=x.shape[1])


def dequantize(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype,
    out_features: int,
    in_features: int,
) -> Tensor:
    """Return the values `[out_features, in_features]` of a packed weight."""
    out = torch.empty((out_features, in_features), dtype=dtype, device=weight.device)
    row_tiles, column_tiles, _ = weight.shape
    dequantize_kernel[(row_tiles * column_tiles,)](
        weight,
        scale.view(torch.int32),
        None if zero_point is None else zero_point.view(torch.int16),
        out,
        out_features,
        in_features,
        row_tiles * TILE_ROWS,
        column_tiles,
        SCALE_TYPE=tl.bfloat16 if scale.dtype == torch.bfloat16 else tl.float16,
        num_warps=4,
    )
    return out
