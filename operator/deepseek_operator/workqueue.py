"""A queue of names: one piece of work at a time for each, and the last wish counts.

A name that is added while it waits is not added again; one that is added while it is worked on
is worked on once more afterwards. So any number of events about an object costs at most one
more reconcile, which sees the newest state. A failing name waits for its own back-off and holds
up no other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from deepseek_operator.errors import ApiError

logger = logging.getLogger(__name__)

Name = TypeVar("Name", bound=Hashable)

FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 300.0


def backoff_seconds(failures: int, jitter: Callable[[], float] = random.random) -> float:
    """The pause after the n-th failure in a row (n >= 1): exponential, with up to a third off."""
    longest: float = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (failures - 1))
    return longest * (1 - jitter() / 3)


class WorkQueue(Generic[Name]):
    """Runs `work(name)` for names that are added, at most `concurrency` at the same time.

    `work` returns after how many seconds it wants to run again, or None. If it raises, it runs
    again after the back-off.
    """

    def __init__(
        self, work: Callable[[Name], Awaitable[float | None]], *, concurrency: int
    ) -> None:
        self._work = work
        self._concurrency = concurrency
        self._ready: deque[Name] = deque()
        self._waiting: set[Name] = set()
        self._running: set[Name] = set()
        self._again: set[Name] = set()
        self._timers: dict[Name, asyncio.TimerHandle] = {}
        self._failures: dict[Name, int] = {}
        self._wakeup = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, name: Name) -> None:
        """Have the name worked on as soon as possible; must be called in the event loop."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if name in self._running:
            self._again.add(name)
        elif name not in self._waiting:
            self._waiting.add(name)
            self._ready.append(name)
            self._fill()

    def forget(self, name: Name) -> None:
        """Drop a name that is gone: its timer and its failures, not work that is going on."""
        self._failures.pop(name, None)
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def failures(self, name: Name) -> int:
        """How often the work on a name has failed in a row."""
        return self._failures.get(name, 0)

    @property
    def depth(self) -> int:
        """Names that wait for their turn."""
        return len(self._ready)

    async def settle(self) -> None:
        """Return once nothing waits and nothing runs; timers do not count."""
        async with self._wakeup:
            await self._wakeup.wait_for(lambda: not self._ready and not self._running)

    async def close(self, grace_seconds: float) -> None:
        """Take nothing new, let what runs finish within the grace, cancel the rest."""
        self._concurrency = 0
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _fill(self) -> None:
        while self._ready and len(self._running) < self._concurrency:
            name = self._ready.popleft()
            self._waiting.discard(name)
            self._running.add(name)
            task = asyncio.get_running_loop().create_task(self._run(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, name: Name) -> None:
        delay: float | None = None
        try:
            delay = await self._work(name)
            self._failures.pop(name, None)
        except ApiError as error:
            delay = max(self._backoff(name), error.retry_after_seconds or 0.0)
            logger.warning("Work on %s failed; again in %.1f s: %s", name, delay, error)
        except Exception:
            delay = self._backoff(name)
            logger.exception("Work on %s failed; again in %.1f s", name, delay)
        finally:
            self._running.discard(name)
        if name in self._again:
            self._again.discard(name)
            self.add(name)
        elif delay is not None:
            self._add_later(name, delay)
        self._fill()
        async with self._wakeup:
            self._wakeup.notify_all()

    def _backoff(self, name: Name) -> float:
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        return backoff_seconds(failures)

    def _add_later(self, name: Name, delay: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(delay, self._due, name)

    def _due(self, name: Name) -> None:
        self._timers.pop(name, None)
        self.add(name)
