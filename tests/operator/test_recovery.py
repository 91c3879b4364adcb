"""Level 2 of the recovery ladder: who leaves his node, how often, and what then."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from scenes import CPU, NOW, Simulation, ended, pod_of
from test_workers import SILENCE, after, answer

from deepseek_operator.kinds import Manifest
from deepseek_operator.recovery import (
    PATIENCE_SECONDS,
    QUARANTINE_LABEL,
    QUARANTINED_AT,
    SILENT_GRACE_SECONDS,
    SILENT_PATIENCE_SECONDS,
    Case,
    Decision,
    decide,
    pause_seconds,
    quarantine_patch,
    trusted,
)
from deepseek_operator.status import notes
from deepseek_operator.workers import MISSES, Reading, Sample

OWNER = {"apiVersion": "deepseek.dev/v1alpha1", "kind": "DeepSeekDeployment", "name": "chat",
         "uid": "u"}  # fmt: skip
WELL = after(answer())
LOST = after(answer(), *[SILENCE] * MISSES)
NEVER_HEARD = after(*[SILENCE] * MISSES)
STALLED = after(answer(is_stalled=True, seconds_since_step=12.0))
BROKEN = after(answer(phase="failed", reason="DeviceFault", message="ECC"))
EXHAUSTED = after(answer(is_exhausted=True, out_of_memory_failures=3))


RUNS = {"name": "worker", "state": {"running": {}}}


def worker(
    name: str, node: str | None = "n1", *, ready: bool = True, made: datetime | None = None,
    **values: Any,
) -> Manifest:  # fmt: skip
    pod = pod_of(name, ready=ready, node=node, **{"containers": [RUNS] * ready, **values})
    if made is not None:
        pod["metadata"]["creationTimestamp"] = stamp(made)
    return pod


def stamp(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def quarantined(
    name: str = "old", node: str = "n1", *, age: float = 0, cause: str = "NodeSilent",
    deleted: float | None = None,
) -> Manifest:  # fmt: skip
    pod = worker(name, node)
    at = (NOW - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    pod["metadata"]["annotations"] = {
        QUARANTINED_AT: at,
        "deepseek.dev/quarantine-cause": cause,
        "deepseek.dev/quarantine-tier": "primary",
    }
    if deleted is not None:
        ends = NOW - timedelta(seconds=deleted)
        pod["metadata"]["deletionTimestamp"] = ends.strftime("%Y-%m-%dT%H:%M:%SZ")
    return pod


def case(ready: dict[str, tuple[str, Reading | None]] | None = None, **values: Any) -> Case:
    """A case of Ready pods, each on a node with a reading."""
    pods = ready or {}
    made = tuple(worker(name, node) for name, (node, _) in pods.items())
    readings = {
        f"uid-of-{name}": reading for name, (_, reading) in pods.items() if reading is not None
    }
    given = {
        "pods": made, "quarantined": (), "wanted": {"primary": len(made)}, "readings": readings,
        "now": NOW, **values,
    }  # fmt: skip
    given.setdefault("tier_of", {pod["metadata"]["uid"]: "primary" for pod in given["pods"]})
    return Case(**given)


def moved(decision: Decision) -> dict[str, str]:
    return {sick.pod["metadata"]["name"]: sick.cause for sick in decision.quarantine}


def ended_pods(decision: Decision) -> dict[str, int | None]:
    return {ending.pod["metadata"]["name"]: ending.grace_seconds for ending in decision.end}


class TestWhoIsSick:
    @pytest.mark.parametrize(
        ("reading", "cause"),
        [
            pytest.param(WELL, None, id="a worker that answers"),
            pytest.param(None, None, id="a worker that was not asked yet"),
            pytest.param(after(answer(), SILENCE, SILENCE), None, id="two silences"),
            pytest.param(LOST, "NodeSilent", id="three silences"),
            pytest.param(NEVER_HEARD, None, id="one that never answered, alone"),
            pytest.param(after(answer(), *[Sample("refused")] * 9), None, id="a closed port"),
            pytest.param(after(answer(), *[Sample("unreadable")] * 9), None, id="nonsense"),
            pytest.param(after(*[Sample("forbidden")] * 9), None, id="a wrong token"),
            pytest.param(STALLED, "EngineStalled", id="a stalled engine"),
            pytest.param(BROKEN, "DeviceFault", id="a broken device"),
            pytest.param(EXHAUSTED, "MemoryExhausted", id="used-up retries"),
            pytest.param(
                after(answer(phase="failed", reason="InternalError")), None, id="a bug of ours"
            ),
            pytest.param(
                after(answer(phase="failed", reason="ModelTooLarge")), None, id="a large model"
            ),
            pytest.param(
                after(answer(is_stalled=True), Sample("unreadable")), None, id="a stall long ago"
            ),
        ],
    )
    def test_by_what_it_says(self, reading: Reading | None, cause: str | None) -> None:
        decision = decide(case({"a": ("n1", reading)}))

        assert moved(decision) == ({"a": cause} if cause else {})

    def test_beside_one_that_answers_silence_counts_without_a_first_answer(self) -> None:
        """So that an operator that started after the loss sees it too."""
        both = {"a": ("n1", NEVER_HEARD), "b": ("n2", WELL)}

        assert moved(decide(case(both))) == {"a": "NodeSilent"}

    def test_but_not_of_one_that_is_not_ready(self) -> None:
        pods = (worker("a", "n1", ready=False), worker("b", "n2"))
        readings = {"uid-of-a": NEVER_HEARD, "uid-of-b": WELL}

        assert moved(decide(case(pods=pods, readings=readings, wanted={"primary": 2}))) == {}

    def test_a_deaf_operator_moves_nobody_for_silence(self) -> None:
        both = {"a": ("n1", LOST), "b": ("n2", BROKEN)}

        assert moved(decide(case(both, is_deaf=True))) == {"b": "DeviceFault"}

    @pytest.mark.parametrize(
        ("reading", "ready", "is_moved"),
        [
            pytest.param(LOST, True, True, id="silent"),
            pytest.param(NEVER_HEARD, True, True, id="never heard"),
            pytest.param(None, True, True, id="never asked"),
            pytest.param(WELL, False, True, id="answers, and gets no requests any more"),
            pytest.param(WELL, True, False, id="answers and is ready"),
        ],
    )
    def test_on_a_node_that_the_cluster_calls_lost(
        self, reading: Reading | None, ready: bool, is_moved: bool
    ) -> None:
        pods = (worker("a", "n1", ready=ready),)
        readings = {"uid-of-a": reading} if reading else {}
        found = case(pods=pods, readings=readings, ready_nodes={"n1": False}, is_deaf=True)

        assert bool(decide(found).quarantine) is is_moved

    def test_a_node_that_is_gone_is_lost(self) -> None:
        assert moved(decide(case({"a": ("n1", None)}, ready_nodes={"n2": True})))

    def test_pods_that_end_or_have_no_node_are_left_alone(self) -> None:
        pods = (worker("a", "n1", deleting=True), worker("b", None, ready=False))
        readings = {"uid-of-a": LOST, "uid-of-b": LOST}

        assert decide(case(pods=pods, readings=readings)).quarantine == ()

    @pytest.mark.parametrize(
        ("restarts", "reason", "is_moved"),
        [
            (2, "MemoryHeld", False),
            (3, "MemoryHeld", True),
            (5, "DeviceUnavailable", True),
            (9, "ModelUnusable", False),
            (9, None, False),
        ],
    )
    def test_a_worker_that_ends_again_and_again_for_its_device(
        self, restarts: int, reason: str | None, is_moved: bool
    ) -> None:
        words = json.dumps({"reason": reason, "message": "said"}) if reason else "Killed"
        container = {"name": "worker", "restartCount": restarts, "lastState": ended(words)}
        pods = (worker("a", "n1", ready=False, containers=[container]),)

        assert bool(decide(case(pods=pods)).quarantine) is is_moved


def stored(*switches: tuple[str, str, float], count: int | None = None) -> dict[str, Any]:
    """`status.recovery` with switches of (pod, node, seconds ago)."""
    entries = [
        {
            "time": (NOW - timedelta(seconds=ago)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "pod": pod,
            "node": node,
            "cause": "NodeSilent",
        }
        for pod, node, ago in switches
    ]
    return {"level": 0, "nodeSwitches": count or len(entries), "switches": entries}


OLD = NOW - timedelta(hours=2)


def zone(number: int, *, made: datetime = OLD, **values: Any) -> Case:
    """A lost zone in which an object has so many pods, on a node each."""
    names = [f"z{n}" for n in range(number)]
    pods = tuple(worker(f"p-{name}", name, made=made) for name in names)
    nodes = dict.fromkeys(names, False) | {f"well-{n}": True for n in range(2 * number)}
    return case(pods=pods, ready_nodes=nodes, **values)


class TestHowOften:
    def test_all_pods_of_a_node_leave_it_at_once(self) -> None:
        found = decide(case({"a": ("n1", LOST), "b": ("n1", LOST), "c": ("n2", WELL)}))

        assert moved(found) == {"a": "NodeSilent", "b": "NodeSilent"}

    def test_another_node_with_a_fault_waits(self) -> None:
        """What made one engine stall may be on its way to the others."""
        pods = {"a": ("n1", STALLED), "b": ("n2", STALLED), "c": ("n3", STALLED)}

        found = decide(case(pods))

        assert moved(found) == {"a": "EngineStalled"}
        assert found.look_again_seconds == 30
        assert found.demand is None

    @pytest.mark.parametrize(
        ("switches", "is_moved"),
        [
            pytest.param([], True, id="the first"),
            pytest.param([("x", "n0", 29)], False, id="within the pause"),
            pytest.param([("x", "n0", 30)], True, id="after the pause"),
            pytest.param([("x", "n0", 120), ("y", "n9", 59)], False, id="the pause doubles"),
            pytest.param([("x", "n0", 120), ("y", "n9", 60)], True, id="and ends"),
            pytest.param([("x", "n1", 59)], True, id="more of the same node"),
            pytest.param([("x", "n0", -3000)], False, id="a clock that was set back"),
            pytest.param([("x", "n0", -4000)], True, id="set back by more than an hour"),
            pytest.param([("x", "n0", 3601)], True, id="longer than an hour ago"),
        ],
    )
    def test_between_two_nodes_there_is_a_pause(self, switches: list[Any], is_moved: bool) -> None:
        found = decide(case({"a": ("n1", LOST)}, status=stored(*switches)))

        assert bool(found.quarantine) is is_moved
        assert found.demand is None

    @pytest.mark.parametrize(
        ("is_heard", "is_called_lost", "number"),
        [
            pytest.param(True, False, 3, id="silent, and another one answers"),
            pytest.param(False, True, 3, id="the cluster calls the nodes lost"),
            pytest.param(False, False, 1, id="nobody answers: it may be us"),
        ],
    )
    def test_nodes_that_are_lost_together_are_left_together(
        self, is_heard: bool, is_called_lost: bool, number: int
    ) -> None:
        lost = ("n1", "n2", "n3")
        pods = tuple(worker(f"p-{node}", node, made=OLD) for node in (*lost, "n4"))
        readings = {f"uid-of-p-{node}": LOST for node in lost}
        readings["uid-of-p-n4"] = WELL if is_heard else NEVER_HEARD
        nodes = {f"n{n}": True for n in range(9)} | dict.fromkeys(lost, not is_called_lost)

        found = decide(case(pods=pods, readings=readings, ready_nodes=nodes))

        assert len(found.quarantine) == number
        assert found.demand is None

    def test_within_the_budget(self) -> None:
        found = decide(zone(9, switches_per_hour=5))

        assert len(found.quarantine) == 5
        assert "5 of 5 in the last hour" in (found.demand or "")

    def test_nodes_that_are_called_lost_one_by_one_are_left_as_they_are(self) -> None:
        """As a zone is: its nodes' heartbeats are missed over a minute."""
        status = stored(("x", "n7", 50), ("y", "n8", 20))

        assert len(decide(zone(3, status=status)).quarantine) == 3

    @pytest.mark.parametrize(
        ("seconds", "number"), [(59, 0), (60, 1)], ids=["too early", "after the pause"]
    )
    def test_a_replacement_that_loses_its_node_too_waits(self, seconds: int, number: int) -> None:
        """It may be what breaks the nodes."""
        status = stored(("x", "n7", 600), ("y", "n8", seconds))
        made = NOW - timedelta(seconds=seconds - 1)

        assert len(decide(zone(1, made=made, status=status)).quarantine) == number

    def test_a_replacement_does_not_go_with_the_pods_of_the_node_that_it_lost(self) -> None:
        """Those were there before it, so it may be what broke the node."""
        status = stored(("x", "n7", 10), ("y", "z0", 1))
        made = NOW - timedelta(seconds=9)

        assert decide(zone(1, made=made, status=status)).quarantine == ()
        assert len(decide(zone(1, status=status)).quarantine) == 1

    def test_a_loss_of_many_nodes_is_one_event_for_those_who_wait(self) -> None:
        status = stored(*((f"x{n}", f"n{n}", 34 - n) for n in range(10, 14)))
        made = NOW - timedelta(seconds=15)

        waits = decide(zone(1, made=made, status=status, switches_per_hour=60))

        assert waits.quarantine == ()
        assert waits.look_again_seconds == 30 - 21

    def test_but_not_one_that_never_ran_there(self) -> None:
        """It was placed on a node that was lost already, which the cluster had not noticed."""
        pods = (worker("a", "n1", ready=False, made=NOW - timedelta(seconds=15)),)
        status = stored(("x", "n7", 20))

        found = decide(case(pods=pods, ready_nodes={"n1": False, "n2": True}, status=status))

        assert set(moved(found)) == {"a"}

    def test_the_pause_doubles_up_to_ten_minutes(self) -> None:
        assert [pause_seconds(n) for n in (1, 2, 3, 5, 6, 60)] == [30, 60, 120, 480, 600, 600]

    def test_a_used_up_budget_asks_for_a_fallback(self) -> None:
        switches = [(f"p{n}", f"n{n}", 700 + n) for n in range(6)]

        found = decide(case({"a": ("n1", LOST)}, status=stored(*switches)))

        assert found.quarantine == ()
        assert found.demand is not None
        assert "6 of 6 in the last hour" in found.demand
        assert found.status is not None
        assert found.status["level"] == 3
        # The oldest switch leaves the hour then.
        assert found.look_again_seconds == pytest.approx(3600 - 705)

    def test_a_budget_of_none_leaves_everything_to_the_fallback(self) -> None:
        found = decide(case({"a": ("n1", BROKEN)}, switches_per_hour=0))

        assert found.quarantine == ()
        assert "0 of 0" in (found.demand or "")

    def test_the_last_of_the_budget_is_used_and_the_rest_asks(self) -> None:
        found = decide(case({"a": ("n1", LOST), "b": ("n1", LOST)}, switches_per_hour=1))

        assert moved(found) == {"a": "NodeSilent"}
        assert found.demand is not None

    def test_a_pod_in_quarantine_counts_before_the_status_knows_it(self) -> None:
        """The operator was killed between the two writes."""
        found = decide(
            case({"a": ("n2", LOST)}, quarantined=(quarantined(age=5),), switches_per_hour=1)
        )

        assert found.quarantine == ()
        assert found.status is not None
        assert found.status["nodeSwitches"] == 1
        assert [entry["pod"] for entry in found.status["switches"]] == ["old"]


