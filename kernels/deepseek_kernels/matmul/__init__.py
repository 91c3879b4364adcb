"""Products with an unquantized weight, at the speed of reading it for few tokens."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.matmul import reference

MAX_FEATURES = 2**24


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply activations with a weight; many tokens go to the library.

    Args:
        x: `[tokens, in_features]` fp16, bf16 or fp32, rows at any stride.
        weight: `[out_features, in_features]` of the same type, rows at any stride.
        bias: `[out_features]`, of any of these types.

    Returns:
        `[tokens, out_features]` in the type of `x`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_activations(x)
    check_tensor("weight", weight, shape=("out_features", x.shape[1]), dtypes=(x.dtype,), like=x)
    check_bias(bias, weight.shape[0], x)
    return _matmul(x, weight, bias)


def cost(x: Tensor, weight: Tensor) -> Cost:
    """Return the work of one call; also that of products with 8-bit weights."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    written = tokens * rows * max(2, x.element_size())
    read = x.numel() * x.element_size() + weight.numel() * weight.element_size()
    return Cost(read + written, 2 * tokens * rows * columns)


def check_activations(x: Tensor) -> None:
    """Refuse activations that no product of this package takes."""
    check_tensor("x", x, shape=("tokens", "in_features"), dtypes=FLOATS)
    check_range("the number of columns of x", x.shape[1], 1, MAX_FEATURES)


def check_bias(bias: Tensor | None, out_features: int, like: Tensor) -> None:
    """Refuse a bias that does not belong to the weight."""
    if bias is not None:
        check_tensor("bias", bias, shape=(out_features,), dtypes=FLOATS, like=like)


def _fake(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


_matmul = Operation(reference.matmul, fake=_fake)
