"""Tenants as objects: who owns a namespace, the quota that is written, limits, status."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_contract.status import TENANT_REASONS, TenantConditionType
from deepseek_contract.tenant import DeepSeekTenantStatus
from deepseek_operator.devices import GPU, MIB, NodeDevices, Pool, Supply, supply_of
from deepseek_operator.kinds import Manifest
from deepseek_operator.quota import Claim, TenantDeal, Workload, deal
from deepseek_operator.tenants import (
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

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
CARD = 80 * 1024 * MIB


def supply(count: int = 10, problem: str = "") -> Supply:
    pools = (Pool(GPU, "whole", count, CARD, CARD),)
    return supply_of([NodeDevices(pools, frozenset({GPU}), problem=problem)])


def manifest(
    name: str = "a",
    namespaces: tuple[str, ...] = ("team",),
    *,
    least: int = 20,
    most: int = 60,
    created: str = "2026-01-01T00:00:00Z",
    status: Manifest | None = None,
    **more: Any,
) -> Manifest:
    return {
        "apiVersion": "deepseek.dev/v1alpha1",
        "kind": "DeepSeekTenant",
        "metadata": {
            "name": name, "uid": f"uid-{name}", "generation": 3, "resourceVersion": "1",
            "creationTimestamp": created,
        },
        "spec": {
            "namespaces": list(namespaces),
            "gpuMemory": {"minPercent": least, "maxPercent": most},
        } | more,
        "status": status or {},
    }  # fmt: skip


def asks(wanted: int, running: int, **more: Any) -> Workload:
    given: dict[str, Any] = {
        "namespace": "team", "name": "chat", "resource": GPU, "units": 1, "tier": "primary",
        "partition": "whole", "drain_seconds": 43.0,
    } | more  # fmt: skip
    return Workload(wanted=wanted, running=running, **given)


def dealt(tenant: Tenant, *workloads: Workload, offered: Supply | None = None) -> TenantDeal:
    found = supply() if offered is None else offered
    return deal(found, [claim_of(tenant, ("team",))], workloads)[tenant.name]


def verdict_of(
    tenant: Tenant, *workloads: Workload, offered: Supply | None = None, **more: Any
) -> Verdict:
    found = supply() if offered is None else offered
    given: dict[str, Any] = {
        "namespaces": ("team",), "taken": {}, "use": Use(), "promised_percent": 20,
    } | more  # fmt: skip
    return Verdict(
        tenant=tenant, supply=found, deal=dealt(tenant, *workloads, offered=found), **given
    )


def conditions(status: Manifest) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


def message(status: Manifest, kind: str) -> str:
    return next(str(c["message"]) for c in status["conditions"] if c["type"] == kind)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("5m", 300), ("24h", 86_400), ("7d", 604_800)]
)
def test_durations_are_read(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


def test_a_namespace_in_two_tenants_belongs_to_the_older_one() -> None:
    old = tenant_of(manifest("z", ("one", "two"), created="2026-01-01T00:00:00Z"))
    new = tenant_of(manifest("a", ("two", "three"), created="2026-02-01T00:00:00Z"))

    found = namespaces_of([new, old])

    assert found.owned == {"z": ("one", "two"), "a": ("three",)}
    assert found.taken == {"z": {}, "a": {"two": "z"}}


def test_a_tenant_that_is_not_understood_takes_no_namespace() -> None:
    bad = tenant_of(manifest("old") | {"spec": {"namespaces": ["team"]}})
    good = tenant_of(manifest("new"))

    assert bad.spec is None
    assert "gpuMemory" in bad.problem
    assert namespaces_of([bad, good]).owned == {"new": ("team",)}
    status = invalid_status(replace(bad, manifest=bad.manifest | {"status": {
        "quota": {"bytes": 1, "percent": 0}
    }}), NOW)  # fmt: skip
    assert conditions(status) == {"Ready": ("False", "InvalidSpec")}
    assert status["quota"] == {"bytes": 1, "percent": 0}


def test_shares_go_by_past_use_as_it_was_told() -> None:
    told = {"pastUsed": {"bytes": 7 * CARD, "percent": 70}}
    partition = {"mode": "mig", "migProfile": "1g.18gb"}

    found = claim_of(
        tenant_of(manifest(status=told, partition=partition, weight=5, maxPercentPerCard=50)),
        ("team",),
    )

    assert found == Claim(
        "a", ("team",), 20, 60, "mig:1g.18gb", weight=5, max_percent_per_card=50,
        past_bytes=7 * CARD,
    )  # fmt: skip


def test_a_quota_is_labelled_and_goes_with_its_tenant() -> None:
    quota = resource_quota(tenant_of(manifest()), "team", {f"requests.{GPU}": 6})

    assert quota["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "deepseek-operator", "deepseek.dev/tenant": "a",
    }  # fmt: skip
    assert quota["metadata"]["ownerReferences"][0]["uid"] == "uid-a"
    assert quota["spec"] == {"hard": {f"requests.{GPU}": "6"}}


@pytest.mark.parametrize(
    "name", ["a", "x" * 63, "x" * 64, "y." * 120 + "z", "x" * 53 + "." * 1 + "y" * 40]
)
def test_a_label_is_legal_for_every_name(name: str) -> None:
    label = label_of(name)

    assert len(label) <= 63
    assert label[0].isalnum()
    assert label[-1].isalnum()
    assert (label == name) == (len(name) <= 63)


def test_two_long_names_have_two_labels() -> None:
    assert label_of("x" * 100) != label_of("x" * 101)


def test_running_pods_end_in_time_for_the_grace_period_and_not_before() -> None:
    tenant = tenant_of(manifest())
    workload = asks(10, running=10)
    found = dealt(tenant, workload)

    def limit(now: float) -> tuple[int, int]:
        limits = limits_of(tenant, found, [workload], over_since=1000.0, now=now)
        one = limits["team", "chat", "primary"]
        return one.now, one.soon

    assert limit(1000.0) == (10, 6)
    assert limit(1061.0) == (10, 6)
    assert limit(1062.0) == (6, 6)
    assert next_end(tenant, found, [workload], over_since=1000.0, now=1010.0) == 52.0
    assert next_end(tenant, found, [workload], over_since=1000.0, now=1100.0) is None
    assert next_end(tenant, found, [workload], over_since=None, now=1100.0) is None


def test_pods_outside_the_partition_get_their_grace_and_then_end() -> None:
    tenant = tenant_of(manifest())
    slices = asks(2, 2, name="slices", partition="mig:1g.10gb")
    found = dealt(tenant, slices)
    since = over_since_of(tenant, found, None, now=1000.0)

    def pods(now: float) -> int:
        return limits_of(tenant, found, [slices], over_since=since, now=now)[slices.key].now

    assert since == 1000.0
    assert (pods(1000.0), pods(1000.0 + tenant.grace_seconds)) == (2, 0)
    told = status_of(verdict_of(tenant, slices, use=Use(over_since=since)), NOW)
    over = next(c for c in told["conditions"] if c["type"] == "OverQuota")
    assert over["status"] == "True"
    assert "2 pods are of deployments that may have none" in over["message"]


def test_what_is_new_and_outside_the_partition_does_not_start_before_it_is_dealt_to() -> None:
    tenant = tenant_of(manifest())
    fallback = {"name": "small", "model": {"source": "package://tiny"}, "gpu": {"mode": "whole"}}
    slice_ = {"mode": "mig", "migProfile": "1g.10gb"}
    spec = DeepSeekDeploymentSpec.parse({"gpu": slice_, "fallbacks": [fallback]})

    limits = outside_limits(tenant, tiers_of(spec), {"primary": 3})

    assert {tier: (limit.now, limit.soon) for tier, limit in limits.items()} == {"primary": (3, 0)}
    assert "has the partition whole" in limits["primary"].message
    assert outside_limits(tenant, tiers_of(spec), {})["primary"].now == 0


def test_pods_that_do_not_run_yet_get_no_grace() -> None:
    tenant = tenant_of(manifest())
    workload = asks(10, running=3)

    limits = limits_of(tenant, dealt(tenant, workload), [workload], over_since=None, now=0.0)

    assert limits["team", "chat", "primary"].now == 6
    assert "may use 6 units now and is asked for 10" in limits["team", "chat", "primary"].message


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        pytest.param({"units": 7}, "One pod asks for 7 units", id="too large"),
        pytest.param({"partition": "vgpu"}, "has the partition whole", id="another partition"),
    ],
)
def test_what_can_never_run_is_said(workload: dict[str, Any], words: str) -> None:
    tenant = tenant_of(manifest())
    one = asks(1, 0, **workload)

    limits = limits_of(tenant, dealt(tenant, one), [one], over_since=None, now=0.0)

    assert limits["team", "chat", "primary"].soon == 0
    assert words in limits["team", "chat", "primary"].message


def test_the_status_says_bytes_and_percent_and_that_all_is_well() -> None:
    tenant = tenant_of(manifest())

    status = status_of(verdict_of(tenant, asks(2, 2), use=Use(2 * CARD, 2.0 * CARD)), NOW)

    assert conditions(status) == {
        "Ready": ("True", "QuotaDealt"),
        "OverQuota": ("False", "WithinQuota"),
        "CapBelowOneUnit": ("False", "CapHoldsUnits"),
        "NamespaceTaken": ("False", "NamespacesAreFree"),
        "GuaranteesOvercommitted": ("False", "GuaranteesFit"),
        "NodesContradict": ("False", "LabelsAgree"),
    }
    assert status["quota"] == {"bytes": 6 * CARD, "percent": 60}
    assert status["used"] == {"bytes": 2 * CARD, "percent": 20}
    assert status["pastUsed"] == {"bytes": 2 * CARD, "percent": 20}
    assert status["pastUsedTime"] == "2026-05-01T12:00:00Z"
    assert DeepSeekTenantStatus.parse(status).document() == status
    assert set(conditions(status)) == set(get_args(TenantConditionType))


A = tenant_of(manifest())
TROUBLES: dict[str, tuple[Verdict, str, str, str]] = {
    "a cap below one unit": (
        verdict_of(tenant_of(manifest(least=0, most=9))),
        "CapBelowOneUnit", "CapBelowOneUnit", "less than one unit of 81920 MiB",
    ),
    "a namespace of another tenant": (
        verdict_of(A, taken={"two": "z"}),
        "NamespaceTaken", "NamespaceInTwoTenants", "two (of z)",
    ),
    "guarantees above the cluster": (
        verdict_of(A, promised_percent=130),
        "GuaranteesOvercommitted", "GuaranteesExceedCluster", "130 percent",
    ),
    "guarantees above the partition": (
        verdict_of(A, overcommitted_partition=True),
        "GuaranteesOvercommitted", "GuaranteesExceedPartition", "instead of 2",
    ),
    "a guarantee below one unit": (
        verdict_of(tenant_of(manifest(least=5))),
        "GuaranteesOvercommitted", "GuaranteeBelowOneUnit", "guarantees nothing",
    ),
    "nodes that contradict": (
        verdict_of(A, offered=supply(problem="Node x: why.")),
        "NodesContradict", "ContradictoryLabels", "Node x: why.",
    ),
    "pods of others": (
        verdict_of(A, Workload("team", "", GPU, 1, 0, running=9)),
        "OverQuota", "PodsOfOthers", "9 are held by pods that are not of a DeepSeekDeployment",
    ),
    "the grace period": (
        verdict_of(A, asks(9, 9), use=Use(over_since=NOW.timestamp() - 60)),
        "OverQuota", "GracePeriod", "made smaller by 2026-05-01T12:01:00Z",
    ),
    "after the grace period": (
        verdict_of(A, asks(9, 9), use=Use(over_since=NOW.timestamp() - 121)),
        "OverQuota", "Shrinking", "9 units are held and 6 may be used now",
    ),
}  # fmt: skip
NOT_READY: dict[str, tuple[Verdict, str, str]] = {
    "no namespace of its own": (
        verdict_of(A, namespaces=(), taken={"team": "z"}), "NoNamespaces", "other tenants",
    ),
    "a namespace that is not there": (
        verdict_of(A, outcome=Outcome(missing_namespaces=("team",))),
        "NamespaceMissing", "no namespace team",
    ),
    "a server that refuses": (
        verdict_of(A, outcome=Outcome(refusals=("No.",))), "ApplyRefused", "No.",
    ),
    "a partition that no node offers": (
        verdict_of(tenant_of(manifest(partition={"mode": "vgpu"}))),
        "PartitionUnavailable", "offered are: whole",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TROUBLES)
def test_each_trouble_is_a_condition_with_a_reason(case: str) -> None:
    verdict, kind, reason, words = TROUBLES[case]

    status = status_of(verdict, NOW)

    assert conditions(status)[kind] == ("True", reason)
    assert words in message(status, kind)


@pytest.mark.parametrize("case", NOT_READY)
def test_a_tenant_without_quota_is_not_ready(case: str) -> None:
    verdict, reason, words = NOT_READY[case]

    status = status_of(verdict, NOW)

    assert conditions(status)["Ready"] == ("False", reason)
    assert words in message(status, "Ready")


def test_every_reason_is_reached_by_a_test() -> None:
    told = {reason for _, _, reason, _ in TROUBLES.values()}
    told |= {reason for _, reason, _ in NOT_READY.values()}
    fine = conditions(status_of(verdict_of(A), NOW)).values()

    told |= {reason for _, reason in fine} | {"InvalidSpec"}

    assert told == {reason for reasons in TENANT_REASONS.values() for reason in reasons}


def test_past_use_is_told_again_when_it_moved_by_five_points() -> None:
    told = {
        "pastUsed": {"bytes": 5 * CARD, "percent": 50}, "pastUsedTime": "2026-05-01T11:00:00Z",
    }  # fmt: skip
    tenant = tenant_of(manifest(status=told))

    near = status_of(verdict_of(tenant, use=Use(0, 4.6 * CARD)), NOW)
    far = status_of(verdict_of(tenant, use=Use(0, 4.5 * CARD)), NOW)

    assert (near["pastUsed"], near["pastUsedTime"]) == (told["pastUsed"], told["pastUsedTime"])
    assert far["pastUsed"]["percent"] == 45
    assert told_past(tenant, NOW.timestamp()) == (5.0 * CARD, 3600.0)
    assert told_past(tenant_of(manifest()), NOW.timestamp()) is None


def test_a_status_is_written_for_conditions_at_once_and_for_numbers_once_a_minute() -> None:
    old = status_of(verdict_of(A, use=Use(2 * CARD, 0)), NOW)
    later = NOW + timedelta(hours=1)
    same = status_of(
        verdict_of(replace(A, manifest=manifest(status=old)), use=Use(2 * CARD)), later
    )
    moved = {**same, "used": {"bytes": 3 * CARD, "percent": 30}}
    nudged = {**same, "used": {"bytes": 2 * CARD + 1, "percent": 24}}
    over = status_of(verdict_of(A, asks(9, 9)), NOW)

    assert not is_due(old, same, 3600.0)
    assert not is_due(old, nudged, 3600.0)
    assert not is_due(old, moved, 59.0)
    assert is_due(old, moved, 60.0)
    assert is_due(old, over, 0.0)
    assert is_due({}, old, 0.0)


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    old = status_of(verdict_of(A), NOW - timedelta(days=1))

    new = status_of(verdict_of(replace(A, manifest=manifest(status=old)), asks(9, 9)), NOW)

    times = {c["type"]: c["lastTransitionTime"] for c in new["conditions"]}
    assert times["Ready"] == "2026-04-30T12:00:00Z"
    assert times["OverQuota"] == "2026-05-01T12:00:00Z"


def test_a_restart_does_not_begin_the_grace_period_anew() -> None:
    over = dealt(A, asks(9, 9))
    told = status_of(verdict_of(A, asks(9, 9)), NOW - timedelta(seconds=90))
    again = tenant_of(manifest(status=told))
    now = NOW.timestamp()

    assert over_since_of(A, over, None, now) == now
    assert over_since_of(again, over, None, now) == now - 90
    assert over_since_of(again, over, now - 30, now) == now - 30
    assert over_since_of(again, dealt(A), now - 30, now) is None
