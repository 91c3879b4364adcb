"""Products of few tokens with a large weight: the weight is read once and at full bandwidth.

For one token each program reduces whole rows of the weight on the plain arithmetic units. For
more, the weight is the left operand of the matrix unit, so that its rows and not the few tokens
are padded to 64. A program may take only a part of the sum; the last of the programs that share
a tile adds the parts in their order, so that the result is the same in every run.

Launches overlap their predecessor (programmatic dependent launch): before they wait for it they
fetch the beginning of their weight into the L2 cache. Weights are therefore expected not to be
written by a kernel that lets its successor start early; no kernel of this package does that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._backend import multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels._counters import counters

SCALE_SIZE = tl.constexpr(128)
"""Columns, and rows of a weight, that share a scale where scales are per block."""

# Four codes to four bf16: exponent and mantissa are moved in place, which leaves a factor of
# 2^-120, and the multiplication by 2^120 is exact. Triton's own cast goes through fp32.
_FP8_TO_BF16 = tl.constexpr("""
{
.reg .b32 even, odd, sign, power;
mov.b32 power, 0x7B807B80;
prmt.b32 even, $2, 0, 0x1404;
prmt.b32 odd, $2, 0, 0x3424;
and.b32 sign, even, 0x80008000;
shr.u32 even, even, 4;
lop3.b32 even, even, 0x07F007F0, sign, 0xEA;
mul.bf16x2 $0, even, power;
and.b32 sign, odd, 0x80008000;
shr.u32 odd, odd, 4;
lop3.b32 odd, odd, 0x07F007F0, sign, 0xEA;
mul.bf16x2 $1, odd, power;
}
""")

# Four int8 to four fp32: a byte plus 128 as the last bits of 2^23 is the number 2^23 + 128 + code.
_INT8_TO_FP32 = tl.constexpr("""
{
.reg .b32 bytes, magic;
.reg .f32 base;
xor.b32 bytes, $4, 0x80808080;
mov.b32 magic, 0x4B000000;
mov.b32 base, 0x4B000080;
prmt.b32 $0, bytes, magic, 0x7440;
prmt.b32 $1, bytes, magic, 0x7441;
prmt.b32 $2, bytes, magic, 0x7442;
prmt.b32 $3, bytes, magic, 0x7443;
sub.f32 $0, $0, base;
sub.f32 $1, $1, base;
sub.f32 $2, $2, base;
sub.f32 $3, $3, base;
}
""")

_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@triton.jit
def wait_for_predecessor(OVERLAP: tl.constexpr):
    """Block until what the previous kernel of the stream wrote can be read."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_successor(OVERLAP: tl.constexpr):
    """Let the next kernel start its programs as this one's leave the processors."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(p_lines):
    """Bring the cache lines at these addresses into the L2 cache without waiting."""
    tl.inline_asm_elementwise(
        _PREFETCH, "=r,l", [p_lines.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def decode(b_codes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Turn 8-bit weights into the type of the activations, exactly."""
    if b_codes.dtype == tl.float8e4nv and dtype == tl.bfloat16 and NATIVE:
        b_values = tl.inline_asm_elementwise(
            _FP8_TO_BF16, "=r,=r,r", [b_codes], tl.bfloat16, is_pure=True, pack=4
        )
    elif b_codes.dtype == tl.float8e4nv and dtype == tl.float16:
        b_values = b_codes.to(tl.float16)
    elif b_codes.dtype == dtype:
        b_values = b_codes
    else:
        b_values = b_codes.to(tl.float32).to(dtype)
    return b_values


@triton.jit
def settle(b_acc, NATIVE: tl.constexpr):
    """Use a sum, so that the matrix unit has read its operands before they are decoded anew.

    Triton 3.6 lets the last product of a turn run into the next one, which overwrites the
    registers that the product still reads.
    """
    if NATIVE:
        b_acc = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [b_acc], tl.float32, is_pure=False, pack=1
        )
    return b_acc


@triton.jit
def decode_fp32(b_codes, NATIVE: tl.constexpr):
    """Turn weights into fp32, exactly."""
    if b_codes.dtype == tl.int8 and NATIVE:
        b_values = tl.inline_asm_elementwise(
            _INT8_TO_FP32, "=&f,=&f,=&f,=&f,r", [b_codes], tl.float32, is_pure=True, pack=4
        )
    else:
        b_values = b_codes.to(tl.float32)
    return b_values


