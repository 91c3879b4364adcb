"""The objects that one DeepSeekDeployment wants to exist.

Pure: an object and the installation's settings in, manifests out. The plan calls it; it reads no
cluster and no clock. Names are fixed, so that two runs, or two operators, mean the same objects.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_contract.pod import PodSettings
from deepseek_contract.quantity import amount
from deepseek_contract.source import (
    Downloaded,
    HttpsSource,
    HubSource,
    NodePathSource,
    OciSource,
    PackageSource,
    PvcSource,
    Source,
)
from deepseek_operator.kinds import (
    DEEPSEEK_DEPLOYMENT,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Manifest,
)
from deepseek_operator.settings import Settings

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "deepseek-operator"
MANAGED_BY_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
DEPLOYMENT_LABEL = "deepseek.dev/deployment"
TIER_LABEL = "deepseek.dev/tier"
PRIMARY = "primary"
HASH_ANNOTATION = "deepseek.dev/applied-hash"
"""On each child: the hash of the manifest it was applied from. A field that is no longer wanted
leaves no trace in the live object, but it changes the hash."""
MODEL_ANNOTATION = "deepseek.dev/model-source"
"""On the pod template: the source that its pods serve."""

CONTAINER = "worker"
PORT = 8000
DNS_PORT = 53
GPU_RESOURCE = "nvidia.com/gpu"
TOKEN_KEY = "token"  # noqa: S105 - the key in the Secret, not a token
STATE_TOKEN_FOLDER = "/etc/deepseek/state-token"  # noqa: S105 - a folder
API_KEY_FOLDER = "/etc/deepseek/api-keys"
MODEL_FOLDER = "/model"
CACHE_FOLDER = "/cache"
PACKAGED_MODELS = "/models"

ENDPOINT_SECONDS = 3
"""A pod that ends still answers this long, until no Service sends it requests any more."""
EXIT_SECONDS = 10
"""Time between the end of draining and being killed."""
STARTUP_PERIOD_SECONDS = 2
LOADING_MINUTES = 30
"""Longest time that reading a model into memory may take."""


@dataclass(frozen=True)
class Owner:
    """The object that children are made for."""

    namespace: str
    name: str
    uid: str


def desired_state(
    owner: Owner, spec: DeepSeekDeploymentSpec, settings: Settings
) -> tuple[Manifest, ...]:
    """All children of an object but those of its model's cache, which other objects may share.

    The Secret comes without its token: that is random, made once and then left alone.
    """
    children = (
        _service_account(owner),
        _token_secret(owner),
        _network_policy(owner, spec, settings),
        _disruption_budget(owner),
        _service(owner, spec),
        _deployment(owner, spec, settings),
    )
    return tuple(with_hash(child) for child in children)


def with_hash(manifest: Manifest) -> Manifest:
    """The manifest with its own hash as an annotation."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    metadata = dict(manifest["metadata"])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata["annotations"] = {**metadata.get("annotations", {}), HASH_ANNOTATION: digest}
    return {**manifest, "metadata": metadata}


def deployment_name(owner: Owner, tier: str = PRIMARY) -> str:
    """Name of a tier's Deployment."""
    return f"{owner.name}-{tier}"


def selector(owner_name: str, tier: str | None = None) -> dict[str, str]:
    """Labels by which an object's pods are told apart: all of them, or those of one tier."""
    labels = {DEPLOYMENT_LABEL: owner_name}
    return labels if tier is None else labels | {TIER_LABEL: tier}


def cache_name(source: Source) -> str | None:
    """Name of the volume, the job and the folder of a downloaded model; None for other sources.

    It depends on the source alone: all objects of a namespace share one download.
    """
    if isinstance(source, HubSource):
        text = f"hf://{source.repository}@{source.revision or ''}"
    elif isinstance(source, HttpsSource):
        text = f"{source.url}#sha256={source.sha256}"
    else:
        return None
    return f"model-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def claim_name(spec: DeepSeekDeploymentSpec) -> str | None:
    """Name of the claim that holds the model, for the sources that have one."""
    source = spec.model.parsed_source
    if isinstance(source, PvcSource):
        return source.claim
    if spec.model.cache is not None and spec.model.cache.existing_claim is not None:
        return spec.model.cache.existing_claim
    return cache_name(source)


