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
from deepseek_contract.status import (
    HISTORY_LENGTH,
    ConditionReason,
    ConditionType,
    EventReason,
)
from deepseek_operator.devices import unavailable
from deepseek_operator.kinds import AUTOSCALER, HTTP_ROUTE, SCALED_OBJECT, Manifest, Reference
from deepseek_operator.observed import Observed
from deepseek_operator.plan import Plan
from deepseek_operator.pods import Trouble, creation_refusal, is_ready, names_quota, worst_trouble
from deepseek_operator.recovery import new_switches, sentence_of, was_used_up
from deepseek_operator.render import MODEL_ANNOTATION, selector
from deepseek_operator.tiers import PRIMARY, tiers_of
from deepseek_operator.workers import memory_status

MESSAGE_LENGTH = 1024
HISTORY_MESSAGE_LENGTH = 512
SOURCE_LENGTH = 2048
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
_SCALERS = frozenset({AUTOSCALER.kind, SCALED_OBJECT.kind})
_SCALING_TROUBLES = frozenset(
    {"MetricUnavailable", "ProviderUnavailable", "ForeignAutoscaler", "ApplyRefused"}
)
_TOLD = ("Ready", "Degraded", "ModelCached")
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
    reason: ConditionReason | EventReason
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
    """Every pod is of the current generation, and unless they are scaled there are as many as
    wanted."""

    @property
    def current_ready(self) -> int:
        """Pods of the current generation that answer, as far as the counts tell."""
        return self.ready if self.is_complete else min(self.ready, self.updated)


@dataclass(frozen=True)
class _Picture:
    """All that the conditions are made from."""

    spec: DeepSeekDeploymentSpec
    observed: Observed
    todo: Plan
    rollout: _Rollout
    trouble: Trouble | None
    refusals: tuple[Refusal, ...]

    @property
    def needed_refusals(self) -> list[Refusal]:
        """Refusals of what serving needs."""
        return [
            found for found in self.refusals if found.child.kind not in {*_SCALERS, HTTP_ROUTE.kind}
        ]


def status_of(
    spec: DeepSeekDeploymentSpec,
    observed: Observed,
    todo: Plan,
    refusals: Iterable[Refusal],
    now: datetime,
) -> dict[str, Any]:
    """The whole status of an object whose spec is sound.

    Args:
        spec: The object's.
        observed: What there is, after the plan was carried out.
        todo: What was planned last.
        refusals: What of it could not be written.
        now: The time of changes.
    """
    rollout = _rollout(spec, observed, todo)
    picture = _Picture(spec, observed, todo, rollout, _trouble(observed, now), tuple(refusals))
    states = (
        next(state for check in _READY_CHECKS if (state := check(picture)) is not None),
        _progressing(picture),
        _degraded(todo),
        _quota(observed),
        _scaling(picture),
        _model_cached(todo),
        *_routed(picture),
    )
    status = _assembled(observed, states, rollout, _active_model(spec, observed), now)
    memory = todo.decision.memory.document()
    if memory is not None:
        status["degrade"] = memory
    return _with_recovery(status, observed, todo, now)


def _with_recovery(
    status: dict[str, Any], observed: Observed, todo: Plan, now: datetime
) -> dict[str, Any]:
    """The same with what the recovery ladder did, and its steps in the history."""
    if todo.ladder.status is None:
        return status
    new = {**status, "recovery": dict(todo.ladder.status)}
    told = [
        {"time": _stamp(now), "message": sentence_of(switch)[:HISTORY_MESSAGE_LENGTH]}
        for switch in new_switches(observed.owner.get("status") or {}, new)
    ]
    new["history"] = (told + list(new.get("history") or []))[:HISTORY_LENGTH]
    return new


def invalid_status(observed: Observed, problem: str, now: datetime) -> dict[str, Any]:
    """The status of an object whose spec this version of the operator cannot read."""
    message = f"The spec is not understood: {problem} Correct it, or upgrade operator and CRD."
    states = (
        _State("Ready", "False", "InvalidSpec", message),
        _State("Progressing", "False", "InvalidSpec", message),
    )
    return _assembled(observed, states, _Rollout(0, 1), None, now)


