"""When the device will be done with what was launched. Pure: time is an argument.

The next step has to be launched before this one ends, but the later that happens, the more of the
requests that arrive meanwhile are in it. Steps of one shape take about the same time.
"""

from collections import deque
from collections.abc import Hashable

# Of a predicted time: steps get shorter as sequences end.
CAUTION = 0.9


class StepClock:
    """Follows the launches and ends of steps."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}
        self._launched: deque[tuple[int, Hashable]] = deque()
        self._num_launched = 0
        self._started_at: float | None = None
        """Of the oldest that was launched; None where it is not known."""

    def launched(self, shape: Hashable, now: float) -> int:
        """A step was given to the device, which takes it up when those before have ended.

        Returns its number.
        """
        if not self._launched:
            self._started_at = now
        self._num_launched += 1
        self._launched.append((self._num_launched, shape))
        return self._num_launched

    def ended(self, number: int, now: float, *, is_exact: bool) -> None:
        """That step, and all before it, have ended; `is_exact` says: just now, and not earlier."""
        while len(self._launched) > 1 and self._launched[0][0] < number:
            self._launched.popleft()
            self._started_at = None
        if not self._launched or self._launched[0][0] != number:
            return
        _, shape = self._launched.popleft()
        if is_exact and self._started_at is not None:
            self._seconds[shape] = now - self._started_at
        self._started_at = now if is_exact else None

    def seconds_left(self, now: float) -> float:
        """Of the one step that runs, cautiously; 0 where nothing is known of it."""
        if len(self._launched) != 1 or self._started_at is None:
            return 0.0
        seconds = self._seconds.get(self._launched[0][1], 0.0)
        return max(0.0, self._started_at + CAUTION * seconds - now)
