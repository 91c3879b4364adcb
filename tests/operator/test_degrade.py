"""Degrade and promote, on a cluster of a few GPUs in memory."""

import copy
import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from scenes import NOW
from small_cluster import DRAIN_SECONDS, GPU, START_SECONDS, SmallCluster

from deepseek_contract.status import REASONS, DeepSeekDeploymentStatus
from deepseek_operator.degrade import (
    Case,
    Memory,
    Room,
    Rules,
    Seen,
    View,
    backoff_seconds,
    decide,
)
from deepseek_operator.fleet import Wish
from deepseek_operator.plan import plan
from deepseek_operator.quota import PodLimit
from deepseek_operator.tiers import tiers_of

SMALL = {"name": "small", "model": {"source": "package://small"}, "gpu": {"count": 1}}
TWO_GPUS = {
    "model": {"source": "package://large"},
    "gpu": {"count": 2},
    "fallbacks": [SMALL],
    "degrade": {"afterSeconds": 60},
    "promote": {"afterSeconds": 120},
}
START = START_SECONDS + 4
"""From asking for a pod until its being ready is seen."""


def cluster(document: dict[str, Any] | None = None, **options: Any) -> SmallCluster:
    made = SmallCluster(copy.deepcopy({**TWO_GPUS, **(document or {})}), **options)
    made.run(START)
    return made


def lose(made: SmallCluster, **left: int) -> None:
    """Others take all GPUs but these, and the primary's pods with their nodes' GPUs are gone."""
    for pod in [p for p in made.pods if p["metadata"]["labels"]["deepseek.dev/tier"] == "primary"]:
        made.pods.remove(pod)
    made.taken = {name: number - left.get(name, 0) for name, number in made.gpus.items()}


def give_back(made: SmallCluster) -> None:
    made.taken = {}