def has_foreign_claim(spec: DeepSeekDeploymentSpec) -> bool:
    """Whether the model's volume was made by somebody else."""
    return claim_name(spec) is not None and claim_name(spec) != cache_name(spec.model.parsed_source)


def worker_image(spec: DeepSeekDeploymentSpec, settings: Settings) -> str:
    """Image of the worker and of its loader."""
    return spec.pod.image or settings.worker_image


def pull_policy(spec: DeepSeekDeploymentSpec, settings: Settings) -> str:
    """Pull policy of the worker's image."""
    return spec.pod.image_pull_policy or settings.image_pull_policy


def metadata_of(kind: Kind, namespace: str, name: str, labels: dict[str, str]) -> Manifest:
    """The beginning of every manifest."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
    }


CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def pod_security(settings: Settings, *, has_claim: bool) -> Manifest:
    """The pod's security context under the restricted standard.

    No user is named: the image has one, and some platforms choose their own. The group matters
    only where a volume has to be readable for it.
    """
    context: Manifest = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if has_claim and settings.volume_group is not None:
        context |= {
            "fsGroup": settings.volume_group,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
    return context


def scratch_volume() -> tuple[Manifest, Manifest]:
    """A volume for temporary files, and its mount: the image's own file system is read-only."""
    return {"name": "tmp", "emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108


def dns_egress() -> Manifest:
    """Leave to ask any DNS server, the node's own cache among them."""
    return {
        "ports": [
            {"protocol": "UDP", "port": DNS_PORT},
            {"protocol": "TCP", "port": DNS_PORT},
        ]
    }


def placement(pod: PodSettings) -> Manifest:
    """Where pods may run, in the words of the pod's spec."""
    document = pod.document()
    names = ("nodeSelector", "affinity", "tolerations", "priorityClassName", "imagePullSecrets")
    return {name: document[name] for name in names if document.get(name)}


def _child(kind: Kind, owner: Owner, name: str, labels: dict[str, str] | None = None) -> Manifest:
    manifest = metadata_of(kind, owner.namespace, name, _labels(owner) | (labels or {}))
    manifest["metadata"]["ownerReferences"] = [
        {
            "apiVersion": DEEPSEEK_DEPLOYMENT.api_version,
            "kind": DEEPSEEK_DEPLOYMENT.kind,
            "name": owner.name,
            "uid": owner.uid,
            "controller": True,
            # Blocking would need a right on the owner's finalizers, and nothing waits for it.
            "blockOwnerDeletion": False,
        }
    ]
    return manifest


def _labels(owner: Owner) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "deepseek-worker",
        "app.kubernetes.io/instance": owner.name,
        MANAGED_BY_LABEL: MANAGED_BY,
        DEPLOYMENT_LABEL: owner.name,
    }


def _service_account(owner: Owner) -> Manifest:
    # Workers never talk to the API server.
    return _child(SERVICE_ACCOUNT, owner, owner.name) | {"automountServiceAccountToken": False}


def _token_secret(owner: Owner) -> Manifest:
    secret = _child(SECRET, owner, token_secret_name(owner))
    return secret | {"type": "Opaque", "immutable": True}


def token_secret_name(owner: Owner) -> str:
    """Name of the Secret with the token of GET /state."""
    return f"{owner.name}-state-token"


def _service(owner: Owner, spec: DeepSeekDeploymentSpec) -> Manifest:
    wanted = spec.routing.service
    service = _child(SERVICE, owner, owner.name)
    if wanted.annotations:
        service["metadata"]["annotations"] = dict(wanted.annotations)
    return service | {
        "spec": {
            "type": wanted.type,
            "selector": selector(owner.name),
            "ports": [
                {"name": "http", "protocol": "TCP", "port": wanted.port, "targetPort": "http"}
            ],
        }
    }


def _disruption_budget(owner: Owner) -> Manifest:
    return _child(DISRUPTION_BUDGET, owner, owner.name) | {
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(owner.name)},
        }
    }


