"""The next step of a model's download: its volume, then attempts until one has fetched it.

Pure. Called by `models`. Claim, policy and jobs are made in `loader`, which also reads what became
of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_operator import loader
from deepseek_operator.draft import Draft
from deepseek_operator.kinds import VOLUME_CLAIM, Manifest, Reference, is_owned_by
from deepseek_operator.observed import Observed
from deepseek_operator.pods import pod_trouble
from deepseek_operator.render import Owner, cache_name, claim_name, has_foreign_claim
from deepseek_operator.settings import Settings
from deepseek_operator.tiers import Tier
from deepseek_operator.volumes import ModelState, named_claim, one_node_only


def download(
    tier: Tier,
    observed: Observed,
    settings: Settings,
    now: datetime,
    draft: Draft,
) -> ModelState:
    """Whether a tier's model has been downloaded; if not, the next step is taken."""
    spec = tier.spec
    name = cache_name(spec.model.parsed_source) or ""
    owner = observed.identity
    claim = (
        observed.foreign_claims.get(claim_name(spec) or "")
        if has_foreign_claim(spec)
        else _own_claim(owner, name, observed)
    )
    if not has_foreign_claim(spec):
        draft.ensure(loader.volume_claim(owner.namespace, name, spec, claim), observed.cache)
    elif claim is None:
        field = "spec.model.cache.existingClaim"
        missing = named_claim(tier, claim_name(spec) or "", field, observed, draft)
        return replace(missing, may_start=False)
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
        trouble = one_node_only(claim, observed.pods_of(tier.name))
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


def _next_attempt(download: _Download, now: datetime, draft: Draft) -> ModelState:
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
    told = _before_the_pod(spec, observed)
    if told is None and previous is not None:
        return _failed(previous, "It is being tried again.")
    told = told or _of_the_pod(spec, observed)
    if told is not None:
        return told
    return ModelState(
        "False",
        "Downloading",
        f"{spec.model.source} is being downloaded; `kubectl logs` of the loader's pod shows how"
        " far it is.",
        may_start=False,
    )


def _before_the_pod(spec: DeepSeekDeploymentSpec, observed: Observed) -> ModelState | None:
    """What keeps the loader's pod from existing or from starting, without a word of its own."""
    refusal = observed.loader_refusals.get(cache_name(spec.model.parsed_source) or "")
    if refusal is not None:
        message = (
            f"The API server refuses the loader's pod: {refusal!r}. Ask for more quota, or change"
            " what the message names; the download then goes on by itself."
        )
        return ModelState("False", "CreationRefused", message, may_start=False)
    missing = observed.missing_authorities.get(spec.model.source)
    if missing is not None:
        return ModelState("False", "ConfigMapMissing", missing, may_start=False)
    return None


def _of_the_pod(spec: DeepSeekDeploymentSpec, observed: Observed) -> ModelState | None:
    """What keeps the loader's pod from running."""
    name = cache_name(spec.model.parsed_source)
    troubles = [
        trouble
        for pod in observed.loader_pods
        if (pod["metadata"].get("labels") or {}).get(loader.MODEL_LABEL) == name
        and (trouble := pod_trouble(pod)) is not None
    ]
    reason, words = (troubles[0].reason, troubles[0].message) if troubles else ("", "")
    if reason == "ImageUnavailable":
        return ModelState("False", "ImageUnavailable", words, may_start=False)
    if reason == "VolumeUnavailable":
        return ModelState("False", "ClaimPending", words, may_start=False)
    if observed.missing_secrets:
        missing = " ".join(observed.missing_secrets)
        return ModelState("False", "SecretMissing", missing, may_start=False)
    if reason == "Unschedulable":
        return ModelState("False", "Waiting", words, may_start=False)
    return None
