"""Degrade and promote under any sequence of capacity, health, quota, pins and time."""

import copy
from datetime import timedelta
from typing import Any

import pytest
from degrading import end_pods
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_cluster import SmallCluster

from deepseek_operator.plan import Plan

# Days of the small cluster, on a machine that may do ten other things.
pytestmark = pytest.mark.timeout(600)

AFTER_SECONDS, PROMOTE_SECONDS = 30, 60
NODES = {"a": 2, "b": 2, "c": 1}
NAMES = st.sets(st.sampled_from(sorted(NODES)), min_size=1)
TIERS = ["primary", "medium", "small"]
SETTLED_SECONDS = 2 * 3600
DOCUMENT: dict[str, Any] = {
    "model": {"source": "package://large"},
    "gpu": {"count": 2},
    "fallbacks": [
        {"name": "medium", "model": {"source": "package://medium"}, "gpu": {"count": 2}},
        {"name": "small", "model": {"source": "package://small"}, "gpu": {"count": 1}},
    ],
    "degrade": {"afterSeconds": AFTER_SECONDS},
}


def _happening(what: str, how: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(what), how)


HAPPENINGS = st.one_of(
    _happening("nodes_go", NAMES),
    _happening("nodes_come", NAMES),
    _happening("others_take_what_is_free", NAMES),
    _happening("others_go", NAMES),
    _happening("a_quota_is_set", st.tuples(st.sampled_from([None, 1, 2, 3, 5]), st.integers(0, 2))),
    _happening("pods_are_lost", st.sets(st.sampled_from(TIERS), min_size=1)),
    _happening("pods_break", st.sets(st.sampled_from(TIERS), max_size=2)),
    _happening("models_turn_out_too_large", st.sets(st.sampled_from(TIERS), max_size=2)),
    _happening("a_policy_refuses", st.sets(st.sampled_from(TIERS), max_size=2)),
    _happening("a_person_pins", st.sampled_from([None, None, "primary", "small", "nobody"])),
    _happening("the_status_is_lost", st.none()),
    _happening("the_operators_clock_jumps", st.sampled_from([0, 400, -400, 100_000, -100_000])),
    _happening("the_spec_is_written_again", st.none()),
)
"""What may happen, as the name of the machine's method and its argument."""


class Watched(SmallCluster):
    """Notices when what the operator wrote ends the last pod that answers, or one on its way."""

    lost_last: int = 0
    lost_coming: int = 0

    def reconcile(self) -> Plan:
        was_swap = self._is_swap
        is_coming = self._num_coming() >= self.spec.min_available
        todo = super().reconcile()
        is_over = self.tiers()["primary"] < self.spec.min_available
        if is_coming and is_over and not (was_swap or self.pin == "small"):
            self.lost_coming += 1
        return todo

    def second(self) -> bool:
        before = self.num_ready()
        did = super().second()
        if before and not self.num_ready() and not self._is_swap:
            self.lost_last += 1
        return did

    @property
    def _is_swap(self) -> bool:
        return (self.status.get("degrade") or {}).get("phase") == "swapping"

    def _num_coming(self) -> int:
        """The primary's pods that answer or have a node; none where one says that it cannot run."""
        mine = [pod for pod in self._of("primary") if "deletionTimestamp" not in pod["metadata"]]
        if not self.num_ready("primary") and any("containers" in pod["status"] for pod in mine):
            return 0
        return sum("nodeName" in pod["spec"] and "containers" not in pod["status"] for pod in mine)