def _network_policy(owner: Owner, spec: DeepSeekDeploymentSpec, settings: Settings) -> Manifest:
    """Who may reach the workers, and whom they may reach: nobody but DNS."""
    ingress: Manifest = {"ports": [{"protocol": "TCP", "port": PORT}]}
    is_open = spec.routing.service.type != "ClusterIP" or "*" in settings.client_namespaces
    if not is_open:
        namespaces = {
            settings.namespace,
            *settings.prometheus_namespaces,
            *settings.client_namespaces,
        }
        ingress["from"] = [
            {"podSelector": {}},
            {
                "namespaceSelector": {
                    "matchExpressions": [
                        {
                            "key": "kubernetes.io/metadata.name",
                            "operator": "In",
                            "values": sorted(namespaces),
                        }
                    ]
                }
            },
        ]
    return _child(NETWORK_POLICY, owner, owner.name) | {
        "spec": {
            "podSelector": {"matchLabels": selector(owner.name)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [ingress],
            "egress": [dns_egress()],
        }
    }


def _deployment(owner: Owner, spec: DeepSeekDeploymentSpec, settings: Settings) -> Manifest:
    labels = selector(owner.name, PRIMARY)
    return _child(DEPLOYMENT, owner, deployment_name(owner), {TIER_LABEL: PRIMARY}) | {
        "spec": {
            "replicas": spec.replicas,
            "selector": {"matchLabels": labels},
            "strategy": _strategy(spec),
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": 60 * LOADING_MINUTES + 300,
            "template": {
                "metadata": {
                    "labels": _labels(owner) | labels,
                    "annotations": {MODEL_ANNOTATION: spec.model.source},
                },
                "spec": _pod(owner, spec, settings),
            },
        }
    }


def _strategy(spec: DeepSeekDeploymentSpec) -> Manifest:
    rollout = spec.rollout
    if rollout == "auto":
        rollout = "surge" if spec.gpu.mode == "cpu" else "replace"
    surge, unavailable = (1, 0) if rollout == "surge" else (0, 1)
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }


def _pod(owner: Owner, spec: DeepSeekDeploymentSpec, settings: Settings) -> Manifest:
    model_volumes, model_mounts, model_path = _model_volume(spec)
    scratch, scratch_mount = scratch_volume()
    volumes = [
        scratch,
        {
            "name": "state-token",
            "secret": {"secretName": token_secret_name(owner)},
        },
        *model_volumes,
    ]
    mounts = [
        scratch_mount,
        {"name": "state-token", "mountPath": STATE_TOKEN_FOLDER, "readOnly": True},
        *model_mounts,
    ]
    keys = spec.security.api_key_secret
    if keys is not None:
        items = [{"key": keys.key, "path": keys.key}]
        volumes.append(
            {
                "name": "api-keys",
                "secret": {"secretName": keys.name, "items": items},
            }
        )
        mounts.append({"name": "api-keys", "mountPath": API_KEY_FOLDER, "readOnly": True})
    pod: Manifest = {
        "serviceAccountName": owner.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(settings, has_claim=claim_name(spec) is not None),
        "terminationGracePeriodSeconds": (
            ENDPOINT_SECONDS + spec.recovery.drain_seconds + EXIT_SECONDS
        ),
        "containers": [_container(owner, spec, settings, model_path, mounts)],
        "volumes": volumes,
        **placement(spec.pod),
    }
    if spec.pod.runtime_class_name is not None:
        pod["runtimeClassName"] = spec.pod.runtime_class_name
    if spec.pod.topology_spread:
        pod["topologySpreadConstraints"] = [
            spread.document()
            | {
                "labelSelector": {"matchLabels": selector(owner.name, PRIMARY)},
                "matchLabelKeys": ["pod-template-hash"],
            }
            for spread in spec.pod.topology_spread
        ]
    return pod


def _container(
    owner: Owner,
    spec: DeepSeekDeploymentSpec,
    settings: Settings,
    model_path: str,
    mounts: list[Manifest],
) -> Manifest:
    ready = {"path": "/health/ready", "port": "http"}
    container: Manifest = {
        "name": CONTAINER,
        "image": worker_image(spec, settings),
        "imagePullPolicy": pull_policy(spec, settings),
        "args": worker_arguments(owner, spec, model_path),
        "env": _environment(spec),
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "resources": _resources(spec),
        "securityContext": CONTAINER_SECURITY,
        "startupProbe": {
            "httpGet": ready,
            "periodSeconds": STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 2,
            "failureThreshold": LOADING_MINUTES * 60 // STARTUP_PERIOD_SECONDS,
        },
        "readinessProbe": {
            "httpGet": ready,
            "periodSeconds": 5,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            "httpGet": {"path": "/health/live", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINT_SECONDS}}},
        "volumeMounts": mounts,
    }
    return container


