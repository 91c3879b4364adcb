"""LayerNorm, GeLU and a matrix product, in the two orders that are meant by it.

All arithmetic is fp32 and nothing is rounded between the steps.
"""

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm_matmul_gelu(
    x: Tensor, weight: Tensor, weight_sum: Tensor, bias: Tensor, eps: float, approximate: str
) -> Tensor:
    """Return `gelu(standardised(x) @ weight.T + bias)` with what `fold_layer_norm` returned.

    `weight_sum` is a property of `weight` that the definition does not need.
    """
    del weight_sum
    product = _standardised(x, eps) @ weight.float().t() + bias
    return functional.gelu(product, approximate=approximate).to(x.dtype)


def layer_norm_gelu_matmul(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    approximate: str,
) -> Tensor:
    """Return `gelu(layer_norm(x)) @ weight.T + bias`."""
    normalised = _standardised(x, eps) * norm_weight.float()
    if norm_bias is not None:
        normalised = normalised + norm_bias.float()
    product = functional.gelu(normalised, approximate=approximate) @ weight.float().t()
    return (product if bias is None else product + bias.float()).to(x.dtype)


def fold_layer_norm(
    weight: Tensor, bias: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Move the norm's weight and bias into the product that follows it.

    Source: FlashNorm, arXiv 2407.09577, with the mean's term added.
    """
    folded = (weight.float() * norm_weight.float()).to(weight.dtype)
    shift = torch.zeros(len(weight), device=weight.device) if bias is None else bias.float()
    if norm_bias is not None:
        shift = shift + weight.float() @ norm_bias.float()
    return folded, folded.float().sum(1), shift


def _standardised(x: Tensor, eps: float) -> Tensor:
    values = x.float()
    centred = values - values.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
