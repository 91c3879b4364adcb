"""Numbers that all API processes of a worker have in common, in memory that they share.

Each process writes a row of its own and reads all rows, so any of them can say how many requests
the worker has answered, whichever process it was. A process that takes the place of one that died
goes on with its row: counters never fall. Cells are doubles of eight bytes, written at once.
"""

import mmap
import os
from collections.abc import Sequence

from deepseek_contract import metrics as names
from deepseek_worker.errors import reasons

Key = tuple[str, object]

UNFINISHED: Key = ("unfinished", None)
"""Requests that were given to the engine and have not had their last output."""
WARM: Key = ("warm", None)
"""1 once the process has had an answer from the engine."""
HISTOGRAMS = (
    names.TIME_TO_FIRST_TOKEN_SECONDS,
    names.INTER_TOKEN_LATENCY_SECONDS,
    names.REQUEST_DURATION_SECONDS,
)
SUM = "sum"
CELL_BYTES = 8


def _keys() -> Sequence[Key]:
    return (
        UNFINISHED,
        WARM,
        *((names.REQUESTS_TOTAL.name, reason) for reason in names.REQUESTS_TOTAL.label_values),
        *((names.REQUESTS_REJECTED_TOTAL.name, reason) for reason in reasons()),
        *(
            (metric.name, cell)
            for metric in HISTOGRAMS
            # One bucket more than bounds, for what exceeds them all.
            for cell in (SUM, *range(len(metric.buckets) + 1))
        ),
    )


CELLS = {key: at for at, key in enumerate(_keys())}


class Board:
    """The rows of all API processes, one of which may be written."""

    def __init__(self, fd: int, num_rows: int, row: int = 0) -> None:
        """Map the memory.

        Args:
            fd: From `create_board`.
            num_rows: As many as it was created with.
            row: The one to write.
        """
        self.num_rows = num_rows
        self._map = mmap.mmap(fd, num_rows * len(CELLS) * CELL_BYTES)
        self._cells = memoryview(self._map).cast("d")
        self._first = row * len(CELLS)

    def add(self, key: Key, amount: float = 1.0) -> None:
        """Count in the own row."""
        self._cells[self._first + CELLS[key]] += amount

    def set(self, key: Key, value: float) -> None:
        """Write into the own row."""
        self._cells[self._first + CELLS[key]] = value

    def total(self, key: Key) -> float:
        """The sum over all rows."""
        return float(sum(self._column(key)))

    @property
    def num_unfinished(self) -> int:
        """Requests of the whole worker."""
        return int(self.total(UNFINISHED))

    @property
    def is_warm(self) -> bool:
        """Whether every process has had an answer from the engine."""
        return all(self._column(WARM))

    def forget_requests(self, row: int) -> None:
        """The process that wrote this row is dead, and its requests with it."""
        self._cells[row * len(CELLS) + CELLS[UNFINISHED]] = 0.0

    def _column(self, key: Key) -> Sequence[float]:
        return self._cells[CELLS[key] :: len(CELLS)].tolist()


def create_board(num_rows: int) -> int:
    """Memory without a name, of zeros; returns its file descriptor."""
    fd = os.memfd_create("deepseek-board", os.MFD_CLOEXEC)
    os.truncate(fd, num_rows * len(CELLS) * CELL_BYTES)
    return fd
