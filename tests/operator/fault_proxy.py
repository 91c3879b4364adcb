"""A proxy before the real API server that makes the faults which a healthy one does not make."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from cluster import ControlPlane
from deepseek_operator.api import Attributes, attributes_of

STALL = "stall"


@dataclass
class Fault:
    """What happens to the requests it is for, the first `times` of each resource."""

    applies: Callable[[Attributes], bool]
    status: int = 0
    """Answer with this status instead of asking the server."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    event: Mapping[str, Any] | None = None
    """Send this event as the first of the watch, and end the stream."""
    cut: bool = False
    """Drop the connection without an answer."""
    stall: bool = False
    """Let nothing of the stream through, and keep it open."""
    swallow: str = ""
    """Leave out the watch events whose line has this text."""
    hold: threading.Event | None = None
    """Keep watch events back, in their order, while this is cleared."""
    times: int = 1
    hits: dict[str, int] = field(default_factory=dict)

    def strikes(self, attributes: Attributes) -> bool:
        if not self.applies(attributes) or self.hits.get(attributes.resource, 0) >= self.times:
            return False
        self.hits[attributes.resource] = self.hits.get(attributes.resource, 0) + 1
        return True


class FaultProxy:
    """Runs in a thread of its own; faults may be added at any time."""

    def __init__(
        self, plane: ControlPlane, *, latency_seconds: tuple[float, float] = (0, 0)
    ) -> None:
        self._server = plane.server
        folder = plane.state / "certificates"
        self._tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self._latency = latency_seconds
        self._random = random.Random(1)
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Event
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.faults: list[Fault] = []
        self.seen: list[tuple[Attributes, int]] = []
        self.port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)

    def add(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def count(self, verb: str, resource: str) -> int:
        return sum(attributes == Attributes(verb, resource) for attributes, _ in self.seen)

    def _run(self) -> None:
        # Unlike a loop that is only closed, this ends the streams that are still open.
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            self._started.set()
            await self._ended.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        attributes = attributes_of(request.method, request.path, request.query)
        low, high = self._latency
        if high:
            await asyncio.sleep(self._random.uniform(low, high))
        fault = next((fault for fault in self.faults if fault.strikes(attributes)), None)
        if fault is not None and fault.cut:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault is not None and fault.status:
            self.seen.append((attributes, fault.status))
            body = fault.body or {"kind": "Status", "code": fault.status, "message": "made up"}
            return web.json_response(body, status=fault.status, headers=fault.headers)
        if fault is not None and fault.event is not None:
            self.seen.append((attributes, 200))
            return web.Response(text=json.dumps(fault.event) + "\n")
        try:
            return await self._forward(request, attributes, fault)
        except (aiohttp.ClientConnectionResetError, aiohttp.ClientPayloadError):
            # The operator was ended, or the server.
            return web.Response(status=502)

    async def _forward(
        self, request: web.Request, attributes: Attributes, fault: Fault | None
    ) -> web.StreamResponse:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in {"host", "content-length", "accept-encoding"}
        }
        # The answer's header is not passed on, and the client's own would ask for another one.
        headers["Accept-Encoding"] = "identity"
        url = f"{self._server}{request.path_qs}"
        body = await request.read()
        async with self._session.request(
            request.method, url, headers=headers, data=body or None,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:  # fmt: skip
            self.seen.append((attributes, answer.status))
            kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            response = web.StreamResponse(status=answer.status, headers=kind)
            await response.prepare(request)
            if fault is not None and fault.stall:
                await asyncio.sleep(3600)
            if fault is not None and (fault.swallow or fault.hold):
                async for line in answer.content:
                    # Another thread sets it.
                    while fault.hold is not None and not fault.hold.is_set():  # noqa: ASYNC110 - above
                        await asyncio.sleep(0.01)
                    if not fault.swallow or fault.swallow.encode() not in line:
                        await response.write(line)
            else:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            await response.write_eof()
            return response


def writes(*resources: str) -> Callable[[Attributes], bool]:
    """Requests that change something, of these resources or of all but the Lease."""

    def applies(attributes: Attributes) -> bool:
        if attributes.verb not in {"create", "update", "patch", "delete"}:
            return False
        if resources:
            return attributes.resource in resources
        return not attributes.resource.startswith("leases")

    return applies


def watches(resource: str) -> Callable[[Attributes], bool]:
    return lambda attributes: attributes == Attributes("watch", resource)


def lists(resource: str) -> Callable[[Attributes], bool]:
    return lambda attributes: attributes == Attributes("list", resource)
