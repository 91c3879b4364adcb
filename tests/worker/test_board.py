"""Numbers that several processes share."""

import os
import subprocess
import sys

import pytest

from deepseek_worker.board import CELLS, UNFINISHED, WARM, Board, create_board

STOPPED = ("deepseek_requests_total", "stop")


@pytest.fixture
def fd():
    fd = create_board(3)
    yield fd
    os.close(fd)


def test_every_process_sees_what_all_count(fd):
    rows = [Board(fd, 3, row) for row in range(3)]

    rows[0].add(STOPPED)
    rows[2].add(STOPPED, 4)
    rows[1].set(UNFINISHED, 5)
    rows[2].set(UNFINISHED, 2)

    assert [board.total(STOPPED) for board in rows] == [5, 5, 5]
    assert [board.num_unfinished for board in rows] == [7, 7, 7]


def test_another_process_counts_in_the_same_memory(fd):
    code = f"import sys; from deepseek_worker.board import *;Board({fd}, 3, 1).add({STOPPED!r}, 3)"

    subprocess.run([sys.executable, "-c", code], pass_fds=[fd], check=True)

    assert Board(fd, 3).total(STOPPED) == 3


def test_a_successor_goes_on_counting_and_starts_without_requests(fd):
    first = Board(fd, 3, 1)
    first.add(STOPPED, 10)
    first.set(UNFINISHED, 4)

    Board(fd, 3).forget_requests(1)
    Board(fd, 3, 1).add(STOPPED)

    assert Board(fd, 3).total(STOPPED) == 11
    assert Board(fd, 3).num_unfinished == 0


def test_warm_is_a_worker_whose_processes_all_are(fd):
    rows = [Board(fd, 3, row) for row in range(3)]
    seen = []

    for board in rows:
        seen.append(rows[0].is_warm)
        board.set(WARM, 1)

    assert seen == [False, False, False]
    assert rows[0].is_warm


def test_no_two_numbers_share_a_cell():
    assert sorted(CELLS.values()) == list(range(len(CELLS)))
