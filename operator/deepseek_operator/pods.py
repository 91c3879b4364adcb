"""What keeps a pod from answering, in words that say what to do.

Pure. Works on the views of `views.view`; used for workers and for loaders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

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
_WORKER_REASONS: dict[str, ReadyReason] = {
    "ModelTooLarge": "ModelTooLarge",
    "OutOfMemory": "ModelTooLarge",
    "ModelNotFound": "ModelUnusable",
    "ModelInvalid": "ModelUnusable",
    "ModelUnusable": "ModelUnusable",
    "UnsupportedModel": "ModelUnusable",
}
"""The worker's words for why it ended; all others are `WorkerCrashing`."""

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


@dataclass(frozen=True)
class Trouble:
    """Why a pod does not answer."""

    reason: ReadyReason
    message: str


def is_ready(pod: Manifest) -> bool:
    """Whether the pod answers requests."""
    return "deletionTimestamp" not in pod["metadata"] and _condition(pod, "Ready") == "True"


def worst_trouble(pods: Iterable[Manifest]) -> Trouble | None:
    """The most telling trouble among pods; those that are ending do not count."""
    troubles = [
        trouble
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"] and (trouble := pod_trouble(pod)) is not None
    ]
    return min(troubles, key=lambda t: _MOST_TELLING_FIRST.index(t.reason), default=None)


def pod_trouble(pod: Manifest) -> Trouble | None:
    """Why one pod does not answer; None when it does, or has ended and is being replaced."""
    status = pod["status"]
    if is_ready(pod) or status.get("phase") in {"Succeeded", "Failed"}:
        return None
    found = placement_trouble(pod) or image_trouble(pod)
    if found is not None:
        return found
    name = pod["metadata"]["name"]
    for container in status.get("containers") or []:
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


def _crash(pod_name: str, ended: Manifest) -> Trouble:
    """What the end of a worker means: its own words, or those of the node."""
    if ended.get("reason") == "OOMKilled":
        return Trouble(
            "ModelTooLarge",
            f"Pod {pod_name} was killed for using more memory than its limit. Raise"
            " spec.pod.resources.limits.memory, or lower spec.model.maxContextTokens.",
        )
    text = (ended.get("message") or "").strip()
    try:
        told = json.loads(text)
        reason, words = str(told["reason"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        words = text[-500:] or f"exit code {ended.get('exitCode')}"
        return Trouble(
            "WorkerCrashing",
            f"Pod {pod_name} ended: {words}. `kubectl logs {pod_name} --previous` shows more.",
        )
    return Trouble(
        _WORKER_REASONS.get(reason, "WorkerCrashing"), f"Pod {pod_name}: {sentence(words)}"
    )


def _condition(pod: Manifest, kind: str) -> str | None:
    for condition in pod["status"].get("conditions") or []:
        if condition["type"] == kind:
            return str(condition["status"])
    return None