@triton.jit
def gelu(b_values, TANH: tl.constexpr, FAST: tl.constexpr):
    """Return `x * Phi(x)`, or its approximation by tanh that some models are trained with.

    `FAST` takes the tanh of the hardware, right to 11 bits: enough for a bf16 result.
    """
    if TANH:
        b_inner = b_values * (0.7978845608028654 + 0.035677408136300125 * b_values * b_values)
        if FAST:
            b_tanh = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=f,f", [b_inner], tl.float32, is_pure=True, pack=1
            )
            b_phi = 0.5 + 0.5 * b_tanh
        else:
            b_phi = tl.sigmoid(2.0 * b_inner)
    else:
        # erf by Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7, without branches.
        b_z = tl.abs(b_values) * 0.7071067811865476
        b_t = 1.0 / (1.0 + 0.3275911 * b_z)
        b_poly = 1.061405429 * b_t - 1.453152027
        b_poly = b_poly * b_t + 1.421413741
        b_poly = b_poly * b_t - 0.284496736
        b_poly = b_poly * b_t + 0.254829592
        b_tail = 0.5 * b_poly * b_t * tl.exp(-b_z * b_z)
        b_phi = tl.where(b_values < 0, b_tail, 1.0 - b_tail)
    return b_values * b_phi


@triton.jit
def gemv_kernel(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    stride_w,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < N
    p_w = w_ptr + o_n.to(tl.int64)[:, None] * stride_w + o_k[None, :]
    if OVERLAP:
        BYTES: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        o_lines = tl.arange(0, BLOCK_K * BYTES // 128) * (128 // BYTES)
        p_lines = w_ptr + o_n.to(tl.int64)[:, None] * stride_w + o_lines[None, :]
        prefetch(tl.where(m_n[:, None] & (o_lines < K)[None, :], p_lines, w_ptr))
    wait_for_predecessor(OVERLAP)

    b_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            b_x = tl.load(x_ptr + i_k + o_k).to(tl.float32)
            b_w = tl.load(p_w + i_k)
        else:
            m_k = o_k < K - i_k
            b_x = tl.load(x_ptr + i_k + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_w = tl.load(p_w + i_k, mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_acc += decode_fp32(b_w, OVERLAP) * b_x[None, :]
    release_successor(OVERLAP)

    b_out = tl.sum(b_acc, 1)
    if w_scale_ptr is not None:
        b_out *= tl.load(w_scale_ptr + o_n, mask=m_n, other=0.0)
    if bias_ptr is not None:
        b_out += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + o_n, b_out.to(out_ptr.dtype.element_ty), mask=m_n)


@triton.jit(do_not_specialize=["num_tokens"])
def skinny_kernel(
    x_ptr,
    w_ptr,
    x_scale_ptr,
    w_scale_ptr,
    x_mean_ptr,
    w_sum_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_tokens,
    N,
    K,
    stride_x,
    stride_w,
    stride_x_scale,
    stride_w_scale,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    TOKENS_LEFT: tl.constexpr,
    GELU: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    FAST_SUMS: tl.constexpr,
    NATIVE: tl.constexpr,
    ASYNCHRONOUS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Tiles of tokens are neighbours, so that the weight is read from memory once.
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    i_n = i_tile // num_m
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = (i_tile % num_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < N
    m_m = o_m < num_tokens
    # This program sums the blocks [first, last) of columns.
    num_blocks = tl.cdiv(K, BLOCK_K)
    per_split = tl.cdiv(num_blocks, SPLITS)
    first = i_split * per_split
    last = min(first + per_split, num_blocks)
    p_w = w_ptr + o_n.to(tl.int64)[:, None] * stride_w + o_k[None, :]
    p_x = x_ptr + o_m.to(tl.int64)[None, :] * stride_x + o_k[:, None]
    if OVERLAP:
        BYTES: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        o_lines = tl.arange(0, 2 * BLOCK_K * BYTES // 128) * (128 // BYTES) + first * BLOCK_K
        p_lines = w_ptr + o_n.to(tl.int64)[:, None] * stride_w + o_lines[None, :]
        prefetch(tl.where(m_n[:, None] & (o_lines < K)[None, :], p_lines, w_ptr))
    # Only the means come from the predecessor of a product with a norm: it let this kernel start
    # after its own predecessor had written `x`.
    LATE: tl.constexpr = x_mean_ptr is not None
    if not LATE:
        wait_for_predecessor(OVERLAP)

    INTEGER: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    ACC: tl.constexpr = tl.int32 if INTEGER and not BLOCK_SCALES else tl.float32
    # Eight-bit sums inside the matrix unit keep 14 bits: they leave it after 128 columns, which
    # takes time, unless the caller allows more.
    FP8: tl.constexpr = x_ptr.dtype.element_ty == tl.float8e4nv
    IMPRECISE: tl.constexpr = SCALE_SIZE if FP8 and not FAST_SUMS else None
    if TOKENS_LEFT:
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    else:
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], ACC)
    if BLOCK_SCALES:
        # The rows of this program share one scale; scales are loaded one turn ahead.
        tl.static_assert(BLOCK_K == SCALE_SIZE and SCALE_SIZE % BLOCK_N == 0)
        p_x_scale = x_scale_ptr + o_m.to(tl.int64) * stride_x_scale
        p_w_scale = w_scale_ptr + (i_n * BLOCK_N // SCALE_SIZE) * stride_w_scale
        b_scale = tl.load(p_x_scale + first, mask=m_m & (first < last), other=0.0)
        b_scale *= tl.load(p_w_scale + first, mask=first < last, other=0.0)
    for i_block in tl.range(first, last, num_stages=STAGES):
        i_k = i_block * BLOCK_K
        if EVEN:
            b_w = tl.load(p_w + i_k)
            b_x = tl.load(p_x + i_k, mask=m_m[None, :], other=0.0)
        else:
            m_k = o_k < K - i_k
            b_w = tl.load(p_w + i_k, mask=m_n[:, None] & m_k[None, :], other=0.0)
            b_x = tl.load(p_x + i_k, mask=m_k[:, None] & m_m[None, :], other=0.0)
        b_left = decode(b_w, b_x.dtype, NATIVE)
        b_right = b_x
        if TOKENS_LEFT:
            b_left, b_right = tl.trans(b_x), tl.trans(b_left)
        if BLOCK_SCALES:
            b_part = tl.dot(b_left, b_right, out_dtype=tl.int32 if INTEGER else tl.float32)
            if TOKENS_LEFT:
                b_acc += b_part.to(tl.float32) * b_scale[:, None]
            else:
                b_acc += b_part.to(tl.float32) * b_scale[None, :]
            m_next = m_m & (i_block + 1 < last)
            b_scale = tl.load(p_x_scale + i_block + 1, mask=m_next, other=0.0)
            b_scale *= tl.load(p_w_scale + i_block + 1, mask=i_block + 1 < last, other=0.0)
        else:
            b_acc = tl.dot(
                b_left,
                b_right,
                b_acc,
                input_precision="ieee",
                max_num_imprecise_acc=IMPRECISE,
                out_dtype=ACC,
            )
            if ASYNCHRONOUS and x_ptr.dtype.element_ty != w_ptr.dtype.element_ty:
                b_acc = settle(b_acc, NATIVE)
    release_successor(OVERLAP)

    b_sum = b_acc.to(tl.float32)
    if TOKENS_LEFT:
        b_sum = tl.trans(b_sum)
    if SPLITS > 1:
        o_part = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        p_part = partial_ptr + i_tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M) + o_part
        tl.store(p_part + i_split * (BLOCK_N * BLOCK_M), b_sum, cache_modifier=".cg")
        # Every thread's part is visible before the arrival is.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + i_tile, 1, sem="acq_rel")
        if arrived != SPLITS - 1:
            return
        tl.store(counter_ptr + i_tile, 0)
        b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i_part in tl.static_range(SPLITS):
            b_sum += tl.load(p_part + i_part * (BLOCK_N * BLOCK_M), cache_modifier=".cg")

    if LATE:
        wait_for_predecessor(OVERLAP)
        b_mean = tl.load(x_mean_ptr + o_m, mask=m_m, other=0.0)
        b_w_sum = tl.load(w_sum_ptr + o_n, mask=m_n, other=0.0)
        b_sum -= b_w_sum[:, None] * b_mean[None, :]
    if w_scale_ptr is not None and not BLOCK_SCALES:
        b_sum *= tl.load(w_scale_ptr + o_n, mask=m_n, other=0.0)[:, None]
    if x_scale_ptr is not None and not BLOCK_SCALES:
        p_x_scale = x_scale_ptr + o_m.to(tl.int64) * stride_x_scale
        b_sum *= tl.load(p_x_scale, mask=m_m, other=0.0)[None, :]
    if bias_ptr is not None:
        b_sum += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if GELU is not None:
        b_sum = gelu(b_sum, GELU == "tanh", NATIVE and out_ptr.dtype.element_ty == tl.bfloat16)
    p_out = out_ptr + o_m.to(tl.int64)[None, :] * N + o_n[:, None]
    tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_n[:, None] & m_m[None, :])


def is_compiled() -> bool:
    """Tell whether kernels are compiled: the interpreter has no predecessors and no assembly."""
    return not triton.knobs.runtime.interpret


def gemv(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, config: dict[str, int]
) -> Tensor:
    """Multiply one token, `[1, in_features]`, with a plain or channel-scaled weight."""
    rows, columns = weight.shape
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    block_n, block_k = config["block_n"], config["block_k"]
    overlap = is_compiled()
    gemv_kernel[(triton.cdiv(rows, block_n),)](
        x,
        weight,
        scale,
        bias,
        out,
        rows,
        columns,
        weight.stride(0),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN=rows % block_n == 0 and columns % block_k == 0,
        STAGES=config["num_stages"],
        OVERLAP=overlap,
        num_warps=config["num_warps"],
        launch_pdl=overlap,
    )
    return out


def skinny(
    x: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype,
    config: dict[str, int],
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    x_mean: Tensor | None = None,
    weight_sum: Tensor | None = None,
    bias: Tensor | None = None,
    block_scales: bool = False,
    gelu: str | None = None,
    fast_sums: bool = False,
) -> Tensor:
    """Multiply few tokens, `[tokens, in_features]`, with a weight `[out_features, in_features]`.

    `config` gives the tile (`block_n`, `block_k`, at most `block_m`), `num_warps`, `num_stages`,
    `per_sm`, the programs for each multiprocessor up to which the sum is split, and optionally
    `tokens_left`: the tokens and not the weight are the left operand. With `fast_sums`, sums of
    FP8 products stay in the matrix unit.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    out = torch.empty((tokens, rows), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_n, block_k = config["block_n"], config["block_k"]
    tokens_left = bool(config.get("tokens_left"))
    least = 64 if tokens_left else 16
    block_m = min(max(least, triton.next_power_of_2(tokens)), config["block_m"])
    tiles = triton.cdiv(rows, block_n) * triton.cdiv(tokens, block_m)
    splits = split_count(x.device, tiles, triton.cdiv(columns, block_k), config["per_sm"])
    partial = counter = None
    if splits > 1:
        elements = tiles * splits * block_n * block_m
        partial = torch.empty(elements, dtype=torch.float32, device=x.device)
        counter = counters(x.device, tiles)
    overlap = is_compiled()
    skinny_kernel[(tiles, splits)](
        x,
        weight,
        x_scale,
        weight_scale,
        x_mean,
        weight_sum,
        bias,
        out,
        partial,
        counter,
        tokens,
        rows,
        columns,
        x.stride(0),
        weight.stride(0),
        x_scale.stride(0) if x_scale is not None else 0,
        weight_scale.stride(0) if weight_scale is not None else 0,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_M=block_m,
        SPLITS=splits,
        BLOCK_SCALES=block_scales,
        TOKENS_LEFT=tokens_left,
        GELU=gelu,
        EVEN=rows % block_n == 0 and columns % block_k == 0,
        STAGES=config["num_stages"],
        FAST_SUMS=fast_sums,
        NATIVE=overlap,
        # Four warps share one asynchronous matrix instruction; fewer use the old one.
        ASYNCHRONOUS=config["num_warps"] >= 4,
        OVERLAP=overlap,
        num_warps=config["num_warps"],
        launch_pdl=overlap,
    )
    return out


def split_count(device: torch.device, tiles: int, blocks: int, per_sm: int) -> int:
    """Return into how many parts to split the sum of a tile, every part with some blocks."""
    wanted = max(1, min(per_sm * multiprocessors(device) // tiles, blocks // 2))
    per_split = -(-blocks // wanted)
    return -(-blocks // per_split)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Launch the kernel for `reference.matmul`, or the library where that is faster."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    if tokens == 1:
        return gemv(x, weight, None, bias, pick("matmul_gemv", n=rows, k=columns))
    config = pick("matmul", m=tokens, n=rows, k=columns)
    if config.get("library"):
        return torch.nn.functional.linear(x, weight, bias)
    return skinny(x, weight, x.dtype, config, bias=bias)