class TestDegrade:
    def test_the_primary_serves_while_it_can(self) -> None:
        made = cluster()

        assert made.tiers() == {"primary": 1}
        assert (made.degraded, made.condition["status"]) == ("PrimaryServing", "False")
        assert made.plan().is_empty

    def test_a_fallback_takes_over_after_its_time(self) -> None:
        made = cluster()
        lose(made, a=1)

        waited = made.until("FallbackStarting")
        made.until("FallbackServing")

        assert 60 <= waited <= 64
        assert made.tiers() == {"primary": 1, "small": 1}
        assert made.num_ready("small") == 1
        assert made.condition["status"] == "True"
        assert made.status["activeModel"] == "package://small"
        ready = next(c for c in made.status["conditions"] if c["type"] == "Ready")
        assert (ready["status"], ready["reason"]) == ("True", "FallbackAvailable")

    def test_it_is_said_before_it_happens(self) -> None:
        made = cluster()
        lose(made, a=1)

        made.until("DegradePending")

        assert made.condition["status"] == "False"
        assert "Insufficient nvidia.com/gpu" in made.message
        assert "a fallback takes over at 2026-05-01T12:01:" in made.message

    def test_capacity_that_comes_back_in_time_changes_nothing(self) -> None:
        made = cluster()
        lose(made, a=1)
        made.run(50)
        give_back(made)

        made.run(60)

        assert made.degraded == "PrimaryServing"
        assert made.status.get("degrade") is None

    def test_a_pod_that_only_does_not_answer_is_no_trigger(self) -> None:
        made = cluster()
        made.broken = {"primary"}
        made.others()

        made.run(200)

        assert made.num_ready() == 0
        assert made.tiers() == {"primary": 1}

    def test_enough_pods_that_answer_are_enough(self) -> None:
        made = cluster({"replicas": 2})
        made.taken = {"b": 2}
        made.pods = [pod for pod in made.pods if pod["spec"]["nodeName"] == "a"]

        made.run(200)

        assert made.tiers() == {"primary": 2}
        assert made.degraded == "PrimaryServing"

    def test_fewer_than_wanted_are_too_few_where_more_must_be_available(self) -> None:
        made = cluster({"replicas": 2, "minAvailable": 2})
        made.taken = {"b": 1}
        made.pods = [pod for pod in made.pods if pod["spec"]["nodeName"] == "a"]

        made.until("FallbackServing")

        assert made.num_ready("primary") == 1
        assert made.num_ready("small") == 1

    def test_the_time_counts_from_when_too_few_answered(self) -> None:
        """A pod that has been pending for long is not the reason why the last one is missed."""
        made = cluster({"replicas": 2})
        made.taken = {"b": 2}
        made.pods = [pod for pod in made.pods if pod["spec"]["nodeName"] == "a"]
        made.run(300)
        lose(made, b=1)

        assert 60 <= made.until("FallbackStarting") <= 66

    def test_a_model_that_does_not_fit_is_not_waited_for(self) -> None:
        made = SmallCluster(copy.deepcopy(TWO_GPUS), too_large={"primary"})

        waited = made.until("FallbackServing", 30)

        assert waited <= 2 * START
        assert "It needs 99 GiB" in made.message or made.tiers()["primary"] == 1

    def test_a_model_that_does_not_fit_gives_its_units_to_the_fallback(self) -> None:
        made = SmallCluster(copy.deepcopy(TWO_GPUS), too_large={"primary"}, gpus={"a": 2})

        made.until("PromotionBlockedByFallback", 60)

        assert made.tiers() == {"primary": 0, "small": 1}
        assert made.num_ready("small") == 1

    def test_a_changed_spec_is_tried_at_once(self) -> None:
        made = SmallCluster(copy.deepcopy(TWO_GPUS), too_large={"primary"}, gpus={"a": 3})
        made.gpus = {"a": 2}
        made.until("PromotionBlockedByFallback", 60)
        made.gpus = {"a": 3}
        made.too_large = set()
        made.document["model"]["source"] = "package://less"
        made.generation = 2

        made.run(3)

        assert made.tiers()["primary"] == 1

    def test_without_fallbacks_nothing_degrades(self) -> None:
        document = {key: TWO_GPUS[key] for key in ("model", "gpu")}
        made = SmallCluster(document, taken={"a": 2, "b": 2})

        made.run(200)

        assert made.degraded == "PrimaryServing"

    def test_an_object_of_no_replicas_has_no_fallback(self) -> None:
        made = cluster()
        lose(made, a=1)
        made.until("FallbackServing")

        made.document["replicas"] = 0
        made.run(START)

        assert made.tiers() == {"primary": 0}
        assert made.num_ready() == 0

    def test_the_recovery_ladder_may_ask_for_it_at_once(self) -> None:
        made = cluster()
        view = View(tiers_of(made.spec)[0], 1, Seen(asked=1, down_since=(NOW,)))
        small = View(tiers_of(made.spec)[1], 1, Seen())
        case = Case((view, small), Rules(), Room(), Memory(), NOW, demand="two nodes were tried.")

        decision = decide(case)

        assert decision.reason == "FallbackStarting"
        assert "two nodes were tried" in decision.message
        assert decide(replace(case, demand=None)).reason == "PrimaryServing"

    def test_a_share_that_has_no_room_for_the_primary_degrades(self) -> None:
        made = cluster()
        limits = {"primary": PodLimit(now=0, soon=0, message="The share of team is used up.")}
        ready = plan(made.spec, replace(made.observed(), limits=limits), made.settings, NOW)
        made.carry_out(ready)
        made.others()

        gone = plan(made.spec, replace(made.observed(), limits=limits), made.settings, made.now)

        assert ready.decision.reason == "PrimaryServing"
        assert gone.decision.reason == "FallbackStarting"
        assert "share of team is used up" in gone.decision.message
        assert gone.wishes == {"primary": 1, "small": 1}


