"""Being one: the Lease that an operator holds while it works.

The client library's leader election is not used (docs/operator.md says why): it lets one broken
connection end the election, does not bound a request by the renewal deadline, and labels local
time as UTC. Like client-go, this one never compares clocks of two machines: a Lease has run out
when this process has seen no change of it for its duration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from deepseek_operator.api import Api
from deepseek_operator.errors import ApiError, ConflictError, LeaseLostError, NotFoundError
from deepseek_operator.kinds import LEASE, Manifest
from deepseek_operator.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sighting:
    """The Lease as it was last seen to change."""

    holder: str
    version: str
    duration_seconds: float
    seen_at: float
    """On this process's monotonic clock."""


def sighting(lease: Manifest, previous: Sighting | None, now: float) -> Sighting:
    """What is known of the Lease now; the time stays while the Lease does not change."""
    spec = lease.get("spec") or {}
    version = lease["metadata"]["resourceVersion"]
    unchanged = previous is not None and previous.version == version
    return Sighting(
        holder=spec.get("holderIdentity") or "",
        version=version,
        duration_seconds=spec.get("leaseDurationSeconds") or 0,
        seen_at=previous.seen_at if previous is not None and unchanged else now,
    )


def is_free(seen: Sighting, identity: str, now: float) -> bool:
    """Whether this process may take the Lease: it is its own, nobody's, or ran out."""
    if seen.holder in {"", identity}:
        return True
    return now >= seen.seen_at + seen.duration_seconds


class Lease:
    """Takes, renews and releases one Lease object."""

    def __init__(
        self, api: Api, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._namespace = settings.namespace
        self._name = settings.lease_name
        self._identity = settings.holder
        self._owners = _owners(settings)
        self._duration = settings.lease_duration_seconds
        self._interval = settings.lease_duration_seconds / 5
        self._deadline = settings.lease_duration_seconds * 2 / 3
        self._clock = clock
        self._lease: Manifest | None = None
        self._seen: Sighting | None = None
        self._renewed_at = 0.0

    async def acquire(self) -> None:
        """Return once this process holds the Lease, however long that takes."""
        told = ""
        while True:
            try:
                if await self._take():
                    logger.info("Took the lease %s as %s", self._name, self._identity)
                    return
            except ApiError as error:
                logger.warning("Cannot read or write the lease %s: %s", self._name, error)
            holder = self._seen.holder if self._seen is not None else ""
            if holder and holder != told:
                logger.info("Waiting: the lease %s is held by %s", self._name, holder)
                told = holder
            await asyncio.sleep(self._interval)

    async def hold(self) -> None:
        """Renew until cancelled.

        Raises:
            LeaseLostError: Another process took the Lease, or it could not be renewed for two
                thirds of its duration.
        """
        while True:
            # From one start to the next: a slow renewal has used up some of its time already.
            await asyncio.sleep(max(0.0, self._renewed_at + self._interval - self._clock()))
            remaining = self._renewed_at + self._deadline - self._clock()
            try:
                async with asyncio.timeout(remaining):
                    await self._renew()
            except TimeoutError as error:
                raise LeaseLostError(
                    f"The lease {self._name} was not renewed for {self._deadline:.0f} s"
                ) from error

    async def release(self) -> None:
        """Let the next process start at once; only tried, since the Lease runs out by itself."""
        if self._lease is None:
            return
        try:
            await self._write(holder="", duration_seconds=1)
        except ApiError as error:
            logger.warning("Could not release the lease %s: %s", self._name, error)

    async def _renew(self) -> None:
        while True:
            try:
                if await self._take():
                    return
            except ApiError as error:
                logger.warning("Could not renew the lease %s: %s", self._name, error)
                await asyncio.sleep(self._interval / 3)
                continue
            holder = self._seen.holder if self._seen is not None else "somebody else"
            raise LeaseLostError(f"The lease {self._name} was taken by {holder}")

    async def _take(self) -> bool:
        """Read and write the Lease once; whether this process holds it now."""
        started_at = self._clock()
        if self._lease is None or not await self._write_as_holder():
            self._lease = await self._api.get(LEASE, self._namespace, self._name)
            if self._lease is not None:
                self._seen = sighting(self._lease, self._seen, self._clock())
                if not is_free(self._seen, self._identity, self._clock()):
                    self._lease = None
                    return False
            if not await self._write_as_holder():
                self._lease = None
                return False
        self._renewed_at = started_at
        return True

    async def _write_as_holder(self) -> bool:
        """Whether the write went through: another writer in between makes it fail."""
        try:
            await self._write(holder=self._identity, duration_seconds=self._duration)
        except ConflictError:
            return False
        return self._lease is not None

    async def _write(self, *, holder: str, duration_seconds: int) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = (self._lease or {}).get("spec") or {}
        is_takeover = old.get("holderIdentity") != holder
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": duration_seconds,
            "acquireTime": now if is_takeover else old.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": old.get("leaseTransitions", 0) + int(is_takeover and bool(old)),
        }
        manifest: Manifest = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "ownerReferences": self._owners,
            },
            "spec": spec,
        }
        if self._lease is None:
            self._lease = await self._api.create(LEASE, manifest)
        else:
            manifest["metadata"] = {**self._lease["metadata"], "ownerReferences": self._owners}
            try:
                self._lease = await self._api.replace(LEASE, manifest)
            except NotFoundError:
                # Somebody deleted it: the next try makes another one.
                self._lease = None
                raise


def _owners(settings: Settings) -> list[Manifest]:
    """The pod of this process, where it runs in one: with it the Lease is collected."""
    if not settings.pod_uid:
        return []
    return [{"apiVersion": "v1", "kind": "Pod", "name": settings.identity, "uid": settings.pod_uid}]
