"""What has to be done for one object: start reading here.

Pure: the object's spec and what was observed go in, a `Plan` comes out; time is an argument.
`handlers.reconcile` observes, calls `plan`, has it carried out and writes the status. Children
are compared before they are written, so a cluster that is as it should be gets an empty plan.

Each tier of an object is a Deployment of its own. There is one tier now, the primary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_contract.source import (
    NodePathSource,
    OciSource,
    PackageSource,
    PvcSource,
)
from deepseek_contract.status import ModelCachedReason
from deepseek_operator import loader
from deepseek_operator.drift import deviations
from deepseek_operator.kinds import (
    DEPLOYMENT,
    SECRET,
    SERVICE_ACCOUNT,
    VOLUME_CLAIM,
    Manifest,
    Reference,
    reference,
)
from deepseek_operator.pods import Trouble, image_trouble, placement_trouble, pod_trouble
from deepseek_operator.render import (
    MODEL_ANNOTATION,
    TOKEN_KEY,
    Owner,
    cache_name,
    claim_name,
    deployment_name,
    desired_state,
    has_foreign_claim,
)
from deepseek_operator.settings import Settings

CLAIM_CHECK_SECONDS = 15.0
"""How often a volume or Secret of somebody else is looked for; it is not watched."""


@dataclass(frozen=True)
class Observed:
    """One object and all that belongs to it, as views (see `views.view`)."""

    owner: Manifest
    children: Mapping[Reference, Manifest] = field(default_factory=dict)
    """Live children, without those of the model's cache."""
    pods: tuple[Manifest, ...] = ()
    """The workers."""
    cache: Mapping[Reference, Manifest] = field(default_factory=dict)
    """Claim, policy and jobs of the model's cache."""
    loader_pods: tuple[Manifest, ...] = ()
    foreign_claim: Manifest | None = None
    """The claim that the spec names and somebody else made."""
    missing_secrets: tuple[str, ...] = ()
    """Secrets that the spec names and that are not there, or lack the key, in words."""
    tolerated: Mapping[Reference, tuple[str, ...]] = field(default_factory=dict)
    """Deviations that came back with the answer to our own apply: an admission webhook of this
    cluster wants them so, and writing again would not change that."""

    @property
    def identity(self) -> Owner:
        """The object, as children name it."""
        metadata = self.owner["metadata"]
        return Owner(metadata["namespace"], metadata["name"], metadata["uid"])

    @property
    def deployment(self) -> Manifest | None:
        """The primary's Deployment."""
        owner = self.identity
        name = deployment_name(owner)
        return self.children.get(Reference(DEPLOYMENT.kind, owner.namespace, name))


@dataclass(frozen=True)
class ModelState:
    """Whether pods find the model, and what is being done about it: the condition ModelCached."""

    status: Literal["True", "False"]
    reason: ModelCachedReason
    message: str
    may_start: bool = True
    """Whether a pod started now could find the model."""


