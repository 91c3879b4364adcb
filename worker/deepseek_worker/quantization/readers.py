"""How a file stores one matrix: which tensors there are, and what they say."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepseek_worker.errors import BrokenCheckpoint, UnsupportedModel
from deepseek_worker.quantization.codes import BlockCodes, Codes, RowCodes
from deepseek_worker.quantization.schemes import GROUP_COLUMNS, KeptWeights
from deepseek_worker.quantization.stored import StoredQuantization
from deepseek_worker.quantization.unpacking import (
    WORD_BITS,
    dequantize_groups,
    group_of_inputs,
    in_groups_of_128,
    unpack_columns,
    unpack_rows,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INT32 = (torch.int32,)
# AWQ's kernels take two halves of a word at once; its codes lie in the order 0 2 4 6 1 3 5 7.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Piece:
    """One of the tensors that a matrix is stored as."""

    suffix: str
    """What follows the projection's name and a dot."""
    shape: tuple[int, ...]
    is_required: bool = True
    dtypes: tuple[torch.dtype, ...] | None = None
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """That mean the same."""


class Reader(Protocol):
    """The storage format of a matrix."""

    @property
    def writes_zero_biases(self) -> bool:
        """Whether files hold biases, all zero, for matrices that have none."""

    def pieces(self, rows: int, columns: int) -> Iterator[Piece]:
        """The tensors of a matrix `[rows, columns]`.

        Raises:
            UnsupportedModel: the format cannot hold such a matrix.
        """

    def read(self, pieces: Mapping[str, Tensor], rows: int, columns: int) -> Tensor | Codes:
        """Decode them, on the device they are on.

        Raises:
            BrokenCheckpoint: their values contradict each other or the shape.
        """


