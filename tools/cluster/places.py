"""Where the local cluster keeps things: all of it outside the checkout, under one cache folder."""

import os
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
REPOSITORY = SOURCE.parent.parent
PROGRAM_MODULES = SOURCE / "programs"
MANIFESTS = SOURCE / "manifests"


def cache() -> Path:
    """The cache folder: `$DEEPSEEK_CACHE`, or `~/.cache/deepseek`."""
    chosen = os.environ.get("DEEPSEEK_CACHE")
    return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "deepseek"


def binaries() -> Path:
    """Programs built from Go modules, one file per program and version."""
    return cache() / "bin"


def clusters() -> Path:
    """One folder per cluster: certificates, data, logs and the record of its processes."""
    return cache() / "clusters"


def lock(cluster: str) -> Path:
    """Held by the command that changes a cluster."""
    return clusters() / f".{cluster}.lock"


def images() -> Path:
    """What nodes share: the image store and the layers exported into it."""
    return cache() / "images"