class TestRoom:
    def test_nothing_free_is_no_capacity(self) -> None:
        made = cluster()
        lose(made)

        made.until("NoCapacity")

        assert made.condition["status"] == "True"
        assert "Insufficient nvidia.com/gpu" in made.message
        assert made.tiers() == {"primary": 1}
        assert made.plan().is_empty

    def test_free_units_of_two_nodes_are_not_one_place(self) -> None:
        medium = {"name": "medium", "model": {"source": "package://medium"}, "gpu": {"count": 2}}
        made = cluster({"gpu": {"count": 3}, "fallbacks": [medium]}, gpus={"a": 3, "b": 1})
        lose(made, a=1, b=1)

        made.until("NoCapacity")

    def test_capacity_that_comes_is_used(self) -> None:
        made = cluster()
        lose(made)
        made.until("NoCapacity")
        made.run(100)
        made.taken["b"] = 1

        assert made.until("FallbackServing") <= 2 * START

    def test_the_first_fallback_that_fits_is_taken(self) -> None:
        medium = {"name": "medium", "model": {"source": "package://medium"}, "gpu": {"count": 2}}
        document = {"gpu": {"count": 4}, "fallbacks": [medium, SMALL]}
        made = cluster(document, gpus={"a": 4})
        lose(made, a=1)
        fits_small = cluster(document, gpus={"a": 4})
        lose(fits_small, a=3)

        made.until("FallbackServing")
        fits_small.until("FallbackServing")

        assert made.tiers() == {"primary": 1, "small": 1}
        assert fits_small.tiers() == {"primary": 1, "medium": 1}

    def test_a_fallback_has_as_many_pods_as_fit(self) -> None:
        made = cluster({"replicas": 4, "gpu": {"count": 4}}, gpus=dict.fromkeys("abcd", 4))
        lose(made, a=1, b=2)

        made.until("FallbackServing")

        assert made.tiers() == {"primary": 4, "small": 3}
        made.run(30)
        assert made.num_ready("small") == 3

    def test_units_that_were_promised_to_others_are_not_free(self) -> None:
        made = cluster()
        lose(made, a=1)
        made.run(50)
        observed = replace(made.observed(), promised={"a": {"nvidia.com/gpu": 1}})
        later = made.now + timedelta(seconds=20)

        free = plan(made.spec, made.observed(), made.settings, later).decision
        promised = plan(made.spec, observed, made.settings, later).decision

        assert (free.reason, promised.reason) == ("FallbackStarting", "NoCapacity")
        assert free.promises == (("a", {"nvidia.com/gpu": 1}),)
        assert promised.promises == ()

    def test_a_promise_ends_when_the_pod_is_bound(self) -> None:
        made = cluster()
        lose(made, a=1)

        made.until("FallbackServing")

        assert made.plan().decision.promises == ()

    def test_without_sight_of_nodes_fallbacks_are_tried_in_their_order(self) -> None:
        medium = {"name": "medium", "model": {"source": "package://medium"}, "gpu": {"count": 2}}
        made = cluster(
            {"gpu": {"count": 4}, "fallbacks": [medium, SMALL]}, gpus={"a": 4}, is_visible=False
        )
        lose(made, a=1)

        made.until("FallbackServing")

        assert made.tiers() == {"primary": 1, "small": 1}
        assert made.status["degrade"]["degradations"] == 1

    def test_without_sight_of_nodes_nothing_free_is_no_capacity(self) -> None:
        made = cluster(is_visible=False)
        lose(made)

        made.until("NoCapacity")
        made.run(200)

        assert made.degraded == "NoCapacity"
        assert made.plan().is_empty

    def test_without_sight_of_nodes_it_says_so(self) -> None:
        made = cluster(is_visible=False)
        lose(made, a=1)

        made.until("FallbackServing")

        assert "may not see nodes here" in made.message


