"""Tenants from their objects, and what is told of them: ResourceQuotas, limits, status.

Pure; time is an argument. `quota` divides and knows no manifests; this reads them for it and
writes down what it says. `tenancy` calls both in turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from deepseek_contract.status import TenantConditionReason, TenantConditionType
from deepseek_contract.tenant import DeepSeekTenantSpec
from deepseek_operator.devices import Supply, partition_of, units_of
from deepseek_operator.kinds import (
    DEEPSEEK_TENANT,
    RESOURCE_QUOTA,
    Manifest,
)
from deepseek_operator.quota import (
    CHANGE_POINTS,
    Claim,
    PodLimit,
    TenantDeal,
    Workload,
    WorkloadKey,
    most_pods,
    percent_of,
    starts_to_shrink,
)
from deepseek_operator.render import MANAGED_BY, MANAGED_BY_LABEL, metadata_of, with_hash
from deepseek_operator.tiers import Tier

QUOTA_NAME = "deepseek-tenant"
TENANT_LABEL = "deepseek.dev/tenant"
LABEL_LENGTH = 63
MESSAGE_LENGTH = 1024
NUMBERS_EVERY_SECONDS = 60.0
"""How often a status is written when only numbers or words changed."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds_of(duration: str) -> int:
    """A duration such as `24h` in seconds."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


@dataclass(frozen=True)
class Tenant:
    """One object of the kind DeepSeekTenant."""

    manifest: Manifest
    spec: DeepSeekTenantSpec | None
    problem: str = ""
    """Why there is no spec."""

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def age(self) -> tuple[str, str]:
        """By which the older of two tenants is told."""
        return (str(self.manifest["metadata"].get("creationTimestamp", "")), self.name)

    @property
    def status(self) -> Manifest:
        """What was last told."""
        return self.manifest.get("status") or {}

    @property
    def grace_seconds(self) -> int:
        """For how long pods beyond the share may go on."""
        return self.spec.dynamic.grace_seconds if self.spec is not None else 0


def tenant_of(manifest: Manifest) -> Tenant:
    """Read an object."""
    try:
        return Tenant(manifest, DeepSeekTenantSpec.from_stored(manifest.get("spec") or {}))
    except ValidationError as error:
        problem = "; ".join(
            f"spec.{'.'.join(map(str, detail['loc']))}: {detail['msg']}."
            for detail in error.errors()
        )
        return Tenant(manifest, None, problem)


@dataclass(frozen=True)
class Namespaces:
    """Whose namespaces are whose."""

    owned: Mapping[str, tuple[str, ...]]
    """By tenant."""
    taken: Mapping[str, Mapping[str, str]]
    """By tenant, the namespaces that it names and that belong to an older one, with its name."""


def namespaces_of(tenants: Iterable[Tenant]) -> Namespaces:
    """Each namespace belongs to the oldest tenant that names it."""
    owner: dict[str, str] = {}
    owned: dict[str, tuple[str, ...]] = {}
    taken: dict[str, dict[str, str]] = {}
    for tenant in sorted(tenants, key=lambda tenant: tenant.age):
        if tenant.spec is None:
            continue
        mine = [name for name in tenant.spec.namespaces if name not in owner]
        theirs = {name: owner[name] for name in tenant.spec.namespaces if name in owner}
        owned[tenant.name] = tuple(sorted(mine))
        taken[tenant.name] = theirs
        owner |= dict.fromkeys(mine, tenant.name)
    return Namespaces(owned, taken)


def claim_of(tenant: Tenant, namespaces: Sequence[str]) -> Claim:
    """A tenant as shares are computed from it.

    Past use is what the status says, not what it is at this moment: so it moves in steps, seldom,
    and is the same after a restart.
    """
    spec = tenant.spec
    assert spec is not None  # noqa: S101 -- callers leave out those that are not understood
    past = tenant.status.get("pastUsed") or {}
    return Claim(
        name=tenant.name,
        namespaces=tuple(namespaces),
        min_percent=spec.gpu_memory.min_percent,
        max_percent=spec.gpu_memory.max_percent,
        partition=partition_of(spec.partition),
        weight=spec.weight,
        max_percent_per_card=spec.max_percent_per_card,
        is_dynamic=spec.dynamic.enabled,
        past_bytes=int(past.get("bytes", 0)),
    )


@dataclass(frozen=True)
class Use:
    """What a tenant's pods hold and held."""

    used_bytes: int = 0
    """Of pods on nodes."""
    past_bytes: float = 0.0
    """Decayed, at this moment."""
    over_since: float | None = None
    """Since when more pods exist than the share has room for; seconds since the epoch."""