def worker_arguments(owner: Owner, spec: DeepSeekDeploymentSpec, model_path: str) -> list[str]:
    """The worker's command line."""
    arguments = [
        "serve",
        f"--model={model_path}",
        f"--served-model-name={spec.model.served_name or owner.name}",
        f"--port={PORT}",
        f"--device={'cpu' if spec.gpu.mode == 'cpu' else 'cuda'}",
        f"--weights={spec.model.weights}",
        f"--kv-cache={spec.model.kv_cache}",
        f"--drain-seconds={spec.recovery.drain_seconds}",
        f"--state-token-file={STATE_TOKEN_FOLDER}/{TOKEN_KEY}",
        _memory_limit(spec),
    ]
    if spec.model.max_context_tokens is not None:
        arguments.append(f"--max-context-tokens={spec.model.max_context_tokens}")
    if spec.security.api_key_secret is not None:
        arguments.append(f"--api-key-file={API_KEY_FOLDER}/{spec.security.api_key_secret.key}")
    return arguments + list(spec.pod.extra_args or [])


def _memory_limit(spec: DeepSeekDeploymentSpec) -> str:
    """On a GPU a share of the device; on a CPU of the container's limit, where it has one."""
    percent = spec.gpu.memory_limit_percent
    limits = (spec.pod.resources.limits if spec.pod.resources is not None else None) or {}
    if spec.gpu.mode == "cpu" and "memory" in limits:
        return f"--memory-limit-bytes={int(amount(limits['memory']) * percent / 100)}"
    return f"--memory-limit-percent={percent}"


def _environment(spec: DeepSeekDeploymentSpec) -> list[Manifest]:
    given = [variable.document() for variable in spec.pod.env or []]
    names = {variable["name"] for variable in given}
    # Caches of libraries go where the container may write.
    own = {"HOME": "/tmp"}  # noqa: S108
    limits = (spec.pod.resources.limits if spec.pod.resources is not None else None) or {}
    if spec.gpu.mode == "cpu" and "cpu" in limits:
        # Without it there is a thread for each core of the node, and they take turns.
        own["OMP_NUM_THREADS"] = str(max(1, math.ceil(amount(limits["cpu"]))))
    return [
        *({"name": name, "value": value} for name, value in own.items() if name not in names),
        *given,
    ]


def _resources(spec: DeepSeekDeploymentSpec) -> Manifest:
    resources: dict[str, Any] = {}
    if spec.pod.resources is not None:
        resources = spec.pod.resources.document()
    if spec.gpu.mode == "whole":
        for part in ("requests", "limits"):
            resources[part] = {**resources.get(part, {}), GPU_RESOURCE: spec.gpu.count}
    # Kubernetes stores amounts as text.
    return {
        part: {name: str(value) for name, value in amounts.items()}
        for part, amounts in resources.items()
    }


def _model_volume(
    spec: DeepSeekDeploymentSpec,
) -> tuple[list[Manifest], list[Manifest], str]:
    """The volume that holds the model, its mount, and the model's path in the container."""
    source = spec.model.parsed_source
    volume: Manifest
    folder = MODEL_FOLDER
    match source:
        case PackageSource(name=name):
            return [], [], f"{PACKAGED_MODELS}/{name}"
        case OciSource(image=image, path=path):
            volume = {"image": {"reference": image, "pullPolicy": "IfNotPresent"}}
        case PvcSource(claim=claim, path=path):
            volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        case NodePathSource(path=node_path):
            place, path = _node_folder(node_path)
            volume = {"hostPath": {"path": place, "type": "Directory"}}
        case HubSource() | HttpsSource():
            claim_of_cache = claim_name(spec)
            volume = {"persistentVolumeClaim": {"claimName": claim_of_cache, "readOnly": True}}
            folder, path = CACHE_FOLDER, cache_name(source)
    mount = {"name": "model", "mountPath": folder, "readOnly": True}
    return [{"name": "model", **volume}], [mount], f"{folder}/{path}" if path else folder


def _node_folder(path: str) -> tuple[str, str | None]:
    """The folder to mount and the file in it: a single file is reached through its folder."""
    pure = PurePosixPath(path)
    if pure.suffix in {".gguf", ".safetensors"}:
        return str(pure.parent), pure.name
    return path, None


def is_downloaded(source: Source) -> bool:
    """Whether a loader has to fetch the model."""
    return isinstance(source, Downloaded)
