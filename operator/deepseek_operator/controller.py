"""The loop of one object: observe, plan, carry out, write the status.

Every event leads to the same `reconcile`, which looks at what is there and not at what happened.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_operator.api import Api
from deepseek_operator.cluster import Cluster, Name
from deepseek_operator.errors import ApiError
from deepseek_operator.health import Health
from deepseek_operator.kinds import Manifest
from deepseek_operator.plan import Observed, plan
from deepseek_operator.settings import Settings
from deepseek_operator.status import Refusal, invalid_status, is_transition, notes, status_of
from deepseek_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

REFUSED_AGAIN_SECONDS = 15.0
"""What the API server refuses may be allowed a little later: a namespace that is going, a quota."""
MOST_STEPS = 4
"""Plans in a row: what one step makes, such as a volume, the next one may need."""
PASSING_FAILURES = 2
"""After so many failures in a row the status tells of the next one."""
SETTLE_SECONDS = 0.3
"""After writing children the status waits this long: they are about to change it."""
STATUS_EVERY_SECONDS = 1.0
"""How often the status of one object is written at most."""
MESSAGES_EVERY_SECONDS = 60.0
"""How often the status is written when only the words of its messages changed."""


class Controller:
    """Keeps every DeepSeekDeployment as it should be, from whatever event."""

    def __init__(self, api: Api, settings: Settings, health: Health) -> None:
        self.queue: WorkQueue[Name] = WorkQueue(
            self.reconcile, concurrency=settings.max_concurrent_reconciles
        )
        self.cluster = Cluster(api, settings, wake=self.queue.add)
        self._settings = settings
        self._health = health
        self._metrics = health.metrics
        self._written_at: dict[Name, float] = {}
        self._settling: set[Name] = set()

    def notice(self, event_type: str | None, manifest: Manifest) -> None:
        """Every watch event ends here."""
        self._health.heard()
        for name in self.cluster.notice(event_type, manifest):
            self.queue.add(name)

    async def resync(self) -> None:
        """List everything again, and look at every object."""
        await self.cluster.resync()
        for name in self.cluster.names:
            self.queue.add(name)

    async def reconcile(self, name: Name) -> float | None:
        """Bring one object's children and status to what they should be.

        Returns:
            After how many seconds to look again, or None to wait for events.
        """
        started_at = time.monotonic()
        try:
            again = await self._reconcile(name)
        except ApiError as error:
            self._metrics.failed(type(error).__name__)
            raise
        except Exception:
            self._metrics.failed("Internal")
            raise
        self._metrics.reconciled(time.monotonic() - started_at)
        return again

    async def _reconcile(self, name: Name) -> float | None:
        owner = self.cluster.owner(name)
        if owner is None:
            self._written_at.pop(name, None)
            self._settling.discard(name)
            self._metrics.forget(*name)
            self.queue.forget(name)
            return None
        now = datetime.now(UTC)
        try:
            spec = DeepSeekDeploymentSpec.from_stored(owner.get("spec") or {})
        except ValidationError as error:
            problem = "; ".join(
                f"spec.{'.'.join(map(str, detail['loc']))}: {detail['msg']}."
                for detail in error.errors()
            )
            return await self._tell(name, invalid_status(Observed(owner), problem, now), 0)
        observed = await self.cluster.observe(name, spec)
        if observed is None:
            return None
        refusals: list[Refusal] = []
        failure: ApiError | None = None
        has_written = False
        for _ in range(MOST_STEPS):
            todo = plan(spec, observed, self._settings, now)
            if todo.is_empty or refusals:
                break
            logger.info("%s/%s: %s", *name, "; ".join(todo.reasons))
            refusals, failure = await self.cluster.carry_out(name, todo)
            has_written = True
            later = self.cluster.glance(name, spec, observed)
            if later is None:
                return None
            observed = later
        status = status_of(spec, observed, todo.model, refusals, now)
        if has_written and not refusals and name not in self._settling:
            self._settling.add(name)
            return SETTLE_SECONDS
        if failure is not None and self.queue.failures(name) < PASSING_FAILURES:
            # It may be over before anybody reads of it.
            raise failure
        told = await self._tell(name, status, spec.replicas)
        if failure is not None:
            raise failure
        wishes = [
            todo.requeue_after_seconds,
            REFUSED_AGAIN_SECONDS if refusals else None,
            told,
        ]
        return min((wish for wish in wishes if wish is not None), default=None)

    async def _tell(self, name: Name, status: dict[str, Any], wanted: int) -> float | None:
        """Write a status that differs, but not too often, and less so if only words differ.

        Returns:
            After how many seconds it may be written, if that has to wait.
        """
        self._settling.discard(name)
        self._metrics.tell(*name, wanted, status)
        owner = self.cluster.owner(name)
        old = (owner or {}).get("status") or {}
        if owner is None or old == status:
            return None
        now = time.monotonic()
        pause = STATUS_EVERY_SECONDS if is_transition(old, status) else MESSAGES_EVERY_SECONDS
        due = self._written_at.get(name, -MESSAGES_EVERY_SECONDS) + pause
        if now < due:
            return due - now
        await self.cluster.write_status(name, status)
        self._written_at[name] = now
        await self.cluster.post(name, notes(old, status))
        return None