@dataclass(frozen=True)
class Outcome:
    """What came of writing a tenant's quotas."""

    missing_namespaces: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """All that the status of a tenant is made from."""

    tenant: Tenant
    supply: Supply
    namespaces: tuple[str, ...]
    taken: Mapping[str, str]
    deal: TenantDeal
    use: Use
    promised_percent: int
    """What the guarantees of all tenants come to."""
    overcommitted_partition: bool = False
    """Whether the guarantees of this tenant's partition are more than there is of it."""
    outcome: Outcome = field(default_factory=Outcome)


def label_of(tenant: str) -> str:
    """The tenant's name as a label's value, which may be shorter."""
    if len(tenant) <= LABEL_LENGTH:
        return tenant
    digest = hashlib.sha256(tenant.encode()).hexdigest()[:8]
    return f"{tenant[: LABEL_LENGTH - 9].rstrip('.-')}-{digest}"


def resource_quota(tenant: Tenant, namespace: str, hard: Mapping[str, int]) -> Manifest:
    """The ResourceQuota of one namespace of a tenant."""
    labels = {MANAGED_BY_LABEL: MANAGED_BY, TENANT_LABEL: label_of(tenant.name)}
    manifest = metadata_of(RESOURCE_QUOTA, namespace, QUOTA_NAME, labels)
    metadata = tenant.manifest["metadata"]
    manifest["metadata"]["ownerReferences"] = [
        {
            "apiVersion": DEEPSEEK_TENANT.api_version,
            "kind": DEEPSEEK_TENANT.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": False,
        }
    ]
    manifest["spec"] = {"hard": {key: str(units) for key, units in sorted(hard.items())}}
    return with_hash(manifest)


def limits_of(
    tenant: Tenant,
    deal: TenantDeal,
    workloads: Iterable[Workload],
    *,
    over_since: float | None,
    now: float,
) -> dict[WorkloadKey, PodLimit]:
    """How many pods each of the tenant's deployments may have, where that is a limit."""
    limits = {}
    for workload in workloads:
        limit = deal.limits.get(workload.key)
        if limit is None:
            continue
        may_end = over_since is not None and now >= starts_to_shrink(
            over_since, tenant.grace_seconds, workload.drain_seconds
        )
        pods = most_pods(limit, workload.running, may_end_pods=may_end)
        assert pods is not None  # noqa: S101 -- there is a limit
        limits[workload.key] = PodLimit(pods, limit, _why(tenant, deal, workload, limit))
    return limits


def next_end(
    tenant: Tenant,
    deal: TenantDeal,
    workloads: Iterable[Workload],
    *,
    over_since: float | None,
    now: float,
) -> float | None:
    """After how many seconds pods that may go on now have to end; None if none has to."""
    if over_since is None:
        return None
    starts = [
        starts_to_shrink(over_since, tenant.grace_seconds, workload.drain_seconds) - now
        for workload in workloads
        if workload.key in deal.limits
    ]
    return min((start for start in starts if start > 0), default=None)


