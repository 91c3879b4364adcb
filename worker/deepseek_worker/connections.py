"""Connections that end after some requests or some time.

kube-proxy balances connections, not requests: a client that keeps its connections would never
meet a new pod. So the answer that reaches a limit says `Connection: close`, and the client opens
another connection. A connection is never cut in the middle of an answer, however long it takes.
"""

import time
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
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


class _PatientProtocol(HttpToolsProtocol):
    """What uvicorn lacks: a limit for heads, answers to requests that offer another protocol."""

    _num_head_bytes: int | None = None
    """Of the head that is coming; None between heads."""

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
            return
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(f"The head of a request may have {MAX_HEAD_BYTES} bytes; send less.")

    def _refuse(self, message: str) -> None:
        self.logger.warning(message)
        self.send_400_response(message)

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which passes over the body of a request that offers a protocol.

        Another parser then begins with the same request, without the offer.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self.is_offer():
                    return
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def is_offer(self) -> bool:
        """Whether the request would do without another protocol."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        kept = (header for header in self.headers if header[0] != b"upgrade")
        return b"".join((first, *(b"%b: %b\r\n" % header for header in kept), b"\r\n"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0

    def on_message_complete(self) -> None:
        if not self.is_offer():
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._num_head_bytes = None
        if not self.is_offer():
            super().on_headers_complete()


def protocol(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes for each connection."""

    class AgeingProtocol(_PatientProtocol):
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
            if self.is_offer():
                return
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
