"""Chooses the class of each projection."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from deepseek_contract.sizing import WeightFormat, product_bytes
from deepseek_worker.layers.linear import Linear, PlainLinear, Projection
from deepseek_worker.quantization.eight_bits import BlockScaledLinear, RowScaledLinear
from deepseek_worker.quantization.four_bits import GroupScaledLinear
from deepseek_worker.quantization.linears import DequantizedLinear, JoinedLinear, QuantizedLinear
from deepseek_worker.quantization.readers import PlainReader, Reader, reader_of
from deepseek_worker.quantization.schemes import GROUP_COLUMNS, PLAIN, Scheme, sized_as
from deepseek_worker.quantization.stored import HEAD, StoredQuantization

QUANTIZED: dict[str, type[QuantizedLinear]] = {
    "fp8": RowScaledLinear,
    "int8": RowScaledLinear,
    "fp8_block": BlockScaledLinear,
    "int4": GroupScaledLinear,
}

# The order of the inputs, int64.
ORDER_BYTES = 8

StorageOf = Callable[[str], tuple[Reader, Scheme]]
"""How the matrix of that name is stored in the file and kept in memory."""


def everything_plain(_name: str) -> tuple[Reader, Scheme]:
    """A model without quantization."""
    return PlainReader(), PLAIN


def rounded(scheme: Scheme) -> StorageOf:
    """An unquantized checkpoint whose projections, but not the head, are rounded to `scheme`."""
    return lambda name: (PlainReader(), PLAIN if name == HEAD else scheme)


def as_stored(stored: StoredQuantization, scheme: Scheme) -> StorageOf:
    """A quantized checkpoint; what it stores quantized is kept as `scheme`."""
    storage = reader_of(stored, scheme.weights), scheme
    return lambda name: storage if stored.covers(name) else (PlainReader(), PLAIN)


def build_linear(
    projection: Projection, storage_of: StorageOf, dtype: torch.dtype, device: torch.device
) -> Linear:
    """One projection, in one piece where its parts are stored alike."""
    members = [
        _build(part, *storage_of(next(iter(part.parts))), dtype, device)
        for part in _alike(projection, storage_of)
    ]
    return members[0] if len(members) == 1 else JoinedLinear(members)


def projection_bytes(projection: Projection, storage_of: StorageOf, plain: WeightFormat) -> int:
    """Bytes of a projection's weight in memory; biases aside.

    Args:
        projection: Its shape.
        storage_of: See `StorageOf`.
        plain: What unquantized weights are kept as.
    """
    total = 0
    for part in _alike(projection, storage_of):
        _, scheme = storage_of(next(iter(part.parts)))
        total += product_bytes(part.out_features, part.in_features, sized_as(scheme, plain))
        if scheme.is_sorted:
            total += ORDER_BYTES * part.in_features
    return total


def _alike(projection: Projection, storage_of: StorageOf) -> Sequence[Projection]:
    """Neighbouring parts that can be one matrix."""
    runs = [list(names) for _, names in groupby(projection.parts, key=storage_of)]
    split: list[list[str]] = []
    for run in runs:
        _, scheme = storage_of(run[0])
        is_ragged = any(projection.parts[name] % GROUP_COLUMNS for name in run[:-1])
        if scheme.weights == "fp8_block" and is_ragged:
            split += [[name] for name in run]
        else:
            split.append(run)
    return [
        Projection(
            {name: projection.parts[name] for name in run},
            projection.in_features,
            projection.has_bias,
        )
        for run in split
    ]


def _build(
    projection: Projection,
    reader: Reader,
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    if scheme.weights != "plain":
        return QUANTIZED[scheme.weights](projection, reader, scheme, dtype, device)
    if isinstance(reader, PlainReader):
        return PlainLinear(projection, dtype, device)
    return DequantizedLinear(projection, reader, dtype, device)
