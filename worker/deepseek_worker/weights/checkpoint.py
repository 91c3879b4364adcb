"""What the loader needs of a checkpoint, whatever its file format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from deepseek_worker.errors import ModelNotFound
from deepseek_worker.models.config import ModelConfig
from deepseek_worker.weights.gguf import GgufCheckpoint
from deepseek_worker.weights.safetensors import SafetensorsCheckpoint


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


def find_model(path: Path) -> Path:
    """The .gguf file or the folder with config.json that a path means.

    Raises:
        ModelNotFound: there is neither.
    """
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        files = sorted(file for file in path.glob("*.gguf") if file.is_file())
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(file.name for file in files)
            raise ModelNotFound(f"{path} holds several GGUF files; name one of them: {names}")
        raise ModelNotFound(f"{path} holds neither a config.json nor a .gguf file")
    if path.exists():
        raise ModelNotFound(f"{path} is neither a folder nor a .gguf file")
    raise ModelNotFound(f"{path} does not exist")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors or a GGUF file and read its configuration.

    Raises:
        ModelError: it is missing, broken or not served.
    """
    found = find_model(path)
    return GgufCheckpoint(found) if found.is_file() else SafetensorsCheckpoint(found)
