"""Back to the primary, on to another fallback, and more or better of one."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
from degrading import (
    CHAIN,
    MEDIUM,
    SMALL,
    START,
    TWO_GPUS,
    cluster,
    degraded,
    end_pods,
    give_back,
    lose,
)
from small_cluster import DRAIN_SECONDS, SmallCluster

from deepseek_operator.plan import plan
from deepseek_operator.quota import PodLimit


def runs_of(made: SmallCluster, seconds: int) -> list[dict[str, int]]:
    """Which tiers had how many pods, one after another."""
    runs = [made.tiers()]
    for _ in range(seconds):
        made.second()
        if made.tiers() != runs[-1]:
            runs.append(made.tiers())
    return runs


class TestPromote:
    def test_the_primary_takes_over_after_its_time_and_nothing_is_lost_meanwhile(self) -> None:
        made = degraded()
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
        made = degraded()
        give_back(made)

        made.until("Promoting")

        assert (made.num_ready("primary"), made.num_ready("small")) == (1, 1)
        assert made.status["activeModel"] == "package://large"

    def test_a_primary_that_goes_again_leaves_the_fallback_where_it_is(self) -> None:
        made = degraded()
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
        made = degraded()
        for _ in range(5):
            give_back(made)
            made.until("Promoting")
            made.run(60)
            lose(made)
            made.run(30)

        assert made.status["degrade"]["degradations"] == 1
        assert made.num_ready("small") == 1

    def test_a_lost_status_comes_back_while_degraded(self) -> None:
        made = degraded()
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

    def test_a_fallback_that_somebody_deletes_comes_back_at_once(self) -> None:
        made = degraded()
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

    def test_pods_that_a_quota_lets_in_are_kept_where_they_are_enough(self) -> None:
        """With the fallback there is room for one of two, and one is what has to answer."""
        made = cluster({"replicas": 2}, quota=4)
        lose(made, a=2, b=2)
        made.taken_of_quota = 3
        made.until("FallbackServing")
        made.run(20)
        before = made.tiers()
        made.taken_of_quota = 1
        made.ready_log.clear()

        made.until("Promoting", 60)
        made.until("PrimaryServing")

        assert before == {"primary": 0, "small": 1}
        assert made.num_ready("primary") == 1
        assert min(made.ready_log) >= 1

    @pytest.mark.parametrize("strategy", ["surge", "swap"])
    def test_they_are_not_blocked_while_they_load(self, strategy: str) -> None:
        promote = {"afterSeconds": 30, "strategy": strategy}
        made = cluster({"replicas": 2, "promote": promote}, quota=4)
        lose(made, a=2, b=2)
        made.taken_of_quota = 3
        made.until("FallbackServing")
        made.broken = {"primary"}
        made.taken_of_quota = 1
        made.run(60)
        made.ready_log.clear()

        made.run(600)

        assert made.degraded == "FallbackServing"
        assert min(made.ready_log) >= 1
        assert len([pod for pod in made.pods if "primary" in pod["metadata"]["name"]]) == 1


class TestHandOver:
    """A fallback that does not answer either."""

    @pytest.mark.parametrize("left", [3, 2], ids=["beside it", "in its place"])
    def test_one_that_cannot_run_hands_over_to_the_next(self, left: int) -> None:
        made = cluster(CHAIN, gpus={"a": 4}, too_large={"medium"})
        lose(made, a=left)

        while "small" not in made.tiers():
            made.second()
        told = made.message
        made.until("FallbackServing")

        assert made.tiers() == {"primary": 1, "small": 1}
        assert made.num_ready("small") == 1
        assert made.status["degrade"]["degradations"] == 1
        assert "since fallback medium cannot run: Pod chat-medium-" in told

    def test_one_whose_pods_are_refused_hands_over_to_the_next_after_the_usual_time(self) -> None:
        made = cluster(CHAIN, gpus={"a": 4}, refused={"medium"})
        lose(made, a=3)
        made.until("FallbackStarting")

        started = made.now
        while "small" not in made.tiers():
            made.second()
        waited, told = (made.now - started).total_seconds(), made.message
        made.until("FallbackServing")

        assert 58 <= waited <= 64
        assert made.tiers() == {"primary": 1, "small": 1}
        assert 'since fallback medium cannot run, its pods are refused: \'pods "x" is' in told
        assert 'ValidatingAdmissionPolicy "gate" denied request' in told

    def test_one_with_enough_pods_that_load_stays_though_a_quota_refuses_more(self) -> None:
        made = cluster({**CHAIN, "replicas": 2}, gpus={"a": 4, "b": 4}, quota=8)
        lose(made, a=2, b=2)
        made.taken_of_quota, made.broken = 5, {"medium"}

        made.until("FallbackStarting")
        made.run(300)
        kept = made.tiers()
        made.broken = set()
        made.until("FallbackServing", 10)

        assert kept["medium"] >= 1
        assert made.num_ready("medium") == 1
        assert "small" not in made.tiers()

    def test_one_that_is_let_in_within_that_time_stays(self) -> None:
        made = cluster(CHAIN, gpus={"a": 4}, refused={"medium"})
        lose(made, a=3)
        made.until("FallbackStarting")
        made.run(50)

        made.refused = set()
        made.until("FallbackServing")

        assert made.tiers() == {"primary": 1, "medium": 1}

    def test_a_refusal_for_a_quota_is_none_that_stays(self) -> None:
        """The first words were of something else, and only events tell the newest."""
        made = cluster(CHAIN, gpus={"a": 4}, first_refusal="no token", quota=4, taken_of_quota=4)
        lose(made, a=3)

        made.until("NoCapacity")
        told = made.message
        made.quota = None
        made.run(2 * START)

        assert "fallback small finds no place" in told
        assert made.num_ready() == 1

    def test_refused_ones_are_tried_in_turn_with_a_pause(self) -> None:
        made = cluster(CHAIN, gpus={"a": 4}, refused={"medium", "small"})
        lose(made, a=3)
        made.until("FallbackStarting")
        runs = runs_of(made, 1800)
        made.refused = {"small"}
        made.until("FallbackServing", 900)

        assert 6 <= len(runs) <= 14
        assert made.tiers() == {"primary": 1, "medium": 1}

    def test_where_there_is_no_next_it_is_told_why(self) -> None:
        made = cluster(too_large={"small"})
        lose(made, a=1)

        made.run(300)

        assert made.tiers() == {"primary": 1, "small": 1}
        assert made.degraded == "FallbackStarting"
        assert made.message.startswith("Fallback small cannot run: Pod chat-small-")
        assert made.message.endswith("It needs 99 GiB.")

    def test_the_last_one_hands_back_to_the_first_but_not_again_and_again(self) -> None:
        made = cluster(CHAIN, gpus={"a": 4}, too_large={"medium", "small"})
        lose(made, a=2)
        made.until("FallbackStarting")
        runs = runs_of(made, 1800)
        made.too_large = {"small"}
        made.until("FallbackServing", 900)

        assert 6 <= len(runs) <= 14
        assert made.tiers() == {"primary": 1, "medium": 1}

    def test_where_the_next_does_not_fit_that_is_told(self) -> None:
        document = {**CHAIN, "fallbacks": [SMALL, MEDIUM]}
        made = cluster(document, gpus={"a": 4}, too_large={"small"})
        lose(made, a=1)

        made.until("NoCapacity", 200)

        assert "fallback small cannot run" in made.message

    def test_a_primary_that_never_runs_does_not_keep_the_fallbacks_place(self) -> None:
        """It takes both units when it is tried again and the fallback's pod is lost."""
        made = SmallCluster(copy.deepcopy(TWO_GPUS), too_large={"primary"}, gpus={"a": 2})
        made.until("PromotionBlockedByFallback", 60)
        made.run(40)
        end_pods(made, "small")

        made.run(60)

        assert made.tiers()["small"] == 1
        assert made.num_ready("small") == 1

    def test_a_primary_that_never_runs_makes_room_for_the_next(self) -> None:
        """The one that can run needs what a primary that cannot holds."""
        fallbacks = [MEDIUM, SMALL]
        made = cluster({"fallbacks": fallbacks}, too_large={"primary", "medium"}, gpus={"a": 3})
        made.until("FallbackServing", 400)
        made.too_large = {"primary", "small"}
        made.others()

        made.run(900)

        assert made.num_ready("medium") == 1
        assert made.degraded in {"FallbackServing", "PromotionBlockedByFallback"}

    def test_a_better_one_that_is_coming_is_waited_for(self) -> None:
        made = cluster(CHAIN, gpus={"a": 4, "b": 4})
        lose(made, a=1)
        made.until("FallbackServing")
        made.run(10)
        made.broken = {"medium"}
        made.taken["b"] = 2
        made.run(120 + START)
        made.taken["a"] = 4
        end_pods(made, "small")

        made.run(90)
        waited = made.degraded
        made.broken = set()
        made.run(START)

        assert waited == "FallbackStarting"
        assert made.degraded == "FallbackServing"
        assert made.num_ready("medium") == 1

    def test_it_is_kept_while_another_one_is_started(self) -> None:
        tiny = {"name": "tiny", "model": {"source": "package://tiny"}, "gpu": {"count": 1}}
        small = {**SMALL, "gpu": {"count": 2}}
        medium = {**MEDIUM, "gpu": {"count": 3}}
        document = {"gpu": {"count": 4}, "fallbacks": [medium, small, tiny]}
        made = cluster(document, gpus={"a": 4, "b": 4})
        lose(made, a=2)
        made.until("FallbackServing")
        made.run(10)
        made.broken = {"medium"}
        made.taken["b"] = 1
        made.run(120 + START)
        made.taken["a"] = 3
        end_pods(made, "small")

        made.run(60 + 2 * START)

        assert made.tiers() == {"primary": 1, "medium": 1, "tiny": 1}
        assert made.num_ready("tiny") == 1


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

    def test_one_whose_pods_are_refused_goes_again(self) -> None:
        made = self.small_serves()
        made.refused = {"medium"}
        made.taken["a"] = 1
        made.run(120 + START)
        both = made.tiers()

        made.run(60)

        assert "medium" in both
        assert made.tiers() == {"primary": 1, "small": 1}
        assert min(made.ready_log) >= 1

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

    def test_pods_that_are_refused_do_not_keep_others_from_making_room(self) -> None:
        made = cluster({"replicas": 3}, gpus={"a": 2, "b": 2, "c": 2})
        lose(made, a=1, b=1, c=1)
        made.until("FallbackServing")
        made.run(20)
        made.refused = {"small"}
        made.pods.remove(next(pod for pod in made.pods if pod["spec"].get("nodeName") == "c"))
        made.taken["c"] = 2
        made.run(20)
        assert (made.tiers()["small"], made.num_ready("small")) == (3, 2)

        made.taken["a"] = 0

        made.until("Promoting")
        assert made.num_ready("small") == 1

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
