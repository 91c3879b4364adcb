"""Where a model's files are. No torch: the tokenizer looks here too."""

from pathlib import Path

from deepseek_worker.errors import ModelNotFound


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
