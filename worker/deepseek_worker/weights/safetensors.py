"""A folder with config.json and one or more safetensors files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepseek_worker.errors import BrokenCheckpoint, ModelNotFound
from deepseek_worker.models.config import ModelConfig, from_hf
from deepseek_worker.weights.transfer import Extent

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LENGTH_BYTES = 8
"""Of the header, in front of it."""
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """Opens every file at once, so that a missing or short one is found before any weight."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = read_config(folder)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._extents: dict[str, Extent] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file_name in self._file_names():
            self._open(file_name)
        self._compare_with_index()

    def tensor(self, name: str) -> Tensor:
        """Read one tensor as it is stored."""
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def extent(self, name: str) -> Extent | None:
        """Where the tensor is; None if torch lacks its type."""
        return self._extents.get(name)

    def _file_names(self) -> list[str]:
        index = self._folder / INDEX
        if index.is_file():
            names = sorted(set(self._weight_map().values()))
        else:
            names = sorted(file.name for file in self._folder.glob("*.safetensors"))
            if not names:
                raise ModelNotFound(f"{self._folder} holds a config.json but no .safetensors file")
        missing = [name for name in names if not (self._folder / name).is_file()]
        if missing:
            raise BrokenCheckpoint(
                f"{self._folder} lacks the files {', '.join(missing)}; download the model again"
            )
        return names

    def _weight_map(self) -> dict[str, str]:
        index = _read_json(self._folder / INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BrokenCheckpoint(f"{self._folder / INDEX} has no weight_map")
        return weight_map

    def _open(self, file_name: str) -> None:
        path = self._folder / file_name
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise BrokenCheckpoint(
                f"{path} is cut short or no safetensors file: {error}; download the model again"
            ) from error
        twice = sorted(shapes.keys() & self.shapes.keys())
        if twice:
            raise BrokenCheckpoint(
                f"tensor {twice[0]} is in {self._file_of[twice[0]]} and in {file_name}"
            )
        self._files[file_name] = file
        self._extents.update(_extents(path))
        self._file_of.update(dict.fromkeys(shapes, file_name))
        self.shapes.update(shapes)

    def _compare_with_index(self) -> None:
        if not (self._folder / INDEX).is_file():
            return
        for name, file_name in self._weight_map().items():
            if self._file_of.get(name) != file_name:
                raise BrokenCheckpoint(
                    f"{INDEX} says that {file_name} holds tensor {name}, but it does not; "
                    "download the model again"
                )


def _extents(path: Path) -> Iterator[tuple[str, Extent]]:
    """Of the tensors in a file that safetensors has opened, and so checked."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(header_bytes))
    data = LENGTH_BYTES + header_bytes
    for name, entry in header.items():
        dtype = DTYPES.get(entry.get("dtype"))
        if dtype is not None:
            first, last = entry["data_offsets"]
            yield name, Extent(path, data + first, last - first, dtype, tuple(entry["shape"]))


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, with the end tokens of generation_config.json where there is one.

    Raises:
        ModelError: the file is missing, broken or asks for what is not served.
    """
    generation = folder / "generation_config.json"
    return from_hf(
        _read_json(folder / "config.json"), _read_json(generation) if generation.is_file() else None
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise BrokenCheckpoint(f"{path} holds no JSON object")
    return content
