"""Products of 8-bit activations and 8-bit weights, and the quantization of activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepseek_kernels._backend import multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels._device import encode, overlaps, quantization_scale, take_turn
from deepseek_kernels._quantize import GROUP_COLUMNS, MAXIMUM
from deepseek_kernels.matmul.kernel import gelu, is_compiled, skinny, wait_for_predecessor

ALIGNMENT = 16
"""The bytes to which the library and tensor descriptors need rows aligned."""


FAST_COLUMNS = 5120
"""FP8 sums of so many products stay in the matrix unit, which keeps 14 bits of them, where the
tokens are many enough for arithmetic to count. On an H200, a sum of 5,120 products of either sign
is off by 0.15 % (rounding it to bf16 costs 0.17 %, quantizing its factors 3.7 %), and one of
products of one sign by 3.3 %. Longer sums, whose error grows with their length, leave the matrix
unit after every 128 products."""

FEW_TOKENS = 64
"""Up to so many, reading the weight takes longer than adding outside the matrix unit."""


@triton.jit(do_not_specialize=["num_tokens"])
def tiled_kernel(
    x_desc,
    w_desc,
    out_desc,
    x_scale_ptr,
    w_scale_ptr,
    x_mean_ptr,
    w_sum_ptr,
    bias_ptr,
    num_tokens,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    GELU: tl.constexpr,
    STAGES: tl.constexpr,
    HALVES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply many tokens: each program takes every `num_programs`-th tile of the output.

    `GROUP_M` rows of tiles are walked together, so that the tiles that run at one time share
    what they read. As in `skinny_kernel`, means may still be on their way when it starts.
    Stored by `HALVES`, a tile takes half the shared memory on its way out.
    """
    LATE: tl.constexpr = x_mean_ptr is not None
    if not LATE:
        wait_for_predecessor(OVERLAP)
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    INTEGER: tl.constexpr = x_desc.dtype == tl.int8
    FP8: tl.constexpr = x_desc.dtype == tl.float8e4nv
    ACC: tl.constexpr = tl.int32 if INTEGER else tl.float32
    IMPRECISE: tl.constexpr = 128 if FP8 else None
    for i_tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        i_group = i_tile // (GROUP_M * num_n)
        group_m = min(num_m - i_group * GROUP_M, GROUP_M)
        i_m = i_group * GROUP_M + (i_tile % (GROUP_M * num_n)) % group_m
        i_n = (i_tile % (GROUP_M * num_n)) // group_m
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        for i_k in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
            b_x = x_desc.load([i_m * BLOCK_M, i_k * BLOCK_K])
            b_w = w_desc.load([i_n * BLOCK_N, i_k * BLOCK_K])
            b_acc = tl.dot(
                b_x,
                b_w.T,
                b_acc,
                input_precision="ieee",
                max_num_imprecise_acc=IMPRECISE,
                out_dtype=ACC,
            )
        if LATE:
            wait_for_predecessor(OVERLAP)
        if HALVES:
            b_halves = tl.permute(tl.reshape(b_acc, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1])
            b_left, b_right = tl.split(b_halves)
        for i_part in tl.static_range(2 if HALVES else 1):
            b_out = b_acc
            if HALVES:
                b_out = b_left if i_part == 0 else b_right
            b_out = b_out.to(tl.float32)
            i_first = i_n * BLOCK_N + i_part * (BLOCK_N // 2)
            o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
            o_n = i_first + tl.arange(0, b_out.shape[1])
            m_m, m_n = o_m < num_tokens, o_n < N
            if LATE:
                b_mean = tl.load(x_mean_ptr + o_m, mask=m_m, other=0.0)
                b_w_sum = tl.load(w_sum_ptr + o_n, mask=m_n, other=0.0)
                b_out -= b_mean[:, None] * b_w_sum[None, :]
            b_out *= tl.load(x_scale_ptr + o_m, mask=m_m, other=0.0)[:, None]
            if w_scale_ptr is not None:
                b_out *= tl.load(w_scale_ptr + o_n, mask=m_n, other=0.0)[None, :]
            if bias_ptr is not None:
                b_out += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
            if GELU is not None:
                b_out = gelu(b_out, GELU == "tanh", OVERLAP and out_desc.dtype == tl.bfloat16)
            out_desc.store([i_m * BLOCK_M, i_first], b_out.to(out_desc.dtype))


@triton.jit
def quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    stride_x,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAXIMUM: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    GROUPS: tl.constexpr = BLOCK_N // GROUP
    i_row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_block = tl.program_id(0) % BLOCKS
    o_columns = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_columns = o_columns < N
    take_turn(OVERLAP)
    p_x = x_ptr + i_row * stride_x + o_columns
    if OVERLAP:
        b_x = tl.load(p_x, mask=m_columns, other=0.0, cache_modifier=".cg")
    else:
        b_x = tl.load(p_x, mask=m_columns, other=0.0)
    b_grouped = tl.reshape(b_x.to(tl.float32), [GROUPS, GROUP])
    b_scale = quantization_scale(b_grouped, 1, MAXIMUM)
    b_codes = encode(tl.reshape(b_grouped / b_scale, [BLOCK_N]), INTEGER)
    tl.store(out_ptr + i_row * N + o_columns, b_codes, mask=m_columns)
    o_groups = i_block * GROUPS + tl.arange(0, GROUPS)
    p_scale = scale_ptr + i_row * tl.cdiv(N, GROUP) + o_groups
    tl.store(p_scale, tl.reshape(b_scale, [GROUPS]), mask=o_groups * GROUP < N)


def quantize(x: Tensor, dtype: torch.dtype, group_columns: int) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `reference.quantize`."""
    tokens, columns = x.shape
    out = torch.empty((tokens, columns), dtype=dtype, device=x.device)
    groups = columns // group_columns
    scale = torch.empty((tokens, groups), dtype=torch.float32, device=x.device)
    if tokens == 0:
        return out, scale
    if group_columns == columns:
        # The row's group is padded with the row; zeros do not change its scale.
        block = group = triton.next_power_of_2(columns)
    else:
        block, group = max(1024, group_columns), group_columns
    overlap = overlaps(tokens)
    quantize_kernel[(tokens * triton.cdiv(columns, block),)](
        x,
        out,
        scale,
        x.stride(0),
        N=columns,
        BLOCK_N=block,
        MAXIMUM=MAXIMUM[dtype],
        GROUP=group,
        INTEGER=dtype == torch.int8,
        OVERLAP=overlap,
        num_warps=max(4, min(16, block // 1024)),
        launch_pdl=overlap,
    )
    return out, scale


def tiled(
    x: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype,
    config: dict[str, int],
    *,
    x_scale: Tensor,
    weight_scale: Tensor | None = None,
    x_mean: Tensor | None = None,
    weight_sum: Tensor | None = None,
    bias: Tensor | None = None,
    gelu: str | None = None,
) -> Tensor:
    """Multiply many tokens, with one scale for each token.

    All rows must be `fits_descriptors`. `config` gives the tile (`block_m`, `block_n`,
    `block_k`), `group_m`, `num_warps`, `num_stages`, and optionally `per_sm`, the programs for
    each multiprocessor, and `halves`.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    out = torch.empty((tokens, rows), dtype=out_dtype, device=x.device)
    block_m, block_n, block_k = config["block_m"], config["block_n"], config["block_k"]
    tiles = triton.cdiv(tokens, block_m) * triton.cdiv(rows, block_n)
    overlap = is_compiled()
    halves = bool(config.get("halves"))
    tiled_kernel[(min(multiprocessors(x.device) * config.get("per_sm", 1), tiles),)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        TensorDescriptor.from_tensor(out, [block_m, block_n // 2 if halves else block_n]),
        x_scale,
        weight_scale,
        x_mean,
        weight_sum,
        bias,
        tokens,
        rows,
        columns,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=config["group_m"],
        GELU=gelu,
        STAGES=config["num_stages"],
        HALVES=halves,
        OVERLAP=overlap,
        num_warps=config["num_warps"],
        launch_pdl=overlap,
    )
    return out


def fits_descriptors(tensor: Tensor) -> bool:
    """Tell whether a matrix can be read by the copy engine: start and rows 16 bytes aligned."""
    return (
        tensor.data_ptr() % ALIGNMENT == 0
        and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
    )


def matmul_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Launch the kernel for `reference.matmul_w8a8`, or the library where that is faster."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    by_block = weight_scale.dim() == 2
    fast_sums = tokens > FEW_TOKENS and columns <= FAST_COLUMNS
    fits = fits_descriptors(x) and fits_descriptors(weight) and rows % ALIGNMENT == 0
    # The library reads the weight's scales four blocks of columns at a time.
    whole = x.is_cuda and columns % (4 * GROUP_COLUMNS) == 0
    if by_block:
        config = pick("matmul_w8a8_blocks", m=tokens, n=rows, k=columns)
        if config.get("library") and fits and whole and x.dtype == torch.float8_e4m3fn:
            return _library_blocks(x, x_scale, weight, weight_scale, bias, dtype)
    else:
        config = pick("matmul_w8a8", m=tokens, n=rows, k=columns)
        if config.get("library") and fits:
            if x.dtype == torch.float8_e4m3fn and dtype == torch.bfloat16:
                return _library_rows(x, x_scale, weight, weight_scale, bias, fast_sums)
            config = pick("matmul_w8a8_tiled", m=tokens, n=rows, k=columns)
            return tiled(
                x, weight, dtype, config, x_scale=x_scale, weight_scale=weight_scale, bias=bias
            )
    return skinny(
        x,
        weight,
        dtype,
        config,
        x_scale=x_scale,
        weight_scale=weight_scale,
        bias=bias,
        block_scales=by_block,
        fast_sums=fast_sums and not by_block,
    )


def _library_rows(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    fast_sums: bool,
) -> Tensor:
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale,
        scale_b=weight_scale[None, :],
        bias=None if bias is None else bias.bfloat16(),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_sums,
    )


def _library_blocks(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    recipe = torch.nn.functional.ScalingType
    tokens = len(x)
    padding = -tokens % ALIGNMENT
    if padding:
        # The library takes whole multiples only.
        x = torch.nn.functional.pad(x.view(torch.uint8), (0, 0, 0, padding)).view(x.dtype)
        x_scale = torch.nn.functional.pad(x_scale, (0, 0, 0, padding))
    out = torch.nn.functional.scaled_mm(
        x,
        weight.t(),
        # The library reads the scales of the tokens column by column.
        x_scale.t().contiguous().t(),
        recipe.BlockWise1x128,
        weight_scale.t(),
        recipe.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[:tokens]
    if bias is not None:
        out.add_(bias)
    return out.to(dtype)
