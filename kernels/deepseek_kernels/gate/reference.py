"""The gate of a gated MLP: `silu(gate) * up`, in fp32, rounded once."""

import torch
from torch import Tensor
from torch.nn import functional

from deepseek_kernels._quantize import quantize_rows


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` of `gate_up`, `[tokens, gate columns then up columns]`."""
    return _values(gate_up).to(gate_up.dtype)


def silu_mul_quantize(
    gate_up: Tensor, dtype: torch.dtype, group_columns: int
) -> tuple[Tensor, Tensor]:
    """Quantize what `silu_mul` would return before it is rounded to the type of `gate_up`."""
    return quantize_rows(_values(gate_up), dtype, group_columns)


def _values(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate) * up
