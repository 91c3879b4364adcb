"""When a fallback takes over, on a cluster of a few GPUs in memory."""

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from degrading import SMALL, START, TWO_GPUS, cluster, end_pods, give_back, lose
from scenes import NOW, spec_of
from small_cluster import SmallCluster

from deepseek_contract.status import REASONS, DeepSeekDeploymentStatus
from deepseek_operator.capacity import Room, Seen, View
from deepseek_operator.degrade import decide
from deepseek_operator.degrade_case import Case, Memory, Rules
from deepseek_operator.plan import plan
from deepseek_operator.pods import is_ready
from deepseek_operator.quota import PodLimit
from deepseek_operator.tiers import tiers_of


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

    def test_a_rollout_that_no_fallback_fits_for_waits_on_the_primary(self) -> None:
        primary, fallback = tiers_of(spec_of(TWO_GPUS))
        serves = View(primary, 1, Seen(exists=True, asked=1, ready_since=(NOW,)))
        absent = View(fallback, 1, Seen(), may_start=False)
        case = Case((serves, absent), Rules(), Room(), Memory(), NOW, rolls_via_fallback=True)

        decision = decide(case)

        assert (decision.reason, decision.replicas) == ("PrimaryServing", {"primary": 1})
        assert decision.message == "The primary model serves; a change of it waits for free units."
        assert decision.waits_for_capacity

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

    def test_pods_that_a_quota_lets_in_go_on_loading_where_they_are_enough(self) -> None:
        made = cluster({"replicas": 2}, quota=4)
        end_pods(made, "primary")
        made.taken_of_quota, made.broken = 1, {"primary"}
        made.run(2)
        (loading,) = [pod["metadata"]["name"] for pod in made.pods]

        made.until("FallbackServing")
        made.run(300)
        made.broken = set()
        made.until("Promoting", 10)

        ready = [pod["metadata"]["name"] for pod in made.pods if is_ready(pod)]
        assert loading in ready
        assert made.num_ready("small") == 1

    def test_nor_do_they_go_for_a_fallback_that_the_quota_refuses(self) -> None:
        """Also those without a node give back what they hold of it, and these alone."""
        made = cluster({"replicas": 2}, quota=4)
        end_pods(made, "primary")
        made.taken, made.broken = {"b": 1}, {"primary"}
        made.run(2)
        (loading,) = [pod["metadata"]["name"] for pod in made.pods if pod["spec"].get("nodeName")]

        made.until("FallbackServing")

        assert made.tiers() == {"primary": 1, "small": 1}
        assert loading in [pod["metadata"]["name"] for pod in made.pods]

    def test_where_the_quota_has_no_room_for_a_fallback_beside_them_that_is_told(self) -> None:
        made = cluster({"replicas": 2}, quota=4)
        end_pods(made, "primary")
        made.taken_of_quota, made.broken = 2, {"primary"}

        made.until("NoCapacity")
        told = made.message
        made.run(600)
        made.broken = set()

        assert told.startswith("No fallback fits: fallback small finds no place")
        assert told.endswith("The primary's pods that have their place are waited for.")
        made.until("Promoting", 2 * START)

    def test_pods_that_are_too_few_go_where_the_quota_refuses_the_others(self) -> None:
        made = cluster({"replicas": 2, "minAvailable": 2}, quota=4)
        end_pods(made, "primary")
        made.taken_of_quota, made.broken = 1, {"primary"}

        made.until("FallbackStarting")

        assert made.tiers()["primary"] == 0

    def test_pods_that_the_recovery_ladder_has_given_up_go_for_a_fallback(self) -> None:
        primary, small = tiers_of(spec_of(TWO_GPUS | {"replicas": 2}))
        seen = Seen(exists=True, asked=2, down_since=(NOW,), over_quota_since=NOW)
        case = Case(
            (View(primary, 2, seen), View(small, 2, Seen())), Rules(), Room(), Memory(), NOW
        )
        rolls = decide(replace(case, rolls_via_fallback=True))
        given_up = decide(replace(case, demand="two nodes were tried."))

        assert rolls.replicas["primary"] == 1
        assert given_up.replicas["primary"] == 0

    def test_pending_pods_that_hold_the_quota_give_way(self) -> None:
        made = cluster(quota=2)
        lose(made, a=1)

        made.until("FallbackServing")

        assert made.tiers() == {"primary": 0, "small": 1}
        assert made.num_ready("small") == 1


class TestPolicy:
    def test_a_primary_that_a_policy_refuses_degrades_and_comes_back(self) -> None:
        made = cluster(refused={"primary"})

        waited = made.until("FallbackStarting")
        made.until("FallbackServing")
        told, progress = made.message, made.said_of("Progressing")
        made.refused = set()
        made.until("PrimaryServing")

        assert 60 - START <= waited <= 64
        assert 'ValidatingAdmissionPolicy "gate" denied request' in told
        assert progress["reason"] == "RolloutBlocked"
        assert "change what the message names" in progress["message"]
        assert made.tiers() == {"primary": 1}

    def test_one_that_is_let_in_within_that_time_is_kept(self) -> None:
        made = cluster(refused={"primary"})
        made.run(40)
        made.refused = set()

        made.run(300)

        assert "small" not in str(made.status["history"])

    def test_a_pod_beyond_those_that_have_to_answer_is_no_reason(self) -> None:
        made = cluster({"replicas": 2})
        made.refused, made.broken = {"primary"}, {"primary"}
        made.pods = made.pods[:1]

        made.run(300)

        assert made.tiers() == {"primary": 2}

    def test_the_fallback_grows_while_the_primary_is_refused(self) -> None:
        made = cluster({"replicas": 2, "promote": {"afterSeconds": 30}}, refused={"primary"})
        made.taken = {"a": 2, "b": 1}
        made.until("FallbackServing")

        made.taken = {}
        made.run(120)

        assert made.num_ready("small") == 2


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