class TestPromote:
    def degraded(self, document: dict[str, Any] | None = None, **options: Any) -> SmallCluster:
        made = cluster(document, **options)
        lose(made, a=1)
        made.until("FallbackServing")
        made.run(20)
        return made

    def test_the_primary_takes_over_after_its_time_and_nothing_is_lost_meanwhile(self) -> None:
        made = self.degraded()
        give_back(made)
        made.ready_log.clear()

        started = made.until("Promoting")
        waited = made.until("PrimaryServing")
        made.run(10)

        assert started <= START
        assert 118 <= waited <= 124
        assert made.tiers() == {"primary": 1}
        assert made.num_ready("primary") == 1
        assert min(made.ready_log) >= 1
        assert made.plan().is_empty

    def test_both_serve_while_both_are_ready(self) -> None:
        made = self.degraded()
        give_back(made)

        made.until("Promoting")

        assert (made.num_ready("primary"), made.num_ready("small")) == (1, 1)
        assert made.status["activeModel"] == "package://large"

    def test_a_primary_that_goes_again_leaves_the_fallback_where_it_is(self) -> None:
        made = self.degraded()
        give_back(made)
        made.until("Promoting")
        made.run(60)
        made.ready_log.clear()

        lose(made, a=0, b=0)
        made.run(200)

        assert made.degraded == "FallbackServing"
        assert made.tiers()["small"] == 1
        assert made.status["degrade"]["degradations"] == 1
        assert min(made.ready_log) >= 1

    def test_a_primary_that_flaps_is_not_promoted(self) -> None:
        made = self.degraded()
        for _ in range(5):
            give_back(made)
            made.until("Promoting")
            made.run(60)
            lose(made)
            made.run(30)

        assert made.status["degrade"]["degradations"] == 1
        assert made.num_ready("small") == 1

    def test_surge_says_what_is_in_the_way(self) -> None:
        made = self.degraded(gpus={"a": 2})
        give_back(made)

        made.until("PromotionBlockedByFallback")
        made.run(600)

        assert made.degraded == "PromotionBlockedByFallback"
        assert "promote.strategy to swap" in made.message
        assert made.num_ready("small") == 1
        assert made.plan().is_empty

    def test_swap_drains_the_fallback_first(self) -> None:
        document = {"promote": {"afterSeconds": 120, "strategy": "swap"}}
        made = self.degraded(document, gpus={"a": 2})
        give_back(made)
        made.until("PromotionBlockedByFallback")
        made.ready_log.clear()

        waited = made.until("SwapInProgress")
        gone = made.until("PrimaryServing")

        assert 118 <= waited <= 122
        assert gone <= DRAIN_SECONDS + START + 4
        assert made.tiers() == {"primary": 1}
        assert made.ready_log.count(0) <= DRAIN_SECONDS + START + 4

    def test_a_swap_that_fails_is_undone_and_tried_later(self) -> None:
        document = {"promote": {"afterSeconds": 60, "strategy": "swap"}}
        made = self.degraded(document, gpus={"a": 2})
        give_back(made)
        made.until("SwapInProgress")
        made.taken = {"a": 1}

        undone = made.until("FallbackStarting", 200)
        made.until("FallbackServing")

        assert undone <= 43 + 10 + 60 + 5
        assert made.status["degrade"]["attempts"] == 1
        assert "could not take its place back" in str(made.status["history"])

    def test_swaps_that_fail_again_and_again_are_tried_more_and_more_rarely(self) -> None:
        document = {"promote": {"afterSeconds": 30, "strategy": "swap"}}
        made = self.degraded(document, gpus={"a": 2})
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

    def test_a_lost_status_comes_back_while_degraded(self) -> None:
        made = self.degraded()
        before = dict(made.status["degrade"])

        made.status = {}
        made.run(3)

        assert made.degraded == "FallbackServing"
        assert made.status["degrade"]["phase"] == before["phase"]
        assert made.tiers() == {"primary": 1, "small": 1}

    def test_one_that_no_status_told_of_is_counted_once(self) -> None:
        """An operator that is killed between starting the fallback and writing the status."""
        made = cluster()
        lose(made, a=1)
        before = dict(made.status)
        while "small" not in made.tiers():
            before = dict(made.status)
            made.second()

        made.status = before
        made.until("FallbackServing")
        made.run(20)

        assert made.status["degrade"]["degradations"] == 1

    def test_a_lost_status_in_a_swap_heals(self) -> None:
        document = {"promote": {"afterSeconds": 60, "strategy": "swap"}}
        made = self.degraded(document, gpus={"a": 2})
        give_back(made)
        made.until("SwapInProgress")

        made.status = {}

        made.until("PrimaryServing")
        made.run(2 * START)
        assert made.num_ready("primary") == 1

    def test_a_fallback_that_somebody_deletes_comes_back_at_once(self) -> None:
        made = self.degraded()
        del made.objects[next(key for key in made.objects if key.name == "chat-small")]

        made.run(START + DRAIN_SECONDS)

        assert made.num_ready("small") == 1

    def test_a_chain_moves_on_when_a_fallback_loses_its_place_too(self) -> None:
        medium = {"name": "medium", "model": {"source": "package://medium"}, "gpu": {"count": 2}}
        made = cluster({"gpu": {"count": 4}, "fallbacks": [medium, SMALL]}, gpus={"a": 4})
        lose(made, a=2)
        made.until("FallbackServing")
        made.run(10)
        made.taken = {"a": 3}
        made.pods = [p for p in made.pods if "medium" not in p["metadata"]["name"]]

        made.run(60 + 2 * START)

        assert made.tiers() == {"primary": 1, "small": 1}
        assert made.num_ready("small") == 1

    def test_a_chain_promotes_the_primary(self) -> None:
        medium = {"name": "medium", "model": {"source": "package://medium"}, "gpu": {"count": 2}}
        made = cluster({"gpu": {"count": 4}, "fallbacks": [medium, SMALL]}, gpus={"a": 4, "b": 4})
        lose(made, a=1)
        made.until("FallbackServing")
        give_back(made)

        made.until("PrimaryServing")

        assert made.tiers() == {"primary": 1}


