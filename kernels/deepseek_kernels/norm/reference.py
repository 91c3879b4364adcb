"""RMSNorm and LayerNorm over rows, after an optional addition to the residual stream.

All arithmetic is fp32. With a residual, `residual + x` is rounded to the residual's type, kept
in `residual`, and that rounded sum is what is normalised, as the separate addition would.
"""

import torch
from torch import Tensor

from deepseek_kernels._quantize import quantize_rows


def rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> Tensor:
    """Return `x / rms(x) * weight`, `[tokens, columns]` in the type of `x`."""
    return _rms(x, weight, residual, eps).to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float
) -> Tensor:
    """Return `(x - mean(x)) / std(x) * weight + bias`, `[tokens, columns]`."""
    return _layer(x, weight, bias, residual, eps).to(x.dtype)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    group_columns: int,
) -> tuple[Tensor, Tensor]:
    """Quantize what `rms_norm` would return before it is rounded to the type of `x`."""
    return quantize_rows(_rms(x, weight, residual, eps), dtype, group_columns)


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    group_columns: int,
) -> tuple[Tensor, Tensor]:
    """Quantize what `layer_norm` would return before it is rounded to the type of `x`."""
    return quantize_rows(_layer(x, weight, bias, residual, eps), dtype, group_columns)


def _rms(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> Tensor:
    values = _added(x, residual)
    variance = values.square().mean(-1, keepdim=True)
    return values * torch.rsqrt(variance + eps) * weight.float()


def _layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float
) -> Tensor:
    values = _added(x, residual)
    centred = values - values.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    normalised = centred * torch.rsqrt(variance + eps) * weight.float()
    return normalised if bias is None else normalised + bias.float()


def _added(x: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return x.float()
    residual.copy_(residual.float() + x.float())
    return residual.float()
