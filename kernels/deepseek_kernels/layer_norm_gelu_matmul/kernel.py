"""LayerNorm, GeLU and a matrix product with at most one small kernel beside the product.

`gelu(LN(x) W' + b)`: the norm's weight is folded into the product's, whose input is then `x`
itself; mean and standard deviation are applied to the sums, `(x W' - mean sum(W')) / std`.
`gelu(LN(x)) W' + b`: a nonlinearity cannot be moved behind the sum; norm and GeLU are one pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._configs import pick
from deepseek_kernels.matmul.kernel import (
    gelu,
    is_compiled,
    release_successor,
    skinny,
    wait_for_predecessor,
)
from deepseek_kernels.matmul.kernel import matmul as plain_matmul
from deepseek_kernels.matmul_w8a8.kernel import fits_descriptors, tiled

MANY_ROWS = 2**20
"""A weight of so many rows has the configuration for few tokens that fits fp32 as well."""


@triton.jit
def row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    inverse_ptr,
    stride_x,
    eps,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TANH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Store mean and inverse deviation of a row, or the GeLU of the normalised row."""
    wait_for_predecessor(OVERLAP)
    i_row = tl.program_id(0).to(tl.int64)
    o_columns = tl.arange(0, BLOCK_N)
    m_columns = o_columns < N
    b_x = tl.load(x_ptr + i_row * stride_x + o_columns, mask=m_columns, other=0.0)
    b_x = b_x.to(tl.float32)
    release_successor(OVERLAP)
    b_mean = tl.sum(b_x, 0) / N
    b_x = tl.where(m_columns, b_x - b_mean, 0.0)
    b_inverse = tl.rsqrt(tl.sum(b_x * b_x, 0) / N + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + i_row, b_mean)
        tl.store(inverse_ptr + i_row, b_inverse)
    else:
        b_weight = tl.load(weight_ptr + o_columns, mask=m_columns, other=0.0).to(tl.float32)
        b_out = b_x * b_inverse * b_weight
        if bias_ptr is not None:
            b_out += tl.load(bias_ptr + o_columns, mask=m_columns, other=0.0).to(tl.float32)
        b_out = gelu(b_out, TANH, OVERLAP and out_ptr.dtype.element_ty == tl.bfloat16)
        tl.store(
            out_ptr + i_row * N + o_columns, b_out.to(out_ptr.dtype.element_ty), mask=m_columns
        )


def _rows(
    x: Tensor,
    eps: float,
    *,
    mean: Tensor | None = None,
    inverse: Tensor | None = None,
    out: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    tanh: bool = False,
) -> None:
    tokens, columns = x.shape
    block = triton.next_power_of_2(columns)
    overlap = is_compiled()
    row_kernel[(tokens,)](
        x,
        weight,
        bias,
        out,
        mean,
        inverse,
        x.stride(0),
        eps,
        N=columns,
        BLOCK_N=block,
        TANH=tanh,
        OVERLAP=overlap,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=overlap,
    )


def layer_norm_matmul_gelu(
    x: Tensor, weight: Tensor, weight_sum: Tensor, bias: Tensor, eps: float, approximate: str
) -> Tensor:
    """Launch the kernels for `reference.layer_norm_matmul_gelu`."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    if tokens == 0:
        return torch.empty((0, rows), dtype=x.dtype, device=x.device)
    mean = torch.empty(tokens, dtype=torch.float32, device=x.device)
    inverse = torch.empty_like(mean)
    _rows(x, eps, mean=mean, inverse=inverse)
    config = pick("layer_norm_matmul_gelu", m=tokens, n=rows, k=columns)
    # Tiles of fp32 exceed shared memory.
    fits = x.element_size() == 2 and rows % 8 == 0
    if "group_m" in config and fits and fits_descriptors(x) and fits_descriptors(weight):
        return tiled(
            x,
            weight,
            x.dtype,
            config,
            x_scale=inverse,
            x_mean=mean,
            weight_sum=weight_sum,
            bias=bias,
            gelu=approximate,
        )
    return skinny(
        x,
        weight,
        x.dtype,
        config
        if "group_m" not in config
        else pick("layer_norm_matmul_gelu", m=1, n=MANY_ROWS, k=columns),
        x_scale=inverse,
        x_mean=mean,
        weight_sum=weight_sum,
        bias=bias,
        gelu=approximate,
    )


def layer_norm_gelu_matmul(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    approximate: str,
) -> Tensor:
    """Launch the kernels for `reference.layer_norm_gelu_matmul`."""
    if len(x) == 0:
        return torch.empty((0, len(weight)), dtype=x.dtype, device=x.device)
    activated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rows(
        x,
        eps,
        out=activated,
        weight=norm_weight,
        bias=norm_bias,
        tanh=approximate == "tanh",
    )
    return plain_matmul(activated, weight, bias)