MEDIUM = {"name": "medium", "model": {"source": "package://medium"}, "gpu": {"count": 2}}
CHAIN: dict[str, Any] = {"gpu": {"count": 4}, "fallbacks": [MEDIUM, SMALL]}


class TestBetter:
    """More of a fallback, and a better one, while the primary is still away."""

    def small_serves(self, document: dict[str, Any] | None = None, **options: Any) -> SmallCluster:
        made = cluster({**CHAIN, **(document or {})}, gpus={"a": 4, "b": 4}, **options)
        lose(made, a=1)
        made.until("FallbackServing")
        made.run(10)
        made.ready_log.clear()
        assert made.tiers() == {"primary": 1, "small": 1}
        return made

    def test_a_better_fallback_that_fits_again_takes_over_before_the_primary_fits(self) -> None:
        made = self.small_serves()
        made.taken["a"] = 1

        made.run(120 + START)
        both = made.tiers()
        made.run(120 + START)

        assert both == {"primary": 1, "medium": 1, "small": 1}
        assert made.tiers() == {"primary": 1, "medium": 1}
        assert min(made.ready_log) >= 1
        assert made.status["degrade"]["degradations"] == 1
        assert made.status["activeModel"] == "package://medium"
        give_back(made)
        made.until("PrimaryServing")
        assert made.tiers() == {"primary": 1}

    def test_it_does_not_take_what_the_primary_waits_for(self) -> None:
        """Three units are free, and with the one of the fallback the primary has its four."""
        made = self.small_serves({"promote": {"afterSeconds": 120, "strategy": "swap"}})
        made.taken["a"] = 0

        made.until("SwapInProgress")
        made.until("PrimaryServing")

        assert made.tiers() == {"primary": 1}

    def test_one_that_does_not_answer_goes_again_and_is_tried_later(self) -> None:
        made = self.small_serves()
        made.broken = {"medium"}
        made.taken["a"] = 1
        tries, before = [], False
        for second in range(5000):
            now = "medium" in made.tiers()
            if now and not before:
                tries.append(second)
            before = now
            made.second()

        assert min(made.ready_log) >= 1
        assert 3 <= len(tries) <= 5
        assert made.status["degrade"]["degradations"] == 1

    def test_one_that_flaps_does_not_displace_the_one_that_serves(self) -> None:
        made = self.small_serves()
        made.taken["a"] = 1
        for _ in range(6):
            made.broken = {"medium"}
            made.run(100)
            made.broken = set()
            made.run(100)

        assert made.num_ready("small") == 1
        assert min(made.ready_log) >= 1

    def test_more_pods_come_as_units_become_free(self) -> None:
        made = cluster({"replicas": 3, "gpu": {"count": 4}}, gpus=dict.fromkeys("abc", 4))
        lose(made, a=1)
        made.until("FallbackServing")
        one = made.tiers()
        made.taken["b"] = 2

        made.run(2 * START)

        assert (one["small"], made.tiers()["small"]) == (1, 3)
        made.run(2 * START)
        assert made.num_ready("small") == 3
        assert made.plan().is_empty

    def test_pods_that_are_not_needed_make_room_for_the_primary(self) -> None:
        """Each of two nodes lacks but what a pod of the fallback holds."""
        made = cluster({"replicas": 2, "gpu": {"count": 2}}, gpus={"a": 2, "b": 2})
        lose(made, a=1, b=1)
        made.until("FallbackServing")
        made.run(20)
        assert made.tiers() == {"primary": 2, "small": 2}
        made.ready_log.clear()

        made.taken["a"] = 0

        made.until("Promoting")
        assert made.tiers()["small"] == 1
        assert min(made.ready_log) >= 1

    def test_the_last_pod_that_is_needed_stays(self) -> None:
        made = cluster({"replicas": 2, "minAvailable": 2}, gpus={"a": 2, "b": 2})
        lose(made, a=1, b=1)
        made.until("FallbackServing")
        made.run(20)
        made.taken["a"] = 0

        made.until("PromotionBlockedByFallback")
        made.run(300)

        assert made.tiers()["small"] == 2

    def test_pods_that_a_quota_refuses_are_taken_back(self) -> None:
        made = cluster({"replicas": 3, "gpu": {"count": 4}}, gpus=dict.fromkeys("abc", 4))
        lose(made, a=1)
        made.until("FallbackServing")
        made.run(20)
        # What the primary's pending pods and the fallback ask for, and no more.
        made.quota = 13
        made.taken["b"] = 2
        asked = []
        for _ in range(900):
            made.second()
            asked.append(made.tiers()["small"])

        assert asked[-1] == 1
        # One attempt in five minutes.
        assert sum(later > before for before, later in itertools.pairwise(asked)) <= 4
        assert min(made.ready_log[-900:]) >= 1

    def test_no_more_than_the_share_of_a_tenant_has_room_for(self) -> None:
        made = cluster({"replicas": 3, "gpu": {"count": 4}}, gpus=dict.fromkeys("abc", 4))
        lose(made, a=1)
        made.until("FallbackServing")
        made.run(20)
        made.taken["b"] = 2
        limits = {"small": PodLimit(now=2, soon=2, message="That is the share.")}

        limited = plan(made.spec, replace(made.observed(), limits=limits), made.settings, made.now)

        assert limited.decision.replicas["small"] == 2
        assert len(limited.decision.promises) == 1

    def test_without_sight_of_nodes_it_stays_as_it_is(self) -> None:
        made = cluster({**CHAIN, "replicas": 2}, gpus={"a": 4, "b": 4}, is_visible=False)
        lose(made, a=1)
        made.until("FallbackServing")
        made.run(20)
        before = made.tiers()
        made.taken["a"] = 1

        made.run(900)

        assert made.tiers() == before

    def test_a_lost_status_ends_no_attempt_that_goes_on(self) -> None:
        made = self.small_serves()
        made.broken = {"medium"}
        made.taken["a"] = 1
        made.run(120 + START)
        assert "medium" in made.tiers()

        made.status = {}
        made.run(30)
        kept = made.tiers()
        made.run(900)

        assert "medium" in kept
        assert "medium" not in made.tiers()
        assert made.num_ready("small") == 1