def _why(tenant: Tenant, deal: TenantDeal, workload: Workload, limit: int) -> str:
    if workload.key in deal.outside:
        return _why_outside(tenant)
    if workload.key in deal.too_large:
        return (
            f"One pod asks for {workload.units} units, and tenant {tenant.name} may have"
            f" {deal.cap_units}, or less of a shared card than that. Ask for less, or raise the"
            " tenant's gpuMemory.maxPercent or maxPercentPerCard."
        )
    return (
        f"Tenant {tenant.name} may use {deal.share_units} units now and is asked for"
        f" {deal.asked_units}: this has room for {limit} of {workload.wanted} pods. Those of higher"
        " priority, then older ones, go first."
    )


def _why_outside(tenant: Tenant) -> str:
    partition = partition_of(tenant.spec.partition) if tenant.spec is not None else ""
    return (
        f"Tenant {tenant.name} has the partition {partition}, and this asks for another one."
        " Change spec.gpu, or the tenant's partition."
    )


def outside_limits(
    tenant: Tenant, tiers: Iterable[Tier], running: Mapping[str, int]
) -> dict[str, PodLimit]:
    """Limits of an object that was not dealt to yet: none may start outside the partition.

    Where names are shared, such a pod would take the quota of the tenant's own.

    Args:
        tenant: Whose namespace the object is in.
        tiers: The object's.
        running: Pods by tier; they have their grace period.
    """
    if tenant.spec is None:
        return {}
    mine = partition_of(tenant.spec.partition)
    return {
        tier.name: PodLimit(running.get(tier.name, 0), 0, _why_outside(tenant))
        for tier in tiers
        if units_of(tier.gpu) and partition_of(tier.gpu) != mine
    }


@dataclass(frozen=True)
class _State:
    """A condition without its times."""

    type: TenantConditionType
    status: bool
    reason: TenantConditionReason
    message: str


def status_of(verdict: Verdict, now: datetime) -> dict[str, Any]:
    """The whole status of a tenant that is understood."""
    total = verdict.supply.total_bytes
    deal, use = verdict.deal, verdict.use
    states = (
        _ready(verdict),
        _over(verdict, now.timestamp()),
        _cap(verdict),
        _namespaces(verdict),
        _guarantees(verdict),
        _nodes(verdict),
    )
    old = verdict.tenant.status
    status: dict[str, Any] = {
        **_assembled(verdict.tenant, states, now),
        "quota": _share(deal.share_bytes, total),
        "used": _share(use.used_bytes, total),
        "pastUsed": old.get("pastUsed"),
        "pastUsedTime": old.get("pastUsedTime"),
    }
    told = (old.get("pastUsed") or {}).get("percent")
    is_news = told is None or abs(percent_of(use.past_bytes, total) - int(told)) >= CHANGE_POINTS
    if is_news:
        status["pastUsed"] = _share(use.past_bytes, total)
        status["pastUsedTime"] = _stamp(now)
    return {key: value for key, value in status.items() if value is not None}


def invalid_status(tenant: Tenant, now: datetime) -> dict[str, Any]:
    """The status of a tenant that this version of the operator cannot read."""
    message = (
        f"The spec is not understood: {tenant.problem} Correct it, or upgrade operator and CRD."
        " Its quotas stay as they are."
    )
    kept = {
        key: value
        for key, value in tenant.status.items()
        if key in {"quota", "used", "pastUsed", "pastUsedTime"}
    }
    return {**_assembled(tenant, (_State("Ready", False, "InvalidSpec", message),), now), **kept}


def is_due(old: Manifest, new: Manifest, seconds_since_write: float) -> bool:
    """Whether a status has to be written now.

    Conditions at once; numbers when one of them moved by five points, and words, both at most once
    a minute.
    """
    if _words(old, with_messages=False) != _words(new, with_messages=False):
        return True
    if seconds_since_write < NUMBERS_EVERY_SECONDS:
        return False
    if any(
        abs(_percent(old, key) - _percent(new, key)) >= CHANGE_POINTS
        for key in ("quota", "used", "pastUsed")
    ):
        return True
    return _words(old, with_messages=True) != _words(new, with_messages=True)


