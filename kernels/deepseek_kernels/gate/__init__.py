"""The gate of a gated MLP, with optional 8-bit output for the matmul that follows."""

from typing import Any

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._quantize import check_quantization
from deepseek_kernels._validation import FLOATS, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.gate import reference

MAX_COLUMNS = 65536


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`.

    Args:
        gate_up: `[tokens, 2 * columns]` fp16, bf16 or fp32, the gate's columns before the
            up projection's, rows at any stride.

    Returns:
        `[tokens, columns]` in the type of `gate_up`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape or stride.
    """
    _check(gate_up)
    return _silu_mul(gate_up)


def silu_mul_quantize(
    gate_up: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group_columns: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gate as `silu_mul` and quantize the result without rounding it in between.

    Args:
        gate_up: As in `silu_mul`.
        dtype: `float8_e4m3fn` or `int8`.
        group_columns: None for one scale per row, or 128 for one per 128 neighbours.

    Returns:
        Codes `[tokens, columns]` and fp32 scales `[tokens, groups]`; `value = code * scale`.
    """
    _check(gate_up)
    group = check_quantization(gate_up.shape[1] // 2, dtype, group_columns)
    return _silu_mul_quantize(gate_up, dtype, group)


def cost(gate_up: Tensor, *, dtype: torch.dtype | None = None) -> Cost:
    """Return the work of one call; `dtype` is the output's where it is not that of `gate_up`."""
    outputs = gate_up.numel() // 2
    size = gate_up.element_size()
    return Cost(outputs * (2 * size + (dtype.itemsize if dtype else size)), 5 * outputs)


def _check(gate_up: Tensor) -> None:
    check_tensor("gate_up", gate_up, shape=("tokens", "2 * columns"), dtypes=FLOATS)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns; an even number is required")
    check_range("the number of columns of gate_up", gate_up.shape[1], 2, 2 * MAX_COLUMNS)


def _fake(gate_up: Tensor) -> Tensor:
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


def _fake_quantized(gate_up: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype, group_columns = rest
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    return (
        torch.empty((tokens, columns), dtype=dtype, device=gate_up.device),
        torch.empty((tokens, columns // group_columns), dtype=torch.float32, device=gate_up.device),
    )


_silu_mul = Operation(reference.silu_mul, fake=_fake)
_silu_mul_quantize = Operation(reference.silu_mul_quantize, fake=_fake_quantized)
