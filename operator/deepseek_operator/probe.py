"""Asks every worker for `GET /state`, over and over: the only module that talks to workers.

Each worker is asked every `probe_seconds`, at most `max_concurrent_probes` of them at the same
time; one that is silent holds a place for `probe_timeout_seconds` and is then asked less often. So
a zone that is gone neither delays the others nor makes a storm. Whatever comes back, or does not,
is a `Sample`; nothing that a worker does is an exception here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import aiohttp
from pydantic import ValidationError

from deepseek_contract.state import STATE_VERSION, WorkerState
from deepseek_operator.metrics import Metrics
from deepseek_operator.settings import Settings
from deepseek_operator.workers import Readings, Sample

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.2
SILENT_FACTOR = 5
"""How many times rarer a worker is asked that has been silent too often."""
MOST_PROBES_PER_SECOND = 400
"""With more workers than this allows, each is asked less often."""
MAX_STATE_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 25.0
"""A worker closes a connection after 30 s; we let go of it first."""
EXCERPT_LENGTH = 80


@dataclass(frozen=True)
class Target:
    """A worker that can be asked."""

    uid: str
    """Of its pod."""
    namespace: str
    deployment: str
    """The DeepSeekDeployment that it works for."""
    url: str
    token: str


class Prober:
    """Keeps `readings` fresh until its task is cancelled.

    Args:
        targets: The workers there are now; called several times a second.
        heard: Called with each worker whose reading has news.
    """

    def __init__(
        self,
        targets: Callable[[], Iterable[Target]],
        heard: Callable[[Target], None],
        readings: Readings,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._targets = targets
        self._heard = heard
        self._readings = readings
        self._settings = settings
        self._metrics = metrics
        self._due_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Ask until cancelled."""
        limit = self._settings.max_concurrent_probes
        connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEP_ALIVE_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._settings.probe_timeout_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        ) as session:
            try:
                while True:
                    self._ask_those_due(session)
                    await asyncio.sleep(TICK_SECONDS)
            finally:
                tasks = list(self._asking.values())
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _ask_those_due(self, session: aiohttp.ClientSession) -> None:
        targets = {target.uid: target for target in self._targets()}
        self._readings.keep_only(set(targets))
        for uid in self._due_at.keys() - targets.keys():
            del self._due_at[uid]
        now = time.monotonic()
        due = sorted(
            (due_at, uid)
            for uid in targets
            if uid not in self._asking and (due_at := self._due_at.get(uid, 0.0)) <= now
        )
        interval = max(self._settings.probe_seconds, len(targets) / MOST_PROBES_PER_SECOND)
        free = self._settings.max_concurrent_probes - len(self._asking)
        for _, uid in due[:free]:
            reading = self._readings.get(uid)
            is_rare = reading is not None and reading.is_lost
            self._due_at[uid] = now + interval * (SILENT_FACTOR if is_rare else 1)
            task = asyncio.get_running_loop().create_task(self._ask(session, targets[uid]))
            self._asking[uid] = task
            task.add_done_callback(partial(self._answered, uid))

    def _answered(self, uid: str, _: asyncio.Task[None]) -> None:
        self._asking.pop(uid, None)

    async def _ask(self, session: aiohttp.ClientSession, target: Target) -> None:
        asked_at = time.time()
        sample = await ask(session, target.url, target.token)
        self._metrics.probed(sample.outcome)
        if self._readings.take(target.uid, sample, asked_at):
            if sample.message:
                logger.info("Worker %s: %s: %s", target.url, sample.outcome, sample.message)
            self._heard(target)


async def ask(session: aiohttp.ClientSession, url: str, token: str) -> Sample:
    """Ask one worker once, within the session's time limit."""
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    try:
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status in {401, 403}:
                return Sample("forbidden", f"HTTP {response.status}: it does not take the token")
            body = await _read(response.content)
            return _sample_of(response.status, body)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return _sample_of_error(error)


def _sample_of_error(error: Exception) -> Sample:
    match error:
        case TimeoutError():
            return Sample("silent", "no answer in time")
        case aiohttp.ClientConnectorError(
            os_error=ConnectionRefusedError() | ConnectionResetError()
        ):
            return Sample("refused", "nobody listens at its port")
        case aiohttp.ClientConnectorError():
            return Sample("silent", f"there is no way to it: {error.os_error}")
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            return Sample("refused", "it closed the connection without an answer")
        case _:
            return Sample("unreadable", f"it does not speak HTTP: {_excerpt(str(error))}")


async def _read(content: aiohttp.StreamReader) -> bytes:
    """A body, up to one byte more than is allowed."""
    parts: list[bytes] = []
    left = MAX_STATE_BYTES + 1
    while left > 0 and (part := await content.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _sample_of(status: int, body: bytes) -> Sample:
    if status != 200:
        words = _excerpt(body.decode(errors="replace"))
        return Sample("unreadable", f"HTTP {status}: {words}")
    if len(body) > MAX_STATE_BYTES:
        return Sample("unreadable", f"its answer is longer than {MAX_STATE_BYTES} bytes")
    try:
        state = WorkerState.from_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the answer"
        return Sample("unreadable", f"not the state of a worker: {place}: {first['msg']}")
    if state.version > STATE_VERSION:
        return Sample(
            "unreadable",
            f"its state is of version {state.version}; this operator reads {STATE_VERSION}:"
            " upgrade the operator",
        )
    return Sample("answered", state=state)


def _excerpt(words: str) -> str:
    return repr(words[:EXCERPT_LENGTH])