class TestWhatBecomesOfIt:
    def ending(self, pod: Manifest, **values: Any) -> Decision:
        given = {"pods": (), "quarantined": (pod,), "wanted": {"primary": 1}, **values}
        return decide(case(**given))

    def test_it_drains_when_its_replacement_is_bound(self) -> None:
        pod = quarantined(cause="EngineStalled", age=3)

        found = self.ending(pod, pods=(worker("new", "n2", ready=False),))

        assert ended_pods(found) == {"old": None}

    def test_one_that_says_nothing_gets_little_time(self) -> None:
        found = self.ending(quarantined(age=3), pods=(worker("new", "n2", ready=False),))

        assert ended_pods(found) == {"old": SILENT_GRACE_SECONDS}

    def test_it_keeps_its_node_away_until_then(self) -> None:
        found = self.ending(quarantined(age=3), pods=(worker("new", None, ready=False),))

        assert found.end == ()
        assert found.look_again_seconds == SILENT_PATIENCE_SECONDS - 3

    @pytest.mark.parametrize(
        ("cause", "patience"),
        [("EngineStalled", PATIENCE_SECONDS), ("NodeSilent", SILENT_PATIENCE_SECONDS)],
    )
    def test_where_no_other_node_takes_it_the_units_are_given_back(
        self, cause: str, patience: float
    ) -> None:
        early = self.ending(quarantined(cause=cause, age=patience - 1))
        late = self.ending(quarantined(cause=cause, age=patience))

        assert early.end == ()
        assert set(ended_pods(late)) == {"old"}

    def test_on_a_node_that_the_cluster_calls_lost_it_is_deleted_at_once(self) -> None:
        found = self.ending(quarantined(age=1), ready_nodes={"n1": False})

        assert ended_pods(found) == {"old": 0}

    @pytest.mark.parametrize(
        ("overdue", "node_is_ready", "grace"),
        [(4, False, None), (5, False, 0), (600, True, None), (5, None, 0)],
    )
    def test_one_that_does_not_end_is_forced_only_on_a_lost_node(
        self, overdue: float, node_is_ready: bool | None, grace: int | None
    ) -> None:
        nodes = None if node_is_ready is None else {"n1": node_is_ready}

        found = self.ending(quarantined(deleted=overdue), ready_nodes=nodes)

        assert ended_pods(found) == ({} if grace is None else {"old": grace})

    def test_a_tier_that_is_gone_needs_no_replacement(self) -> None:
        found = self.ending(quarantined(age=1, cause="DeviceFault"), wanted={})

        assert ended_pods(found) == {"old": None}