@dataclass(frozen=True, slots=True)
class PlainReader:
    """One floating-point tensor."""

    writes_zero_biases: bool = False

    def pieces(self, rows: int, columns: int) -> Iterator[Piece]:
        """The weight."""
        yield Piece("weight", (rows, columns))

    def read(self, pieces: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:  # noqa: ARG002
        """The weight as it is."""
        return pieces["weight"]


@dataclass(frozen=True, slots=True)
class RowsReader:
    """8-bit codes with one scale for each row, or one for all."""

    stored: StoredQuantization
    kept: KeptWeights
    writes_zero_biases: bool = False

    def pieces(self, rows: int, columns: int) -> Iterator[Piece]:
        """Codes and scale; scales of inputs are there and not used: inputs get their own."""
        codes = torch.float8_e4m3fn if self.stored.is_float else torch.int8
        yield Piece("weight", (rows, columns), dtypes=(codes,))
        if self.stored.has_one_scale:
            yield Piece("weight_scale", (1,), dtypes=FLOATS, other_shapes=((), (1, 1)))
        else:
            yield Piece("weight_scale", (rows, 1), dtypes=FLOATS, other_shapes=((rows,),))
        yield Piece("input_scale", (1,), is_required=False, other_shapes=((),))

    def read(self, pieces: Mapping[str, Tensor], rows: int, columns: int) -> Tensor | Codes:  # noqa: ARG002
        """Spread a single scale over the rows."""
        scale = pieces["weight_scale"].float().reshape(-1).expand(rows).contiguous()
        codes = RowCodes(pieces["weight"], scale)
        return codes.dequantize() if self.kept == "plain" else codes


@dataclass(frozen=True, slots=True)
class BlocksReader:
    """FP8 with one scale for each block of 128 by 128; a value is code times scale."""

    stored: StoredQuantization
    kept: KeptWeights
    writes_zero_biases: bool = False

    def pieces(self, rows: int, columns: int) -> Iterator[Piece]:
        """Codes and scales, the last blocks cut; powers of two may be stored as such."""
        yield Piece("weight", (rows, columns), dtypes=(torch.float8_e4m3fn,))
        blocks = (-(-rows // GROUP_COLUMNS), -(-columns // GROUP_COLUMNS))
        yield Piece(self.stored.scale_name, blocks, dtypes=(*FLOATS, torch.float8_e8m0fnu))
        yield Piece("input_scale", (1,), is_required=False, other_shapes=((),))

    def read(self, pieces: Mapping[str, Tensor], rows: int, columns: int) -> Tensor | Codes:  # noqa: ARG002
        """Codes and scales as they are."""
        codes = BlockCodes(pieces["weight"], pieces[self.stored.scale_name].float())
        return codes.dequantize() if self.kept == "plain" else codes


@dataclass(frozen=True, slots=True)
class GroupsReader:
    """4 or 8 bits in groups: what GPTQ, AWQ and packed compressed-tensors have in common."""

    stored: StoredQuantization
    kept: KeptWeights

    @property
    def writes_zero_biases(self) -> bool:
        """AutoGPTQ did."""
        return self.stored.method == "gptq"

    def pieces(self, rows: int, columns: int) -> Iterator[Piece]:
        """Codes, scales, zero points and the groups of the inputs."""
        method, in_word = self.stored.method, WORD_BITS // self.stored.bits
        groups = -(-columns // self._group_size(columns))
        has_zeros = not self.stored.is_symmetric
        if method == "packed":
            yield Piece("weight_packed", (rows, -(-columns // in_word)), dtypes=INT32)
            yield Piece("weight_scale", (rows, groups), dtypes=FLOATS)
            yield Piece("weight_shape", (2,), dtypes=(torch.int64, torch.int32))
            zeros = (-(-rows // in_word), groups)
            yield Piece("weight_zero_point", zeros, is_required=has_zeros, dtypes=INT32)
            yield Piece("weight_g_idx", (columns,), self.stored.is_sorted, INT32)
            return
        for side, size in (("out", rows), ("in", columns)):
            if size % in_word and (side == "out" or method == "gptq"):
                raise UnsupportedModel(
                    f"{method} packs {in_word} codes in a word, and a matrix [{rows}, {columns}] "
                    f"has {size} {side}puts"
                )
        if method == "gptq":
            yield Piece("qweight", (columns // in_word, rows), dtypes=INT32)
            yield Piece("g_idx", (columns,), self.stored.is_sorted, INT32)
        else:
            yield Piece("qweight", (columns, rows // in_word), dtypes=INT32)
        yield Piece("qzeros", (groups, rows // in_word), has_zeros, INT32)
        yield Piece("scales", (groups, rows), dtypes=FLOATS)

    def read(self, pieces: Mapping[str, Tensor], rows: int, columns: int) -> Tensor | Codes:
        """Unpack, and sort the inputs by their groups."""
        codes, scale, zeros = self._unpack(pieces, rows, columns)
        bits = self.stored.bits
        if (
            self.stored.is_symmetric
            and zeros is not None
            and bool((zeros == 2 ** (bits - 1)).all())
        ):
            zeros = None
        index = pieces.get("g_idx", pieces.get("weight_g_idx"))
        group = group_of_inputs(index, columns, self.stored.group_size)
        if self.kept == "int4":
            # Kernels take two types; the range of float32 scales is that of bfloat16.
            kind = torch.bfloat16 if scale.dtype == torch.float32 else scale.dtype
            return in_groups_of_128(codes, scale.to(kind), zeros, group, "g_idx")
        if self.kept == "int8" and zeros is None:
            return RowCodes((codes.to(torch.int16) - 128).to(torch.int8), scale[:, 0].float())
        return dequantize_groups(codes, scale, zeros, group, bits)

    def _unpack(
        self, pieces: Mapping[str, Tensor], rows: int, columns: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes `[rows, columns]`, scales and zero points `[rows, groups]`."""
        stored, bits = self.stored, self.stored.bits
        if stored.method == "packed":
            shape = pieces["weight_shape"].tolist()
            if shape != [rows, columns]:
                raise BrokenCheckpoint(
                    f"weight_shape is {shape}; its config asks for {[rows, columns]}"
                )
            codes = unpack_columns(pieces["weight_packed"], bits)[:, :columns]
            packed = pieces.get("weight_zero_point")
            zeros = None if packed is None else unpack_rows(packed, bits)[:rows]
            return codes, pieces["weight_scale"], zeros
        scale = pieces["scales"].T.contiguous()
        words = pieces.get("qzeros")
        if stored.method == "awq":
            codes = _in_order(unpack_columns(pieces["qweight"], bits)).T.contiguous()
            return codes, scale, None if words is None else _in_order(unpack_columns(words, bits)).T
        codes = unpack_rows(pieces["qweight"], bits).T.contiguous()
        if words is None:
            return codes, scale, None
        zeros = unpack_columns(words, bits)
        if stored.zeros_less_one:
            # In the bits of a code: zero point 0 is stored as all ones.
            zeros = (zeros + 1) & (2**bits - 1)
        return codes, scale, zeros.T.contiguous()

    def _group_size(self, columns: int) -> int:
        return self.stored.group_size if self.stored.group_size > 0 else columns


def reader_of(stored: StoredQuantization, kept: KeptWeights) -> Reader:
    """The reader of quantized matrices; `kept` is what they are kept as."""
    if stored.method == "rows":
        return RowsReader(stored, kept)
    if stored.method == "blocks":
        return BlocksReader(stored, kept)
    return GroupsReader(stored, kept)


def _in_order(codes: Tensor) -> Tensor:
    """Undo AWQ's order within words."""
    words = codes.view(len(codes), -1, len(AWQ_PLACES))
    return words[..., list(AWQ_PLACES)].reshape(codes.shape)
