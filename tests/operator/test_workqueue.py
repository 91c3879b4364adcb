"""The queue of names."""

import asyncio
import logging
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_operator.errors import ClusterBusyError
from deepseek_operator.workqueue import LONGEST_BACKOFF_SECONDS, WorkQueue, backoff_seconds


class Work:
    """Remembers what was worked on; each piece takes as long as it is told."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.done: list[str] = []
        self.running: set[str] = set()
        self.most_at_once = 0
        self.seconds = seconds
        self.failures: dict[str, int] = {}
        self.again: dict[str, float] = {}

    async def __call__(self, name: str) -> float | None:
        assert name not in self.running
        self.running.add(name)
        self.most_at_once = max(self.most_at_once, len(self.running))
        await asyncio.sleep(self.seconds)
        self.running.discard(name)
        if self.failures.get(name, 0) > 0:
            self.failures[name] -= 1
            raise RuntimeError(name)
        self.done.append(name)
        return self.again.pop(name, None)


async def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def test_a_name_that_waits_is_not_added_again() -> None:
    work = Work()
    queue = WorkQueue(work, concurrency=1)
    queue.add("first")
    for _ in range(5):
        queue.add("a")
    waiting = queue.depth
    await queue.settle()

    assert waiting == 1
    assert work.done == ["first", "a"]


async def test_a_name_added_while_it_is_worked_on_is_worked_on_once_more() -> None:
    work = Work(0.02)
    queue = WorkQueue(work, concurrency=4)
    queue.add("a")
    await until(lambda: "a" in work.running)
    for _ in range(5):
        queue.add("a")
    await queue.settle()

    assert work.done == ["a", "a"]


async def test_the_last_of_many_quick_wishes_wins() -> None:
    """Case A11, as far as the queue goes: what is written last is what is read last."""
    wish, seen = 0, []

    async def work(_name: str) -> None:
        read = wish
        await asyncio.sleep(0.003)
        seen.append(read)

    queue = WorkQueue(work, concurrency=4)
    for value in range(1, 21):
        wish = value
        queue.add("a")
        await asyncio.sleep(0.001)
    await queue.settle()

    assert seen[-1] == 20
    assert seen == sorted(seen)


async def test_no_more_at_once_than_allowed() -> None:
    work = Work(0.002)
    queue = WorkQueue(work, concurrency=3)
    for number in range(20):
        queue.add(str(number))
    await queue.settle()

    assert work.most_at_once == 3
    assert len(work.done) == 20


async def test_a_failing_name_waits_and_holds_up_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_operator.workqueue.FIRST_BACKOFF_SECONDS", 0.2)
    caplog.set_level(logging.CRITICAL, "deepseek_operator.workqueue")
    work = Work()
    work.failures["bad"] = 2
    queue = WorkQueue(work, concurrency=1)
    for name in ("bad", "good", "fine"):
        queue.add(name)
    await queue.settle()
    first = list(work.done)
    await until(lambda: len(work.done) == 3)

    assert first == ["good", "fine"]
    assert work.done == ["good", "fine", "bad"]


async def test_a_busy_server_is_given_the_time_it_asks_for() -> None:
    started = asyncio.get_running_loop().time()
    turns: list[float] = []

    async def work(_name: str) -> None:
        turns.append(asyncio.get_running_loop().time() - started)
        if len(turns) == 1:
            raise ClusterBusyError("busy", retry_after_seconds=1.5)

    queue = WorkQueue(work, concurrency=1)
    queue.add("a")
    await until(lambda: len(turns) == 2)

    assert turns[1] >= 1.4


async def test_work_can_ask_to_be_done_again_later() -> None:
    work = Work()
    work.again["a"] = 0.01
    queue = WorkQueue(work, concurrency=1)
    queue.add("a")
    await until(lambda: len(work.done) == 2)

    assert work.done == ["a", "a"]


async def test_an_event_does_not_wait_for_the_timer() -> None:
    work = Work()
    work.again["a"] = 60.0
    queue = WorkQueue(work, concurrency=1)
    queue.add("a")
    await queue.settle()
    queue.add("a")
    await queue.settle()
    await queue.close(0.1)

    assert work.done == ["a", "a"]


async def test_a_forgotten_name_is_not_done_again() -> None:
    work = Work()
    work.again["a"] = 0.2
    queue = WorkQueue(work, concurrency=1)
    queue.add("a")
    await queue.settle()
    queue.forget("a")
    await asyncio.sleep(0.3)

    assert work.done == ["a"]


async def test_closing_lets_work_finish_within_the_grace_and_starts_nothing() -> None:
    work = Work(0.01)
    queue = WorkQueue(work, concurrency=1)
    queue.add("a")
    queue.add("b")
    await asyncio.sleep(0)
    await queue.close(1.0)

    assert work.done == ["a"]


async def test_closing_cancels_what_takes_too_long() -> None:
    work = Work(60.0)
    queue = WorkQueue(work, concurrency=1)
    queue.add("a")
    await asyncio.sleep(0)
    await queue.close(0.01)

    assert work.done == []


@given(st.integers(1, 60), st.floats(0, 1))
def test_back_off_grows_and_is_bounded(failures: int, jitter: float) -> None:
    pause = backoff_seconds(failures, lambda: jitter)

    assert 0.6 <= pause <= LONGEST_BACKOFF_SECONDS
    assert pause <= backoff_seconds(failures + 1, lambda: 0.0)