@dataclass(frozen=True)
class Plan:
    """What to write, and when to look again."""

    apply: tuple[Manifest, ...]
    """Manifests for server-side apply."""
    create: tuple[Manifest, ...]
    """Manifests of objects that must not exist yet: the token's Secret, ServiceAccounts, jobs."""
    delete: tuple[Manifest, ...]
    """Live objects."""
    model: ModelState
    requeue_after_seconds: float | None = None
    reasons: tuple[str, ...] = ()
    """Why each write is needed, for the log."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.apply or self.create or self.delete)


def plan(
    spec: DeepSeekDeploymentSpec, observed: Observed, settings: Settings, now: datetime
) -> Plan:
    """Everything that brings the cluster from `observed` to what `spec` wants."""
    draft = _Draft(observed)
    model = _model(spec, observed, settings, now, draft)
    for manifest in desired_state(observed.identity, spec, settings):
        if manifest["kind"] == SECRET.kind:
            draft.ensure_token(manifest)
        elif manifest["kind"] == DEPLOYMENT.kind and _is_held_back(spec, observed, model):
            draft.reasons.append(f"{manifest['metadata']['name']} waits for its model")
        else:
            draft.ensure(manifest, observed.children)
    if observed.missing_secrets:
        draft.look_again(CLAIM_CHECK_SECONDS)
    return draft.finish(model)


def is_owned_by(live: Manifest, uid: str) -> bool:
    """Whether an object says that it belongs to the object of this uid."""
    owners = live["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == uid for owner in owners)


def _is_held_back(spec: DeepSeekDeploymentSpec, observed: Observed, model: ModelState) -> bool:
    """Pods start once their model is there; until then those of the previous model go on."""
    if model.may_start:
        return False
    live = observed.deployment
    if live is None:
        return True
    annotations = live["spec"]["template"]["metadata"].get("annotations") or {}
    return bool(annotations.get(MODEL_ANNOTATION) != spec.model.source)


class _Draft:
    """A plan in the making."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._apply: list[Manifest] = []
        self._create: list[Manifest] = []
        self._delete: list[Manifest] = []
        self._again: float | None = None
        self.reasons: list[str] = []

    def ensure(self, manifest: Manifest, live_objects: Mapping[Reference, Manifest]) -> None:
        """Apply the manifest if the live object is missing or differs."""
        key = reference(manifest)
        live = live_objects.get(key)
        if live is None:
            # Somebody else's ServiceAccount would not conflict with ours, so it is not applied.
            is_created = key.kind == SERVICE_ACCOUNT.kind
            (self._create if is_created else self._apply).append(manifest)
            self.reasons.append(f"{key.kind} {key.name} is missing")
        elif "deletionTimestamp" not in live["metadata"]:
            found = deviations(manifest, live)
            if found and found != self._observed.tolerated.get(key):
                self._apply.append(manifest)
                self.reasons.append(f"{key.kind} {key.name} differs: {', '.join(found)[:500]}")

    def ensure_token(self, manifest: Manifest) -> None:
        """Create the Secret once; of a live one only labels and the like are kept up."""
        key = reference(manifest)
        live = self._observed.children.get(key)
        if live is not None and TOKEN_KEY in live["keys"]:
            self.ensure(manifest, self._observed.children)
        elif live is None or "deletionTimestamp" not in live["metadata"]:
            self.create(manifest, f"Secret {key.name} has no token")

    def create(self, manifest: Manifest, reason: str) -> None:
        self._create.append(manifest)
        self.reasons.append(reason)

    def delete(self, live: Manifest, reason: str) -> None:
        self._delete.append(live)
        self.reasons.append(reason)

    def look_again(self, seconds: float) -> None:
        """Plan anew after this time at the latest."""
        self._again = seconds if self._again is None else min(self._again, seconds)

    def finish(self, model: ModelState) -> Plan:
        return Plan(
            apply=tuple(self._apply),
            create=tuple(self._create),
            delete=tuple(self._delete),
            model=model,
            requeue_after_seconds=self._again,
            reasons=tuple(self.reasons),
        )


def _model(
    spec: DeepSeekDeploymentSpec,
    observed: Observed,
    settings: Settings,
    now: datetime,
    draft: _Draft,
) -> ModelState:
    """The state of the model's source; for a download also the next step of its cache."""
    match spec.model.parsed_source:
        case PackageSource(name=name):
            return ModelState("True", "InWorkerImage", f"{name} is in the worker's image.")
        case OciSource(image=image):
            return _image_volume(image, observed)
        case PvcSource():
            return _volume(spec, observed, draft)
        case NodePathSource(path=path):
            return _node_path(path, observed)
        case _:
            return _download(spec, observed, settings, now, draft)


def _image_volume(image: str, observed: Observed) -> ModelState:
    for pod in observed.pods:
        trouble = image_trouble(pod)
        if trouble is not None and image in trouble.message:
            return ModelState("False", "ImageUnavailable", trouble.message)
    return ModelState("True", "InImageVolume", f"The node mounts {image} into each pod.")


