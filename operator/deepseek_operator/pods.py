"""What keeps a pod from existing or answering, in words that say what to do.

Pure. Works on the views of `views.view`; used for workers and for loaders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from deepseek_contract.status import ReadyReason
from deepseek_operator.kinds import Manifest

_IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
WORKER_REASONS: dict[str, ReadyReason] = {
    "ModelTooLarge": "ModelTooLarge",
    "OutOfMemory": "ModelTooLarge",
    "ModelNotFound": "ModelUnusable",
    "ModelUnusable": "ModelUnusable",
}
"""What some of the contract's reasons of a failed worker come to; all others: `WorkerCrashing`."""

_MOST_TELLING_FIRST: tuple[ReadyReason, ...] = (
    "ImageUnavailable",
    "SecretMissing",
    "ModelTooLarge",
    "ModelUnusable",
    "WorkerCrashing",
    "VolumeUnavailable",
    "Unschedulable",
    "PodsNotReady",
    "ModelLoading",
    "RolloutInProgress",
)

FIRST_LOOK_SECONDS = 10.0
"""How long the node of a worker that has started may take to see that it is ready, which it asks
by itself: at once or after the probe's period of 5 s, for 2 s at the most."""


@dataclass(frozen=True)
class Trouble:
    """Why a pod does not answer."""

    reason: ReadyReason
    message: str


