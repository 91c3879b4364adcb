"""The loop of one object: observe, plan, carry out, write the status.

Every event leads to the same `reconcile`, which looks at what is there and not at what happened.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Set
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_operator.api import Api
from deepseek_operator.cluster import Cluster, Name
from deepseek_operator.degrade_case import Memory
from deepseek_operator.errors import ApiError
from deepseek_operator.fleet import Fleet, Units
from deepseek_operator.health import Health
from deepseek_operator.kinds import TENANT_KINDS, Manifest
from deepseek_operator.observed import Observed
from deepseek_operator.plan import Plan, plan
from deepseek_operator.probe import Prober, Target
from deepseek_operator.recovery import new_switches, trusted
from deepseek_operator.settings import Settings
from deepseek_operator.status import Refusal, invalid_status, is_transition, notes, status_of
from deepseek_operator.tenancy import Tenancy
from deepseek_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

TENANT_KIND_NAMES = frozenset(kind.kind for kind in TENANT_KINDS)
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
FLEET_SECONDS = 1.0
"""How long after a change of the fleet those whom it may concern are looked at together."""
MESSAGES_EVERY_SECONDS = 60.0
"""How often the status is written when only the words of its messages changed."""


class Controller:
    """Keeps every DeepSeekDeployment as it should be, from whatever event."""

    def __init__(self, api: Api, settings: Settings, health: Health) -> None:
        self.queue: WorkQueue[Name] = WorkQueue(
            self.reconcile, concurrency=settings.max_concurrent_reconciles
        )
        self.cluster = Cluster(api, settings, wake=self.queue.add)
        self.fleet = Fleet()
        self.prober = Prober(
            self.cluster.workers, self._heard_of, self.cluster.readings, settings, health.metrics
        )
        # Tenants and nodes are of the whole cluster.
        self.tenancy = (
            Tenancy(api, self.cluster, self.fleet, health.metrics, wake=self.queue.add)
            if settings.is_cluster_wide
            else None
        )
        self._uids: dict[Name, str] = {}
        """Of whom everything below is remembered: another one may get the name at any moment."""
        self._memories: dict[Name, Memory] = {}
        """What the last decisions about tiers left, until the status has it."""
        self._promises: dict[Name, tuple[tuple[str, Units], ...]] = {}
        """Units that the pods of an object will take which are not bound yet."""
        self._waiting_for_capacity: set[Name] = set()
        self._ready_then: frozenset[str] = frozenset()
        """Nodes that were ready when the fleet was looked at last."""
        self._look_at_fleet: asyncio.TimerHandle | None = None
        self._settings = settings
        self._health = health
        self._metrics = health.metrics
        self._written_at: dict[Name, float] = {}
        self._settling: set[Name] = set()

    def notice(self, event_type: str | None, manifest: Manifest) -> None:
        """Every watch event ends here."""
        self._health.heard()
        if manifest["kind"] in TENANT_KIND_NAMES:
            if self.tenancy is not None:
                self.tenancy.notice(event_type, manifest)
            return
        for name in self.cluster.notice(event_type, manifest):
            self.queue.add(name)

    def _heard_of(self, worker: Target) -> None:
        self.queue.add(Name(worker.namespace, worker.deployment))

    def fleet_changed(self) -> None:
        """Nodes or free units changed: soon, those whom that may concern are looked at."""
        if self._look_at_fleet is None:
            loop = asyncio.get_running_loop()
            self._look_at_fleet = loop.call_later(FLEET_SECONDS, self._tell_of_fleet)

    def _tell_of_fleet(self) -> None:
        self._look_at_fleet = None
        ready = frozenset(name for name, node in self.fleet.nodes.items() if node.is_ready)
        # A pod that never ran there says nothing of its node's loss.
        changed, self._ready_then = ready ^ self._ready_then, ready
        for name in self._waiting_for_capacity | self.cluster.names_on(changed):
            self.queue.add(name)

    async def resync(self) -> None:
        """List everything again, and look at every object, in another order each time.

        A process that does not live to see the end of it, again and again, would otherwise never
        come to the last ones.
        """
        await self.cluster.resync()
        if self.tenancy is not None:
            await self.tenancy.resync()
            self.tenancy.prepare()
        names = self.cluster.names
        random.shuffle(names)
        for name in names:
            self.queue.add(name)

    async def list_again(self, paths: Set[str]) -> None:
        """List what kopf has listed, and look at the objects for which something was missed."""
        touched = await self.cluster.resync(paths)
        if self.tenancy is not None and any(kind.path(None) in paths for kind in TENANT_KINDS):
            await self.tenancy.resync()
        for name in touched:
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
            self._forget(name)
            return None
        uid = owner["metadata"]["uid"]
        if self._uids.get(name, uid) != uid:
            # It was deleted and made again before anybody looked.
            self._forget(name)
        self._uids[name] = uid
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
        if observed is None or observed.identity.uid != uid:
            return None
        observed = self._within_share(name, observed)
        refusals: list[Refusal] = []
        failure: ApiError | None = None
        has_written = False
        observed = replace(observed, ready_nodes=self._ready_nodes())
        for _ in range(MOST_STEPS):
            todo = self._plan(name, spec, observed, now)
            if self.tenancy is not None:
                self.tenancy.wish(name, todo.wishes)
            if todo.is_empty or refusals:
                break
            logger.info("%s/%s: %s", *name, "; ".join(todo.reasons))
            refusals, failure = await self.cluster.carry_out(name, todo)
            has_written = True
            later = self.cluster.glance(name, spec, observed)
            if later is None or later.identity.uid != uid:
                return None
            observed = replace(self._within_share(name, later), ready_nodes=observed.ready_nodes)
        status = status_of(spec, observed, todo, refusals, now)
        is_decided = status.get("degrade") != (observed.owner.get("status") or {}).get("degrade")
        if has_written and not refusals and not is_decided and name not in self._settling:
            self._settling.add(name)
            return SETTLE_SECONDS
        if failure is not None and self.queue.failures(name) < PASSING_FAILURES:
            # It may be over before anybody reads of it.
            raise failure
        wanted = sum(observed.scaled(tier).wanted_replicas for tier in todo.tiers)
        told = await self._tell(name, status, wanted)
        if failure is not None:
            raise failure
        wishes = [
            todo.requeue_after_seconds,
            REFUSED_AGAIN_SECONDS if refusals else None,
            told,
        ]
        return min((wish for wish in wishes if wish is not None), default=None)

    def _within_share(self, name: Name, observed: Observed) -> Observed:
        """What was observed, with what the cluster's nodes and its tenant's share allow."""
        if self.tenancy is None:
            return observed
        limits = self.tenancy.limits(name)
        return replace(observed, supply=self.tenancy.supply, limits=limits)

    def _ready_nodes(self) -> Mapping[str, bool] | None:
        if not self.fleet.is_known:
            return None
        return trusted({name: node.is_ready for name, node in self.fleet.nodes.items()})

    def _plan(
        self, name: Name, spec: DeepSeekDeploymentSpec, observed: Observed, now: datetime
    ) -> Plan:
        """Plan with the room there is. Nothing runs meanwhile, so no unit is promised twice."""
        surrounded = replace(
            observed,
            fleet=self.fleet if self.fleet.is_known else None,
            promised=self._promised_to_others(name),
        )
        todo = plan(spec, surrounded, self._settings, now, self._memories.get(name))
        decision = todo.decision
        self._memories[name] = decision.memory
        self._promises.pop(name, None)
        if decision.promises:
            self._promises[name] = decision.promises
        if decision.waits_for_capacity:
            self._waiting_for_capacity.add(name)
        else:
            self._waiting_for_capacity.discard(name)
        return todo

    def _promised_to_others(self, name: Name) -> dict[str, dict[str, int]]:
        promised: dict[str, dict[str, int]] = {}
        for other, promises in self._promises.items():
            for node, units in promises if other != name else ():
                amounts = promised.setdefault(node, {})
                for resource, number in units.items():
                    amounts[resource] = amounts.get(resource, 0) + number
        return promised

    def _forget(self, name: Name) -> None:
        """Whoever had the name is gone."""
        self._uids.pop(name, None)
        self._written_at.pop(name, None)
        self._memories.pop(name, None)
        self._promises.pop(name, None)
        self._settling.discard(name)
        self._waiting_for_capacity.discard(name)
        self._metrics.forget(*name)
        if self.tenancy is not None:
            self.tenancy.forget(name)
        self.queue.forget(name)

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
            # What is stored is what was decided: from now on the status is the memory.
            self._memories.pop(name, None)
            return None
        now = time.monotonic()
        pause = STATUS_EVERY_SECONDS if is_transition(old, status) else MESSAGES_EVERY_SECONDS
        due = self._written_at.get(name, -MESSAGES_EVERY_SECONDS) + pause
        if now < due:
            return due - now
        await self.cluster.write_status(name, status)
        self.cluster.count_retries(name)
        self._written_at[name] = now
        for switch in new_switches(old, status):
            self._metrics.switched_node(*name, switch.cause)
        self._memories.pop(name, None)
        self._metrics.switched(*name, old, status)
        await self.cluster.post(name, notes(old, status))
        return None
