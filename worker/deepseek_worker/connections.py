"""Connections that end after some requests or some time.

kube-proxy balances connections, not requests: a client that keeps its connections would never
meet a new pod. So the answer that reaches a limit says `Connection: close`, and the client opens
another connection. A connection is never cut in the middle of an answer, however long it takes.
"""

import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# A connection on which nobody asks anything costs a file descriptor, of which there are few.
FIRST_REQUEST_SECONDS = 30.0


class ConnectionLimits:
    """Shared by all connections of a server."""

    def __init__(
        self,
        max_requests: int,
        max_seconds: float,
        first_request_seconds: float = FIRST_REQUEST_SECONDS,
    ) -> None:
        self.max_requests = max_requests
        self.max_seconds = max_seconds
        self.first_request_seconds = first_request_seconds
        self.is_draining = False
        """Every answer ends its connection from now on."""
        self.num_open = 0


def protocol(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes for each connection."""

    class AgeingProtocol(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            limits.num_open += 1
            self._num_requests = 0
            self._opened_at = time.monotonic()
            self._unused_timer = self.loop.call_later(
                limits.first_request_seconds, self._close_if_unused
            )

        def connection_lost(self, exc: Exception | None) -> None:
            limits.num_open -= 1
            # A timer holds on to the connection and to all of its last request until its time.
            self._unused_timer.cancel()
            # uvicorn itself does so only where the client did not reset the connection.
            self._unset_keepalive_if_required()
            super().connection_lost(exc)

        def _close_if_unused(self) -> None:
            if self._num_requests == 0:
                self.transport.close()

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self._num_requests += 1
            age_seconds = time.monotonic() - self._opened_at
            if (
                limits.is_draining
                or self._num_requests >= limits.max_requests
                or age_seconds >= limits.max_seconds
            ):
                # uvicorn writes the header when the answer starts, and closes after its end.
                self.cycle.keep_alive = False

    return AgeingProtocol
