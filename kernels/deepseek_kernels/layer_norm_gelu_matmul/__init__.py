"""LayerNorm, GeLU and a matrix product in one call, in both orders."""

from typing import Literal

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_choice, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.layer_norm_gelu_matmul import reference

Approximation = Literal["none", "tanh"]

MAX_COLUMNS = 65536
"""A row is kept in the registers of one program."""


def layer_norm_matmul_gelu(
    x: Tensor,
    weight: Tensor,
    weight_sum: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-5,
    approximate: Approximation = "none",
) -> Tensor:
    """Return `gelu(layer_norm(x) @ weight.T + bias)`: one product of `x` with a folded weight.

    Args:
        x: `[tokens, in_features]` fp16, bf16 or fp32, rows at any stride.
        weight: `[out_features, in_features]` of the same type, as `fold_layer_norm` returns it,
            like the next two.
        weight_sum: `[out_features]` fp32, contiguous.
        bias: `[out_features]` fp32, contiguous.
        eps: Added to the variance.
        approximate: `none` for the exact GeLU, `tanh` for its approximation, as in torch.

    Returns:
        `[tokens, out_features]` in the type of `x`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    _check(x, weight, eps, approximate)
    for name, vector in (("weight_sum", weight_sum), ("bias", bias)):
        check_tensor(
            name,
            vector,
            shape=(weight.shape[0],),
            dtypes=(torch.float32,),
            like=x,
            contiguous=True,
        )
    return _layer_norm_matmul_gelu(x, weight, weight_sum, bias, eps, approximate)


def layer_norm_gelu_matmul(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    approximate: Approximation = "none",
) -> Tensor:
    """Return `gelu(layer_norm(x)) @ weight.T + bias`: one pass over `x`, one product.

    Args:
        x: `[tokens, in_features]` fp16, bf16 or fp32, rows at any stride.
        norm_weight: `[in_features]`, any of these types.
        norm_bias: As `norm_weight`, or None.
        weight: `[out_features, in_features]` of the type of `x`, rows at any stride.
        bias: `[out_features]`, any of these types, or None.
        eps: Added to the variance.
        approximate: `none` for the exact GeLU, `tanh` for its approximation, as in torch.

    Returns:
        `[tokens, out_features]` in the type of `x`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    _check(x, weight, eps, approximate)
    vectors = (
        ("norm_weight", norm_weight, x.shape[1]),
        ("norm_bias", norm_bias, x.shape[1]),
        ("bias", bias, weight.shape[0]),
    )
    for name, vector, size in vectors:
        if vector is not None:
            check_tensor(name, vector, shape=(size,), dtypes=FLOATS, like=x)
    return _layer_norm_gelu_matmul(x, norm_weight, norm_bias, weight, bias, eps, approximate)


def fold_layer_norm(
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Move a norm's weight and bias into the product that follows it, once, at load time.

    Args:
        weight: `[out_features, in_features]` fp16, bf16 or fp32.
        bias: `[out_features]`, or None.
        norm_weight: `[in_features]`.
        norm_bias: `[in_features]`, or None.

    Returns:
        The folded weight in the type of `weight`, the sums of its rows and the folded bias, both
        `[out_features]` fp32.
    """
    check_tensor("weight", weight, shape=("out_features", "in_features"), dtypes=FLOATS)
    rows, columns = weight.shape
    vectors = (("bias", bias, rows), ("norm_weight", norm_weight, columns))
    for name, vector, size in (*vectors, ("norm_bias", norm_bias, columns)):
        if vector is not None:
            check_tensor(name, vector, shape=(size,), dtypes=FLOATS, like=weight)
    return reference.fold_layer_norm(weight, bias, norm_weight, norm_bias)


def cost(x: Tensor, weight: Tensor) -> Cost:
    """Return the work of one call: `x` and the weight read once, the result written once."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    elements = x.numel() + weight.numel() + tokens * rows
    return Cost(elements * x.element_size(), 2 * tokens * rows * columns)


def intermediate_bytes(x: Tensor, weight: Tensor, *, fused: bool, gelu_last: bool) -> int:
    """Return the bytes of what one call writes and reads again between its steps.

    The chain keeps the normalised rows and the GeLU's input; fused, `gelu(LN(x) W')` keeps two
    numbers a row and `gelu(LN(x)) W'` the activated rows.
    """
    tokens, columns = x.shape
    size = x.element_size()
    if not fused:
        between = columns + (weight.shape[0] if gelu_last else columns)
        return 2 * tokens * between * size
    return 2 * tokens * 8 if gelu_last else 2 * tokens * columns * size


def _check(x: Tensor, weight: Tensor, eps: float, approximate: str) -> None:
    check_tensor("x", x, shape=("tokens", "in_features"), dtypes=FLOATS)
    columns = x.shape[1]
    check_range("the number of columns of x", columns, 1, MAX_COLUMNS)
    check_tensor("weight", weight, shape=("out_features", columns), dtypes=(x.dtype,), like=x)
    check_range("eps", eps, 0.0, 1.0)
    check_choice("approximate", approximate, ("none", "tanh"))


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


def _fake_gelu_first(
    x: Tensor, _norm_weight: Tensor, _norm_bias: Tensor | None, weight: Tensor, *_: object
) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


_layer_norm_matmul_gelu = Operation(reference.layer_norm_matmul_gelu, fake=_fake)
_layer_norm_gelu_matmul = Operation(reference.layer_norm_gelu_matmul, fake=_fake_gelu_first)
