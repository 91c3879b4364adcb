"""What of a cluster stays as it is from its first start to its end: its addresses and its size."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster import files, places

_FILE = "fixed.json"


@dataclass(frozen=True)
class Fixed:
    """One cluster's."""

    index: int
    """Which set of addresses it has."""
    num_nodes: int

    def write(self, state: Path) -> None:
        """Keep it in a cluster's folder."""
        state.mkdir(parents=True, exist_ok=True)
        files.write(state / _FILE, json.dumps(asdict(self)))


def read(state: Path) -> Fixed | None:
    """What the cluster in a folder has fixed; None before it did, and once it is down."""
    with suppress(FileNotFoundError):
        return Fixed(**json.loads((state / _FILE).read_text(encoding="utf-8")))
    return None


def of_all() -> Iterator[Fixed]:
    """What every cluster of this cache folder has fixed, running or not."""
    for file in places.clusters().glob(f"*/{_FILE}"):
        found = read(file.parent)
        if found is not None:
            yield found
