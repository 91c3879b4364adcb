"""What a pod's status means."""

from datetime import datetime, timedelta
from typing import get_args

import pytest
from scenes import NOW, Simulation, ended, pod_of, unschedulable, waiting

from deepseek_contract.state import FailureReason
from deepseek_operator.kinds import Manifest
from deepseek_operator.pods import (
    FIRST_LOOK_SECONDS,
    WORKER_REASONS,
    first_look_seconds,
    is_ready,
    pod_trouble,
    sentence,
    worst_trouble,
)

RUNNING = {"running": {"startedAt": "2026-05-01T12:00:00Z"}}
TOO_LARGE = '{"reason": "ModelTooLarge", "message": "needs 9 GiB, has 4 GiB: use a smaller one"}'
# What an admission webhook may have added to the worker's container.
SIDECAR = {"state": RUNNING, "started": True, "ready": True}
DONE = {"state": ended("", exit_code=0, reason="Completed"), "started": False, "ready": True}

CASES = {
    "it answers": (pod_of(ready=True), None),
    "it has ended": (pod_of(phase="Failed"), None),
    "it is being created": (
        pod_of(containers=[waiting("ContainerCreating")]), "RolloutInProgress",
    ),
    "nothing is known yet": (pod_of(), "RolloutInProgress"),
    "no node has a GPU": (pod_of(conditions=unschedulable()), "Unschedulable"),
    "its claim is not bound": (
        pod_of(conditions=unschedulable('persistentvolumeclaim "x" not found')),
        "VolumeUnavailable",
    ),
    "its image is not there": (
        pod_of(containers=[waiting("ImagePullBackOff")]), "ImageUnavailable",
    ),
    "its image may not be pulled": (
        pod_of(containers=[waiting("ErrImageNeverPull")]), "ImageUnavailable",
    ),
    "a secret of its variables is missing": (
        pod_of(containers=[waiting("CreateContainerConfigError", 'secret "s" not found')]),
        "SecretMissing",
    ),
    "the node cannot start it": (
        pod_of(containers=[waiting("RunContainerError", "no such file")]), "PodsNotReady",
    ),
    "it loads": (pod_of(containers=[{"state": RUNNING, "started": False}]), "ModelLoading"),
    "it runs and does not answer": (
        pod_of(containers=[{"state": RUNNING, "started": True}]), "PodsNotReady",
    ),
    "it loads again after a crash": (
        pod_of(containers=[{"state": RUNNING, "lastState": ended(TOO_LARGE)}]), "ModelTooLarge",
    ),
    "it answered once, crashed and is back": (
        pod_of(containers=[{"state": RUNNING, "started": True, "lastState": ended("x")}]),
        "PodsNotReady",
    ),
    "it loads beside a sidecar that runs": (
        pod_of(containers=[SIDECAR, {"state": RUNNING, "started": False}]), "ModelLoading",
    ),
    "its sidecar came up again after a crash": (
        pod_of(
            containers=[SIDECAR | {"lastState": ended("x")}, {"state": RUNNING, "started": False}]
        ),
        "ModelLoading",
    ),
    "it is being created after an init container": (
        pod_of(containers=[DONE, waiting("PodInitializing")]), "RolloutInProgress",
    ),
    "it loads after an init container": (
        pod_of(containers=[DONE, {"state": RUNNING, "started": False}]), "ModelLoading",
    ),
    "its init container fails": (
        pod_of(containers=[{"state": ended("no route")}, waiting("PodInitializing")]),
        "WorkerCrashing",
    ),
    "all its containers are ready and something outside says no": (
        pod_of(containers=[SIDECAR, {"state": RUNNING, "started": True, "ready": True}]),
        "PodsNotReady",
    ),
    "the model is too large": (
        pod_of(containers=[waiting("CrashLoopBackOff") | {"lastState": ended(TOO_LARGE)}]),
        "ModelTooLarge",
    ),
    "the model is broken": (
        pod_of(
            containers=[
                {"state": ended('{"reason": "ModelUnusable", "message": "tensor x is missing"}')}
            ]
        ),
        "ModelUnusable",
    ),
    "the node killed it for memory": (
        pod_of(containers=[{"state": ended("", exit_code=137, reason="OOMKilled")}]),
        "ModelTooLarge",
    ),
    "it ended without a word": (pod_of(containers=[{"state": ended("")}]), "WorkerCrashing"),
    "it ended with text that is no JSON": (
        pod_of(containers=[{"state": ended("Traceback ...")}]), "WorkerCrashing",
    ),
    "it ended with JSON of another form": (
        pod_of(containers=[{"state": ended("[1, 2]")}]), "WorkerCrashing",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pod", "reason"), CASES.values(), ids=CASES)
def test_a_pod_is_in_trouble_because(pod: dict, reason: str | None) -> None:
    trouble = pod_trouble(pod)

    assert (trouble.reason if trouble else None) == reason


def test_the_schedulers_words_are_quoted() -> None:
    trouble = pod_trouble(pod_of(conditions=unschedulable("0/3 nodes are available")))

    assert trouble is not None
    assert "'0/3 nodes are available'" in trouble.message


def test_the_workers_words_are_quoted() -> None:
    trouble = pod_trouble(pod_of(containers=[{"state": ended(TOO_LARGE)}]))

    assert trouble is not None
    assert "needs 9 GiB, has 4 GiB: use a smaller one" in trouble.message


def test_the_most_telling_trouble_of_several_pods_counts() -> None:
    pods = [
        pod_of("a", containers=[{"state": RUNNING}]),
        pod_of("b", conditions=unschedulable()),
        pod_of("c", containers=[{"state": ended(TOO_LARGE)}]),
    ]

    trouble = worst_trouble(pods, NOW)

    assert trouble is not None
    assert trouble.reason == "ModelTooLarge"


def test_only_what_a_worker_can_say_is_told_apart() -> None:
    assert WORKER_REASONS.keys() <= set(get_args(FailureReason))


def test_pods_that_are_ending_do_not_count() -> None:
    pods = [pod_of("a", containers=[waiting("ErrImagePull")], deleting=True), pod_of(ready=True)]

    assert worst_trouble(pods, NOW) is None
    assert not is_ready(pod_of(ready=True, deleting=True))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("connection refused", "connection refused."),
        ("It is full.", "It is full."),
        ("  why? ", "why?"),
        ("", ""),
    ],
)
def test_what_others_say_ends_as_a_sentence(words: str, told: str) -> None:
    assert sentence(words) == told


