"""Health and metrics over HTTP: /healthz, /readyz and /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from deepseek_operator.metrics import CONTENT_TYPE, Metrics


@dataclass
class Health:
    """What the process knows of its own state. Times are seconds since 1970.

    The API server ends each watch after `watch_seconds`, so a process that leads and has heard
    nothing for three times as long is deaf, whatever else still works in it.
    """

    watch_seconds: float
    metrics: Metrics
    clock: Callable[[], float] = time.time
    is_leader: bool = False
    started_at: float = 0.0
    last_heard_at: float = 0.0

    def __post_init__(self) -> None:
        self.started_at = self.last_heard_at = self.clock()

    def heard(self) -> None:
        """The API server sent an event, or opened a watch."""
        self.last_heard_at = self.clock()
        self.metrics.heard(self.last_heard_at)

    def lead(self, *, is_leader: bool) -> None:
        """Whether this process holds the Lease now."""
        self.is_leader = is_leader
        self.last_heard_at = self.clock()
        self.metrics.lead(is_leader=is_leader)

    @property
    def silent_seconds(self) -> float:
        """Age of the last event."""
        return self.clock() - self.last_heard_at

    @property
    def is_alive(self) -> bool:
        """Whether the process is of use, or should be started again."""
        return not self.is_leader or self.silent_seconds < 3 * self.watch_seconds

    def report(self) -> dict[str, bool | float]:
        """The answer of /healthz."""
        return {
            "alive": self.is_alive,
            "leader": self.is_leader,
            "last_event_age_seconds": round(self.silent_seconds, 1),
            "uptime_seconds": round(self.clock() - self.started_at, 1),
        }


async def serve(health: Health, port: int) -> web.AppRunner:
    """Start answering on every interface; the caller cleans the runner up."""

    async def healthz(_request: web.Request) -> web.Response:
        return web.json_response(health.report(), status=200 if health.is_alive else 503)

    async def readyz(_request: web.Request) -> web.Response:
        # A process that waits for the Lease is ready to take over.
        return web.json_response(health.report())

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=health.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner
