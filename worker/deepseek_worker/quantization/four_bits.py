"""Weights of 4 bits with a scale, and perhaps a zero point, for each 128 columns of a row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepseek_kernels import gated_matmul_w4a16, matmul_w4a16, pack_w4a16, quantize_w4a16
from deepseek_kernels.matmul_w4a16.reference import (
    SYMMETRIC_ZERO,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    quantize_weight,
)
from deepseek_worker.layers.linear import RANDOM_STD, GatedProduct
from deepseek_worker.quantization.codes import Codes, GroupCodes
from deepseek_worker.quantization.linears import QuantizedLinear, joined
from deepseek_worker.quantization.rounding import Inputs, best_scale, compensated, second_moments
from deepseek_worker.quantization.schemes import GROUP_COLUMNS

# Of codes 0 to 15, each as likely.
CODE_STD = 4.6
CLIPPED = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Of the range of a group's weights: with 15 steps, cutting the largest may better the rest."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of the weight, packed, whose columns are in one order."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    order: Tensor | None
    """Which input each column multiplies; None where they are in order."""
    out_features: int
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Project to these rows."""
        return matmul_w4a16(
            x if self.order is None else x.index_select(1, self.order),
            self.weight,
            self.scale,
            self.zero_point,
            self.bias,
            out_features=self.out_features,
        )


class GroupScaledLinear(QuantizedLinear):
    """Multiplies 16-bit inputs with 4-bit weights.

    Where the file sorted the inputs by importance (act-order), its columns are kept in the order
    of their groups, and the input is brought into that order. Parts that are sorted differently
    are multiplied one by one.
    """

    segments: tuple[Segment, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[tokens, in_features]` to `[tokens, out_features]`."""
        if len(self.segments) == 1:
            return self.segments[0](x)
        return torch.cat([segment(x) for segment in self.segments], 1)

    def gated_product(self) -> GatedProduct | None:
        """For one segment in order, without a bias."""
        first = self.segments[0]
        if len(self.segments) > 1 or first.order is not None or self.bias is not None:
            return None
        return partial(
            gated_matmul_w4a16,
            weight=first.weight,
            scale=first.scale,
            zero_point=first.zero_point,
            out_features=first.out_features // 2,
        )

    def weights(self) -> Iterator[Tensor]:
        """Codes, scales, zero points and orders."""
        for segment in self.segments:
            for tensor in (segment.weight, segment.scale, segment.zero_point, segment.order):
                if tensor is not None:
                    yield tensor

    @property
    def _scale_type(self) -> torch.dtype:
        return torch.float16 if self._dtype == torch.float16 else torch.bfloat16

    def _quantize(self, weight: Tensor, inputs: Inputs | None) -> None:
        if inputs is None:
            packed = quantize_w4a16(
                weight, dtype=self._scale_type, symmetric=not self.scheme.zero_points
            )
        else:
            packed = pack_w4a16(*self._rounded_for(inputs, weight))
        self.segments = (Segment(*packed, None, weight.shape[0], self.bias),)

    def _rounded_for(self, inputs: Inputs, weight: Tensor) -> tuple[Tensor, Tensor]:
        moments = second_moments(inputs.rows)
        _, largest, _ = quantize_weight(weight, self._scale_type, symmetric=True)
        scale = best_scale(
            weight, moments, largest.float(), GROUP_COLUMNS, _to_grid, factors=CLIPPED
        ).to(self._scale_type)
        values = compensated(weight, moments, scale.float(), GROUP_COLUMNS, _to_grid)
        return (values + SYMMETRIC_ZERO).to(torch.uint8), scale

    def _keep(self, parts: Sequence[Codes]) -> None:
        self.segments = tuple(
            self._segments([part for part in parts if isinstance(part, GroupCodes)])
        )

    def _segments(self, parts: Sequence[GroupCodes]) -> Iterator[Segment]:
        """One for each run of neighbours in the same order."""
        first, first_row = 0, 0
        while first < len(parts):
            last = first + 1
            while last < len(parts) and _are_alike(parts[first], parts[last]):
                last += 1
            run = parts[first:last]
            zero_points = [part.zero_point for part in run if part.zero_point is not None]
            packed = pack_w4a16(
                joined([part.codes for part in run]),
                joined([part.scale for part in run]),
                joined(zero_points) if zero_points else None,
            )
            rows = sum(part.codes.shape[0] for part in run)
            bias = None if self.bias is None else self.bias[first_row : first_row + rows]
            yield Segment(*packed, run[0].order, rows, bias)
            first, first_row = last, first_row + rows

    def _randomize_weight(self, generator: torch.Generator) -> None:
        rows, columns = self._projection.out_features, self._projection.in_features
        row_tiles, column_tiles = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
        weight = torch.empty(
            (row_tiles, column_tiles, TILE_BYTES), dtype=torch.uint8, device=self._device
        ).random_(0, 256, generator=generator)
        groups = (column_tiles, TILE_ROWS * row_tiles, 2)
        scale = torch.full(
            groups, RANDOM_STD / CODE_STD, dtype=self._scale_type, device=self._device
        )
        zero_point = (
            torch.full(groups, 8, dtype=torch.uint8, device=self._device)
            if self.scheme.zero_points
            else None
        )
        self.segments = (Segment(weight, scale, zero_point, None, rows, self.bias),)


def _to_grid(values: Tensor) -> Tensor:
    return values.round().clamp(-SYMMETRIC_ZERO, 15 - SYMMETRIC_ZERO)


def _are_alike(one: GroupCodes, other: GroupCodes) -> bool:
    if (one.zero_point is None) != (other.zero_point is None):
        return False
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)