class TestStatus:
    def test_while_nothing_happens_there_is_none(self) -> None:
        assert decide(case({"a": ("n1", WELL)})) == Decision()

    def test_a_switch_is_told_and_counted(self) -> None:
        found = decide(case({"a": ("n1", LOST)}, status=stored(("x", "n0", 1000), count=7)))

        assert found.status == {
            "level": 2,
            "batchRetries": 0,
            "nodeSwitches": 8,
            "degradations": 0,
            "message": "Pod a on node n1 did not answer 3 times in a row (no answer in time).",
            "lastChangeTime": "2026-05-01T12:00:00Z",
            "switches": [
                {"time": "2026-05-01T11:43:20Z", "pod": "x", "node": "n0", "cause": "NodeSilent"},
                {"time": "2026-05-01T12:00:00Z", "pod": "a", "node": "n1", "cause": "NodeSilent"},
            ],
        }

    def test_the_hour_forgets_and_the_count_does_not(self) -> None:
        found = decide(case({"a": ("n1", WELL)}, status=stored(("x", "n0", 3601), count=7)))

        assert found.status == {
            "level": 0, "batchRetries": 0, "nodeSwitches": 7, "degradations": 0,
        }  # fmt: skip

    def test_level_one_lasts_a_minute_after_a_retry(self) -> None:
        seconds = NOW.timestamp()
        retried = after(answer(), answer(out_of_memory_retries=2), start=seconds - 30)

        now = decide(case({"a": ("n1", retried)}))
        later = decide(
            case({"a": ("n1", retried)}, now=NOW + timedelta(seconds=61), status=now.status or {})
        )

        assert now.status is not None
        assert (now.status["level"], now.status["batchRetries"]) == (1, 2)
        assert now.look_again_seconds is not None
        assert later.status is not None
        assert later.status["level"] == 0

    def test_level_three_while_a_fallback_serves(self) -> None:
        found = decide(case({"a": ("n1", WELL)}, is_degraded=True, degradations=4))

        assert found.status is not None
        assert (found.status["level"], found.status["degradations"]) == (3, 4)

    def test_a_status_that_somebody_broke_is_no_error(self) -> None:
        broken = {"switches": [{"time": "yesterday"}, "x", {}], "nodeSwitches": -3, "level": 1}

        assert moved(decide(case({"a": ("n1", LOST)}, status=broken))) == {"a": "NodeSilent"}


