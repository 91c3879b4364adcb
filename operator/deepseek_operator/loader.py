"""The cache of a downloaded model: its volume, the job that fills it, and what became of it.

Pure. One cache serves all objects of a namespace that name the same source, and outlives them,
so its parts belong to the volume's claim and to no object. A finished job is the record that
the model is complete: nothing else is stored, and a deleted record costs one check of files
that are there, not a download. Each attempt is a job of its own with a number, and the next one
is made before the last one is deleted, so the count survives a crash in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_contract.model import ModelCache
from deepseek_contract.source import HttpsSource
from deepseek_contract.status import ModelCachedReason
from deepseek_operator.drift import amount_of
from deepseek_operator.kinds import JOB, NETWORK_POLICY, VOLUME_CLAIM, Manifest
from deepseek_operator.pods import sentence
from deepseek_operator.render import (
    CACHE_FOLDER,
    CONTAINER_SECURITY,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    Owner,
    claim_name,
    dns_egress,
    metadata_of,
    placement,
    pod_security,
    pull_policy,
    scratch_volume,
    with_hash,
    worker_image,
)
from deepseek_operator.settings import Settings

MODEL_LABEL = "deepseek.dev/model"
"""On the parts of a cache: the cache's name."""
ATTEMPT_ANNOTATION = "deepseek.dev/attempt"
REQUESTER_ANNOTATION = "deepseek.dev/requested-by"
WISH_ANNOTATION = "deepseek.dev/wish"
"""On a job: what of the object's spec it was made from; another wish replaces a failed job."""
FAILURE_ANNOTATION = "deepseek.dev/last-failure"
"""On a job after the first: why the one before it failed, so that the condition says so until
the model is there."""

CREDENTIALS_FOLDER = "/etc/deepseek/credentials"
AUTHORITY_FOLDER = "/etc/deepseek/ca"
CONTAINER = "loader"

FIRST_RETRY_SECONDS = 10.0
LONGEST_RETRY_SECONDS = 300.0

_REASONS: dict[str, ModelCachedReason] = {
    "NotFound": "ModelNotFound",
    "CredentialsRefused": "AccessDenied",
    "ChecksumMismatch": "ChecksumMismatch",
    "NoSpace": "DiskFull",
}
"""The loader's words for its failures; all others are `DownloadFailed`."""


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed."""

    reason: ModelCachedReason
    message: str


@dataclass(frozen=True)
class Attempt:
    """One job, as far as it got."""

    job: Manifest
    number: int
    phase: str
    """`running`, `done` or `failed`."""
    failed_at: datetime | None
    previous_failure: Failure | None


def retry_seconds(attempt: int) -> float:
    """The pause after the n-th attempt (n >= 1) failed."""
    return float(min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(attempt - 1, 10)))


def attempts(jobs: Iterable[Manifest]) -> list[Attempt]:
    """The jobs of one cache, the latest first."""
    found = [_attempt(job) for job in jobs if not job["metadata"].get("deletionTimestamp")]
    return sorted(found, key=lambda attempt: attempt.number, reverse=True)


def failure_of(attempt: Attempt, pods: Iterable[Manifest]) -> Failure:
    """Why an attempt failed, in the loader's own words where it left some."""
    for pod in pods:
        if not _is_of(pod, attempt):
            continue
        for container in (pod.get("status") or {}).get("containers") or []:
            ended = (container.get("state") or {}).get("terminated")
            if ended and ended.get("exitCode") != 0:
                return _failure_in_words(ended)
    return Failure("DownloadFailed", "The loader's pod is gone without saying why.")


