"""Finds texts in an answer's bytes, such as the end of its thought. Pure."""


class MarkerSearch:
    """Looks for texts, one after the other, in bytes that come piece by piece."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = [marker.encode() for marker in markers]
        self._tail = b""

    @property
    def is_done(self) -> bool:
        """Whether all of them have come."""
        return not self._markers

    def push(self, data: bytes) -> None:
        """Look at the next piece."""
        self._tail += data
        while self._markers:
            before, found, after = self._tail.partition(self._markers[0])
            if not found:
                self._tail = before[-len(self._markers[0]) :]
                return
            del self._markers[0]
            self._tail = after