def _node_path(path: str, observed: Observed) -> ModelState:
    refusal = creation_refusal(observed.deployment)
    if refusal is not None and "hostPath" in refusal:
        return ModelState(
            "False",
            "CacheForbidden",
            f"The namespace's pod security forbids folders of the node: {refusal!r}. Use another"
            " form of spec.model.source, or serve from a namespace whose level is privileged.",
        )
    return ModelState("True", "OnNode", f"Each node has the model in {path}.")


def creation_refusal(deployment: Manifest | None) -> str | None:
    """Why the API server refuses to create the Deployment's pods, in its own words."""
    status = (deployment or {}).get("status") or {}
    for condition in status.get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message", ""))
    return None


def _volume(spec: DeepSeekDeploymentSpec, observed: Observed, draft: _Draft) -> ModelState:
    name = claim_name(spec)
    claim = observed.foreign_claim
    if claim is None:
        draft.look_again(CLAIM_CHECK_SECONDS)
        return ModelState(
            "False",
            "ClaimMissing",
            f"There is no PersistentVolumeClaim {name} in this namespace: create it, or change"
            " spec.model.source.",
        )
    if claim["status"].get("phase") != "Bound":
        draft.look_again(CLAIM_CHECK_SECONDS)
        return ModelState(
            "False",
            "ClaimPending",
            f"The claim {name} has no volume yet. Its storage class may wait for the first pod;"
            " if this lasts, `kubectl describe pvc` says why.",
        )
    trouble = _one_node_only(claim, observed)
    if trouble is not None:
        return ModelState("False", "SingleNodeVolume", trouble)
    return ModelState("True", "OnVolume", f"The claim {name} holds the model.")


def _one_node_only(claim: Manifest, observed: Observed) -> str | None:
    """A message, when pods need a second node and the volume can only be on one."""
    modes = claim["spec"].get("accessModes") or []
    if any(mode in {"ReadWriteMany", "ReadOnlyMany"} for mode in modes):
        return None
    placed = {pod["spec"]["nodeName"] for pod in observed.pods if pod["spec"].get("nodeName")}
    waiting = [trouble for pod in observed.pods if (trouble := placement_trouble(pod)) is not None]
    if not placed or not waiting:
        return None
    return (
        f"The volume of {claim['metadata']['name']} ({', '.join(modes)}) can be on one node only,"
        f" which is {sorted(placed)[0]}, and {len(waiting)} of the pods do not fit there. Use a"
        " ReadWriteMany claim, or fewer replicas."
    )


def _download(
    spec: DeepSeekDeploymentSpec,
    observed: Observed,
    settings: Settings,
    now: datetime,
    draft: _Draft,
) -> ModelState:
    name = cache_name(spec.model.parsed_source) or ""
    owner = observed.identity
    claim = observed.foreign_claim if has_foreign_claim(spec) else _own_claim(owner, name, observed)
    if not has_foreign_claim(spec):
        draft.ensure(loader.volume_claim(owner.namespace, name, spec, claim), observed.cache)
    elif claim is None:
        return replace(_volume(spec, observed, draft), may_start=False)
    if claim is None or "deletionTimestamp" in claim["metadata"]:
        return ModelState("False", "Waiting", f"The volume {name} is being made.", may_start=False)
    draft.ensure(
        loader.network_policy(owner.namespace, name, spec, settings, claim), observed.cache
    )

    tries = loader.attempts(
        live
        for live in observed.cache.values()
        if live["kind"] == "Job" and is_owned_by(live, claim["metadata"]["uid"])
    )
    done = next((attempt for attempt in tries if attempt.phase == "done"), None)
    for old in tries:
        if old is not (done or tries[0]):
            draft.delete(old.job, f"Job {old.job['metadata']['name']} is superseded")
    if done is not None:
        trouble = _one_node_only(claim, observed)
        if trouble is not None:
            return ModelState("False", "SingleNodeVolume", trouble)
        return ModelState("True", "Downloaded", f"{spec.model.source} is on the volume {name}.")
    if not tries:
        first = loader.job(owner, name, spec, settings, claim)
        draft.create(first, f"{spec.model.source} has to be downloaded")
        return _downloading(spec, observed, None)
    return _next_attempt(_Download(spec, observed, settings, claim, tries[0]), now, draft)


