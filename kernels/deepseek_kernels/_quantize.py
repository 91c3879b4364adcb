"""Dynamic 8-bit quantization of activations: the definition that every quantizing op shares.

A group of values gets the scale `amax / 448` (fp8 e4m3) or `amax / 127` (int8), so that
`value = code * scale`. Groups are whole rows or 128 neighbours. A group that holds a value
that is not finite gets a scale that is not finite: its values come back as NaN or infinity
instead of as something plausible.
"""

from typing import Final

import torch
from torch import Tensor

from deepseek_kernels._validation import check_choice

GROUP_COLUMNS: Final = 128

MAXIMUM: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}

SMALLEST_SCALE: Final = 1e-12
"""Keeps a group of zeros from dividing by zero."""


def check_quantization(columns: int, dtype: torch.dtype, group_columns: int | None) -> int:
    """Refuse what cannot be quantized so; return the width of a group, the row's for None.

    Raises:
        ValueError: Names the argument, what was given and what is allowed.
    """
    check_choice("dtype", dtype, tuple(MAXIMUM))
    check_choice("group_columns", group_columns, (None, GROUP_COLUMNS))
    if group_columns is None:
        return columns
    if columns % group_columns:
        raise ValueError(
            f"the output has {columns} columns; groups of {group_columns} need a multiple of that"
        )
    return group_columns


def quantize_rows(values: Tensor, dtype: torch.dtype, group_columns: int) -> tuple[Tensor, Tensor]:
    """Quantize `values`, `[rows, columns]` fp32, in groups of neighbours.

    Returns:
        Codes `[rows, columns]` of `dtype` and scales `[rows, columns / group_columns]` fp32.
    """
    rows, columns = values.shape
    grouped = values.view(rows, columns // group_columns, group_columns)
    scale = (grouped.abs().amax(-1) / MAXIMUM[dtype]).clamp_min(SMALLEST_SCALE)
    return encode(grouped / scale[..., None], dtype).view(rows, columns), scale


def encode(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scaled fp32 values to codes, halves to even; out of range saturates."""
    if dtype == torch.int8:
        return scaled.nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    return scaled.clamp(-448.0, 448.0).to(dtype)