def refusal_of(deployment: Manifest | None) -> Manifest | None:
    """The condition of a Deployment whose pods the API server refuses to create.

    Its message says why the first one was refused, however often and why ever others were since.
    """
    for condition in ((deployment or {}).get("status") or {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            found: Manifest = condition
            return found
    return None


def creation_refusal(deployment: Manifest | None) -> str | None:
    """Why the API server refuses to create the Deployment's pods, in its own words."""
    condition = refusal_of(deployment)
    return None if condition is None else str(condition.get("message", ""))


def with_refusal(deployment: Manifest, words: str) -> Manifest:
    """The Deployment, its pods refused in other words."""
    conditions = [
        condition | {"message": words} if condition["type"] == "ReplicaFailure" else condition
        for condition in deployment["status"]["conditions"]
    ]
    return deployment | {"status": deployment["status"] | {"conditions": conditions}}


def names_quota(refusal: str) -> bool:
    """Whether the API server refuses for a ResourceQuota."""
    return "exceeded quota" in refusal


def is_ready(pod: Manifest) -> bool:
    """Whether the pod answers requests."""
    return "deletionTimestamp" not in pod["metadata"] and _condition(pod, "Ready") == "True"


def is_running(pod: Manifest) -> bool:
    """Whether the pod has an address and its process runs, as far as its node has told."""
    status = pod["status"]
    return (
        "deletionTimestamp" not in pod["metadata"]
        and "podIP" in status
        and status.get("phase") == "Running"
        and any("running" in (c.get("state") or {}) for c in status.get("containers") or [])
    )


def has_run(pod: Manifest) -> bool:
    """Whether any process of the pod was ever started, as far as its node has told."""
    return any(
        kind in (container.get(state) or {})
        for container in pod["status"].get("containers") or []
        for state in ("state", "lastState")
        for kind in ("running", "terminated")
    )


def worst_trouble(pods: Iterable[Manifest], now: datetime) -> Trouble | None:
    """The most telling trouble among pods; those that are ending do not count."""
    troubles = [
        trouble
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and (trouble := _starting(pod, now) or pod_trouble(pod)) is not None
    ]
    return min(troubles, key=lambda t: _MOST_TELLING_FIRST.index(t.reason), default=None)


def first_look_seconds(pod: Manifest, now: datetime) -> float | None:
    """How long the node of a worker that has just started may still take to see that it is ready.

    None once it has had the time, of a pod that was ready since its process began, and where it is
    not known when the process began or the node told of it.
    """
    behind = [c for c in pod["status"].get("containers") or [] if not c.get("ready")]
    if "toldAt" not in pod or not all(container.get("started") for container in behind):
        return None
    begins = [((c.get("state") or {}).get("running") or {}).get("startedAt", "") for c in behind]
    conditions = pod["status"].get("conditions") or []
    since = [c.get("lastTransitionTime") for c in conditions if c["type"] == "Ready"]
    if not begins or not all(time is not None and time <= min(begins) for time in since):
        return None
    age = (now - datetime.fromisoformat(pod["toldAt"])).total_seconds()
    # A clock that is far from the node's must not put the look off.
    return FIRST_LOOK_SECONDS - age if abs(age) < FIRST_LOOK_SECONDS else None


def _starting(pod: Manifest, now: datetime) -> Trouble | None:
    if first_look_seconds(pod, now) is None:
        return None
    name = pod["metadata"]["name"]
    return Trouble("ModelLoading", f"Pod {name} has read its model and is about to take requests.")


def pod_trouble(pod: Manifest) -> Trouble | None:
    """Why one pod does not answer; None when it does, or has ended and is being replaced."""
    status = pod["status"]
    if is_ready(pod) or status.get("phase") in {"Succeeded", "Failed"}:
        return None
    found = placement_trouble(pod) or image_trouble(pod)
    if found is not None:
        return found
    name = pod["metadata"]["name"]
    containers = status.get("containers") or []
    # A sidecar that runs, or an init container that has done its work, is ready by itself.
    behind = [container for container in containers if not container.get("ready")]
    if containers and not behind:
        return _not_ready(name, is_started=True)
    for container in behind:
        found = _container_trouble(name, container)
        if found is not None:
            return found
    return Trouble(
        "RolloutInProgress",
        f"Pod {name} is being created. If this lasts, `kubectl describe pod {name}` says why.",
    )


def sentence(words: str) -> str:
    """Somebody else's words as a sentence, so that more can be said after it."""
    words = words.strip()
    return words if words.endswith((".", "!", "?")) or not words else f"{words}."


def placement_trouble(pod: Manifest) -> Trouble | None:
    """Why the scheduler finds no node, in its own words."""
    for condition in pod["status"].get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            words = condition.get("message", "")
            name = pod["metadata"]["name"]
            if "persistentvolumeclaim" in words.lower():
                return Trouble(
                    "VolumeUnavailable",
                    f"Pod {name} waits for its volume: {words!r}. `kubectl describe pvc` says"
                    " what the claim lacks.",
                )
            return Trouble(
                "Unschedulable",
                f"Pod {name} finds no node: {words!r}. Free or add what is missing, or change"
                " spec.gpu, spec.pod.resources, nodeSelector or tolerations.",
            )
    return None


def image_trouble(pod: Manifest) -> Trouble | None:
    """Why an image of the pod, its image volumes among them, cannot be had."""
    for container in pod["status"].get("containers") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _IMAGE_REASONS:
            return Trouble(
                "ImageUnavailable",
                f"Pod {pod['metadata']['name']} cannot get an image: {waiting['reason']}:"
                f" {sentence(waiting.get('message', ''))} Check its name and"
                " spec.pod.imagePullSecrets.",
            )
    return None


def _container_trouble(pod_name: str, container: Manifest) -> Trouble | None:
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    is_crashing = waiting.get("reason") == "CrashLoopBackOff" or "terminated" in state
    is_started = bool(container.get("started"))
    if ended and (is_crashing or ("running" in state and not is_started)):
        return _crash(pod_name, ended)
    if "running" in state:
        return _not_ready(pod_name, is_started=is_started)
    if waiting.get("reason") == "CreateContainerConfigError":
        return Trouble(
            "SecretMissing",
            f"Pod {pod_name} lacks something that its settings name: {waiting.get('message', '')}."
            " Create it, or change spec.pod.env.",
        )
    if waiting.get("reason") not in {None, "ContainerCreating", "PodInitializing"}:
        return Trouble(
            "PodsNotReady",
            f"Pod {pod_name} cannot start: {waiting['reason']}:"
            f" {sentence(waiting.get('message', ''))}",
        )
    return None


def _not_ready(pod_name: str, *, is_started: bool) -> Trouble:
    if not is_started:
        return Trouble("ModelLoading", f"Pod {pod_name} is reading its model into memory.")
    return Trouble(
        "PodsNotReady",
        f"Pod {pod_name} runs but does not take requests; `kubectl logs {pod_name}` says why.",
    )


@dataclass(frozen=True)
class LastWords:
    """Why a worker's process ended, by itself."""

    reason: str
    message: str


def last_words(container: Manifest) -> LastWords | None:
    """What a container's process said when it ended last; None where it said nothing."""
    for state in (container.get("state") or {}, container.get("lastState") or {}):
        ended = state.get("terminated")
        if ended is not None:
            return _words_of(ended)
    return None


def _words_of(ended: Manifest) -> LastWords | None:
    try:
        told = json.loads((ended.get("message") or "").strip())
        return LastWords(str(told["reason"]), str(told["message"]))
    except (ValueError, KeyError, TypeError):
        return None


def _crash(pod_name: str, ended: Manifest) -> Trouble:
    """What the end of a worker means: its own words, or those of the node."""
    if ended.get("reason") == "OOMKilled":
        return Trouble(
            "ModelTooLarge",
            f"Pod {pod_name} was killed for using more memory than its limit. Raise"
            " spec.pod.resources.limits.memory, or lower spec.model.maxContextTokens.",
        )
    told = _words_of(ended)
    if told is None:
        text = (ended.get("message") or "").strip()
        words = text[-500:] or f"exit code {ended.get('exitCode')}"
        return Trouble(
            "WorkerCrashing",
            f"Pod {pod_name} ended: {words}. `kubectl logs {pod_name} --previous` shows more.",
        )
    return Trouble(
        WORKER_REASONS.get(told.reason, "WorkerCrashing"),
        f"Pod {pod_name}: {sentence(told.message)}",
    )


def _condition(pod: Manifest, kind: str) -> str | None:
    for condition in pod["status"].get("conditions") or []:
        if condition["type"] == kind:
            return str(condition["status"])
    return None
