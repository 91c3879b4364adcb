"""Sends streamed completions at given times over kept connections; a process of its own.

`engine_http.py` starts some of these with two files: what to send when, as JSON, and where to write
for each request its arrival, when its events came, and whether the answer was complete. The client
is written for little work per event, so that it is not what is measured.
"""

import asyncio
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

EVENT = b"data: {"
END_OF_BODY = b"\r\n0\r\n\r\n"


@dataclass
class Exchange:
    """One request and what came of it; times count from the common start."""

    arrival: float
    body: bytes
    times: list[float] = field(default_factory=list)
    """When pieces with events came."""
    is_complete: bool = False
    status: int = 0


class Connection(asyncio.Protocol):
    """One connection; it has one exchange at a time."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._transport: Any = None
        self._exchange: Exchange | None = None
        self._tail = b""
        self._is_last = False
        self._is_headed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def send(self, exchange: Exchange) -> None:
        """Ask."""
        self._exchange, self._tail = exchange, b""
        self._is_headed = self._is_last = False
        self._transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(exchange.body), exchange.body)
        )

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        exchange = self._exchange
        if exchange is None:
            return
        if not self._is_headed:
            self._tail += data
            head, found, rest = self._tail.partition(b"\r\n\r\n")
            if not found:
                return
            self._is_headed = True
            exchange.status = int(head[9:12])
            # What follows an error is not read, so nothing else may come after it.
            self._is_last = exchange.status != 200 or b"connection: close" in head.lower()
            data, self._tail = rest, b""
        if EVENT in data:
            exchange.times.append(self._pool.now())
        self._tail = (self._tail + data)[-4096:]
        if self._tail.endswith(END_OF_BODY) or exchange.status != 200:
            exchange.is_complete = b"[DONE]" in self._tail and self._pool.end in self._tail
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio gives it
        """Called by the event loop."""
        self._is_last = True
        if self._exchange is not None:
            self._finish()

    def _finish(self) -> None:
        self._exchange = None
        if self._is_last:
            self._transport.close()
        self._pool.finished(None if self._is_last else self)


class Pool:
    """Connections that are free, and how many answers are missing."""

    def __init__(self, port: int, started_at: float, num: int, end: bytes) -> None:
        self.end = end
        self._port = port
        self._started_at = started_at
        self._free: deque[Connection] = deque()
        self._missing = num
        self.done = asyncio.Event()

    def now(self) -> float:
        """Seconds since the common start."""
        return time.monotonic() - self._started_at

    async def ask(self, exchange: Exchange) -> None:
        """Send at its time, over a free connection or a new one."""
        # The loop's timers count from its last turn, in whole milliseconds: they end early.
        while (left := exchange.arrival - self.now()) > 0:  # noqa: ASYNC110 - waits for a time
            await asyncio.sleep(left)
        if self._free:
            connection = self._free.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: Connection(self), "127.0.0.1", self._port
            )
        connection.send(exchange)

    def finished(self, connection: Connection | None) -> None:
        """An answer has ended; its connection is free, or closed."""
        if connection is not None:
            self._free.append(connection)
        self._missing -= 1
        if self._missing == 0:
            self.done.set()


async def run(told: dict[str, Any]) -> list[dict[str, Any]]:
    """Send everything and wait for every answer."""
    exchanges = [Exchange(at, body.encode()) for at, body in told["requests"]]
    pool = Pool(told["port"], told["started_at"], len(exchanges), told["end"].encode())
    asking = [asyncio.create_task(pool.ask(exchange)) for exchange in exchanges]
    if exchanges:
        await asyncio.wait_for(pool.done.wait(), told["timeout_seconds"])
    await asyncio.gather(*asking)
    return [
        {"arrival": e.arrival, "times": e.times, "ok": e.is_complete, "status": e.status}
        for e in exchanges
    ]


def main() -> None:
    """Read the first file, write the second."""
    told = json.loads(Path(sys.argv[1]).read_text())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(run(told))
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