def volume_claim(
    namespace: str, name: str, spec: DeepSeekDeploymentSpec, live: Manifest | None
) -> Manifest:
    """The claim of a cache. Of a live one only the size may differ, and only upwards."""
    cache = spec.model.cache or ModelCache()
    claim = metadata_of(VOLUME_CLAIM, namespace, name, _labels(name))
    size = f"{cache.claim_size_gib}Gi"
    wanted: Manifest = {
        "accessModes": [cache.claim_access_mode],
        "resources": {"requests": {"storage": size}},
    }
    if cache.storage_class_name is not None:
        wanted["storageClassName"] = cache.storage_class_name
    if live is not None:
        spec_now = live["spec"]
        wanted["accessModes"] = spec_now["accessModes"]
        if "storageClassName" in spec_now:
            wanted["storageClassName"] = spec_now["storageClassName"]
        now = spec_now["resources"]["requests"]["storage"]
        if amount_of(now) > amount_of(size):
            wanted["resources"] = {"requests": {"storage": now}}
    return claim | {"spec": wanted}


def network_policy(
    namespace: str, name: str, spec: DeepSeekDeploymentSpec, settings: Settings, claim: Manifest
) -> Manifest:
    """The loader may reach DNS and the model's source; nobody may reach the loader."""
    policy = metadata_of(NETWORK_POLICY, namespace, name, _labels(name))
    policy["metadata"]["ownerReferences"] = _owned_by(claim)
    policy["spec"] = {
        "podSelector": {"matchLabels": {MODEL_LABEL: name}},
        "policyTypes": ["Ingress", "Egress"],
        "egress": [
            dns_egress(),
            {"ports": [{"protocol": "TCP", "port": port} for port in _ports(spec, settings)]},
        ],
    }
    return with_hash(policy)


def job(
    requester: Owner,
    name: str,
    spec: DeepSeekDeploymentSpec,
    settings: Settings,
    claim: Manifest,
    *,
    number: int = 1,
    last_failure: Failure | None = None,
) -> Manifest:
    """One attempt to download the model into the claim."""
    job_name = name if number == 1 else f"{name}-{number}"
    manifest = metadata_of(JOB, requester.namespace, job_name, _labels(name))
    annotations = {
        ATTEMPT_ANNOTATION: str(number),
        REQUESTER_ANNOTATION: requester.name,
        WISH_ANNOTATION: wish(spec, settings),
    }
    if last_failure is not None:
        annotations[FAILURE_ANNOTATION] = json.dumps(
            {"reason": last_failure.reason, "message": last_failure.message}
        )
    manifest["metadata"] |= {"annotations": annotations, "ownerReferences": _owned_by(claim)}
    manifest["spec"] = {
        # A failed pod ends the attempt: the operator decides when there is another one.
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": _labels(name)},
            "spec": _pod(name, spec, settings),
        },
    }
    return manifest


def wish(spec: DeepSeekDeploymentSpec, settings: Settings) -> str:
    """What a new attempt would be made from; a failed one is repeated at once when it changes."""
    model = spec.model
    parts = [
        worker_image(spec, settings),
        settings.hugging_face_endpoint,
        *(
            part.document() if part is not None else None
            for part in (model.credentials_secret, model.certificate_authority, model.cache)
        ),
    ]
    return json.dumps(parts, sort_keys=True)


def waits_for_pod(live: Manifest) -> bool:
    """Whether this is a job whose pod has not been created yet."""
    status = live.get("status") or {}
    return live["kind"] == JOB.kind and not status.get("active") and not status.get("conditions")


def has_started(pod: Manifest, attempt: Attempt) -> bool:
    """Whether a pod of this attempt got as far as running."""
    states = ((c.get("state") or {}) for c in (pod.get("status") or {}).get("containers") or [])
    return _is_of(pod, attempt) and any("waiting" not in state for state in states)


def _is_of(pod: Manifest, attempt: Attempt) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return bool(labels.get("batch.kubernetes.io/job-name") == attempt.job["metadata"]["name"])


def _labels(name: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "deepseek-model",
        MANAGED_BY_LABEL: MANAGED_BY,
        MODEL_LABEL: name,
    }


