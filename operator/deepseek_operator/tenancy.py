"""The loop of the tenants: look at what there is, deal, write quotas and status, limit pods.

One look is about all tenants, since what one has another lacks. It is cheap and writes only what
differs, so it follows every change of nodes, pods and tenants, and otherwise the shortest
`interval` of a tenant. Only this module writes ResourceQuotas and the status of tenants.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_operator.api import Api
from deepseek_operator.cluster import Cluster, Name
from deepseek_operator.demand import Holdings, holdings_of, workloads_of, workloads_of_others
from deepseek_operator.devices import (
    HAMI_ANNOTATION,
    NodeDevices,
    Stock,
    Supply,
    devices_of,
    partition_of,
    supply_of,
)
from deepseek_operator.drift import amount_of, deviations
from deepseek_operator.errors import ApiError, ConflictError, NotFoundError, RefusedError
from deepseek_operator.fleet import Fleet, Node
from deepseek_operator.kinds import DEEPSEEK_TENANT, RESOURCE_QUOTA, Manifest
from deepseek_operator.metrics import Metrics
from deepseek_operator.quota import (
    Claim,
    Ledger,
    PodLimit,
    TenantDeal,
    Workload,
    deal,
    standing_units,
    written_now,
)
from deepseek_operator.render import (
    HASH_ANNOTATION,
    MANAGED_BY_SELECTOR,
)
from deepseek_operator.tenants import (
    QUOTA_NAME,
    TENANT_LABEL,
    Namespaces,
    Outcome,
    Tenant,
    Use,
    Verdict,
    claim_of,
    invalid_status,
    is_due,
    label_of,
    limits_of,
    namespaces_of,
    next_end,
    outside_limits,
    over_since_of,
    resource_quota,
    seconds_of,
    status_of,
    tenant_of,
    told_past,
)
from deepseek_operator.tiers import tiers_of
from deepseek_operator.versions import Departed, is_newer

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0
"""Changes come in crowds; looks are so far apart at least."""
IDLE_SECONDS = 60.0
"""How often to look when there is no tenant."""
AGAIN_SECONDS = 15.0
"""What the API server refused is tried again after this."""
UNHURRIED_SECONDS = 60.0
"""Quotas that change without somebody waiting for it change so often at most."""

QuotaKey = tuple[str, str]
"""Namespace and name of a ResourceQuota."""


@dataclass(frozen=True)
class _Failure:
    """A quota that could not be written."""

    again_at: float
    words: str = ""
    """What the API server says; empty where there is no such namespace."""


@dataclass(frozen=True)
class _Picture:
    """What one look sees."""

    tenants: list[Tenant]
    namespaces: Namespaces
    claims: list[Claim]
    supply: Supply
    holdings: Holdings
    workloads: list[Workload]
    dealt: Mapping[str, TenantDeal]

    @cached_property
    def _by_namespace(self) -> dict[str, list[Workload]]:
        found: dict[str, list[Workload]] = {}
        for workload in self.workloads:
            if workload.is_ours:
                found.setdefault(workload.namespace, []).append(workload)
        return found

    @cached_property
    def running_units(self) -> Counter[tuple[str, str]]:
        """Units that pods have, by namespace and resource name."""
        found: Counter[tuple[str, str]] = Counter()
        for workload in self.workloads:
            found[workload.namespace, workload.resource] += workload.units * workload.running
        return found

    def workloads_of(self, tenant: Tenant) -> list[Workload]:
        """The deployments in a tenant's namespaces."""
        return [
            workload
            for namespace in self.namespaces.owned[tenant.name]
            for workload in self._by_namespace.get(namespace, ())
        ]