class DegradeMachine(RuleBasedStateMachine):
    """What may happen around one object, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.site = Watched()
        self.is_uncounted = False
        """Whether the count of switches was lost, or the clock did not count the time between."""

    @initialize(
        strategy=st.sampled_from(["surge", "swap"]),
        replicas=st.integers(1, 2),
        is_visible=st.booleans(),
    )
    def begin(self, strategy: str, replicas: int, is_visible: bool) -> None:
        promote = {"afterSeconds": PROMOTE_SECONDS, "strategy": strategy}
        document = {**copy.deepcopy(DOCUMENT), "promote": promote, "replicas": replicas}
        self.site = Watched(document, gpus=dict(NODES), is_visible=is_visible)
        self.started = self.site.now
        self.site.run(20)

    @rule(
        happenings=st.lists(HAPPENINGS, max_size=3),
        seconds=st.sampled_from([1, 7, 31, 45, 70, 400]),
    )
    def things_happen_and_time_passes(
        self, happenings: list[tuple[str, Any]], seconds: int
    ) -> None:
        for what, how in happenings:
            getattr(self, what)(how)
        self.site.run(seconds)

    def nodes_go(self, names: set[str]) -> None:
        for name in names:
            self.site.gpus.pop(name, None)
        self.site.pods = [p for p in self.site.pods if p["spec"].get("nodeName") not in names]

    def nodes_come(self, names: set[str]) -> None:
        self.site.gpus |= {name: NODES[name] for name in names}

    def others_take_what_is_free(self, names: set[str]) -> None:
        for name in names & self.site.gpus.keys():
            self.site.taken[name] = self.site.taken.get(name, 0) + self.site.free(name)

    def others_go(self, names: set[str]) -> None:
        self.site.taken = {n: count for n, count in self.site.taken.items() if n not in names}

    def a_quota_is_set(self, amounts: tuple[int | None, int]) -> None:
        self.site.quota, self.site.taken_of_quota = amounts

    def pods_are_lost(self, tiers: set[str]) -> None:
        for tier in tiers:
            end_pods(self.site, tier)

    def pods_break(self, broken: set[str]) -> None:
        self.site.broken = broken
        self.site.others()

    def models_turn_out_too_large(self, tiers: set[str]) -> None:
        self.site.too_large = tiers
        self.site.others()

    def a_policy_refuses(self, tiers: set[str]) -> None:
        self.site.refused = tiers

    def a_person_pins(self, pin: str | None) -> None:
        self.site.pin = pin

    def the_status_is_lost(self, _: None) -> None:
        self.site.status = {}
        self.is_uncounted = True

    def the_operators_clock_jumps(self, seconds: int) -> None:
        self.site.operator_is_ahead = timedelta(seconds=seconds)
        self.is_uncounted = True

    def the_spec_is_written_again(self, _: None) -> None:
        self.site.generation += 1

    @invariant()
    def the_last_pod_that_answers_is_not_ended(self) -> None:
        assert self.site.lost_last == 0, self.site.status.get("history")

    @invariant()
    def a_primary_that_is_coming_is_kept(self) -> None:
        assert self.site.lost_coming == 0, self.site.status.get("history")

    @invariant()
    def at_most_one_pod_too_many_is_asked_for(self) -> None:
        assert all(asked <= 2 for asked in self.site.tiers().values())

    @precondition(lambda self: not self.is_uncounted)
    @invariant()
    def switches_are_as_rare_as_their_times_allow(self) -> None:
        elapsed = (self.site.now - self.started).total_seconds() if self.site.tiers() else 0
        degradations = (self.site.status.get("degrade") or {}).get("degradations", 0)
        assert degradations <= 1 + elapsed // AFTER_SECONDS

    def teardown(self) -> None:
        site = self.site
        if not site.tiers():
            return
        # With steady input there is nothing more to do, but for attempts that are backed off.
        site.run(SETTLED_SECONDS)
        quiet = 0
        for _ in range(20):
            quiet += site.plan().is_empty
            site.run(7)
        assert quiet >= 15, (site.degraded, site.message)
        # With room enough no tier that cannot run keeps another one from serving.
        site.gpus, site.taken, site.quota, site.broken = dict(NODES), {}, None, set()
        site.pin, site.operator_is_ahead = None, timedelta()
        site.run(SETTLED_SECONDS)
        can_run = set(TIERS) - site.too_large - site.refused
        assert site.num_ready() >= 1 or not can_run, (site.degraded, site.message)
        # And when all is well again, the primary serves alone.
        site.too_large, site.refused = set(), set()
        site.run(SETTLED_SECONDS)
        if site.degraded != "PrimaryServing":
            # With surge, or without sight of the nodes, a fallback may hold what it needs.
            is_patient = site.document["promote"]["strategy"] == "surge" or not site.is_visible
            assert is_patient, site.message
            assert max(map(site.free, site.gpus)) < 2, site.message
            assert site.num_ready() >= 1
            return
        assert site.tiers() == {"primary": site.spec.replicas}
        assert site.num_ready("primary") == site.spec.replicas
        assert site.plan().is_empty


TestDegradeMachine = DegradeMachine.TestCase
TestDegradeMachine.settings = settings(
    max_examples=15,
    stateful_step_count=8,
)
