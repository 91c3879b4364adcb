"""A primary that fits only on the units of the fallback that serves."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from degrading import START, TWO_GPUS, cluster, degraded, end_pods, give_back, lose
from scenes import NOW, spec_of
from small_cluster import DRAIN_SECONDS, GPU, SmallCluster

from deepseek_operator.capacity import Room, Seen, View
from deepseek_operator.degrade import decide
from deepseek_operator.degrade_case import Case, Decision, Memory, Rules
from deepseek_operator.fleet import charges_of
from deepseek_operator.tiers import tiers_of


def degraded_by_a_quota(document: dict[str, Any] | None = None) -> SmallCluster:
    """A fallback serves, since others held a unit of the quota that they have given back."""
    made = cluster(document, quota=2)
    lose(made, a=2, b=2)
    made.taken_of_quota = 1
    made.until("FallbackServing")
    made.taken_of_quota = 0
    return made


def test_surge_says_what_is_in_the_way() -> None:
    made = degraded(gpus={"a": 2})
    give_back(made)

    made.until("PromotionBlockedByFallback")
    made.run(600)

    assert made.degraded == "PromotionBlockedByFallback"
    assert "promote.strategy to swap" in made.message
    assert made.num_ready("small") == 1
    assert made.plan().is_empty


def test_swap_drains_the_fallback_first() -> None:
    document = {"promote": {"afterSeconds": 120, "strategy": "swap"}}
    made = degraded(document, gpus={"a": 2})
    give_back(made)
    made.until("PromotionBlockedByFallback")
    made.ready_log.clear()

    waited = made.until("SwapInProgress")
    gone = made.until("PrimaryServing")

    assert 118 <= waited <= 122
    assert gone <= DRAIN_SECONDS + START + 4
    assert made.tiers() == {"primary": 1}
    assert made.ready_log.count(0) <= DRAIN_SECONDS + START + 4


def test_a_swap_that_fails_is_undone_and_tried_later() -> None:
    document = {"promote": {"afterSeconds": 60, "strategy": "swap"}}
    made = degraded(document, gpus={"a": 2})
    give_back(made)
    made.until("SwapInProgress")
    made.taken = {"a": 1}

    undone = made.until("FallbackStarting", 200)
    made.until("FallbackServing")

    assert undone <= 43 + 10 + 60 + 5
    assert made.status["degrade"]["attempts"] == 1
    assert "could not take its place back" in str(made.status["history"])


def test_a_primary_that_cannot_run_is_not_waited_for_in_a_swap() -> None:
    document = {"promote": {"afterSeconds": 60, "strategy": "swap"}}
    made = degraded(document, gpus={"a": 2})
    give_back(made)
    made.until("SwapInProgress")
    made.too_large = {"primary"}

    undone = made.until("FallbackStarting", 200)
    made.until("PromotionBlockedByFallback")

    assert undone <= DRAIN_SECONDS + START
    assert "could not take its place back, Pod chat-primary-" in str(made.status["history"])


def test_a_swap_whose_primary_is_refused_is_undone_once_the_fallback_has_drained() -> None:
    made = degraded_by_a_quota({"promote": {"afterSeconds": 60, "strategy": "swap"}})
    made.until("SwapInProgress", 900)
    made.taken_of_quota = 1

    undone = made.until("FallbackStarting", 200)
    made.until("FallbackServing")

    assert undone <= 43 + 10
    assert "could not take its place back, its pods are refused" in str(made.status["history"])


def test_a_swap_whose_primary_a_policy_refuses_is_undone_as_soon() -> None:
    document = {"promote": {"afterSeconds": 60, "strategy": "swap"}}
    made = degraded(document, gpus={"a": 2})
    give_back(made)
    made.until("SwapInProgress")
    end_pods(made, "primary")
    made.refused = {"primary"}

    undone = made.until("FallbackStarting", 200)
    made.until("FallbackServing")

    assert undone <= 43 + 10
    assert "could not take its place back, its pods are refused" in str(made.status["history"])


def test_a_swap_is_not_undone_for_a_pod_that_is_refused_where_enough_are_let_in() -> None:
    (primary, small) = tiers_of(spec_of(TWO_GPUS | {"replicas": 2}))
    one_loads = Seen(
        exists=True, asked=2, down_since=(NOW,), bound={"a": 1}, over_quota_since=NOW,
        over_quota="exceeded quota: team",
    )  # fmt: skip
    case = Case(
        views=(View(primary, 2, one_loads), View(small, 2, Seen())),
        rules=Rules(),
        room=Room(),
        memory=Memory("swapping", NOW, "small"),
        now=NOW + timedelta(seconds=60),
    )

    assert decide(case).reason == "SwapInProgress"
    assert decide(_refused(case)).reason == "FallbackStarting"


def _refused(case: Case) -> Case:
    """The same without the pod that was let in."""
    primary, small = case.views
    seen = replace(primary.seen, down_since=(), bound={})
    return replace(case, views=(replace(primary, seen=seen), small))


def test_nor_for_one_that_finds_no_node_beside_enough_that_load() -> None:
    primary, small = tiers_of(spec_of(TWO_GPUS | {"replicas": 2}))
    one_loads = Seen(
        exists=True, asked=2, down_since=(NOW, NOW), bound={"a": 1}, unschedulable_since=(NOW,)
    )
    case = Case(
        views=(View(primary, 2, one_loads), View(small, 2, Seen())),
        rules=Rules(),
        room=Room(),
        memory=Memory("swapping", NOW, "small"),
        now=NOW + timedelta(seconds=300),
    )
    none_loads = replace(one_loads, bound={}, unschedulable_since=(NOW, NOW))
    no_place = replace(case, views=(View(primary, 2, none_loads), View(small, 2, Seen())))

    assert decide(case).reason == "SwapInProgress"
    assert decide(no_place).reason == "FallbackStarting"


def test_a_primary_that_takes_too_long_in_a_swap_gives_its_quota_back() -> None:
    made = degraded_by_a_quota({"promote": {"afterSeconds": 60, "strategy": "swap"}})
    made.broken = {"primary"}
    made.until("SwapInProgress", 900)

    made.until("FallbackStarting", 1000)
    made.run(2 * START)

    assert made.num_ready("small") == 1


def test_where_the_fallback_does_not_fit_any_more_either_both_are_waited_for() -> None:
    document = {"promote": {"afterSeconds": 60, "strategy": "swap"}}
    made = degraded(document, gpus={"a": 2})
    give_back(made)
    made.until("SwapInProgress")
    made.taken = {"a": 2}

    made.until("NoCapacity", 200)
    attempts = made.status["degrade"]["attempts"]
    made.taken = {"a": 1}
    waited = made.until("FallbackServing")

    assert attempts == 1
    assert waited <= 2 * START


def test_swaps_that_fail_again_and_again_are_tried_more_and_more_rarely() -> None:
    document = {"promote": {"afterSeconds": 30, "strategy": "swap"}}
    made = degraded(document, gpus={"a": 2})
    give_back(made)
    made.broken = {"primary"}
    begun = [made.now]
    for _ in range(4):
        made.until("SwapInProgress", 3600)
        begun.append(made.now)
        made.until("PromotionBlockedByFallback", 3600)

    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert pauses == sorted(pauses)
    assert made.status["degrade"]["attempts"] == 4


def test_a_lost_status_in_a_swap_heals() -> None:
    document = {"promote": {"afterSeconds": 60, "strategy": "swap"}}
    made = degraded(document, gpus={"a": 2})
    give_back(made)
    made.until("SwapInProgress")

    made.status = {}

    made.until("PrimaryServing")
    made.run(2 * START)
    assert made.num_ready("primary") == 1


def test_a_quota_that_only_the_fallback_is_in_the_way_of_is_told() -> None:
    made = degraded_by_a_quota()

    made.until("PromotionBlockedByFallback", 400)
    made.run(400)

    assert made.num_ready("small") == 1


def test_it_is_in_the_way_no_more_once_others_are() -> None:
    made = degraded_by_a_quota()
    made.until("PromotionBlockedByFallback", 400)

    made.taken_of_quota = 1
    made.until("FallbackServing", 400)
    made.run(400)

    assert made.degraded == "FallbackServing"


OVER_GPUS = f"requested: requests.{GPU}=2, used: requests.{GPU}=1, limited: requests.{GPU}=2"

OVER_LIMITS = (
    "requested: limits.cpu=4,limits.memory=12Gi, used: limits.cpu=2500m,limits.memory=4Gi,"
    " limited: limits.cpu=5,limits.memory=12Gi"
)


def refused_beside_a_fallback(amounts: str, *, made_at: int) -> Decision:
    """A quota refuses the primary at `NOW`, and a pod of the fallback was made seconds after it."""
    primary, small = tiers_of(spec_of(TWO_GPUS))
    moment = NOW + timedelta(seconds=made_at)
    words = f"exceeded quota: team, {amounts}"
    requests = {GPU: "1", "cpu": "500m"}
    resources = {"requests": requests, "limits": {GPU: "1", "cpu": "2", "memory": "4Gi"}}
    charges = charges_of({"containers": [{"resources": resources}]})
    refused = Seen(exists=True, over_quota_since=NOW, over_quota=words)
    serving = Seen(exists=True, asked=1, ready_since=(moment,), charges=((moment, charges),))
    return decide(
        Case(
            views=(View(primary, 1, refused), View(small, 1, serving)),
            rules=Rules(),
            room=Room(),
            memory=Memory("degraded", NOW, "small", next_attempt=NOW + timedelta(seconds=15)),
            now=NOW + timedelta(seconds=2),
        )
    )


@pytest.mark.parametrize(
    ("made_at", "reason"),
    [(1, "FallbackServing"), (-1, "PromotionBlockedByFallback")],
    ids=["after it", "before it"],
)
def test_a_refusal_tells_only_of_pods_that_were_made_before_it(made_at: int, reason: str) -> None:
    """The one that a fallback is started for may still be told when that answers already."""
    decision = refused_beside_a_fallback(OVER_GPUS, made_at=made_at)

    assert decision.reason == reason
    assert decision.again_seconds == 13


@pytest.mark.parametrize(
    ("amounts", "is_blocked"),
    [
        (OVER_GPUS, True),
        ("requested: pods=1, used: pods=2, limited: pods=2", True),
        ("requested: pods=1, used: pods=3, limited: pods=2", False),
        ("requested: count/pods=1, used: count/pods=2, limited: count/pods=2", True),
        ("requested: cpu=1, used: cpu=1, limited: cpu=1500m", True),
        ("requested: cpu=1, used: cpu=1, limited: cpu=1400m", False),
        (OVER_LIMITS, True),
        (OVER_LIMITS.replace("used: limits.cpu=2500m", "used: limits.cpu=4"), False),
        (OVER_GPUS.replace(": ", ": pods=1,").replace("limited: pods=1", "limited: pods=0"), False),
        ("requested: pods=1, used: pods=2, limited: pods=few", False),
    ],
    ids=[
        "devices",
        "pods",
        "others' pods too",
        "objects",
        "requests by their short name",
        "too few of these",
        "limits",
        "others' limits too",
        "one of two",
        "no quantity",
    ],
)
def test_a_fallback_is_in_the_way_of_all_that_a_quota_limits(
    amounts: str, *, is_blocked: bool
) -> None:
    decision = refused_beside_a_fallback(amounts, made_at=-1)

    assert (decision.reason == "PromotionBlockedByFallback") == is_blocked


def test_a_swap_within_a_quota() -> None:
    made = degraded_by_a_quota({"promote": {"afterSeconds": 60, "strategy": "swap"}})

    made.until("SwapInProgress", 900)
    waited = made.until("PrimaryServing", 60)

    assert waited <= DRAIN_SECONDS + START + 5
