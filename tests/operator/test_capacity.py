"""What is seen of a tier's pods, and what would fit where."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from degrading import TWO_GPUS
from scenes import NOW, spec_of
from small_cluster import GPU, stamp
from test_fleet import node

from deepseek_operator.capacity import LEAVING_SECONDS, Room, Seen, View, see
from deepseek_operator.fleet import Fleet, Wish
from deepseek_operator.pods import Trouble
from deepseek_operator.tiers import tiers_of


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def pod(name: str, *, on: str | None = None, phase: str = "Pending", **more: Any) -> dict[str, Any]:
    """A pod that was made at `NOW`."""
    metadata = {"namespace": "team", "name": name, "creationTimestamp": stamp(NOW)}
    ends = {"deletionTimestamp": stamp(more["ends"])} if "ends" in more else {}
    return {
        "metadata": metadata | ends,
        "spec": {"nodeName": on} if on is not None else {},
        "status": {"phase": phase, "conditions": more.get("conditions")},
    }


def said(kind: str, value: str, since: float, **more: str) -> dict[str, str]:
    return {"type": kind, "status": value, "lastTransitionTime": stamp(at(since)), **more}


class TestSee:
    def test_a_tier_without_a_deployment_has_nothing(self) -> None:
        assert see(None, [], NOW) == Seen()

    def test_a_pod_of_which_nothing_is_said_is_down_since_it_was_made(self) -> None:
        seen = see({"spec": {"replicas": 1}}, [pod("x")], at(60))

        assert (seen.asked, seen.num_pods, seen.num_ready) == (1, 1, 0)
        assert seen.down_since == (NOW,)

    def test_a_quota_counts_of_a_pod_what_admission_made_of_it(self) -> None:
        found = pod("x")
        found["spec"]["containers"] = [{"resources": {"limits": {"cpu": "2"}}}]

        ((created, charges),) = see(None, [found], NOW).charges

        assert created == NOW
        assert (charges["requests.cpu"], charges["limits.cpu"], charges["pods"]) == (2000, 2000, 1)

    def test_pods_that_answer_are_told_from_others_each_since_when(self) -> None:
        pods = [
            pod("late", on="a", conditions=[said("Ready", "True", 9)]),
            pod("down", on="a", conditions=[said("Ready", "False", 7)]),
            pod("early", on="b", conditions=[said("Ready", "True", 5)]),
        ]

        seen = see(None, pods, at(60))

        assert seen.ready_since == (at(5), at(9))
        assert seen.down_since == (at(7),)
        assert seen.bound == {"a": 2, "b": 1}

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
    def test_a_pod_that_has_ended_is_none(self, phase: str) -> None:
        pods = [pod("over", on="a", phase=phase), pod("going", on="a", phase=phase, ends=at(30))]

        assert see(None, pods, NOW) == Seen()

    def test_a_pod_that_is_ending_holds_units_and_is_nothing_else(self) -> None:
        pods = [pod("x", on="a", ends=at(30)), pod("y", on="a", ends=at(10))]

        seen = see(None, pods, NOW)

        assert (seen.num_pods, seen.bound) == (0, {"a": 2})
        assert seen.leaves_at == at(30 + LEAVING_SECONDS)

    def test_why_there_is_no_node_is_told_in_the_schedulers_words(self) -> None:
        no_node = {"reason": "Unschedulable", "message": "0/2 nodes are available."}
        gated = {"reason": "SchedulingGated", "message": "Waits for a gate."}
        pods = [
            pod("gated", conditions=[said("PodScheduled", "False", 3, **gated)]),
            pod("pending", conditions=[said("PodScheduled", "False", 4, **no_node)]),
        ]

        seen = see(None, pods, at(60))

        assert seen.unschedulable_since == (at(4),)
        assert seen.words == "0/2 nodes are available."
        assert seen.num_placed == 1

    @pytest.mark.parametrize(
        ("words", "is_quota"),
        [("exceeded quota: gpus", True), ("denied by policy", False)],
        ids=["a quota", "a policy"],
    )
    def test_a_refusal_is_for_a_quota_or_for_something_that_stays(
        self, words: str, *, is_quota: bool
    ) -> None:
        conditions = [said("ReplicaFailure", "True", 3, message=words)]

        seen = see({"spec": {"replicas": 1}, "status": {"conditions": conditions}}, [], at(60))

        assert seen.over_quota_since == (at(3) if is_quota else None)
        assert seen.refused_since == (None if is_quota else at(3))
        assert (seen.over_quota, seen.refusal) == ((words, "") if is_quota else ("", words))

    def test_pods_that_waiting_does_not_heal_are_counted(self) -> None:
        crashed = {"name": "worker", "state": {"terminated": {"exitCode": 1}}}
        pods = [pod("crashed", on="a"), pod("loads", on="b")]
        pods[0]["status"]["containers"] = [crashed]

        assert see(None, pods, NOW).num_hopeless == 1

    def test_a_bound_pod_is_placed_once_its_units_are_counted(self) -> None:
        pods = [pod("x", on="a"), pod("y", on="a"), pod("z")]

        assert see(None, pods, NOW).num_placed == 2
        assert see(None, pods, NOW, {"team/x"}.__contains__).num_placed == 1


def view(tier: int, wanted: int, seen: Seen, **changes: Any) -> View:
    return View(tiers_of(spec_of(TWO_GPUS | changes))[tier], wanted, seen)


class TestView:
    def test_as_many_answer_as_have_to_since_the_last_of_them(self) -> None:
        seen = Seen(asked=3, ready_since=(at(1), at(5), at(9)))

        assert view(0, 3, seen, replicas=3, minAvailable=2).ready_since == at(5)
        assert view(0, 3, Seen(asked=3), replicas=3).ready_since is None

    def test_a_fallback_needs_no_more_pods_than_it_found_room_for(self) -> None:
        assert view(1, 3, Seen(asked=1), replicas=3, minAvailable=2).needed == 1
        assert view(1, 3, Seen(), replicas=3, minAvailable=2).needed == 2
        assert view(0, 3, Seen(asked=1), replicas=3, minAvailable=2).needed == 2

    def test_only_down_is_not_starved(self) -> None:
        assert view(0, 1, Seen(asked=1, down_since=(NOW,))).starved_since is None

    def test_it_is_starved_since_too_few_answer(self) -> None:
        """The first of three that lacks a node leaves as many as are needed."""
        seen = Seen(asked=3, down_since=(at(1), at(5), at(9)), unschedulable_since=(at(1),))

        assert view(0, 3, seen, replicas=3, minAvailable=2).starved_since == at(5)

    def test_a_fallback_is_starved_since_too_few_of_those_that_it_has_answer(self) -> None:
        """It wants four pods, found room for two and needs both."""
        seen = Seen(asked=2, down_since=(at(1), at(50)), unschedulable_since=(at(1),))

        assert view(1, 4, seen, replicas=4, minAvailable=2).starved_since == at(1)

    def test_one_that_cannot_run_is_stuck_although_it_has_its_place(self) -> None:
        trouble = Trouble("ModelTooLarge", "It needs 99 GiB.")
        seen = Seen(asked=1, down_since=(at(1),), bound={"a": 1}, trouble=trouble)

        assert view(1, 1, seen).stuck_since == at(1)
        assert view(1, 1, seen).starved_since is None

    def test_one_of_whose_pods_too_few_are_let_in_is_stuck_since_then(self) -> None:
        refused = Seen(asked=2, refused_since=at(1), refusal="denied")

        assert view(1, 2, refused).stuck_since == at(1)
        assert view(1, 2, refused).starved_since is None
        one = replace(refused, down_since=(at(2),))
        assert view(1, 2, one).stuck_since is None
        assert view(1, 2, one, replicas=2, minAvailable=2).stuck_since == at(1)

    @pytest.mark.parametrize(
        ("seen", "is_coming"),
        [
            (Seen(asked=2, down_since=(NOW,)), True),
            (Seen(asked=2, down_since=(NOW,), unschedulable_since=(NOW,)), False),
            (Seen(asked=2, down_since=(NOW,), trouble=Trouble("ModelTooLarge", "No.")), False),
            (Seen(asked=2), False),
        ],
        ids=["it loads", "there is no node", "it cannot run", "there is none"],
    )
    def test_enough_are_coming(self, seen: Seen, *, is_coming: bool) -> None:
        assert view(0, 2, seen, replicas=2).is_coming == is_coming

    def test_one_that_cannot_run_is_not_coming_beside_one_that_answers(self) -> None:
        seen = Seen(asked=3, ready_since=(NOW,), down_since=(NOW,))

        for number, is_coming in ((0, True), (1, False)):
            found = view(0, 3, replace(seen, num_hopeless=number), replicas=3, minAvailable=2)
            assert found.is_coming == is_coming

    @pytest.mark.parametrize(
        "lacks",
        [{"over_quota_since": NOW}, {"down_since": (NOW, NOW), "unschedulable_since": (NOW,)}],
        ids=["a quota", "nodes"],
    )
    def test_one_that_is_coming_is_not_stuck_for_more_pods_that_lack_a_place(
        self, lacks: dict[str, Any]
    ) -> None:
        seen = replace(Seen(asked=2, down_since=(NOW,)), **lacks)

        assert view(1, 2, seen, replicas=2).stuck_since is None
        assert view(1, 2, seen, replicas=2, minAvailable=2).stuck_since == NOW

    def test_its_own_pod_that_is_ending_is_waited_for(self) -> None:
        seen = Seen(asked=1, down_since=(NOW,), unschedulable_since=(NOW,), leaves_at=at(40))

        assert view(0, 1, seen).starved_since == at(40)


class TestRoom:
    def room(self, *, gpus: int) -> Room:
        fleet = Fleet()
        fleet.is_known = True
        fleet.notice_node(None, node("a", gpus=gpus))
        wishes = {"primary": Wish(requests={GPU: 2}), "small": Wish(requests={GPU: 1})}
        return Room(wishes, fleet, {"a": {GPU: 1}})

    def test_what_is_promised_to_others_is_not_free(self) -> None:
        room, primary = self.room(gpus=2), view(0, 1, Seen())

        assert room.fits(primary) is False
        assert self.room(gpus=3).fits(primary) is True

    def test_units_of_a_tier_that_would_go_are(self) -> None:
        serving = view(1, 1, Seen(asked=1, bound={"a": 1}))

        assert self.room(gpus=2).fits(view(0, 1, Seen()), without=[serving]) is True

    def test_less_what_others_of_the_object_will_take(self) -> None:
        room, small = self.room(gpus=3), view(1, 1, Seen())

        left = room.less(room.places(small, 1))

        assert len(left.places(small, 5)) == 1

    def test_as_many_places_as_there_are(self) -> None:
        places = self.room(gpus=3).places(view(1, 5, Seen()), 5)

        assert places == [("a", {GPU: 1})] * 2

    def test_nobody_knows_without_sight_of_nodes(self) -> None:
        room = Room({"small": Wish(requests={GPU: 1})}, None)

        assert not room.is_known
        assert room.fits(view(1, 1, Seen())) is None
        assert room.places(view(1, 1, Seen()), 1) == []
