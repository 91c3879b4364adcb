"""What a pod's status means."""

from typing import get_args

import pytest
from scenes import ended, pod_of, unschedulable, waiting

from deepseek_contract.state import FailureReason
from deepseek_operator.pods import (
    WORKER_REASONS,
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

    trouble = worst_trouble(pods)

    assert trouble is not None
    assert trouble.reason == "ModelTooLarge"


def test_only_what_a_worker_can_say_is_told_apart() -> None:
    assert WORKER_REASONS.keys() <= set(get_args(FailureReason))


def test_pods_that_are_ending_do_not_count() -> None:
    pods = [pod_of("a", containers=[waiting("ErrImagePull")], deleting=True), pod_of(ready=True)]

    assert worst_trouble(pods) is None
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