class TestQuota:
    def test_a_quota_that_refuses_the_primary_degrades(self) -> None:
        made = cluster(quota=2)
        lose(made, a=2, b=2)
        made.taken_of_quota = 1

        waited = made.until("FallbackStarting")
        made.until("FallbackServing")

        assert 60 <= waited <= 64
        assert made.tiers() == {"primary": 0, "small": 1}
        assert "exceeded quota" in str(made.status["history"])
        assert "ScaledToZero" not in str(made.status)

    def test_a_quota_counts_also_where_a_first_pod_was_refused_for_another_reason(self) -> None:
        made = cluster(quota=2, first_refusal="the object has been modified")
        lose(made, a=2, b=2)
        made.taken_of_quota = 1

        waited = made.until("FallbackStarting")

        assert 60 <= waited <= 64
        assert made.tiers() == {"primary": 0, "small": 1}

    def test_pending_pods_that_hold_the_quota_give_way(self) -> None:
        made = cluster(quota=2)
        lose(made, a=1)

        made.until("FallbackServing")

        assert made.tiers() == {"primary": 0, "small": 1}
        assert made.num_ready("small") == 1

    def test_a_refused_primary_is_tried_with_a_growing_pause_and_taken_when_it_fits(self) -> None:
        made = cluster(quota=3)
        lose(made, a=2, b=2)
        made.taken_of_quota = 2
        made.until("FallbackServing")
        tries, before = [], 0
        for second in range(900):
            now = made.tiers()["primary"]
            if now > before:
                tries.append(second)
            before = now
            made.second()

        made.taken_of_quota = 0
        waited = made.until("Promoting", 400)
        made.until("PrimaryServing")

        pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
        assert 4 <= len(tries) <= 8
        assert pauses == sorted(pauses)
        assert waited <= 300 + START

    def test_a_quota_that_only_the_fallback_is_in_the_way_of_is_told(self) -> None:
        made = cluster(quota=2)
        lose(made, a=2, b=2)
        made.taken_of_quota = 1
        made.until("FallbackServing")
        made.taken_of_quota = 0

        made.until("PromotionBlockedByFallback", 400)
        made.run(400)

        assert made.num_ready("small") == 1

    def test_it_is_in_the_way_no_more_once_others_are(self) -> None:
        made = cluster(quota=2)
        lose(made, a=2, b=2)
        made.taken_of_quota = 1
        made.until("FallbackServing")
        made.taken_of_quota = 0
        made.until("PromotionBlockedByFallback", 400)

        made.taken_of_quota = 1
        made.until("FallbackServing", 400)
        made.run(400)

        assert made.degraded == "FallbackServing"

    @pytest.mark.parametrize(
        ("made_at", "reason"),
        [(1, "FallbackServing"), (-1, "PromotionBlockedByFallback")],
        ids=["after it", "before it"],
    )
    def test_a_refusal_tells_only_of_pods_that_were_made_before_it(
        self, made_at: int, reason: str
    ) -> None:
        """The one that a fallback is started for may still be told when that answers already."""
        made = cluster(quota=2)
        primary, small = tiers_of(made.spec)
        moment = NOW + timedelta(seconds=made_at)
        refused = Seen(
            exists=True,
            over_quota_since=NOW,
            over_quota=(
                f"exceeded quota: gpus, requested: requests.{GPU}=2, used: requests.{GPU}=1,"
                f" limited: requests.{GPU}=2"
            ),
        )
        serving = Seen(exists=True, asked=1, ready_since=(moment,), created_at=(moment,))
        wishes = {"small": Wish(requests={GPU: 1})}

        decision = decide(
            Case(
                views=(View(primary, 1, refused), View(small, 1, serving)),
                rules=Rules(),
                room=Room(wishes),
                memory=Memory("degraded", NOW, "small", next_attempt=NOW + timedelta(seconds=15)),
                now=NOW + timedelta(seconds=2),
            )
        )

        assert decision.reason == reason
        assert decision.again_seconds == 13

    def test_a_swap_within_a_quota(self) -> None:
        made = cluster({"promote": {"afterSeconds": 60, "strategy": "swap"}}, quota=2)
        lose(made, a=2, b=2)
        made.taken_of_quota = 1
        made.until("FallbackServing")
        made.taken_of_quota = 0

        made.until("SwapInProgress", 900)
        waited = made.until("PrimaryServing", 60)

        assert waited <= DRAIN_SECONDS + START + 5


