"""Files that others may read at any moment, and whose writer may be killed at any moment."""

from pathlib import Path


def write(file: Path, text: str) -> None:
    """Write a file whole or not at all: whoever opens it finds what was there before, or this."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.rename(file)
