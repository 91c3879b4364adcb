"""Reads the header of a GGUF file. No torch: the tokenizer reads its vocabulary here too.

The `gguf` library's own reader keeps every string of the vocabulary as four memory-mapped
arrays, which takes seconds; this one takes a tenth of one, and names the tensor at which a file
ends too early. Types, block sizes and dequantization are the library's.

Source: the GGUF specification, version 3 (ggml, docs/gguf.md).
"""

import functools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from deepseek_worker.errors import BrokenCheckpoint

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch; the file counts from the innermost."""
    type: GGMLQuantizationType
    offset: int
    """From the start of the file."""
    num_bytes: int


class GgufFile:
    """Metadata and tensor positions; the data stays on the disk until it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._position = 0
            num_tensors, num_fields = self._header()
            self.metadata: dict[str, Any] = {
                self._string(): self._value(self._number("I")) for _ in range(num_fields)
            }
            infos = [self._tensor_info() for _ in range(num_tensors)]
        except (struct.error, ValueError, KeyError, OverflowError, OSError) as error:
            raise self._broken(f"its header is not readable ({error})") from error
        self.tensors = self._place(infos)

    def data(self, tensor: StoredTensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """The stored bytes, read-only."""
        return np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.offset)

    def text(self, key: str) -> str:
        """A string that has to be there."""
        return str(self._needed(key))

    def integer(self, key: str) -> int:
        """A positive integer that has to be there."""
        value = self._needed(key)
        if not isinstance(value, int) or value < 1:
            raise BrokenCheckpoint(f"{self.path}: {key} is {value!r}, not a positive integer")
        return value

    def number(self, key: str) -> float:
        """A number that has to be there."""
        value = self._needed(key)
        if not isinstance(value, int | float):
            raise BrokenCheckpoint(f"{self.path}: {key} is {value!r}, not a number")
        return float(value)

    def _needed(self, key: str) -> Any:
        if key not in self.metadata:
            raise BrokenCheckpoint(f"{self.path}: the header lacks {key}")
        return self.metadata[key]

    def _header(self) -> tuple[int, int]:
        if self._bytes[:4] != b"GGUF":
            raise ValueError(f"it begins with {self._bytes[:4]!r}, not with b'GGUF'")
        self._position = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; versions 2 and 3 are read")
        return self._number("Q"), self._number("Q")

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._position)
        self._position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        end = self._position + length
        if end > len(self._bytes):
            raise ValueError("a string reaches beyond the end of the file")
        text = self._bytes[self._position : end].decode("utf-8")
        self._position = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._number(SCALARS[kind])
        item_kind, length = self._number("I"), self._number("Q")
        if item_kind in (STRING, ARRAY):
            if length > len(self._bytes):
                raise ValueError(f"an array claims {length} items")
            return [self._value(item_kind) for _ in range(length)]
        values = struct.unpack_from(f"<{length}{SCALARS[item_kind]}", self._bytes, self._position)
        self._position += struct.calcsize(f"<{length}{SCALARS[item_kind]}")
        return list(values)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        num_dimensions = self._number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
        return name, shape, GGMLQuantizationType(self._number("I")), self._number("Q")

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]]
    ) -> dict[str, StoredTensor]:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        first = -(-self._position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in infos:
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            num_bytes = int(np.prod(shape, dtype=np.int64)) // block_size * block_bytes
            tensor = StoredTensor(name, shape, kind, first + offset, num_bytes)
            if name in tensors:
                raise self._broken(f"tensor {name} is in it twice")
            if tensor.offset + num_bytes > len(self._bytes):
                raise self._broken(
                    f"tensor {name} reaches to byte {tensor.offset + num_bytes}, but the file has "
                    f"{len(self._bytes)}"
                )
            tensors[name] = tensor
        return tensors

    def _broken(self, what: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(
            f"{self.path} is cut short or no GGUF file: {what}; download the model again"
        )


@functools.lru_cache(maxsize=2)
def open_gguf(path: Path) -> GgufFile:
    """Parse the header once: the engine and the tokenizer read the same file.

    Raises:
        BrokenCheckpoint: the file is cut short or no GGUF file.
    """
    return GgufFile(path)
