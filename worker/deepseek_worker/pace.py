"""When a refused client should come back. Pure: time is an argument."""

import math

MAX_SECONDS = 30
# How much the newest interval counts against all before it.
WEIGHT = 0.1


class Pace:
    """How fast requests end here."""

    def __init__(self) -> None:
        self._ended_at: float | None = None
        self._seconds_each: float | None = None

    def request_ended(self, now: float) -> None:
        """Note the end of a request, by the monotonic clock."""
        if self._ended_at is not None:
            seconds = now - self._ended_at
            known = self._seconds_each
            self._seconds_each = seconds if known is None else known + WEIGHT * (seconds - known)
        self._ended_at = now

    def seconds_until_free(self, num_waiting: int) -> int:
        """When the requests that wait now will have begun, 1 to `MAX_SECONDS`."""
        seconds = math.ceil(num_waiting * (self._seconds_each or 0.0))
        return max(1, min(seconds, MAX_SECONDS))
