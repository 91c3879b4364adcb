"""The product with a weight of 8 bits, one scale for each of its rows."""

import torch
from torch import Tensor

from deepseek_kernels._quantize import quantize_rows


def matmul_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ (weight * scale).T + bias`, `[tokens, out_features]`, summed in fp32."""
    product = x.float() @ dequantize_weight(weight, scale).t()
    return (product if bias is None else product + bias.float()).to(x.dtype)


def quantize_weight(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize each row of `[out_features, in_features]`; also the scales, `[out_features]`."""
    codes, scale = quantize_rows(weight.float(), dtype, weight.shape[1])
    return codes, scale.view(-1)


def quantize_weight_blocks(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize blocks of 128 by 128; also the scales, one for each block, the last ones cut."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    flat = blocks.transpose(1, 2).reshape(-1, 128 * 128)
    codes, scale = quantize_rows(flat, dtype, 128 * 128)
    codes = codes.view(blocks.shape[0], blocks.shape[2], 128, 128).transpose(1, 2)
    codes = codes.reshape(padded.shape)[:rows, :columns].contiguous()
    return codes, scale.view(blocks.shape[0], blocks.shape[2])


def dequantize_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the fp32 weight of codes and their scales, by row or by block of 128 by 128."""
    if scale.dim() == 1:
        return weight.float() * scale[:, None]
    rows, columns = weight.shape
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight.float() * spread
