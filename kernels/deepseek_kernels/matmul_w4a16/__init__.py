"""Products with weights of 4 bits in groups of 128 columns, symmetric or with zero points."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.matmul import check_activations, check_bias
from deepseek_kernels.matmul_w4a16 import reference
from deepseek_kernels.matmul_w4a16.reference import (
    GROUP_COLUMNS,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
)

SCALES = (torch.bfloat16, torch.float16)


def matmul_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_features: int,
) -> Tensor:
    """Multiply activations with a 4-bit weight.

    Args:
        x: `[tokens, in_features]` fp16, bf16 or fp32, rows at any stride.
        weight: uint8 `[ceil(out / 64), ceil(in / 256), 8192]` of `pack_w4a16`.
        scale: bf16 or fp16 `[ceil(in / 256), 64 * ceil(out / 64), 2]` of `pack_w4a16`.
        zero_point: uint8, shape of `scale`, of `pack_w4a16`; None where code 8 means zero.
        bias: `[out_features]` fp16, bf16 or fp32.
        out_features: Rows of the weight, without the padding.

    Returns:
        `[tokens, out_features]` in the type of `x`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    _check(x, weight, scale, zero_point, out_features, "out_features")
    check_bias(bias, out_features, x)
    return _matmul_w4a16(x, weight, scale, zero_point, bias, out_features)


def gated_matmul_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    out_features: int,
) -> Tensor:
    """Return `silu(x @ gate.T) * (x @ up.T)` for a 4-bit weight.

    The products of few tokens are rounded before they are gated, and perhaps those of many.

    Args:
        x: As for `matmul_w4a16`.
        weight: As for `matmul_w4a16`, `2 * out_features` rows: the gate's before the up
            projection's.
        scale: As for `matmul_w4a16`.
        zero_point: As for `matmul_w4a16`.
        out_features: Of the result.

    Returns:
        `[tokens, out_features]` in the type of `x`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    _check(x, weight, scale, zero_point, 2 * out_features, "twice out_features")
    return _gated_matmul_w4a16(x, weight, scale, zero_point, out_features)


def _check(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    rows: int,
    rows_name: str,
) -> None:
    check_activations(x)
    check_tensor(
        "weight",
        weight,
        shape=("row tiles", -(-x.shape[1] // TILE_COLUMNS), TILE_BYTES),
        dtypes=(torch.uint8,),
        like=x,
        contiguous=True,
    )
    padded = weight.shape[0] * TILE_ROWS
    check_range(rows_name, rows, max(0, padded - TILE_ROWS + 1), padded)
    shape = (weight.shape[1], padded, 2)
    check_tensor("scale", scale, shape=shape, dtypes=SCALES, like=x, contiguous=True)
    if zero_point is not None:
        check_tensor(
            "zero_point", zero_point, shape=shape, dtypes=(torch.uint8,), like=x, contiguous=True
        )


def pack_w4a16(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Store a 4-bit weight in the order that `matmul_w4a16` reads.

    Args:
        codes: `[out_features, in_features]` uint8, values 0 to 15.
        scale: `[out_features, ceil(in / 128)]` bf16 or fp16.
        zero_point: `[out_features, ceil(in / 128)]` uint8, values 0 to 15, or None where code 8
            means zero.

    Returns:
        The weight, its scales and its zero points as `matmul_w4a16` takes them.

    Raises:
        ValueError: An argument of the wrong type, shape or device, or a value above 15.
    """
    check_tensor("codes", codes, shape=("out_features", "in_features"), dtypes=(torch.uint8,))
    rows, columns = codes.shape
    check_range("the number of columns of codes", columns, 1, 2**24)
    shape = (rows, -(-columns // GROUP_COLUMNS))
    check_tensor("scale", scale, shape=shape, dtypes=SCALES, like=codes)
    if zero_point is not None:
        check_tensor("zero_point", zero_point, shape=shape, dtypes=(torch.uint8,), like=codes)
    for name, values in (("codes", codes), ("zero_point", zero_point)):
        if values is not None and values.numel() and int(values.max()) > 15:
            raise ValueError(f"{name} holds {int(values.max())}; allowed is 0 to 15")
    zeros = None if zero_point is None else reference.pack_groups(zero_point, 0)
    return reference.pack_codes(codes), reference.pack_groups(scale, 0.0), zeros


def unpack_w4a16(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    out_features: int,
    in_features: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what `pack_w4a16` was given."""
    groups = -(-in_features // GROUP_COLUMNS)
    codes = reference.unpack_codes(weight)[:out_features, :in_features]
    scales = reference.unpack_groups(scale)[:out_features, :groups]
    if zero_point is None:
        return codes, scales, None
    return codes, scales, reference.unpack_groups(zero_point)[:out_features, :groups]


def quantize_w4a16(
    weight: Tensor, *, dtype: torch.dtype = torch.bfloat16, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round a weight to 4 bits, nearest code in each group, and pack it.

    Args:
        weight: `[out_features, in_features]` fp16, bf16 or fp32.
        dtype: Of the scales: bf16 or fp16.
        symmetric: Whether code 8 means zero everywhere; else every group has a zero point.

    Returns:
        As `pack_w4a16`.
    """
    check_tensor("weight", weight, shape=("out_features", "in_features"), dtypes=FLOATS)
    return pack_w4a16(*reference.quantize_weight(weight, dtype, symmetric=symmetric))


def cost(x: Tensor, weight: Tensor, scale: Tensor, out_features: int) -> Cost:
    """Return the work of one call."""
    tokens, columns = x.shape
    read = sum(t.numel() * t.element_size() for t in (x, weight, scale))
    written = tokens * out_features * x.element_size()
    return Cost(read + written, 2 * tokens * out_features * columns)


def _fake(
    x: Tensor,
    _weight: Tensor,
    _scale: Tensor,
    _zero_point: Tensor | None,
    _bias: Tensor | None,
    out_features: int,
) -> Tensor:
    return torch.empty((x.shape[0], out_features), dtype=x.dtype, device=x.device)


def _gated_fake(
    x: Tensor, _weight: Tensor, _scale: Tensor, _zero_point: Tensor | None, out_features: int
) -> Tensor:
    return torch.empty((x.shape[0], out_features), dtype=x.dtype, device=x.device)


_matmul_w4a16 = Operation(reference.matmul_w4a16, fake=_fake)
_gated_matmul_w4a16 = Operation(reference.gated_matmul_w4a16, fake=_gated_fake)
