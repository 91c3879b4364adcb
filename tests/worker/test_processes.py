"""How processes are told apart by their ends."""

import signal

import msgspec
import pytest

from deepseek_worker.processes import how_it_ended, last_words
from deepseek_worker.progress import Failure


def test_last_words_are_read():
    failure = Failure("ModelTooLarge", "too large", 3)

    assert last_words(msgspec.msgpack.encode(failure)) == failure


def test_who_is_killed_leaves_none():
    assert last_words(b"") is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with code 3"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (-signal.SIGKILL, "was ended by SIGKILL, which the kernel sends when memory is used up"),
    ],
)
def test_an_end_is_put_in_words(code, words):
    assert how_it_ended(code) == words
