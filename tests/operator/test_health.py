"""Health over HTTP."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from deepseek_operator.health import Health, serve
from deepseek_operator.metrics import Metrics

WATCH_SECONDS = 300.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(WATCH_SECONDS, Metrics(), clock)


def test_a_leader_that_hears_nothing_for_long_is_not_alive(health: Health, clock: Clock) -> None:
    health.lead(is_leader=True)
    clock.now += 3 * WATCH_SECONDS - 1
    still = health.is_alive
    clock.now += 2

    assert still
    assert not health.is_alive


def test_an_event_keeps_it_alive(health: Health, clock: Clock) -> None:
    health.lead(is_leader=True)
    clock.now += 800
    health.heard()
    clock.now += 800

    assert health.is_alive
    assert health.report()["last_event_age_seconds"] == 800


def test_one_that_waits_for_the_lease_hears_nothing_and_is_alive(
    health: Health, clock: Clock
) -> None:
    clock.now += 100_000
    waiting = health.is_alive
    health.lead(is_leader=True)

    assert waiting
    assert health.is_alive


class TestServer:
    @pytest.fixture
    async def address(self, health: Health, unused_tcp_port: int) -> AsyncIterator[str]:
        runner = await serve(health, unused_tcp_port)
        yield f"http://127.0.0.1:{unused_tcp_port}"
        await runner.cleanup()

    async def get(self, url: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()

    async def test_healthz_tells_the_age_of_the_last_event(
        self, address: str, clock: Clock
    ) -> None:
        clock.now += 5

        status, text = await self.get(f"{address}/healthz")

        assert status == 200
        assert '"last_event_age_seconds": 5.0' in text

    async def test_a_deaf_process_is_reported(
        self, address: str, health: Health, clock: Clock
    ) -> None:
        health.lead(is_leader=True)
        clock.now += 10_000

        assert (await self.get(f"{address}/healthz"))[0] == 503
        assert (await self.get(f"{address}/readyz"))[0] == 200

    async def test_metrics_are_served(self, address: str) -> None:
        status, text = await self.get(f"{address}/metrics")

        assert status == 200
        assert "deepseek_operator_leader" in text