def over_since_of(
    tenant: Tenant, deal: TenantDeal, known: float | None, now: float
) -> float | None:
    """Since when a tenant's pods are more than its share; a restart does not begin anew."""
    if not deal.is_over:
        return None
    if known is not None:
        return known
    for condition in tenant.status.get("conditions") or []:
        if condition["type"] == "OverQuota" and condition["status"] == "True":
            return min(now, _seconds(condition.get("lastTransitionTime"), now))
    return now


def told_past(tenant: Tenant, now: float) -> tuple[float, float] | None:
    """Past use in bytes as it was last told, and how many seconds ago that was."""
    past = tenant.status.get("pastUsed")
    if not past:
        return None
    at = _seconds(tenant.status.get("pastUsedTime"), now)
    return float(past.get("bytes", 0)), max(0.0, now - at)


def _ready(verdict: Verdict) -> _State:
    tenant, outcome, deal = verdict.tenant, verdict.outcome, verdict.deal
    if outcome.refusals:
        return _State("Ready", False, "ApplyRefused", " ".join(outcome.refusals))
    if not verdict.namespaces:
        return _State(
            "Ready", False, "NoNamespaces", "All namespaces that it names belong to other tenants."
        )
    if outcome.missing_namespaces:
        missing = ", ".join(outcome.missing_namespaces)
        return _State(
            "Ready", False, "NamespaceMissing",
            f"There is no namespace {missing}: create it, or take it out of spec.namespaces.",
        )  # fmt: skip
    partition = partition_of(tenant.spec.partition) if tenant.spec is not None else ""
    if partition not in verdict.supply.stocks:
        offered = ", ".join(verdict.supply.stocks) or "none"
        return _State(
            "Ready", False, "PartitionUnavailable",
            f"No node offers the partition {partition}; offered are: {offered}.",
        )  # fmt: skip
    return _State(
        "Ready", True, "QuotaDealt",
        f"{deal.share_units} units of {partition} are dealt to {len(verdict.namespaces)}"
        f" namespaces; at most {deal.cap_units}, {deal.guarantee_units} of them guaranteed.",
    )  # fmt: skip


def _over(verdict: Verdict, now: float) -> _State:
    deal = verdict.deal
    if not deal.is_over:
        return _State(
            "OverQuota", False, "WithinQuota", "No pod runs beyond what the tenant may use."
        )
    beyond = f"{deal.running_units} units are held and {deal.share_units} may be used now."
    if deal.num_barred:
        beyond += (
            f" {deal.num_barred} pods are of deployments that may have none, for another partition"
            " or too large."
        )
    elif deal.running_units - deal.foreign_units <= 0 or deal.foreign_units > deal.share_units:
        return _State(
            "OverQuota", True, "PodsOfOthers",
            f"{beyond} {deal.foreign_units} are held by pods that are not of a"
            " DeepSeekDeployment, which only their owners can end.",
        )  # fmt: skip
    since = verdict.use.over_since if verdict.use.over_since is not None else now
    left = since + verdict.tenant.grace_seconds - now
    if left > 0:
        ends = _stamp(datetime.fromtimestamp(since + verdict.tenant.grace_seconds, UTC))
        return _State(
            "OverQuota", True, "GracePeriod",
            f"{beyond} Deployments of the lowest priority are made smaller by {ends}.",
        )  # fmt: skip
    return _State("OverQuota", True, "Shrinking", f"{beyond} Pods are being ended.")


def _cap(verdict: Verdict) -> _State:
    deal, spec = verdict.deal, verdict.tenant.spec
    percent = spec.gpu_memory.max_percent if spec is not None else 0
    if deal.unit_bytes and deal.cap_units == 0:
        return _State(
            "CapBelowOneUnit", True, "CapBelowOneUnit",
            f"{percent} percent of the cluster are less than one unit of"
            f" {deal.unit_bytes // 2**20} MiB, so that no pod can start. Raise maxPercent, or"
            " choose a smaller partition.",
        )  # fmt: skip
    return _State(
        "CapBelowOneUnit", False, "CapHoldsUnits", f"The cap holds {deal.cap_units} units."
    )