def at(seconds: float) -> str:
    """A time before or after now, as Kubernetes writes it."""
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def started(*, told: float | None = -1, changed: float = -60, **parts: object) -> Manifest:
    """A pod whose process began half a minute ago and whose node tells that it has started."""
    container = {"state": {"running": {"startedAt": at(-30)}}, "started": True, "ready": False}
    pod = pod_of(containers=[SIDECAR, container | parts], phase="Running")
    pod["status"]["conditions"][-1]["lastTransitionTime"] = at(changed)
    return pod if told is None else pod | {"toldAt": at(told)}


FIRST_LOOKS = {
    "it has just started": (started(), 9),
    "it came up again after a crash": (started(changed=-40, lastState=ended("x")), 9),
    "it began in the second in which the pod was told of": (started(changed=-30), 9),
    "the node's clock is a little ahead": (started(told=2), 12),
    "it had the time": (started(told=-10), None),
    "it was ready, and is not any more": (started(changed=-5), None),
    "it loads": (started(started=False), None),
    "it cannot start beside a sidecar": (started(state={"waiting": {"reason": "X"}}), None),
    "when its process began is not known": (started(state={"running": {}}), None),
    "when the node told is not known": (started(told=None), None),
    "the node's clock is far ahead": (started(told=3600), None),
    "it answers": (pod_of(ready=True) | {"toldAt": at(-1)}, None),
}


@pytest.mark.parametrize(("pod", "seconds"), FIRST_LOOKS.values(), ids=FIRST_LOOKS)
def test_a_worker_that_has_just_started_is_given_time_to_be_seen_ready(
    pod: Manifest, seconds: float | None
) -> None:
    assert first_look_seconds(pod, NOW) == seconds


@pytest.mark.parametrize(
    ("pod", "now", "reason"),
    [
        (started(), NOW, "ModelLoading"),
        (started(), NOW + timedelta(seconds=9), "PodsNotReady"),
        (started(changed=-5), NOW, "PodsNotReady"),
    ],
    ids=["just started", "ten seconds later", "not ready any more"],
)
def test_a_start_ends_as_ready_or_in_trouble(pod: Manifest, now: datetime, reason: str) -> None:
    trouble = worst_trouble([pod], now)

    assert trouble is not None
    assert trouble.reason == reason


def test_that_time_is_more_than_the_probe_takes() -> None:
    cluster = Simulation()
    cluster.settle()
    (container,) = cluster.deployment["spec"]["template"]["spec"]["containers"]
    probe = container["readinessProbe"]

    assert probe["periodSeconds"] + probe["timeoutSeconds"] < FIRST_LOOK_SECONDS
