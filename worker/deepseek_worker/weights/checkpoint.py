"""What the loader needs of a checkpoint, whatever its file format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from deepseek_worker.models.config import ModelConfig
from deepseek_worker.weights.files import find_model
from deepseek_worker.weights.gguf import GgufCheckpoint
from deepseek_worker.weights.safetensors import SafetensorsCheckpoint
from deepseek_worker.weights.transfer import Extent


class Checkpoint(Protocol):
    """Tensors by the names of transformers, and the model's configuration."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor, without reading any."""

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, dequantized.

        Raises:
            BrokenCheckpoint: the file ends before the tensor does.
        """

    def extent(self, name: str) -> Extent | None:
        """Where the tensor is in a file, as `tensor` returns it; None if it has to be decoded."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors or a GGUF file and read its configuration.

    Raises:
        ModelError: it is missing, broken or not served.
    """
    found = find_model(path)
    return GgufCheckpoint(found) if found.is_file() else SafetensorsCheckpoint(found)
