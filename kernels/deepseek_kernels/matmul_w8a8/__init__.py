"""Products with both sides in 8 bits, fp8 e4m3 or int8, and the quantization of activations."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._quantize import GROUP_COLUMNS, MAXIMUM, check_quantization
from deepseek_kernels._validation import FLOATS, check_choice, check_range, check_tensor
from deepseek_kernels.matmul import MAX_FEATURES, check_bias, cost
from deepseek_kernels.matmul_w8a8 import reference

__all__ = ["cost", "matmul_w8a8", "quantize"]

MAX_QUANTIZED_COLUMNS = 65536
"""A row with one scale is kept in the registers of one program."""


def matmul_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply quantized activations with a quantized weight.

    Args:
        x: Codes `[tokens, in_features]`, `float8_e4m3fn` or int8, rows at any stride.
        x_scale: fp32, contiguous: `[tokens, 1]`, or `[tokens, ceil(in / 128)]` where the
            weight's scales are per block; as `quantize` and the norms return them.
        weight: Codes `[out_features, in_features]` of the same type, rows at any stride.
        weight_scale: fp32, contiguous: `[out_features]`, or one for each block of 128 by 128,
            `[ceil(out / 128), ceil(in / 128)]`.
        bias: `[out_features]` fp16, bf16 or fp32.
        dtype: Of the result: fp16, bf16 or fp32.

    Returns:
        `[tokens, out_features]`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("x", x, shape=("tokens", "in_features"), dtypes=tuple(MAXIMUM))
    tokens, columns = x.shape
    check_range("the number of columns of x", columns, 1, MAX_FEATURES)
    check_tensor("weight", weight, shape=("out_features", columns), dtypes=(x.dtype,), like=x)
    rows = weight.shape[0]
    scale_type = (torch.float32,)
    groups = 1
    if weight_scale.dim() == 2:
        groups = -(-columns // GROUP_COLUMNS)
        blocks = (-(-rows // GROUP_COLUMNS), groups)
        check_tensor(
            "weight_scale",
            weight_scale,
            shape=blocks,
            dtypes=scale_type,
            like=x,
            contiguous=True,
        )
    else:
        check_tensor(
            "weight_scale",
            weight_scale,
            shape=(rows,),
            dtypes=scale_type,
            like=x,
            contiguous=True,
        )
    check_tensor(
        "x_scale", x_scale, shape=(tokens, groups), dtypes=scale_type, like=x, contiguous=True
    )
    check_bias(bias, rows, x)
    check_choice("dtype", dtype, FLOATS)
    return _matmul_w8a8(x, x_scale, weight, weight_scale, bias, dtype)


def quantize(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, group_columns: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize activations for `matmul_w8a8`.

    Args:
        x: `[tokens, columns]` fp16, bf16 or fp32, rows at any stride.
        dtype: `float8_e4m3fn` or int8.
        group_columns: None for one scale per row, or 128 for one per 128 neighbours.

    Returns:
        Codes `[tokens, columns]` and fp32 scales `[tokens, groups]`; `value = code * scale`.

    Raises:
        ValueError: An argument of the wrong type, shape or stride.
    """
    check_tensor("x", x, shape=("tokens", "columns"), dtypes=FLOATS)
    check_range("the number of columns of x", x.shape[1], 1, MAX_QUANTIZED_COLUMNS)
    group = check_quantization(x.shape[1], dtype, group_columns)
    return _quantize(x, dtype, group)


def _fake(
    x: Tensor,
    _x_scale: Tensor,
    weight: Tensor,
    _weight_scale: Tensor,
    _bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)


def _fake_quantize(x: Tensor, dtype: torch.dtype, group_columns: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty(
            (x.shape[0], x.shape[1] // group_columns), dtype=torch.float32, device=x.device
        ),
    )


_matmul_w8a8 = Operation(reference.matmul_w8a8, fake=_fake)
_quantize = Operation(reference.quantize, fake=_fake_quantize)