def _own_claim(owner: Owner, name: str, observed: Observed) -> Manifest | None:
    return observed.cache.get(Reference(VOLUME_CLAIM.kind, owner.namespace, name))


@dataclass(frozen=True)
class _Download:
    """A download that has been tried at least once."""

    spec: DeepSeekDeploymentSpec
    observed: Observed
    settings: Settings
    claim: Manifest
    latest: loader.Attempt

    @property
    def is_my_old_wish(self) -> bool:
        """Whether this very object asked for the attempt and would ask for another one now."""
        annotations = self.latest.job["metadata"].get("annotations") or {}
        return annotations.get(
            loader.REQUESTER_ANNOTATION
        ) == self.observed.identity.name and annotations.get(loader.WISH_ANNOTATION) != loader.wish(
            self.spec, self.settings
        )

    @property
    def has_started(self) -> bool:
        """Whether the attempt got as far as running."""
        return any(loader.has_started(pod, self.latest) for pod in self.observed.loader_pods)


def _next_attempt(download: _Download, now: datetime, draft: _Draft) -> ModelState:
    """Wait for an attempt that runs, or make another one when it is due."""
    spec, observed, latest = download.spec, download.observed, download.latest
    failure = latest.previous_failure
    if latest.phase == "running":
        if not download.is_my_old_wish or download.has_started:
            return _downloading(spec, observed, failure)
    else:
        failure = loader.failure_of(latest, observed.loader_pods)
        due = loader.retry_seconds(latest.number)
        waited = (now - latest.failed_at).total_seconds() if latest.failed_at else due
        if waited < due and not download.is_my_old_wish:
            draft.look_again(due - waited)
            return _failed(failure, f"Attempt {latest.number} failed; the next one follows.")
    number = latest.number + 1
    following = loader.job(
        observed.identity,
        cache_name(spec.model.parsed_source) or "",
        spec,
        download.settings,
        download.claim,
        number=number,
        last_failure=failure,
    )
    draft.create(following, f"Attempt {number} to download {spec.model.source}")
    draft.delete(latest.job, f"Job {latest.job['metadata']['name']} is superseded")
    return _downloading(spec, observed, failure)


def _failed(failure: loader.Failure, what_now: str) -> ModelState:
    return ModelState("False", failure.reason, f"{failure.message} {what_now}", may_start=False)


def _downloading(
    spec: DeepSeekDeploymentSpec, observed: Observed, previous: loader.Failure | None
) -> ModelState:
    """A download that goes on; after a failure it is told as that failure until it succeeds."""
    if previous is not None:
        return _failed(previous, "It is being tried again.")
    trouble: Trouble | None = None
    for pod in observed.loader_pods:
        trouble = trouble or pod_trouble(pod)
    if trouble is not None and trouble.reason == "ImageUnavailable":
        return ModelState("False", "ImageUnavailable", trouble.message, may_start=False)
    if trouble is not None and trouble.reason == "VolumeUnavailable":
        return ModelState("False", "ClaimPending", trouble.message, may_start=False)
    if observed.missing_secrets:
        missing = " ".join(observed.missing_secrets)
        return ModelState("False", "SecretMissing", missing, may_start=False)
    if trouble is not None and trouble.reason == "Unschedulable":
        return ModelState("False", "Waiting", trouble.message, may_start=False)
    return ModelState(
        "False",
        "Downloading",
        f"{spec.model.source} is being downloaded; `kubectl logs` of the loader's pod shows how"
        " far it is.",
        may_start=False,
    )
