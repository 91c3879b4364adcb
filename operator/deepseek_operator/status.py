"""What an object's status says: conditions with fixed reasons, counts, history.

Pure. Every condition is computed anew from what is observed; the previous status only gives the
times of transitions and the history, so that a lost status comes back by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_contract.status import HISTORY_LENGTH, ConditionReason, ConditionType
from deepseek_operator.kinds import Manifest, Reference
from deepseek_operator.plan import ModelState, Observed, creation_refusal
from deepseek_operator.pods import Trouble, is_ready, worst_trouble
from deepseek_operator.render import MODEL_ANNOTATION, PRIMARY, selector

MESSAGE_LENGTH = 1024
HISTORY_MESSAGE_LENGTH = 512
_PASSING = frozenset({"ModelLoading", "PodsNotReady", "RolloutInProgress"})
"""Troubles of pods that do not hold up a rollout but are part of it."""
_ON_THE_WAY = frozenset(
    {
        "InImageVolume",
        "InWorkerImage",
        "ModelLoading",
        "ModelNotCached",
        "OnNode",
        "OnVolume",
        "RolloutInProgress",
        "Waiting",
    }
)
_ASKED_FOR = frozenset({"Downloading", "ScaledToZero"})
_TOLD = ("Ready", "ModelCached")
"""Conditions whose changes make history and Kubernetes events."""


@dataclass(frozen=True)
class Refusal:
    """A child that could not be written."""

    child: Reference
    message: str
    is_taken: bool = False
    """An object of this name exists and is somebody else's."""


@dataclass(frozen=True)
class Note:
    """A Kubernetes event to post."""

    type: Literal["Normal", "Warning"]
    reason: ConditionReason
    message: str


@dataclass(frozen=True)
class _State:
    """A condition without its times."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: ConditionReason
    message: str


@dataclass(frozen=True)
class _Rollout:
    """How far the Deployment's pods are what the spec wants."""

    wanted: int
    needed: int
    """How many have to answer for the object to be Ready."""
    replicas: int = 0
    updated: int = 0
    available: int = 0
    ready: int = 0
    is_complete: bool = False
    """Every pod is of the current generation, and there are as many as wanted."""

    @property
    def current_ready(self) -> int:
        """Pods of the current generation that answer, as far as the counts tell."""
        return self.ready if self.is_complete else min(self.ready, self.updated)


@dataclass(frozen=True)
class _Picture:
    """All that the conditions are made from."""

    spec: DeepSeekDeploymentSpec
    observed: Observed
    model: ModelState
    rollout: _Rollout
    trouble: Trouble | None
    refusals: tuple[Refusal, ...]


def status_of(
    spec: DeepSeekDeploymentSpec,
    observed: Observed,
    model: ModelState,
    refusals: Iterable[Refusal],
    now: datetime,
) -> dict[str, Any]:
    """The whole status of an object whose spec is sound."""
    rollout = _rollout(spec, observed)
    picture = _Picture(spec, observed, model, rollout, _trouble(observed), tuple(refusals))
    states = (
        next(state for check in _READY_CHECKS if (state := check(picture)) is not None),
        _progressing(picture),
        _State("Degraded", "False", "PrimaryServing", "The primary model is the one that serves."),
        _quota(observed),
        _State("ScalingActive", "False", "FixedReplicas", "spec.replicas sets the number of pods."),
        _State("ModelCached", model.status, model.reason, model.message),
    )
    return _assembled(observed, states, rollout, _active_model(spec, observed), now)


def invalid_status(observed: Observed, problem: str, now: datetime) -> dict[str, Any]:
    """The status of an object whose spec this version of the operator cannot read."""
    message = f"The spec is not understood: {problem} Correct it, or upgrade operator and CRD."
    states = (
        _State("Ready", "False", "InvalidSpec", message),
        _State("Progressing", "False", "InvalidSpec", message),
    )
    return _assembled(observed, states, _Rollout(0, 1), None, now)


