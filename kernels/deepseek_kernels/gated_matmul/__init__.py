"""The gate of a gated MLP together with the product before it."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.gated_matmul import reference
from deepseek_kernels.matmul import check_activations


def gated_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return `silu(x @ gate.T) * (x @ up.T)`.

    For many tokens the products are never stored, and the result is rounded once; for few they
    are rounded before they are gated.

    Args:
        x: `[tokens, in_features]` fp16, bf16 or fp32, rows at any stride.
        weight: `[2 * out_features, in_features]` of the same type, the gate's rows before the up
            projection's, rows at any stride.

    Returns:
        `[tokens, out_features]` in the type of `x`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_activations(x)
    check_tensor(
        "weight", weight, shape=("2 * out_features", x.shape[1]), dtypes=(x.dtype,), like=x
    )
    if weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows; an even number is required")
    return _gated_matmul(x, weight)


def cost(x: Tensor, weight: Tensor) -> Cost:
    """Return the work of one call."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    elements = x.numel() + weight.numel() + tokens * rows // 2
    return Cost(elements * x.element_size(), 2 * tokens * rows * columns)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)


_gated_matmul = Operation(reference.gated_matmul, fake=_fake)
