"""Products with weights of 8 bits, fp8 e4m3 or int8, and unquantized activations."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._quantize import MAXIMUM
from deepseek_kernels._validation import FLOATS, check_choice, check_tensor
from deepseek_kernels.matmul import check_activations, check_bias, cost
from deepseek_kernels.matmul_w8a16 import reference

__all__ = ["cost", "matmul_w8a16", "quantize_weight", "quantize_weight_blocks"]


def matmul_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply activations with an 8-bit weight that has one scale for each row.

    Args:
        x: `[tokens, in_features]` fp16, bf16 or fp32, rows at any stride.
        weight: Codes `[out_features, in_features]`, `float8_e4m3fn` without NaN, or int8; rows
            at any stride.
        scale: `[out_features]` fp32; `value = code * scale`.
        bias: `[out_features]` fp16, bf16 or fp32.

    Returns:
        `[tokens, out_features]` in the type of `x`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_activations(x)
    shape = ("out_features", x.shape[1])
    check_tensor("weight", weight, shape=shape, dtypes=tuple(MAXIMUM), like=x)
    rows = weight.shape[0]
    check_tensor("scale", scale, shape=(rows,), dtypes=(torch.float32,), like=x, contiguous=True)
    check_bias(bias, rows, x)
    return _matmul_w8a16(x, weight, scale, bias)


def quantize_weight(
    weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantize a weight with one scale for each of its rows, on its own device.

    Args:
        weight: `[out_features, in_features]` fp16, bf16 or fp32.
        dtype: `float8_e4m3fn` or int8.

    Returns:
        Codes of the same shape, and fp32 scales `[out_features]`.
    """
    _check_weight(weight, dtype)
    return reference.quantize_weight(weight, dtype)


def quantize_weight_blocks(
    weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantize a weight with one scale for each block of 128 by 128, as `quantize_weight`.

    Returns:
        Codes of the same shape, and fp32 scales `[ceil(out / 128), ceil(in / 128)]`.
    """
    _check_weight(weight, dtype)
    return reference.quantize_weight_blocks(weight, dtype)


def _check_weight(weight: Tensor, dtype: torch.dtype) -> None:
    check_tensor("weight", weight, shape=("out_features", "in_features"), dtypes=FLOATS)
    check_choice("dtype", dtype, tuple(MAXIMUM))


def _fake(x: Tensor, weight: Tensor, _scale: Tensor, _bias: Tensor | None) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


_matmul_w8a16 = Operation(reference.matmul_w8a16, fake=_fake)