def is_transition(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether more than messages differ."""
    return _without_messages(old) != _without_messages(new)


def notes(old: dict[str, Any], new: dict[str, Any]) -> list[Note]:
    """The events that tell of the change from one status to the next.

    What only lies on the way is no event: the conditions and the history have it.
    """
    told = []
    for condition in _changed(old, new):
        if condition["reason"] in _ON_THE_WAY:
            continue
        is_good = condition["status"] == "True" or condition["reason"] in _ASKED_FOR
        kind: Literal["Normal", "Warning"] = "Normal" if is_good else "Warning"
        told.append(Note(kind, condition["reason"], condition["message"]))
    return told


def _rollout(spec: DeepSeekDeploymentSpec, observed: Observed) -> _Rollout:
    wanted = spec.replicas
    needed = max(1, min(spec.min_available, wanted))
    live = observed.deployment
    if live is None:
        return _Rollout(wanted, needed)
    counts = live.get("status") or {}
    replicas = counts.get("replicas", 0)
    updated = counts.get("updatedReplicas", 0)
    is_current = (
        counts.get("observedGeneration", 0) >= live["metadata"].get("generation", 0)
        and live["spec"].get("replicas") == wanted
        and _serves(live["spec"]["template"], spec.model.source)
    )
    return _Rollout(
        wanted=wanted,
        needed=needed,
        replicas=replicas,
        updated=updated,
        available=counts.get("availableReplicas", 0),
        ready=counts.get("readyReplicas", 0),
        is_complete=is_current and updated == wanted == replicas,
    )


def _trouble(observed: Observed) -> Trouble | None:
    """The most telling reason why pods do not answer."""
    refusal = creation_refusal(observed.deployment)
    if refusal is not None:
        return Trouble(
            "CreationRefused",
            f"The API server refuses to create pods: {refusal!r}. Ask for more quota, or change"
            " what the message names.",
        )
    if observed.missing_secrets:
        return Trouble("SecretMissing", " ".join(observed.missing_secrets))
    return worst_trouble(observed.pods)


def _refused(picture: _Picture) -> _State | None:
    for refusal in picture.refusals:
        if refusal.is_taken:
            return _State("Ready", "False", "NameTaken", refusal.message)
        if refusal.child not in picture.observed.children:
            return _State("Ready", "False", "ApplyRefused", refusal.message)
    return None


def _scaled_to_zero(picture: _Picture) -> _State | None:
    if picture.rollout.wanted > 0:
        return None
    return _State("Ready", "False", "ScaledToZero", "spec.replicas is 0: nothing is to run.")


def _available(picture: _Picture) -> _State | None:
    spec, rollout, owner = picture.spec, picture.rollout, picture.observed.identity
    if not rollout.is_complete or rollout.available < rollout.needed:
        return None
    return _State(
        "Ready",
        "True",
        "Available",
        f"{rollout.available} of {rollout.wanted} pods answer at"
        f" http://{owner.name}.{owner.namespace}.svc:{spec.routing.service.port}/v1 as"
        f" {spec.model.served_name or owner.name}.",
    )


def _model_not_cached(picture: _Picture) -> _State | None:
    if picture.model.may_start or picture.observed.deployment is not None:
        return None
    return _State("Ready", "False", "ModelNotCached", picture.model.message)


def _troubled(picture: _Picture) -> _State | None:
    if picture.trouble is None:
        return None
    return _State("Ready", "False", picture.trouble.reason, picture.trouble.message)


def _rolling_out(picture: _Picture) -> _State:
    # Nothing is wrong with any pod, so it is a matter of time.
    return _State("Ready", "False", "RolloutInProgress", _progress(picture.rollout))


_READY_CHECKS: tuple[Callable[[_Picture], _State | None], ...] = (
    _refused,
    _scaled_to_zero,
    _available,
    _model_not_cached,
    _troubled,
    _rolling_out,
)
"""The first that has something to say is the condition Ready."""


def _progressing(picture: _Picture) -> _State:
    rollout, trouble = picture.rollout, picture.trouble
    if picture.refusals:
        return _State("Progressing", "False", "ApplyRefused", picture.refusals[0].message)
    if not picture.model.may_start:
        message = f"The change waits for its model. {picture.model.message}"
        return _State("Progressing", "True", "RolloutInProgress", message)
    if rollout.is_complete and rollout.available >= rollout.wanted:
        message = f"All {rollout.wanted} pods are as the object wants them."
        return _State("Progressing", "False", "RolloutComplete", message)
    if trouble is not None and trouble.reason not in _PASSING:
        return _State("Progressing", "False", "RolloutBlocked", trouble.message)
    return _State("Progressing", "True", "RolloutInProgress", _progress(rollout))


def _progress(rollout: _Rollout) -> str:
    old = rollout.replicas - rollout.updated
    return (
        f"{rollout.updated} of {rollout.wanted} pods are of the current generation,"
        f" {rollout.current_ready} of them answer, {old} old ones remain."
    )


def _quota(observed: Observed) -> _State:
    refusal = creation_refusal(observed.deployment)
    if refusal is not None and "exceeded quota" in refusal:
        message = f"A pod was refused: {refusal!r}. Raise the quota, or ask for less."
        return _State("QuotaExceeded", "True", "CreationRefused", message)
    return _State("QuotaExceeded", "False", "WithinQuota", "No pod was refused for a quota.")


def _active_model(spec: DeepSeekDeploymentSpec, observed: Observed) -> str | None:
    """Source of the model that answers: the wanted one as soon as one of its pods does."""
    sources = [
        (pod["metadata"].get("annotations") or {}).get(MODEL_ANNOTATION)
        for pod in observed.pods
        if is_ready(pod)
    ]
    if spec.model.source in sources:
        return spec.model.source
    return next((source for source in sources if source), None)


def _serves(template: Manifest, source: str) -> bool:
    annotations = template["metadata"].get("annotations") or {}
    return bool(annotations.get(MODEL_ANNOTATION) == source)


def _assembled(
    observed: Observed,
    states: tuple[_State, ...],
    rollout: _Rollout,
    active_model: str | None,
    now: datetime,
) -> dict[str, Any]:
    old = observed.owner.get("status") or {}
    generation = observed.owner["metadata"].get("generation", 0)
    previous = {condition["type"]: condition for condition in old.get("conditions") or []}
    labels = selector(observed.identity.name, PRIMARY)
    new: dict[str, Any] = {
        "observedGeneration": generation,
        "conditions": [_condition(state, previous, generation, now) for state in states],
        "activeModel": active_model,
        "replicas": rollout.replicas,
        "readyReplicas": rollout.current_ready,
        "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
    }
    told = [
        {"time": _stamp(now), "message": _sentence(condition)[:HISTORY_MESSAGE_LENGTH]}
        for condition in _changed(old, new)
    ]
    new["history"] = (told + list(old.get("history") or []))[:HISTORY_LENGTH]
    return {key: value for key, value in new.items() if value is not None}


def _condition(
    state: _State, previous: dict[str, dict[str, Any]], generation: int, now: datetime
) -> dict[str, Any]:
    before = previous.get(state.type)
    changed_at = _stamp(now)
    if before is not None and before.get("status") == state.status:
        changed_at = before.get("lastTransitionTime", changed_at)
    return {
        "type": state.type,
        "status": state.status,
        "reason": state.reason,
        "message": state.message[:MESSAGE_LENGTH],
        "lastTransitionTime": changed_at,
        "observedGeneration": generation,
    }


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The told conditions whose status or reason is another one now, the weightiest first."""
    before = {
        condition["type"]: (condition.get("status"), condition.get("reason"))
        for condition in old.get("conditions") or []
    }
    return [
        condition
        for condition in new["conditions"]
        if condition["type"] in _TOLD
        and before.get(condition["type"]) != (condition["status"], condition["reason"])
    ]


def _sentence(condition: dict[str, Any]) -> str:
    negation = "" if condition["status"] == "True" else "not "
    subject = {"Ready": "ready", "ModelCached": "model there"}[condition["type"]]
    words = f"{negation}{subject} ({condition['reason']}): {condition['message']}"
    return words[0].upper() + words[1:]


def _without_messages(status: dict[str, Any]) -> dict[str, Any]:
    bare = {key: value for key, value in status.items() if key not in {"conditions", "history"}}
    bare["conditions"] = [
        {key: value for key, value in condition.items() if key != "message"}
        for condition in status.get("conditions") or []
    ]
    return bare


def _stamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
