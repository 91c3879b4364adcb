"""Connections: how answers are framed, and what ends them.

kube-proxy balances connections, not requests: a client that keeps its connections would never
meet a new pod. So the answer that reaches a limit says `Connection: close`, and the client opens
another connection. A connection is never cut in the middle of an answer, however long it takes,
unless its client takes nothing of it for minutes.
"""

import asyncio
import socket
import time
from functools import partial
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
# What is read at once may hold ten thousand requests of a client that waits for no answer.
MAX_PIPELINED = 64
# A connection on which nobody asks anything costs a file descriptor, of which there are few.
HEAD_SECONDS = 30.0
# An answer that nobody takes is kept whole until its client does, or is gone.
DEAF_SECONDS = 120.0


class ConnectionLimits:
    """Shared by all connections of a server."""

    def __init__(
        self,
        max_requests: int,
        max_seconds: float,
        head_seconds: float = HEAD_SECONDS,
        deaf_seconds: float = DEAF_SECONDS,
    ) -> None:
        self.max_requests = max_requests
        self.max_seconds = max_seconds
        self.head_seconds = head_seconds
        """How long the head of a request may take, the wait for the first one included."""
        self.deaf_seconds = deaf_seconds
        """How long a client may take nothing of what is sent to it."""
        self.is_draining = False
        """Every answer ends its connection from now on."""
        self.num_open = 0


class _PatientProtocol(HttpToolsProtocol):
    """What uvicorn lacks: limits for what frames bodies, older clients, offers of protocols."""

    _num_framing_bytes = 0
    """Of the head that is coming, or of what is neither head nor body, as trailers are."""
    _num_read_bytes = 0
    """At once, the last time."""
    _is_in_head = False
    _is_deaf = False
    """What comes is no HTTP, or too much of it."""

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._num_read_bytes = len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
            return
        self._num_framing_bytes += len(data)
        if self._num_framing_bytes > MAX_HEAD_BYTES:
            self._refuse(
                f"The head of a request may have {MAX_HEAD_BYTES} bytes, and so may trailers."
            )

    def _refuse(self, message: str) -> None:
        self.logger.warning(message)
        if self._is_answering():
            # A refusal would get into the answer. It may come to its end, and is the last.
            self._is_deaf = True
            self.shutdown()
        else:
            self.send_400_response(message)

    def _is_answering(self) -> bool:
        """Whether a request has come as a whole, or is being answered, and is not done."""
        if self.pipeline:
            return True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return cycle.response_started or not cycle.more_body

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
        # Not whenever data come, as uvicorn does: those that begin no request keep nothing open.
        self._unset_keepalive_if_required()
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no part of the head.
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._forget_framing()
        if self.is_offer():
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError("too many requests at once")
        if self.parser.get_http_version() != "1.1":
            # There is no 100 Continue before 1.1.
            self.expect_100_continue = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._forget_framing()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._forget_framing()
        if not self.is_offer():
            super().on_message_complete()

    def _forget_framing(self) -> None:
        # Where in the data that was is not known: they count for nothing.
        self._num_framing_bytes = -self._num_read_bytes

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] != "1.1":
            app = partial(_without_chunks, app, cycle)
        if cycle.waiting_for_100_continue:
            app = partial(_last_if_unread, app, cycle)
        super()._start_asgi_task(cycle, app)


async def _without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """End the connection with the answer, where uvicorn writes chunks: they exist since 1.1."""
    cycle.keep_alive = False

    async def unframed(message: Message) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        else:
            # What is still to come, as uvicorn knows it of an answer with a length.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, unframed)


async def _last_if_unread(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """End the connection with an answer for which the body was not asked.

    Its client may send the body or leave it out, so nobody knows where the next request begins.
    """

    async def last(message: Message) -> None:
        if cycle.waiting_for_100_continue:
            cycle.keep_alive = False
        await send(message)

    await app(scope, receive, last)


def protocol(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes for each connection."""

    class AgeingProtocol(_PatientProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            limits.num_open += 1
            self._num_requests = 0
            self._opened_at = time.monotonic()
            self._head_timer = self._new_head_timer()
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * limits.deaf_seconds)
            )

        def connection_lost(self, exc: Exception | None) -> None:
            limits.num_open -= 1
            # A timer holds on to the connection and to all of its last request until its time.
            self._head_timer.cancel()
            # uvicorn itself does so only where the client did not reset the connection.
            self._unset_keepalive_if_required()
            super().connection_lost(exc)

        def _new_head_timer(self) -> asyncio.TimerHandle:
            return self.loop.call_later(limits.head_seconds, self.shutdown)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._head_timer.cancelled():
                self._head_timer = self._new_head_timer()

        def on_headers_complete(self) -> None:
            self._head_timer.cancel()
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
