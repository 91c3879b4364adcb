"""The feed-forward half of a block: a norm, the gated projection and the one back."""

from torch import Tensor

import deepseek_kernels
from deepseek_worker.layers.activation import silu_and_mul
from deepseek_worker.layers.linear import Linear
from deepseek_worker.layers.norm import RmsNorm


def feed_forward(
    norm: RmsNorm, gate_up: Linear, down: Linear, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `down(silu(gate) * up)` of the normalised sum, and the sum.

    On a GPU the gate is computed with the product before it or the quantization after it, where
    there is a kernel for that: each saves a pass over the widest activations of the model.
    """
    gated_product = gate_up.gated_product() if x.is_cuda else None
    if gated_product is not None:
        normalised, residual = norm(x, residual)
        return down(gated_product(normalised)), residual
    product, residual = norm.into(gate_up, x, residual)
    quantized = down.taking_codes(len(x)) if x.is_cuda else None
    if quantized is None or quantized.input_format is None:
        return down(silu_and_mul(product)), residual
    codes, scale = deepseek_kernels.silu_mul_quantize(
        product,
        dtype=quantized.input_format.dtype,
        group_columns=quantized.input_format.group_columns,
    )
    return quantized.multiply_codes(codes, scale, x.dtype), residual