def _owned_by(claim: Manifest) -> list[Manifest]:
    metadata = claim["metadata"]
    return [
        {
            "apiVersion": VOLUME_CLAIM.api_version,
            "kind": VOLUME_CLAIM.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
    ]


def _pod(name: str, spec: DeepSeekDeploymentSpec, settings: Settings) -> Manifest:
    model = spec.model
    scratch, scratch_mount = scratch_volume()
    volumes: list[Manifest] = [
        scratch,
        {"name": "cache", "persistentVolumeClaim": {"claimName": claim_name(spec)}},
    ]
    mounts: list[Manifest] = [scratch_mount, {"name": "cache", "mountPath": CACHE_FOLDER}]
    environment = [{"name": "HOME", "value": "/tmp"}]  # noqa: S108
    arguments = [
        "load",
        f"--source={model.source}",
        f"--destination={CACHE_FOLDER}/{name}",
        f"--hf-endpoint={settings.hugging_face_endpoint}",
    ]
    secret = model.credentials_secret
    if secret is not None:
        items = [{"key": secret.key, "path": secret.key}]
        volumes.append(
            {"name": "credentials", "secret": {"secretName": secret.name, "items": items}}
        )
        mounts.append({"name": "credentials", "mountPath": CREDENTIALS_FOLDER, "readOnly": True})
        arguments.append(f"--token-file={CREDENTIALS_FOLDER}/{secret.key}")
    authority = model.certificate_authority
    if authority is not None:
        items = [{"key": authority.key, "path": authority.key}]
        volumes.append({"name": "ca", "configMap": {"name": authority.name, "items": items}})
        mounts.append({"name": "ca", "mountPath": AUTHORITY_FOLDER, "readOnly": True})
        environment.append(
            {"name": "SSL_CERT_FILE", "value": f"{AUTHORITY_FOLDER}/{authority.key}"}
        )
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(settings, has_claim=True),
        # The loader goes where the workers will: the volume may be tied to its node's zone.
        **placement(spec.pod),
        "containers": [
            {
                "name": CONTAINER,
                "image": worker_image(spec, settings),
                "imagePullPolicy": pull_policy(spec, settings),
                "args": arguments,
                "env": environment,
                # Files are streamed to the volume, so the model's size does not matter here.
                "resources": {
                    "requests": {"cpu": "100m", "memory": "256Mi"},
                    "limits": {"memory": "1Gi"},
                },
                "securityContext": CONTAINER_SECURITY,
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _ports(spec: DeepSeekDeploymentSpec, settings: Settings) -> list[int]:
    """TCP ports of the model's source.

    The hub sends its files from hosts of other names, whose addresses nobody knows beforehand, so
    a policy can only name ports.
    """
    source = spec.model.parsed_source
    if isinstance(source, HttpsSource):
        return [urlsplit(source.url).port or 443]
    endpoint = urlsplit(settings.hugging_face_endpoint)
    return sorted({443, endpoint.port or (80 if endpoint.scheme == "http" else 443)})


def _attempt(found: Manifest) -> Attempt:
    annotations = found["metadata"].get("annotations") or {}
    phase, failed_at = "running", None
    for condition in (found.get("status") or {}).get("conditions") or []:
        if condition.get("status") != "True":
            continue
        if condition["type"] == "Complete":
            phase = "done"
        elif condition["type"] == "Failed":
            phase = "failed"
            failed_at = datetime.fromisoformat(condition["lastTransitionTime"])
    try:
        number = int(annotations.get(ATTEMPT_ANNOTATION, "1"))
    except ValueError:
        number = 1
    return Attempt(found, number, phase, failed_at, _previous_failure(annotations))


def _previous_failure(annotations: Manifest) -> Failure | None:
    try:
        failure = json.loads(annotations.get(FAILURE_ANNOTATION, "null"))
        return Failure(failure["reason"], failure["message"]) if failure else None
    except (ValueError, KeyError, TypeError):
        return None


def _failure_in_words(ended: Manifest) -> Failure:
    """What a container's end says: JSON of the loader, or whatever there is."""
    if ended.get("reason") == "OOMKilled":
        return Failure("DownloadFailed", "The loader was killed for using too much memory.")
    text = (ended.get("message") or "").strip()
    try:
        told = json.loads(text)
        reason, message = str(told["reason"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        code = ended.get("exitCode")
        words = sentence(text) or f"The loader ended with exit code {code}."
        return Failure("DownloadFailed", words)
    return Failure(_REASONS.get(reason, "DownloadFailed"), sentence(message))
