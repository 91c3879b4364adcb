"""The Lease: who may take it, and when it is lost. Processes that share one: test_main.py."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from scripted import api_of, json_answer, refusal

from deepseek_operator.errors import LeaseLostError
from deepseek_operator.lease import Lease, Sighting, is_free, sighting
from deepseek_operator.settings import Settings

SETTINGS = Settings(namespace="ops", identity="me", lease_duration_seconds=3, api_retries=0)
PATIENCE_SECONDS = 60


def lease_object(holder: str, version: str = "1", duration: int = 10) -> dict[str, Any]:
    return {
        "metadata": {"name": "x", "namespace": "ops", "resourceVersion": version},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": duration},
    }


class TestSightings:
    def test_the_time_of_a_lease_that_does_not_change_stays(self) -> None:
        first = sighting(lease_object("other"), None, 100.0)
        second = sighting(lease_object("other"), first, 105.0)
        renewed = sighting(lease_object("other", "2"), second, 109.0)

        assert (first.seen_at, second.seen_at, renewed.seen_at) == (100.0, 100.0, 109.0)

    @pytest.mark.parametrize(
        ("holder", "age", "free"),
        [
            ("me", 0, True),
            ("", 0, True),
            ("other", 0, False),
            ("other", 9.9, False),
            ("other", 10, True),
        ],
    )
    def test_a_lease_is_free_when_it_is_mine_nobodys_or_ran_out(
        self, holder: str, age: float, free: bool
    ) -> None:
        seen = Sighting(holder, "1", 10, 100.0)

        assert is_free(seen, "me", 100.0 + age) is free

    def test_one_without_a_spec_is_free(self) -> None:
        seen = sighting({"metadata": {"resourceVersion": "1"}}, None, 0.0)

        assert is_free(seen, "me", 0.0)


@dataclass
class LeaseServer:
    """Stores one Lease, and can be made to fail or to hang."""

    lease: dict[str, Any] | None = None
    version: int = 0
    status: int = 0
    hangs: bool = False
    num_refused: int = 0
    writes: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.status:
            self.num_refused += 1
            return refusal(self.status)
        if request.method == "GET":
            return json_answer(self.lease) if self.lease else refusal(404)
        body = await request.json()
        if request.method == "POST" and self.lease is not None:
            return refusal(409)
        if request.method == "PUT":
            if self.lease is None:
                return refusal(404)
            if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
                return refusal(409)
        self.store(body)
        self.writes.append(body["spec"])
        return json_answer(self.lease)

    def store(self, body: dict[str, Any]) -> None:
        self.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version)}
        self.lease = {**body, "metadata": metadata}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "deepseek_operator.lease")


async def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not check():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def held(lease: Lease) -> AsyncIterator[None]:
    """Hold it meanwhile; in the end it must not be lost."""
    holding = asyncio.create_task(lease.hold())
    try:
        yield
        assert not holding.done()
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


class TestHolding:
    async def test_it_is_made_when_there_is_none(self) -> None:
        server = LeaseServer()

        async with api_of(server, SETTINGS) as (api, _):
            await Lease(api, SETTINGS).acquire()

        assert server.lease is not None
        assert server.lease["metadata"]["name"] == "deepseek-operator"
        assert server.writes[0]["holderIdentity"] == "me"
        assert server.writes[0]["renewTime"].endswith("Z")

    async def test_it_belongs_to_the_pod_that_holds_it_also_after_a_takeover(self) -> None:
        server = LeaseServer()
        in_a_pod = SETTINGS.model_copy(update={"pod_uid": "uid-of-me"})
        pod = {"apiVersion": "v1", "kind": "Pod", "name": "me", "uid": "uid-of-me"}

        async with api_of(server, in_a_pod) as (api, _):
            await Lease(api, in_a_pod).acquire()
            assert server.lease is not None
            assert server.lease["metadata"]["ownerReferences"] == [pod]

            server.lease["metadata"]["ownerReferences"] = [{**pod, "name": "a", "uid": "b"}]
            server.lease["spec"]["holderIdentity"] = ""
            await Lease(api, in_a_pod).acquire()

        assert server.lease["metadata"]["ownerReferences"] == [pod]

    async def test_one_that_is_held_is_waited_for_until_it_runs_out(self) -> None:
        server = LeaseServer()
        server.store(lease_object("other", duration=1))

        async with api_of(server, SETTINGS) as (api, _):
            lease = Lease(api, SETTINGS)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(lease.acquire(), 0.9)
            await asyncio.wait_for(lease.acquire(), PATIENCE_SECONDS)

        assert server.writes[0]["holderIdentity"] == "me"
        assert server.writes[0]["leaseTransitions"] == 1

    async def test_renewing_keeps_the_time_of_taking(self) -> None:
        server = LeaseServer()

        async with api_of(server, SETTINGS) as (api, _):
            lease = Lease(api, SETTINGS)
            await lease.acquire()
            async with held(lease):
                await until(lambda: len(server.writes) >= 3)

        assert len({spec["acquireTime"] for spec in server.writes}) == 1
        assert len({spec["renewTime"] for spec in server.writes}) == len(server.writes)

    @pytest.mark.parametrize("fault", ["hangs", "status"])
    async def test_it_is_lost_when_it_cannot_be_renewed(self, fault: str) -> None:
        server = LeaseServer()

        async with api_of(server, SETTINGS) as (api, _):
            lease = Lease(api, SETTINGS)
            await lease.acquire()
            setattr(server, fault, 503 if fault == "status" else True)
            with pytest.raises(LeaseLostError, match="not renewed for 2 s"):
                await asyncio.wait_for(lease.hold(), PATIENCE_SECONDS)

    async def test_a_short_trouble_is_survived(self) -> None:
        server = LeaseServer()

        async with api_of(server, SETTINGS) as (api, _):
            lease = Lease(api, SETTINGS)
            await lease.acquire()
            async with held(lease):
                server.status = 503
                await until(lambda: server.num_refused > 0)
                server.status = 0
                before = len(server.writes)
                await until(lambda: len(server.writes) > before)

    async def test_a_renewal_that_took_its_time_is_followed_by_the_next_one_at_once(self) -> None:
        server = LeaseServer()
        late = Settings(namespace="ops", identity="me", lease_duration_seconds=300)

        def clock() -> float:
            # Each write takes 61 seconds, and one is due every 60.
            if len(server.writes) == 5:
                server.store({**lease_object("other", duration=600), "metadata": {}})
            return 61.0 * len(server.writes)

        async with api_of(server, late) as (api, _):
            lease = Lease(api, late, clock)
            await lease.acquire()
            with pytest.raises(LeaseLostError, match="taken by other"):
                await asyncio.wait_for(lease.hold(), PATIENCE_SECONDS)

    async def test_it_is_lost_when_another_takes_it(self) -> None:
        server = LeaseServer()

        async with api_of(server, SETTINGS) as (api, _):
            lease = Lease(api, SETTINGS)
            await lease.acquire()
            server.store({**lease_object("other", duration=60), "metadata": {}})
            with pytest.raises(LeaseLostError, match="taken by other"):
                await asyncio.wait_for(lease.hold(), PATIENCE_SECONDS)

    async def test_a_touch_by_somebody_who_does_not_hold_it_is_no_loss(self) -> None:
        server = LeaseServer()

        async with api_of(server, SETTINGS) as (api, _):
            lease = Lease(api, SETTINGS)
            await lease.acquire()
            assert server.lease is not None
            server.store(server.lease)
            async with held(lease):
                await until(lambda: len(server.writes) > 1)

    async def test_one_that_was_deleted_is_made_again(self) -> None:
        server = LeaseServer()

        async with api_of(server, SETTINGS) as (api, _):
            lease = Lease(api, SETTINGS)
            await lease.acquire()
            server.lease = None
            async with held(lease):
                await until(lambda: server.lease is not None)

        assert server.lease is not None
        assert server.lease["spec"]["holderIdentity"] == "me"

    async def test_releasing_lets_the_next_one_start(self) -> None:
        server = LeaseServer()

        async with api_of(server, SETTINGS) as (api, _):
            lease = Lease(api, SETTINGS)
            await lease.release()
            await lease.acquire()
            await lease.release()

        assert server.writes[-1]["holderIdentity"] == ""

    async def test_releasing_into_a_dead_server_is_only_a_pity(self) -> None:
        server = LeaseServer()

        async with api_of(server, SETTINGS) as (api, _):
            lease = Lease(api, SETTINGS)
            await lease.acquire()
            server.status = 503
            await lease.release()

        assert server.lease is not None
        assert server.lease["spec"]["holderIdentity"] == "me"
