"""The product of 8-bit activations and 8-bit weights with their scales."""

import torch
from torch import Tensor

from deepseek_kernels._quantize import GROUP_COLUMNS, quantize_rows
from deepseek_kernels.matmul_w8a16.reference import dequantize_weight


def matmul_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return `(x * x_scale) @ (weight * weight_scale).T + bias`, `[tokens, out_features]`."""
    values = x.float() * spread_scale(x_scale, x.shape[1])
    product = values @ dequantize_weight(weight, weight_scale).t()
    return (product if bias is None else product + bias.float()).to(dtype)


def quantize(x: Tensor, dtype: torch.dtype, group_columns: int) -> tuple[Tensor, Tensor]:
    """Return the codes of `x` and the fp32 scales of its groups, `[tokens, groups]`."""
    return quantize_rows(x.float(), dtype, group_columns)


def spread_scale(scale: Tensor, columns: int) -> Tensor:
    """Return one scale for each column, or one for all of them as it is."""
    if scale.shape[1] == 1:
        return scale
    return scale.repeat_interleave(GROUP_COLUMNS, 1)[:, :columns]