class Tenancy:
    """Shares the cluster's GPU memory among tenants. Used from one event loop.

    Args:
        api: The API server.
        cluster: Where the deployments are.
        fleet: Where nodes and pods are.
        metrics: Where amounts are told.
        wake: Called with each object whose limits changed.
    """

    def __init__(
        self,
        api: Api,
        cluster: Cluster,
        fleet: Fleet,
        metrics: Metrics,
        wake: Callable[[Name], None],
    ) -> None:
        self.supply: Supply | None = None
        """What nodes offer, as of the last look."""
        self._api = api
        self._cluster = cluster
        self._fleet = fleet
        self._metrics = metrics
        self._wake = wake
        self._tenants: dict[str, Manifest] = {}
        self._quotas: dict[QuotaKey, Manifest] = {}
        self._departed = Departed()
        self._owners: dict[str, Tenant] = {}
        """By namespace."""
        self._devices: dict[str, tuple[Node, NodeDevices]] = {}
        self._specs: dict[Name, tuple[str, DeepSeekDeploymentSpec | None]] = {}
        self._ledger = Ledger()
        self._over_since: dict[str, float] = {}
        self._limits: dict[Name, dict[str, PodLimit]] = {}
        self._wishes: dict[Name, Mapping[str, int]] = {}
        self._told_at: dict[str, float] = {}
        self._refused_until: dict[str, float] = {}
        self._failures: dict[QuotaKey, _Failure] = {}
        self._dealt_at = float("-inf")
        self._dealt_for: object = None
        self._changed = asyncio.Event()
        # Seconds since the epoch, by a clock that does not jump: a grace period must not end early
        # because somebody set the time.
        self._started_at = time.time() - time.monotonic()

    # Hearing.

    def notice(self, event_type: str | None, manifest: Manifest) -> None:
        """Take in a watch event about a tenant or a quota."""
        metadata = manifest["metadata"]
        if event_type == "DELETED":
            # Also said of a quota that lost the label it is watched by, and lives on.
            self._departed.add(manifest)
        elif metadata["uid"] in self._departed and not self._departed.is_back(manifest):
            return
        else:
            self._departed.discard(metadata["uid"])
        if manifest["kind"] == DEEPSEEK_TENANT.kind:
            self._notice_tenant(event_type, manifest)
        else:
            self._notice_quota(event_type, manifest)

    def _notice_tenant(self, event_type: str | None, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        old = self._tenants.get(name)
        if event_type == "DELETED":
            if _is_same(old, manifest):
                del self._tenants[name]
                self.look_soon()
            return
        if old is None or not is_newer(old, manifest):
            self._tenants[name] = manifest
        if old is None or _generation(old) != _generation(manifest):
            self.look_soon()

    def _notice_quota(self, event_type: str | None, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        key = (metadata["namespace"], metadata["name"])
        old = self._quotas.get(key)
        if event_type == "DELETED":
            if _is_same(old, manifest):
                del self._quotas[key]
        elif TENANT_LABEL in (metadata.get("labels") or {}) and (
            old is None or not is_newer(old, manifest)
        ):
            self._quotas[key] = manifest
        new = self._quotas.get(key)
        if any((old or {}).get(part) != (new or {}).get(part) for part in ("spec", "status")):
            self.look_soon()

    def look_soon(self) -> None:
        """Something changed that shares may depend on."""
        self._changed.set()

    def wish(self, name: Name, wishes: Mapping[str, int]) -> None:
        """The pods that an object's plan would have if no share were a limit, by tier."""
        if self._wishes.get(name) != wishes:
            self._wishes[name] = wishes
            self.look_soon()

    def forget(self, name: Name) -> None:
        """An object is gone."""
        if self._wishes.pop(name, None) is not None:
            self.look_soon()
        self._specs.pop(name, None)
        self._limits.pop(name, None)

    def limits(self, name: Name) -> Mapping[str, PodLimit]:
        """How many pods an object's tiers may have, where a share is a limit."""
        return {**self._outside(name), **self._limits.get(name, {})}

    def _outside(self, name: Name) -> Mapping[str, PodLimit]:
        """What holds for an object that is new or changed before the next look."""
        tenant, owner = self._owners.get(name.namespace), self._cluster.owner(name)
        spec = self._spec(name, owner)
        if tenant is None or spec is None:
            return {}
        running = {
            tier: int((live.get("status") or {}).get("replicas") or 0)
            for tier, live in self._cluster.deployments(name).items()
        }
        return outside_limits(tenant, tiers_of(spec), running)

    async def resync(self) -> None:
        """List tenants and their quotas.

        Raises:
            ApiError: One of the kinds could not be listed.
        """
        for kind, kept in ((DEEPSEEK_TENANT, self._tenants), (RESOURCE_QUOTA, self._quotas)):
            selector = MANAGED_BY_SELECTOR if kind == RESOURCE_QUOTA else ""
            before: dict[Any, Manifest] = dict(kept)
            seen: set[object] = set()
            async for items, _ in self._api.chunks(kind, None, selector):
                for item in items:
                    seen.add(_key_of(item))
                    self.notice(None, item)
            for key, live in before.items():
                # What came or was replaced since the listing began is not gone.
                if key not in seen and _is_same(kept.get(key), live):
                    del kept[key]
                    self.look_soon()

    # Acting.

    def _now(self) -> float:
        return self._started_at + time.monotonic()

    async def run(self) -> None:
        """Look whenever something changed, until cancelled."""
        pause, failures = 0.0, 0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause)
            self._changed.clear()
            try:
                pause, failures = await self.look(), 0
            except ApiError as error:
                failures += 1
                self._metrics.failed(type(error).__name__)
                logger.warning("Quotas could not be dealt: %s", error)
            except Exception:
                # One object that nobody thought of must not end the sharing for all.
                failures += 1
                self._metrics.failed("Internal")
                logger.exception("Quotas could not be dealt")
            # Events go on coming while the API server fails, and must not make a storm of tries.
            await asyncio.sleep(min(AGAIN_SECONDS, SETTLE_SECONDS * 2.0**failures))
            if failures:
                self._changed.set()

    def prepare(self) -> None:
        """See what limits there are before anything is planned; writes nothing."""
        self._set_limits(self._limit(self._see(), self._now()))

    async def look(self) -> float:
        """Deal, and write what differs.

        Returns:
            After how many seconds to look again at the latest.
        """
        now = self._now()
        picture = self._see()
        uses = self._uses(picture, now)
        before = self._limits
        after = self._limit(picture, now)
        # Pods that may be fewer are told at once; more, when the quotas let them in: a ReplicaSet
        # that was refused waits ever longer before it tries again.
        self._set_limits(_tighter(before, after))
        outcomes = await self._write_quotas(picture)
        self._set_limits(after)
        await self._write_statuses(picture, uses, outcomes, datetime.fromtimestamp(now, UTC))
        pauses = [IDLE_SECONDS]
        for tenant in picture.tenants:
            if tenant.spec is None:
                continue
            pauses.append(float(seconds_of(tenant.spec.dynamic.interval)))
            since = self._over_since.get(tenant.name)
            found = picture.dealt[tenant.name]
            mine = picture.workloads_of(tenant)
            end = next_end(tenant, found, mine, over_since=since, now=now)
            pauses += [end] if end is not None else []
        pauses += [AGAIN_SECONDS] if self._failures else []
        return min(pauses)

    def _see(self) -> _Picture:
        picture = self._picture()
        before, self.supply = self.supply, picture.supply
        if _offer(before) != _offer(self.supply):
            for name in self._cluster.names:
                spec = self._spec(name, self._cluster.owner(name))
                if spec is not None and {"mig", "vgpu"} & {t.gpu.mode for t in tiers_of(spec)}:
                    self._wake(name)
        return picture

    def _picture(self) -> _Picture:
        tenants = [
            tenant_of(manifest)
            for manifest in self._tenants.values()
            if "deletionTimestamp" not in manifest["metadata"]
        ]
        namespaces = namespaces_of(tenants)
        self._owners = {
            namespace: tenant
            for tenant in tenants
            for namespace in namespaces.owned.get(tenant.name, ())
        }
        devices = self._all_devices()
        supply = supply_of(devices.values())
        served = {name for names in namespaces.owned.values() for name in names}
        holdings = holdings_of(self._fleet.loads, devices)
        workloads = workloads_of_others(holdings, served)
        for name in self._cluster.names:
            if name.namespace not in served:
                continue
            owner = self._cluster.owner(name)
            spec = self._spec(name, owner)
            if owner is None or spec is None:
                continue
            held = {tier: limit.soon for tier, limit in self._limits.get(name, {}).items()}
            workloads += workloads_of(
                owner,
                spec,
                live=self._cluster.deployments(name),
                holdings=holdings,
                supply=supply,
                wishes=self._wishes.get(name, {}),
                held_at=held,
            )
        claims = [
            claim_of(tenant, namespaces.owned[tenant.name])
            for tenant in tenants
            if tenant.spec is not None
        ]
        dealt = deal(supply, claims, workloads, holdings.outside(served))
        return _Picture(tenants, namespaces, claims, supply, holdings, workloads, dealt)

    def _all_devices(self) -> dict[str, NodeDevices]:
        """What each node offers; one whose labels contradict, what it last offered."""
        found: dict[str, tuple[Node, NodeDevices]] = {}
        for name, node in self._fleet.nodes.items():
            known = self._devices.get(name)
            if known is not None and known[0] == node:
                found[name] = known
                continue
            annotations = {} if node.register is None else {HAMI_ANNOTATION: node.register}
            new = devices_of(name, node.labels, annotations, node.allocatable)
            if new.problem and known is not None:
                new = replace(known[1], problem=new.problem)
            found[name] = (node, new)
        self._devices = found
        return {name: devices for name, (_, devices) in found.items()}

    def _spec(self, name: Name, owner: Manifest | None) -> DeepSeekDeploymentSpec | None:
        if owner is None:
            return None
        version = f"{owner['metadata']['uid']}/{_generation(owner)}"
        known = self._specs.get(name)
        if known is not None and known[0] == version:
            return known[1]
        spec: DeepSeekDeploymentSpec | None
        try:
            spec = DeepSeekDeploymentSpec.from_stored(owner.get("spec") or {})
        except ValidationError:
            spec = None
        self._specs[name] = (version, spec)
        return spec

    def _uses(self, picture: _Picture, now: float) -> dict[str, Use]:
        uses = {}
        names = {tenant.name for tenant in picture.tenants}
        self._ledger.forget(names)
        self._over_since = {k: v for k, v in self._over_since.items() if k in names}
        for tenant in picture.tenants:
            if tenant.spec is None:
                continue
            used = sum(
                picture.holdings.used_bytes.get(namespace, 0)
                for namespace in picture.namespaces.owned[tenant.name]
            )
            past = self._ledger.look(
                tenant.name, told_past(tenant, now), used,
                seconds_of(tenant.spec.dynamic.half_life), time.monotonic(),
            )  # fmt: skip
            found = picture.dealt[tenant.name]
            since = over_since_of(tenant, found, self._over_since.get(tenant.name), now)
            if since is None:
                self._over_since.pop(tenant.name, None)
            else:
                self._over_since[tenant.name] = since
            uses[tenant.name] = Use(used, past, since)
            self._metrics.tell_tenant(
                tenant.name, quota=found.share_bytes, used=used, past_used=past
            )
        self._metrics.keep_tenants(uses)
        return uses

    def _limit(self, picture: _Picture, now: float) -> dict[Name, dict[str, PodLimit]]:
        limits: dict[Name, dict[str, PodLimit]] = {}
        for tenant in picture.tenants:
            if tenant.name not in picture.dealt:
                continue
            found = limits_of(
                tenant,
                picture.dealt[tenant.name],
                picture.workloads_of(tenant),
                over_since=self._over_since.get(tenant.name),
                now=now,
            )
            for (namespace, object_name, tier), limit in found.items():
                limits.setdefault(Name(namespace, object_name), {})[tier] = limit
        return limits

    def _set_limits(self, limits: dict[Name, dict[str, PodLimit]]) -> None:
        before, self._limits = self._limits, limits
        for name in before.keys() | limits.keys():
            if before.get(name) != limits.get(name):
                self._wake(name)

    async def _write_quotas(self, picture: _Picture) -> dict[str, Outcome]:
        """Bring ResourceQuotas to what was dealt: those that become smaller first."""
        wanted = {
            (namespace, QUOTA_NAME): resource_quota(tenant, namespace, hard)
            for tenant in picture.tenants
            if tenant.spec is not None
            for namespace, hard in self._hard(tenant, picture).items()
        }
        # Tenants that are not understood keep what they have.
        unread = {label_of(tenant.name) for tenant in picture.tenants if tenant.spec is None}
        now = time.monotonic()
        known = wanted.keys() | self._quotas.keys()
        self._failures = {key: f for key, f in self._failures.items() if key in known}
        waiting = {key for key, failure in self._failures.items() if failure.again_at > now}
        for key, live in list(self._quotas.items()):
            if (
                key not in wanted
                and key not in waiting
                and live["metadata"]["labels"][TENANT_LABEL] not in unread
                and "deletionTimestamp" not in live["metadata"]
            ):
                await self._delete_quota(key, live)
        differing = [
            key
            for key, manifest in wanted.items()
            if (key not in self._quotas or deviations(manifest, self._quotas[key]))
            and key not in waiting
        ]
        if differing and self._is_time(differing, wanted, picture):
            self._dealt_at, self._dealt_for = now, _circumstances(picture)
            for key in sorted(differing, key=lambda key: (self._grows(key, wanted[key]), key)):
                await self._write_quota(key, wanted[key])
        return {
            tenant.name: self._outcome(picture.namespaces.owned.get(tenant.name, ()))
            for tenant in picture.tenants
        }

    async def _delete_quota(self, key: QuotaKey, live: Manifest) -> None:
        """Delete a quota, and know at once what became of it: the watch may tell it much later."""
        uid = live["metadata"]["uid"]
        try:
            remaining = await self._api.delete(RESOURCE_QUOTA, *key, uid=uid)
        except (ConflictError, NotFoundError, RefusedError) as error:
            words = f"ResourceQuota {key[1]} in {key[0]} could not be deleted: {error.message}"
            logger.warning(words)
            self._failures[key] = _Failure(time.monotonic() + AGAIN_SECONDS, words)
            return
        self._failures.pop(key, None)
        if remaining is not None:
            self.notice(None, remaining)
            return
        self._departed.add_for_good(uid)
        # Another one may have got its name meanwhile.
        if _is_same(self._quotas.get(key), live):
            del self._quotas[key]

    def _hard(self, tenant: Tenant, picture: _Picture) -> dict[str, dict[str, int]]:
        """What a tenant's quotas can say now, by namespace."""
        found = picture.dealt[tenant.name]
        hard = {namespace: dict(keys) for namespace, keys in found.hard.items()}
        stock = picture.supply.stocks.get(partition_of(tenant.spec.partition))  # type: ignore[union-attr]
        for name in stock.counts if stock is not None else ():
            key = f"requests.{name}"
            dealt = {namespace: keys[key] for namespace, keys in hard.items()}
            written, standing = {}, {}
            for namespace in dealt:
                quota = self._quotas.get((namespace, QUOTA_NAME))
                if quota is None:
                    standing[namespace] = picture.running_units[namespace, name]
                else:
                    written[namespace] = _amount(quota["spec"].get("hard"), key)
                    standing[namespace] = _standing(quota, key)
            now = written_now(dealt, found.share_units, written, standing)
            for namespace, units in now.items():
                hard[namespace][key] = units
        return hard

    async def _write_quota(self, key: QuotaKey, manifest: Manifest) -> None:
        again_at = time.monotonic() + AGAIN_SECONDS
        is_ours = key in self._quotas
        try:
            # Somebody else's quota of this name shows itself by a conflict.
            answer = await self._api.apply(RESOURCE_QUOTA, manifest, force=is_ours)
        except NotFoundError:
            self._failures[key] = _Failure(again_at)
        except (ConflictError, RefusedError) as error:
            words = f"The API server refuses ResourceQuota {key[1]} in {key[0]}: {error.message}"
            self._failures[key] = _Failure(again_at, words)
        else:
            self._failures.pop(key, None)
            self.notice(None, {"kind": RESOURCE_QUOTA.kind, **answer})

    def _outcome(self, namespaces: tuple[str, ...]) -> Outcome:
        failures = {
            namespace: self._failures[namespace, QUOTA_NAME]
            for namespace in namespaces
            if (namespace, QUOTA_NAME) in self._failures
        }
        return Outcome(
            tuple(namespace for namespace, failure in failures.items() if not failure.words),
            tuple(failure.words for failure in failures.values() if failure.words),
        )

    def _is_time(
        self, differing: list[QuotaKey], wanted: Mapping[QuotaKey, Manifest], picture: _Picture
    ) -> bool:
        """Whether to write now what may wait for a minute when nobody waits for it."""
        if time.monotonic() - self._dealt_at >= UNHURRIED_SECONDS:
            return True
        if self._dealt_for != _circumstances(picture):
            return True
        for key in differing:
            live = self._quotas.get(key)
            if live is None or _hash(live) == _hash(wanted[key]):
                # It is missing, or somebody changed it.
                return True
        return any(
            self._waits(tenant, picture) for tenant in picture.tenants if tenant.spec is not None
        )

    def _waits(self, tenant: Tenant, picture: _Picture) -> bool:
        """Whether a tenant is to have more than its quotas say, and asks for it."""
        found = picture.dealt[tenant.name]
        names = picture.supply.stocks.get(
            partition_of(tenant.spec.partition) if tenant.spec is not None else "", Stock({}, 0)
        ).counts
        has = sum(
            _units(self._quotas.get((namespace, QUOTA_NAME)), name)
            for namespace in picture.namespaces.owned[tenant.name]
            for name in names
        )
        return min(found.asked_units, found.share_units) > has or found.is_over

    def _grows(self, key: QuotaKey, manifest: Manifest) -> bool:
        live = self._quotas.get(key)
        hard: Mapping[str, str] = manifest["spec"]["hard"]
        return live is None or any(
            int(units) > _units(live, name.removeprefix("requests."))
            for name, units in hard.items()
        )

    async def _write_statuses(
        self,
        picture: _Picture,
        uses: Mapping[str, Use],
        outcomes: Mapping[str, Outcome],
        now: datetime,
    ) -> None:
        short = {
            partition_of(tenant.spec.partition)
            for tenant in picture.tenants
            if tenant.spec is not None
            and picture.dealt[tenant.name].guarantee_units
            < picture.dealt[tenant.name].promised_units
        }
        for tenant in picture.tenants:
            if tenant.spec is None:
                status = invalid_status(tenant, now)
            else:
                verdict = Verdict(
                    tenant=tenant,
                    supply=picture.supply,
                    namespaces=picture.namespaces.owned[tenant.name],
                    taken=picture.namespaces.taken[tenant.name],
                    deal=picture.dealt[tenant.name],
                    use=uses[tenant.name],
                    promised_percent=sum(claim.min_percent for claim in picture.claims),
                    overcommitted_partition=partition_of(tenant.spec.partition) in short,
                    outcome=outcomes[tenant.name],
                )
                status = status_of(verdict, now)
            since = time.monotonic() - self._told_at.get(tenant.name, float("-inf"))
            if not is_due(tenant.status, status, since) or self._is_refused(tenant.name):
                continue
            self._told_at[tenant.name] = time.monotonic()
            gone = {key: None for key in tenant.status if key not in status}
            self._refused_until[tenant.name] = time.monotonic() + AGAIN_SECONDS
            with _refusals_logged(f"The status of tenant {tenant.name} could not be written"):
                answer = await self._api.patch(
                    DEEPSEEK_TENANT, "", tenant.name, {"status": {**status, **gone}}, "status"
                )
                self.notice("MODIFIED", {"kind": DEEPSEEK_TENANT.kind, **answer})
                self._refused_until.pop(tenant.name)

    def _is_refused(self, tenant: str) -> bool:
        return self._refused_until.get(tenant, 0.0) > time.monotonic()


@contextlib.contextmanager
def _refusals_logged(what: str) -> Iterator[None]:
    """What is refused about one tenant holds up no other; what fails may pass and is raised."""
    try:
        yield
    except (NotFoundError, RefusedError) as error:
        logger.warning("%s: %s", what, error)


def _tighter(
    before: Mapping[Name, Mapping[str, PodLimit]], after: Mapping[Name, Mapping[str, PodLimit]]
) -> dict[Name, dict[str, PodLimit]]:
    """Of two sets of limits, for each tier the one with fewer pods."""
    found: dict[Name, dict[str, PodLimit]] = {}
    for name in before.keys() | after.keys():
        tiers = [*before.get(name, {}).items(), *after.get(name, {}).items()]
        mine = found.setdefault(name, {})
        for tier, limit in tiers:
            known = mine.get(tier)
            if known is None or (limit.now, limit.soon) <= (known.now, known.soon):
                mine[tier] = limit
    return found


def _offer(supply: Supply | None) -> object:
    """What decides what pods ask for and whether they can run at all."""
    if supply is None:
        return None
    return {key: (set(stock.counts), stock.card_bytes) for key, stock in supply.stocks.items()}


def _circumstances(picture: _Picture) -> object:
    """What shares depend on besides what is asked for and past use."""
    claims = tuple(replace(claim, past_bytes=0) for claim in picture.claims)
    return (claims, picture.supply)


def _units(quota: Manifest | None, resource: str) -> int:
    hard = ((quota or {}).get("spec") or {}).get("hard") or {}
    return int(amount_of(hard.get(f"requests.{resource}", 0)))


def _standing(quota: Manifest, key: str) -> int:
    """Units that the pods of a namespace can hold now: what the API server lets in, or has."""
    status = quota.get("status") or {}
    amounts = (quota["spec"].get("hard"), status.get("hard"), status.get("used"))
    return standing_units(*(_amount(part, key) for part in amounts))


def _amount(amounts: Mapping[str, object] | None, key: str) -> int:
    return int(amount_of((amounts or {}).get(key) or 0))


def _hash(manifest: Manifest) -> str | None:
    annotations = manifest["metadata"].get("annotations") or {}
    found: str | None = annotations.get(HASH_ANNOTATION)
    return found


def _key_of(manifest: Manifest) -> str | QuotaKey:
    metadata = manifest["metadata"]
    return (
        (metadata["namespace"], metadata["name"]) if "namespace" in metadata else metadata["name"]
    )


def _generation(manifest: Manifest) -> int:
    return int(manifest["metadata"].get("generation", 0))


def _is_same(known: Manifest | None, manifest: Manifest) -> bool:
    """Whether what is known is this very object, and not another one of its name."""
    return known is not None and known["metadata"]["uid"] == manifest["metadata"]["uid"]
