"""RMSNorm and LayerNorm, fused with the residual addition and with 8-bit output."""

from typing import Any

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._quantize import check_quantization
from deepseek_kernels._validation import (
    FLOATS,
    check_range,
    check_tensor,
)
from deepseek_kernels.cost import Cost
from deepseek_kernels.norm import reference

MAX_COLUMNS = 65536
"""A row is kept in the registers of one program."""


def rms_norm(
    x: Tensor, weight: Tensor, *, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Normalise each row by its root mean square.

    Args:
        x: `[tokens, columns]` fp16, bf16 or fp32, rows at any stride.
        weight: `[columns]`, any of these types.
        residual: Same shape and type as `x`. It becomes `residual + x` in place, and that sum
            is what is normalised.
        eps: Added to the mean square.

    Returns:
        `[tokens, columns]` in the type of `x`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    _check(x, weight, None, residual, eps)
    return _rms_norm(x, weight, residual, eps)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each row by its mean and standard deviation; arguments as `rms_norm`."""
    _check(x, weight, bias, residual, eps)
    return _layer_norm(x, weight, bias, residual, eps)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise as `rms_norm` and quantize the result without rounding it in between.

    Args:
        x: As in `rms_norm`; likewise `weight`, `residual` and `eps`.
        weight: `[columns]`.
        residual: Updated in place.
        eps: Added to the mean square.
        dtype: `float8_e4m3fn` or `int8`.
        group_columns: None for one scale per row, or 128 for one per 128 neighbours.

    Returns:
        Codes `[tokens, columns]` and fp32 scales `[tokens, groups]`; `value = code * scale`.
    """
    _check(x, weight, None, residual, eps)
    group = check_quantization(x.shape[1], dtype, group_columns)
    return _rms_norm_quantize(x, weight, residual, eps, dtype, group)


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise as `layer_norm` and quantize as `rms_norm_quantize`."""
    _check(x, weight, bias, residual, eps)
    group = check_quantization(x.shape[1], dtype, group_columns)
    return _layer_norm_quantize(x, weight, bias, residual, eps, dtype, group)


def cost(x: Tensor, *, residual: bool = False, dtype: torch.dtype | None = None) -> Cost:
    """Return the work of one call; `dtype` is the output's where it is not that of `x`."""
    read = written = x.numel() * x.element_size()
    if dtype is not None:
        written = x.numel() * dtype.itemsize
    return Cost(read + written + 2 * read * residual, 6 * x.numel())


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float
) -> None:
    check_tensor("x", x, shape=("tokens", "columns"), dtypes=FLOATS)
    columns = x.shape[1]
    check_range("the number of columns of x", columns, 1, MAX_COLUMNS)
    check_tensor("weight", weight, shape=(columns,), dtypes=FLOATS, like=x)
    if bias is not None:
        check_tensor("bias", bias, shape=(columns,), dtypes=FLOATS, like=x)
    if residual is not None:
        check_tensor("residual", residual, shape=x.shape, dtypes=(x.dtype,), like=x)
    check_range("eps", eps, 0.0, 1.0)


def _fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_quantized(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, dtype, group_columns = rest
    groups = x.shape[1] // group_columns
    return (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty((x.shape[0], groups), dtype=torch.float32, device=x.device),
    )


_rms_norm = Operation(reference.rms_norm, fake=_fake, mutates=("residual",))
_layer_norm = Operation(reference.layer_norm, fake=_fake, mutates=("residual",))
_rms_norm_quantize = Operation(
    reference.rms_norm_quantize, fake=_fake_quantized, mutates=("residual",)
)
_layer_norm_quantize = Operation(
    reference.layer_norm_quantize, fake=_fake_quantized, mutates=("residual",)
)
