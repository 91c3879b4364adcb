"""What is remembered from one decision to the next, and how long the pauses are."""

from datetime import timedelta

import pytest
from scenes import NOW

from deepseek_operator.degrade_case import Memory, backoff_seconds


@pytest.mark.parametrize(
    "stored",
    [
        None,
        {},
        {"phase": "unheard-of", "degradations": -1},
        {"phase": "blocked", "since": "yesterday", "attempts": "many", "fallback": 7},
        {"phase": "swapping", "since": "2026-05-01T12:00:00", "nextAttemptTime": 5},
    ],
    ids=str,
)
def test_a_status_that_is_not_understood_is_forgotten(stored: dict | None) -> None:
    memory = Memory.of(stored)

    assert memory.since is None
    assert memory.next_attempt is None
    assert memory.attempts == 0
    assert memory.degradations == 0


def test_what_is_remembered_is_read_back_as_it_was() -> None:
    memory = Memory(
        "blocked", NOW, "small", attempts=2, next_attempt=NOW + timedelta(seconds=30),
        next_step=NOW + timedelta(seconds=300), generation=3, degradations=4,
    )  # fmt: skip

    assert Memory.of(memory.document()) == memory
    assert Memory().document() is None


def test_pauses_double_up_to_their_limit() -> None:
    assert [backoff_seconds(n) for n in (1, 2, 3, 6, 60)] == [15, 30, 60, 300, 300]
