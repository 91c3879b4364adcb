"""Which fallback is started, with how many pods, and where none is."""

import copy
from dataclasses import replace
from datetime import timedelta

from degrading import SMALL, START, TWO_GPUS, cluster, lose
from scenes import NOW, spec_of
from small_cluster import GPU, SmallCluster
from test_fleet import node

from deepseek_operator.capacity import Room, Seen, View
from deepseek_operator.degrade import decide
from deepseek_operator.degrade_case import Case, Memory, Rules
from deepseek_operator.fleet import Fleet, Wish
from deepseek_operator.plan import plan
from deepseek_operator.tiers import tiers_of


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

    def test_two_fallbacks_are_not_promised_the_same_unit(self) -> None:
        spec = spec_of(
            {
                **TWO_GPUS,
                "fallbacks": [
                    SMALL,
                    {**SMALL, "name": "other", "model": {"source": "package://other"}},
                ],
            }
        )
        fleet = Fleet()
        fleet.is_known = True
        for name in ("a", "b"):
            fleet.notice_node(None, node(name, gpus=1))
        wish = Wish(requests={GPU: 1})
        asked = Seen(exists=True, asked=1)
        views = [View(tier, 1, asked) for tier in tiers_of(spec)]
        room = Room({"small": wish, "other": wish}, fleet)

        decision = decide(Case(tuple(views), Rules(pin="other"), room, Memory(), NOW))

        assert decision.promises == (("a", {GPU: 1}), ("b", {GPU: 1}))

    def test_somebody_elses_words_end_in_one_full_stop(self) -> None:
        made = SmallCluster(copy.deepcopy(TWO_GPUS), too_large={"primary"})

        made.until("FallbackStarting", 30)

        assert made.message.endswith("It needs 99 GiB.")
        assert not made.message.endswith("..")

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


def test_a_narrower_fallback_is_told_from_the_start() -> None:
    narrow = copy.deepcopy(SMALL)
    narrow["model"]["maxContextTokens"] = 512

    made = cluster({"fallbacks": [narrow]})

    assert "Fallback small is narrower: it refuses contexts above 512 tokens" in made.message