class TestPin:
    def test_a_pinned_fallback_serves_alone_and_the_primary_goes_last(self) -> None:
        made = cluster()
        made.ready_log.clear()

        made.pin = "small"
        made.until("Pinned")
        made.run(2 * START)

        assert made.tiers() == {"primary": 0, "small": 1}
        assert min(made.ready_log) >= 1
        assert "remove the annotation" in made.message
        assert made.plan().is_empty

    def test_without_the_pin_the_primary_comes_back(self) -> None:
        made = cluster()
        made.pin = "small"
        made.run(3 * START)
        made.ready_log.clear()

        made.pin = None
        made.until("PrimaryServing")

        assert min(made.ready_log) >= 1
        assert made.tiers() == {"primary": 1}

    def test_a_pinned_primary_is_not_left(self) -> None:
        made = cluster()
        made.pin = "primary"
        lose(made, a=1)

        made.run(300)

        assert made.tiers() == {"primary": 1}
        assert "pinned" in made.message

    def test_a_pinned_primary_is_promoted_as_soon_as_it_answers(self) -> None:
        made = cluster()
        lose(made, a=1)
        made.until("FallbackServing")
        give_back(made)
        made.pin = "primary"

        assert made.until("PrimaryServing") <= 2 * START

    def test_a_pin_of_no_tier_is_told(self) -> None:
        made = cluster()

        made.pin = "tiny"
        made.run(2)

        assert made.degraded == "PrimaryServing"
        assert "names no tier" in made.message
        assert "allowed are primary, small" in made.message


class TestWords:
    def test_a_narrower_fallback_is_told_from_the_start(self) -> None:
        narrow = copy.deepcopy(SMALL)
        narrow["model"]["maxContextTokens"] = 512

        made = cluster({"fallbacks": [narrow]})

        assert "Fallback small is narrower: it refuses contexts above 512 tokens" in made.message

    def test_every_reason_and_the_memory_are_what_the_contract_allows(self) -> None:
        document = {"promote": {"afterSeconds": 60, "strategy": "swap"}}
        made = cluster(document, gpus={"a": 2})
        told = set()
        lose(made, a=1)
        for second in range(600):
            if second == 200:
                give_back(made)
            made.second()
            told.add(made.degraded)
            DeepSeekDeploymentStatus.parse(made.status)

        assert told <= set(REASONS["Degraded"])
        assert {"DegradePending", "FallbackServing", "SwapInProgress", "PrimaryServing"} <= told

    def test_the_history_tells_the_story(self) -> None:
        made = cluster()
        lose(made, a=1)
        made.until("FallbackServing")
        give_back(made)
        made.until("PrimaryServing")

        story = [entry["message"] for entry in made.status["history"]]

        for words in (
            "Degraded (FallbackStarting)", "Degraded (FallbackServing)", "Degraded (Promoting)",
            "Not degraded (PrimaryServing)",
        ):  # fmt: skip
            assert any(line.startswith(words) for line in story), (words, story)