def _namespaces(verdict: Verdict) -> _State:
    if verdict.taken:
        listed = ", ".join(
            f"{namespace} (of {other})" for namespace, other in sorted(verdict.taken.items())
        )
        return _State(
            "NamespaceTaken", True, "NamespaceInTwoTenants",
            f"A namespace belongs to the oldest tenant that names it: {listed}. Take it out of one"
            " of them.",
        )  # fmt: skip
    return _State("NamespaceTaken", False, "NamespacesAreFree", "No other tenant names them.")


def _guarantees(verdict: Verdict) -> _State:
    promised, deal = verdict.promised_percent, verdict.deal
    if promised > 100:
        return _State(
            "GuaranteesOvercommitted", True, "GuaranteesExceedCluster",
            f"All tenants' minPercent together are {promised} percent; each is made smaller by the"
            " same factor where there is too little.",
        )  # fmt: skip
    if verdict.overcommitted_partition:
        return _State(
            "GuaranteesOvercommitted", True, "GuaranteesExceedPartition",
            "The guarantees of the tenants that share this partition are more than its"
            f" units: instead of {deal.promised_units} this one has {deal.guarantee_units}.",
        )  # fmt: skip
    spec = verdict.tenant.spec
    least = spec.gpu_memory.min_percent if spec is not None else 0
    if deal.unit_bytes and least and deal.promised_units == 0:
        return _State(
            "GuaranteesOvercommitted", True, "GuaranteeBelowOneUnit",
            f"minPercent {least} is less than one unit of"
            f" {deal.unit_bytes // 2**20} MiB, and guarantees nothing.",
        )  # fmt: skip
    return _State(
        "GuaranteesOvercommitted", False, "GuaranteesFit",
        f"All tenants' guarantees together are {promised} percent.",
    )  # fmt: skip


def _nodes(verdict: Verdict) -> _State:
    problems = verdict.supply.problems
    if problems:
        return _State(
            "NodesContradict", True, "ContradictoryLabels",
            f"{len(problems)} nodes are counted as they last made sense, or not at all."
            f" {' '.join(problems)}",
        )  # fmt: skip
    return _State("NodesContradict", False, "LabelsAgree", "All nodes' GPUs are understood.")


def _assembled(tenant: Tenant, states: Iterable[_State], now: datetime) -> dict[str, Any]:
    generation = tenant.manifest["metadata"].get("generation", 0)
    before = {c["type"]: c for c in tenant.status.get("conditions") or []}
    conditions = []
    for state in states:
        status = "True" if state.status else "False"
        old = before.get(state.type)
        since = _stamp(now)
        if old is not None and old.get("status") == status:
            since = old.get("lastTransitionTime", since)
        conditions.append(
            {
                "type": state.type,
                "status": status,
                "reason": state.reason,
                "message": state.message[:MESSAGE_LENGTH],
                "lastTransitionTime": since,
                "observedGeneration": generation,
            }
        )
    return {"observedGeneration": generation, "conditions": conditions}


def _words(status: Manifest, *, with_messages: bool) -> list[Any]:
    keys = ("type", "status", "reason", *(("message",) if with_messages else ()))
    return [
        status.get("observedGeneration"),
        *(
            tuple(condition.get(key) for key in keys)
            for condition in status.get("conditions") or []
        ),
    ]


def _percent(status: Manifest, key: str) -> int:
    return int((status.get(key) or {}).get("percent", 0))


def _share(amount_bytes: float, total_bytes: int) -> dict[str, int]:
    return {"bytes": round(amount_bytes), "percent": percent_of(amount_bytes, total_bytes)}


def _stamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(stamp: str | None, default: float) -> float:
    try:
        return datetime.fromisoformat(stamp or "").timestamp()
    except ValueError:
        return default