def test_the_patch_takes_the_pod_out_of_service_and_gives_it_to_the_object() -> None:
    (sick,) = decide(case({"a": ("n1", LOST)})).quarantine

    patch = quarantine_patch(sick, OWNER, ("deepseek.dev/deployment",), "primary", NOW)

    assert patch["metadata"]["uid"] == "uid-of-a"
    assert patch["metadata"]["labels"] == {
        "deepseek.dev/deployment": None,
        QUARANTINE_LABEL: "chat",
    }
    assert patch["metadata"]["ownerReferences"] == [OWNER]
    assert "did not answer 3 times" in str(patch["metadata"]["annotations"])


@pytest.mark.parametrize(
    ("lost", "ready", "is_trusted"), [(333, 667, True), (6, 5, False), (2, 0, True), (3, 0, False)]
)
def test_most_nodes_are_not_lost_at_once(lost: int, ready: int, is_trusted: bool) -> None:
    nodes = {f"l{n}": False for n in range(lost)} | {f"r{n}": True for n in range(ready)}

    assert (trusted(nodes) is not None) is is_trusted


class Ladder(RuleBasedStateMachine):
    """Any sequence of faults, silences, nodes, replacements, restarts and clocks."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = 4
        self.now = NOW
        self.pods = {f"p{n}": worker(f"p{n}", f"n{n}", made=NOW) for n in range(3)}
        self.readings: dict[str, Reading] = dict.fromkeys(self.pods, WELL)
        self.jail: dict[str, Manifest] = {}
        self.nodes = {f"n{n}": True for n in range(5)}
        self.status: dict[str, Any] = {}
        self.switch_times: list[datetime] = []
        self.cause_of_being: dict[str, datetime] = {}
        """Of each replacement, when the pod was moved that it replaces."""
        self.gaps: list[float] = []
        """Seconds from a switch to that of the replacement."""
        self.number = 3

    def case(self) -> Case:
        named = {**self.pods, **self.jail}
        return Case(
            pods=tuple(self.pods.values()),
            quarantined=tuple(self.jail.values()),
            wanted={"primary": 3},
            readings={
                named[name]["metadata"]["uid"]: reading
                for name, reading in self.readings.items()
                if name in named
            },
            now=self.now,
            tier_of={pod["metadata"]["uid"]: "primary" for pod in self.pods.values()},
            ready_nodes=trusted(self.nodes),
            switches_per_hour=self.budget,
            status=self.status,
        )

    @initialize(budget=st.integers(0, 4))
    def begin(self, budget: int) -> None:
        self.budget = budget

    @rule(
        which=st.integers(0, 2),
        reading=st.sampled_from([WELL, LOST, NEVER_HEARD, STALLED, BROKEN, EXHAUSTED]),
    )
    def hear(self, which: int, reading: Reading) -> None:
        self.readings[sorted(self.pods)[which]] = reading

    @rule(node=st.integers(0, 4), is_ready=st.booleans())
    def change_node(self, node: int, is_ready: bool) -> None:
        self.nodes[f"n{node}"] = is_ready

    @rule(seconds=st.sampled_from([1, 7, 30, 61, 600, 2000]))
    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(writes_status=st.booleans())
    def look(self, writes_status: bool) -> None:
        """One look; now and then the operator is killed before it has written the status."""
        before = self.case()
        decision = decide(before)
        for sick in decision.quarantine:
            name = sick.pod["metadata"]["name"]
            reading = self.readings.get(name)
            node = sick.pod["spec"]["nodeName"]
            is_well = reading is WELL and self.nodes[node]
            assert not is_well, f"{name} is well and on a ready node"
            patch = quarantine_patch(sick, OWNER, (), "primary", self.now)
            pod = self.pods.pop(name)
            pod["metadata"]["annotations"] = patch["metadata"]["annotations"]
            self.jail[name] = pod
            self.switch_times.append(self.now)
            cause = self.cause_of_being.get(name)
            if cause is not None:
                self.gaps.append((self.now - cause).total_seconds())
            fresh = f"p{self.number}"
            self.cause_of_being[fresh] = self.now
            self.number += 1
            away = {q["spec"]["nodeName"] for q in self.jail.values()}
            free = [n for n, is_ready in self.nodes.items() if is_ready and n not in away]
            self.pods[fresh] = worker(
                fresh, free[0] if free else None, ready=bool(free), made=self.now
            )
            self.readings[fresh] = WELL
        for ending in decision.end:
            del self.jail[ending.pod["metadata"]["name"]]
        if decision.status is not None and (writes_status or decision.end):
            self.status = dict(decision.status)

    @precondition(lambda self: any(not p["spec"].get("nodeName") for p in self.pods.values()))
    @rule()
    def schedule(self) -> None:
        away = {q["spec"]["nodeName"] for q in self.jail.values()}
        free = [n for n, is_ready in self.nodes.items() if is_ready and n not in away]
        for name, pod in self.pods.items():
            if not pod["spec"].get("nodeName") and free:
                made = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
                self.pods[name] = worker(name, free[0], made=made)

    @invariant()
    def never_more_than_the_budget(self) -> None:
        for time in self.switch_times:
            within = [t for t in self.switch_times if time <= t < time + timedelta(hours=1)]
            assert len(within) <= self.budget

    @invariant()
    def a_replacement_is_not_moved_on_at_once(self) -> None:
        assert min(self.gaps, default=30.0) >= 30

    @invariant()
    def steady_input_comes_to_rest(self) -> None:
        """Carried out, a decision is not made a second time."""
        found = self.case()
        decision = decide(found)
        moved_pods = {sick.pod["metadata"]["uid"] for sick in decision.quarantine}
        left = tuple(p for p in found.pods if p["metadata"]["uid"] not in moved_pods)
        again = decide(replace(found, pods=left, status=decision.status or {}))

        assert again.quarantine == ()


Ladder.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_ladder = Ladder.TestCase


class TestThroughThePlan:
    FALLBACK: ClassVar = {
        "name": "small", "model": {"source": "package://tiny"}, "gpu": {"mode": "cpu"},
    }  # fmt: skip

    def broken(self, **recovery: Any) -> Simulation:
        """An object with a fallback whose only pod tells of a broken device."""
        cluster = Simulation({**CPU, "fallbacks": [self.FALLBACK], "recovery": recovery})
        cluster.settle()
        cluster.pods = [worker("chat-primary-1", ready=False, phase="Running")]
        cluster.readings = {"uid-of-chat-primary-1": BROKEN}
        return cluster

    def test_within_the_budget_the_pod_moves_and_the_primary_stays(self) -> None:
        todo = self.broken().plan()

        assert len(todo.ladder.quarantine) == 1
        assert not todo.is_empty
        assert todo.decision.reason == "PrimaryServing"

    def test_without_budget_the_fallback_takes_over_at_once(self) -> None:
        cluster = self.broken(nodeSwitchesPerHour=0)

        todo = cluster.reconcile()

        assert todo.ladder.quarantine == ()
        assert todo.decision.degraded
        assert "node switching is used up" in todo.decision.message
        assert ("Deployment", "chat-small") in {
            (manifest["kind"], manifest["metadata"]["name"]) for manifest in todo.apply
        }
        assert cluster.status["recovery"]["level"] == 3

    def test_the_switch_is_told_in_history_and_events_once(self) -> None:
        cluster = self.broken()
        jailed = quarantined("chat-primary-1", cause="DeviceFault")
        cluster.quarantined = [jailed]
        cluster.pods = []
        before = cluster.status

        cluster.reconcile()
        told = notes(before, cluster.status)
        again = cluster.status
        cluster.reconcile()

        words = "Pod chat-primary-1 left node n1, because its device failed."
        assert words in str(cluster.status["history"])
        assert [note.message for note in told if note.reason == "NodeSwitched"] == [words]
        assert not [n for n in notes(again, cluster.status) if n.reason == "NodeSwitched"]
        assert cluster.status["recovery"]["nodeSwitches"] == 1