def is_transition(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether more than messages and live values differ."""
    return _without_messages(old) != _without_messages(new)


def notes(old: dict[str, Any], new: dict[str, Any]) -> list[Note]:
    """The events that tell of the change from one status to the next.

    What only lies on the way is no event: the conditions and the history have it.
    """
    told = []
    for condition in _changed(old, new):
        if condition["reason"] in _ON_THE_WAY:
            continue
        is_good = _is_good(condition) or condition["reason"] in _ASKED_FOR
        kind: Literal["Normal", "Warning"] = "Normal" if is_good else "Warning"
        told.append(Note(kind, condition["reason"], condition["message"]))
    told += _scaling_notes(old, new)
    told += [Note("Warning", "NodeSwitched", sentence_of(s)) for s in new_switches(old, new)]
    if was_used_up(old, new):
        told.append(Note("Warning", "NodeSwitchingUsedUp", new["recovery"]["message"]))
    return told


def _scaling_notes(old: dict[str, Any], new: dict[str, Any]) -> list[Note]:
    """That scaling is in trouble, and that it is out of it; the history has weightier things."""
    before, after = (_of_type(status, "ScalingActive") for status in (old, new))
    if after.get("reason") == before.get("reason"):
        return []
    if after.get("reason") in _SCALING_TROUBLES:
        return [Note("Warning", after["reason"], after["message"])]
    if after.get("reason") == "Scaling" and before.get("reason") in _SCALING_TROUBLES:
        return [Note("Normal", after["reason"], after["message"])]
    return []


def _of_type(status: dict[str, Any], kind: str) -> dict[str, Any]:
    for condition in status.get("conditions") or []:
        if condition["type"] == kind:
            return dict(condition)
    return {}


def _is_good(condition: dict[str, Any]) -> bool:
    wanted = "False" if condition["type"] == "Degraded" else "True"
    return bool(condition["status"] == wanted and condition["reason"] != "DegradePending")


def _rollout(spec: DeepSeekDeploymentSpec, observed: Observed, todo: Plan) -> _Rollout:
    scaled = observed.scaled(todo.tiers[0])
    wanted = scaled.wanted_replicas
    needed = max(1, min(spec.min_available, wanted))
    live = observed.deployment()
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
        # An autoscaler's next pod is not a change of those that there are.
        is_complete=is_current and updated == replicas and (scaled.is_scaled or wanted == replicas),
    )


def _trouble(observed: Observed, now: datetime) -> Trouble | None:
    """The most telling reason why pods do not answer."""
    refusal = creation_refusal(observed.deployment())
    if refusal is not None:
        return Trouble(
            "CreationRefused",
            f"The API server refuses to create pods: {refusal!r}. Ask for more quota, or change"
            " what the message names.",
        )
    if observed.missing_secrets:
        return Trouble("SecretMissing", " ".join(observed.missing_secrets))
    return worst_trouble(observed.pods_of(PRIMARY), now)


def _refused(picture: _Picture) -> _State | None:
    for refusal in picture.needed_refusals:
        if refusal.is_taken:
            return _State("Ready", "False", "NameTaken", refusal.message)
        if refusal.child not in picture.observed.children:
            return _State("Ready", "False", "ApplyRefused", refusal.message)
    return None


def _share_used_up(picture: _Picture) -> _State | None:
    """Nothing may run, because a tenant's share is used up by others of it."""
    limit = picture.observed.limits.get(PRIMARY)
    if limit is None or picture.rollout.wanted > 0 or not picture.todo.wishes.get(PRIMARY):
        return None
    return _State("Ready", "False", "TenantLimit", limit.message)


def _partition_unavailable(picture: _Picture) -> _State | None:
    trouble = unavailable(picture.spec.gpu, picture.observed.supply)
    if trouble is None:
        return None
    return _State("Ready", "False", "PartitionUnavailable", trouble)


def _scaled_to_zero(picture: _Picture) -> _State | None:
    # A primary that a fallback serves instead of may have been scaled down by the operator.
    if picture.rollout.wanted > 0 or picture.todo.decision.degraded:
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


def _fallback_available(picture: _Picture) -> _State | None:
    """A fallback that answers makes the object ready: Degraded says that it is not the primary."""
    spec, observed = picture.spec, picture.observed
    owner = observed.identity
    for tier in picture.todo.tiers[1:]:
        ready = sum(map(is_ready, observed.pods_of(tier.name)))
        if ready:
            return _State(
                "Ready",
                "True",
                "FallbackAvailable",
                f"{ready} pods of fallback {tier.name} answer at"
                f" http://{owner.name}.{owner.namespace}.svc:{spec.routing.service.port}/v1 as"
                f" {spec.model.served_name or owner.name}, with {tier.model.source}.",
            )
    return None


def _model_not_cached(picture: _Picture) -> _State | None:
    model = picture.todo.model
    if model.may_start or picture.observed.deployment() is not None:
        return None
    return _State("Ready", "False", "ModelNotCached", model.message)


def _troubled(picture: _Picture) -> _State | None:
    if picture.trouble is None:
        return None
    return _State("Ready", "False", picture.trouble.reason, picture.trouble.message)


def _rolling_out(picture: _Picture) -> _State:
    # Nothing is wrong with any pod, so it is a matter of time.
    return _State("Ready", "False", "RolloutInProgress", _progress(picture.rollout))


_READY_CHECKS: tuple[Callable[[_Picture], _State | None], ...] = (
    _refused,
    _share_used_up,
    _scaled_to_zero,
    _available,
    _fallback_available,
    _partition_unavailable,
    _model_not_cached,
    _troubled,
    _rolling_out,
)
"""The first that has something to say is the condition Ready."""


def _progressing(picture: _Picture) -> _State:
    rollout, trouble = picture.rollout, picture.trouble
    if picture.needed_refusals:
        return _State("Progressing", "False", "ApplyRefused", picture.needed_refusals[0].message)
    if not picture.todo.model.may_start:
        message = f"The change waits for its model. {picture.todo.model.message}"
        return _State("Progressing", "True", "RolloutInProgress", message)
    held_up = picture.todo.rollouts[PRIMARY].trouble
    if held_up is not None:
        return _State("Progressing", "False", "RolloutBlocked", held_up)
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
    for limit in observed.limits.values():
        return _State("QuotaExceeded", "True", "TenantLimit", limit.message)
    refusal = creation_refusal(observed.deployment())
    if refusal is not None and names_quota(refusal):
        message = f"A pod was refused: {refusal!r}. Raise the quota, or ask for less."
        return _State("QuotaExceeded", "True", "CreationRefused", message)
    for words in observed.loader_refusals.values():
        if names_quota(words):
            message = f"The loader's pod was refused: {words!r}. Raise the quota, or ask for less."
            return _State("QuotaExceeded", "True", "CreationRefused", message)
    message = "No pod was refused for a quota."
    if observed.supply is None:
        message += " The operator serves named namespaces only, where it knows no tenants."
    return _State("QuotaExceeded", "False", "WithinQuota", message)


def _scaling(picture: _Picture) -> _State:
    """Of the tiers that serve, or else the primary, the first that is not scaled."""
    for refusal in picture.refusals:
        if refusal.child.kind in _SCALERS:
            return _State("ScalingActive", "False", "ApplyRefused", refusal.message)
    tiers = picture.todo.tiers
    serving = [tier for tier in tiers if any(map(is_ready, picture.observed.pods_of(tier.name)))]
    states = [(tier, picture.todo.scaling[tier.name]) for tier in serving or tiers[:1]]
    tier, state = next((item for item in states if item[1].status != "True"), states[0])
    whose = "" if tier.is_primary else f"Fallback {tier.name}: "
    return _State("ScalingActive", state.status, state.reason, f"{whose}{state.message}")


def _degraded(todo: Plan) -> _State:
    decision = todo.decision
    value: Literal["True", "False"] = "True" if decision.degraded else "False"
    return _State("Degraded", value, decision.reason, decision.message)


def _routed(picture: _Picture) -> tuple[_State, ...]:
    """Of an object that asks for a route alone."""
    route = picture.todo.route
    if route is None:
        return ()
    for refusal in picture.refusals:
        if refusal.child.kind == HTTP_ROUTE.kind:
            return (_State("Routed", "False", "ApplyRefused", refusal.message),)
    return (_State("Routed", route.status, route.reason, route.message),)


def _model_cached(todo: Plan) -> _State:
    """The primary's model, or else the first fallback's that is not there."""
    for tier in todo.tiers:
        model = todo.models[tier.name]
        if model.status == "False":
            whose = "" if tier.is_primary else f"Fallback {tier.name}: "
            return _State("ModelCached", "False", model.reason, f"{whose}{model.message}")
    return _State("ModelCached", "True", todo.model.reason, todo.model.message)


def _active_model(spec: DeepSeekDeploymentSpec, observed: Observed) -> str | None:
    """Source of the model that answers: the first of the object's that a pod answers with."""
    sources = [
        (pod["metadata"].get("annotations") or {}).get(MODEL_ANNOTATION)
        for pod in observed.pods
        if is_ready(pod)
    ]
    for tier in tiers_of(spec):
        if tier.model.source in sources:
            return tier.model.source
    return next((source[:SOURCE_LENGTH] for source in sources if source), None)


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
        "wantedReplicas": rollout.wanted,
        "readyReplicas": rollout.current_ready,
        "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
        "memory": memory_status(observed.pods, observed.readings, old.get("memory")),
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
    # That a new object is not degraded is no news.
    before = {"Degraded": ("False", "PrimaryServing")} | {
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
    subject = {"Ready": "ready", "Degraded": "degraded", "ModelCached": "model there"}[
        condition["type"]
    ]
    words = f"{negation}{subject} ({condition['reason']}): {condition['message']}"
    return words[0].upper() + words[1:]


def _without_messages(status: dict[str, Any]) -> dict[str, Any]:
    bare = {
        key: value
        for key, value in status.items()
        if key not in {"conditions", "history", "memory", "recovery"}
    }
    bare["recovery"] = {
        key: value
        for key, value in (status.get("recovery") or {}).items()
        if key not in {"batchRetries", "message"}
    }
    # That it is there at all is news; how full it is, once a minute.
    bare["hasMemory"] = "memory" in status
    bare["conditions"] = [
        {key: value for key, value in condition.items() if key != "message"}
        for condition in status.get("conditions") or []
    ]
    return bare


def _stamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
