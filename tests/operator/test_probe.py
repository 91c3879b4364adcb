"""Asking workers over HTTP: whatever they do is a sample, and never a storm."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from test_workers import state_of

from deepseek_operator.metrics import Metrics
from deepseek_operator.probe import MAX_STATE_BYTES, Prober, Target, ask
from deepseek_operator.settings import Settings
from deepseek_operator.workers import Readings, Sample

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FAST = Settings(probe_seconds=0.2, probe_timeout_seconds=1)


@contextlib.asynccontextmanager
async def responder(handler: Handler) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        yield str(server.make_url("/state"))


async def sample_of(handler: Handler, token: str = "right", patience: float = 60) -> Sample:
    async with (
        responder(handler) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience)) as session,
    ):
        return await ask(session, url, token)


def saying(**answer: Any) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(**answer)

    return handler


async def worker(request: web.Request) -> web.StreamResponse:
    if request.headers.get("Authorization") != "Bearer right":
        return web.Response(status=401)
    return web.Response(text=state_of().model_dump_json())


async def slow(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(5)
    return web.Response()


async def dripping(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(50):
        await response.write(b" ")
        await asyncio.sleep(0.1)
    return response


async def hanging_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


class TestAsk:
    async def test_a_worker_answers(self) -> None:
        sample = await sample_of(worker)

        assert sample.outcome == "answered"
        assert sample.state == state_of()

    async def test_a_wrong_token_is_said(self) -> None:
        sample = await sample_of(worker, token="wrong")

        assert (sample.outcome, sample.state) == ("forbidden", None)

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ("", "not the state of a worker"),
            ("<html>", "not the state of a worker"),
            ("{}", "phase: Field required"),
            ("[" * 50_000, "not the state of a worker"),
            ("x" * (MAX_STATE_BYTES + 1), "longer than 65536 bytes"),
            (state_of().model_dump_json().replace("40.0", "Infinity"), "used_percent"),
            (state_of().model_dump_json().replace("110", "-1"), "memory.measured_bytes"),
            (state_of(version=99).model_dump_json(), "version 99; this operator reads 1"),
        ],
        ids=["empty", "HTML", "no field", "nested", "oversized", "infinite", "negative", "newer"],
    )
    async def test_nonsense_is_unreadable(self, body: str, words: str) -> None:
        sample = await sample_of(saying(text=body))

        assert sample.outcome == "unreadable"
        assert words in sample.message

    @pytest.mark.parametrize("status", [302, 404, 500, 503])
    async def test_another_status_is_unreadable(self, status: int) -> None:
        answer = saying(status=status, text="no", headers={"Location": "http://127.0.0.1:1/"})

        sample = await sample_of(answer)

        assert sample == Sample("unreadable", f"HTTP {status}: 'no'")

    @pytest.mark.parametrize("handler", [slow, dripping])
    async def test_who_is_slow_is_silent(self, handler: Handler) -> None:
        assert (await sample_of(handler, patience=0.3)).outcome == "silent"

    async def test_who_hangs_up_refuses(self) -> None:
        assert (await sample_of(hanging_up)).outcome == "refused"

    async def test_a_closed_port_refuses(self) -> None:
        async with aiohttp.ClientSession() as session:
            sample = await ask(session, f"http://127.0.0.1:{unused_port()}/state", "right")

        assert sample == Sample("refused", "nobody listens at its port")

    async def test_something_else_than_http_is_unreadable(self) -> None:
        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with aiohttp.ClientSession() as session:
            sample = await ask(session, f"http://127.0.0.1:{port}/state", "right")
        server.close()

        assert sample.outcome == "unreadable"
        assert "does not speak HTTP" in sample.message


@contextlib.asynccontextmanager
async def probing(
    targets: list[Target], settings: Settings = FAST
) -> AsyncIterator[tuple[Readings, list[str], Metrics]]:
    readings, heard, metrics = Readings(), [], Metrics()
    prober = Prober(
        lambda: targets, lambda target: heard.append(target.uid), readings, settings, metrics
    )
    task = asyncio.create_task(prober.run())
    try:
        yield readings, heard, metrics
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def target(uid: str, url: str) -> Target:
    return Target(uid, "team", "chat", url, "right")


class TestProber:
    async def test_a_worker_that_falls_silent_is_lost_and_found_again(self) -> None:
        is_silent = False

        async def handler(request: web.Request) -> web.StreamResponse:
            return await (slow(request) if is_silent else worker(request))

        async with responder(handler) as url, probing([target("a", url)]) as (readings, heard, _):
            await until(lambda: heard == ["a"])
            is_silent = True
            await until(lambda: heard == ["a", "a"])
            lost = readings.get("a")
            is_silent = False
            await until(lambda: heard == ["a", "a", "a"])
            found = readings.get("a")

        assert lost is not None
        assert lost.is_lost
        assert found is not None
        assert not found.is_lost

    async def test_a_silent_worker_holds_up_no_other(self) -> None:
        settings = Settings(probe_seconds=0.1, probe_timeout_seconds=0.5, max_concurrent_probes=3)
        asked = 0

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            if request.path == "/state/good":
                asked += 1
                return await worker(request)
            return await slow(request)

        async with responder(handler) as url:
            targets = [target("good", f"{url}/good"), target("a", url), target("b", url)]
            async with probing(targets, settings):
                await until(lambda: asked >= 5)

    async def test_no_more_than_allowed_are_asked_at_once(self) -> None:
        settings = Settings(probe_seconds=0.1, probe_timeout_seconds=60, max_concurrent_probes=4)
        now = most = 0

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            return await worker(request)

        async with (
            responder(handler) as url,
            probing([target(str(n), url) for n in range(40)], settings) as (_, heard, _),
        ):
            await until(lambda: len(heard) == 40)

        assert 1 < most <= 4

    async def test_who_is_gone_is_forgotten_and_everything_is_counted(self) -> None:
        async with responder(worker) as url:
            targets = [target("a", url)]
            async with probing(targets) as (readings, heard, metrics):
                await until(lambda: heard == ["a"])
                targets.clear()
                await until(lambda: readings.get("a") is None)

        assert b'deepseek_operator_probes_total{outcome="answered"}' in metrics.text()