def story(**changes: Any) -> list[tuple[str, str]]:
    """What is written and said while capacity goes for three minutes and comes back."""
    made = cluster(changes, gpus={"a": 2, "b": 1})
    told = []
    lose(made, b=1)
    for second in range(500):
        if second == 180:
            made.taken = {"b": 1}
        made.second()
        live = {key.name: value["spec"] for key, value in made.objects.items() if "spec" in value}
        told.append((repr(live), made.degraded))
    return told


@pytest.mark.parametrize(
    "changes",
    [
        {"fallbacks": [{**SMALL, "name": "other"}]},
        {"fallbacks": [{**SMALL, "model": {"source": "package://other"}}]},
        {"fallbacks": [{**SMALL, "model": {**SMALL["model"], "weights": "bf16"}}]},
        {"fallbacks": [{**SMALL, "model": {**SMALL["model"], "kvCache": "bf16"}}]},
        {"fallbacks": [{**SMALL, "model": {**SMALL["model"], "maxContextTokens": 64}}]},
        {"fallbacks": [{**SMALL, "gpu": {"mode": "cpu"}}]},
        {"fallbacks": [{**SMALL, "gpu": {"count": 2}}]},
        {"fallbacks": [{**SMALL, "gpu": {"memoryLimitPercent": 50}}]},
        {"degrade": {"afterSeconds": 90}},
        {"promote": {"afterSeconds": 60}},
        {"rollout": "surge"},
    ],
    ids=str,
)
def test_every_field_of_the_tiers_has_an_effect(changes: dict[str, Any]) -> None:
    """Case A08, for what shows only when capacity goes."""
    assert story(**changes) != story()


def test_a_removed_fallback_goes_once_the_primary_answers() -> None:
    made = cluster()
    lose(made, a=1)
    made.until("FallbackServing")

    del made.document["fallbacks"]
    del made.document["degrade"]
    del made.document["promote"]
    made.run(30)
    kept = dict(made.tiers())
    give_back(made)
    made.run(30)

    assert kept == {"primary": 1, "small": 1}
    assert made.tiers() == {"primary": 1}


@pytest.mark.parametrize(
    "stored",
    [
        None,
        {},
        {"phase": "unheard-of", "degradations": -1},
        {"phase": "blocked", "since": "yesterday", "attempts": "many", "fallback": 7},
        {"phase": "swapping", "since": "2026-05-01T12:00:00", "nextAttemptTime": 5},
    ],
    ids=str,
)
def test_a_status_that_is_not_understood_is_forgotten(stored: dict | None) -> None:
    memory = Memory.of(stored)

    assert memory.since is None
    assert memory.next_attempt is None
    assert memory.attempts == 0
    assert memory.degradations == 0


def test_a_clock_that_was_ahead_holds_nothing_up_for_long() -> None:
    made = cluster(quota=3)
    lose(made, a=2, b=2)
    made.taken_of_quota = 2
    made.until("FallbackServing")
    ahead = "2027-05-01T12:00:00Z"
    made.status["degrade"] |= {"since": ahead, "nextAttemptTime": ahead, "nextStepTime": ahead}
    made.taken_of_quota = 0

    waited = made.until("Promoting", 4000)

    assert waited <= 3600 + START
    # What was seen keeps its meaning.
    assert made.num_ready("small") == 1


@pytest.mark.parametrize("days", [1, -1, 365, -365])
def test_a_clock_that_jumps_ends_nothing_that_serves(days: int) -> None:
    made = cluster()
    lose(made, a=1)
    made.until("FallbackServing")

    jumped = plan(made.spec, made.observed(), made.settings, made.now + timedelta(days=days))

    assert jumped.decision.reason == "FallbackServing"
    assert jumped.is_empty


def test_what_is_remembered_is_read_back_as_it_was() -> None:
    memory = Memory(
        "blocked", NOW, "small", attempts=2, next_attempt=NOW + timedelta(seconds=30),
        next_step=NOW + timedelta(seconds=300), generation=3, degradations=4,
    )  # fmt: skip

    assert Memory.of(memory.document()) == memory
    assert Memory().document() is None


def test_pauses_double_up_to_their_limit() -> None:
    assert [backoff_seconds(n) for n in (1, 2, 3, 6, 60)] == [15, 30, 60, 300, 300]
