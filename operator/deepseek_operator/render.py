"""The objects that one DeepSeekDeployment wants to exist.

Pure: an object and the installation's settings in, manifests out. The plan calls it; it reads no
cluster and no clock. Names are fixed, so that two runs, or two operators, mean the same objects.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_contract.pod import PodSettings
from deepseek_contract.quantity import amount
from deepseek_contract.source import (
    Downloaded,
    HttpsSource,
    HubSource,
    Mounted,
    NodePathSource,
    OciSource,
    PackageSource,
    PvcSource,
    Source,
)
from deepseek_operator.devices import node_requirements, requests_of, resource_of
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
from deepseek_operator.recovery import anti_affinity
from deepseek_operator.settings import Settings
from deepseek_operator.tiers import PRIMARY, Tier, tiers_of

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "deepseek-operator"
MANAGED_BY_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
DEPLOYMENT_LABEL = "deepseek.dev/deployment"
PIN_ANNOTATION = "deepseek.dev/pin"
"""On an object, set by a person: the tier that is to serve."""
TIER_LABEL = "deepseek.dev/tier"
HASH_ANNOTATION = "deepseek.dev/applied-hash"
"""On each child: the hash of the manifest it was applied from. A field that is no longer wanted
leaves no trace in the live object, but it changes the hash."""
MODEL_ANNOTATION = "deepseek.dev/model-source"
"""On the pod template: the source that its pods serve."""

_KEPT = ("app.kubernetes.io/name", "app.kubernetes.io/instance")
CONTAINER = "worker"
PORT = 8000
DNS_PORT = 53
TOKEN_KEY = "token"  # noqa: S105 - the key in the Secret, not a token
STATE_TOKEN_FOLDER = "/etc/deepseek/state-token"  # noqa: S105 - a folder
API_KEY_FOLDER = "/etc/deepseek/api-keys"
MODEL_FOLDER = "/model"
ADAPTER_FOLDER = "/adapters"
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
    owner: Owner,
    spec: DeepSeekDeploymentSpec,
    settings: Settings,
    tiers: Iterable[Tier] | None = None,
) -> tuple[Manifest, ...]:
    """All children of an object but those of its models' caches, which other objects may share.

    The Secret comes without its token: that is random, made once and then left alone. Deployments
    come without `replicas`, which an autoscaler may own (see `autoscale`).

    Args:
        owner: The object.
        spec: What it asks for.
        settings: The installation's.
        tiers: The tiers with the pods that they are to have now; absent, as the spec says.
    """
    children = [
        _service_account(owner),
        _token_secret(owner),
        _network_policy(owner, spec, settings),
        _disruption_budget(owner),
        _service(owner, spec),
    ]
    children += [
        deployment(owner, tier, settings)
        for tier in (tiers_of(spec) if tiers is None else tiers)
        if tier.is_primary or tier.replicas > 0
    ]
    return tuple(with_hash(manifest) for manifest in children)


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


def foreign_claims(spec: DeepSeekDeploymentSpec) -> set[str]:
    """Names of the claims that somebody else made, of the model and of its adapters."""
    adapters = (adapter.parsed_source for adapter in spec.model.lora or [])
    claims = {source.claim for source in adapters if isinstance(source, PvcSource)}
    return claims | ({claim_name(spec) or ""} if has_foreign_claim(spec) else set())


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


def child(kind: Kind, owner: Owner, name: str, labels: dict[str, str] | None = None) -> Manifest:
    """The beginning of the manifest of a child, which Kubernetes collects with its object."""
    manifest = metadata_of(kind, owner.namespace, name, _labels(owner) | (labels or {}))
    manifest["metadata"]["ownerReferences"] = [owner_reference(owner.name, owner.uid)]
    return manifest


def owner_reference(name: str, uid: str) -> Manifest:
    """What makes Kubernetes collect a child when its object is gone."""
    return {
        "apiVersion": DEEPSEEK_DEPLOYMENT.api_version,
        "kind": DEEPSEEK_DEPLOYMENT.kind,
        "name": name,
        "uid": uid,
        "controller": True,
        # Blocking would need a right on the owner's finalizers, and nothing waits for it.
        "blockOwnerDeletion": False,
    }


def _labels(owner: Owner) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "deepseek-worker",
        "app.kubernetes.io/instance": owner.name,
        MANAGED_BY_LABEL: MANAGED_BY,
        DEPLOYMENT_LABEL: owner.name,
    }


def _away_from_quarantine(owner: Owner, affinity: Manifest) -> Manifest:
    """The affinity that people want, and none to nodes that a pod of the object had to leave."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    theirs = affinity.get("podAntiAffinity") or {}
    terms = [*(theirs.get(required) or []), anti_affinity(owner.name)]
    return {**affinity, "podAntiAffinity": {**theirs, required: terms}}


def _service_account(owner: Owner) -> Manifest:
    # Workers never talk to the API server.
    return child(SERVICE_ACCOUNT, owner, owner.name) | {"automountServiceAccountToken": False}


def _token_secret(owner: Owner) -> Manifest:
    secret = child(SECRET, owner, token_secret_name(owner))
    return secret | {"type": "Opaque", "immutable": True}


def token_secret_name(owner: Owner) -> str:
    """Name of the Secret with the token of GET /state."""
    return f"{owner.name}-state-token"


def _service(owner: Owner, spec: DeepSeekDeploymentSpec) -> Manifest:
    wanted = spec.routing.service
    service = child(SERVICE, owner, owner.name)
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
    return child(DISRUPTION_BUDGET, owner, owner.name) | {
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
    return child(NETWORK_POLICY, owner, owner.name) | {
        "spec": {
            # By labels that a quarantined pod keeps.
            "podSelector": {"matchLabels": {label: _labels(owner)[label] for label in _KEPT}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [ingress],
            "egress": [dns_egress()],
        }
    }


def deployment(owner: Owner, tier: Tier, settings: Settings) -> Manifest:
    """A tier's Deployment, without its replicas."""
    spec, labels = tier.spec, selector(owner.name, tier.name)
    name = deployment_name(owner, tier.name)
    return child(DEPLOYMENT, owner, name, {TIER_LABEL: tier.name}) | {
        "spec": {
            "selector": {"matchLabels": labels},
            "strategy": _strategy(spec),
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": 60 * LOADING_MINUTES + 300,
            "template": {
                "metadata": {
                    "labels": _labels(owner) | labels,
                    "annotations": {MODEL_ANNOTATION: spec.model.source},
                },
                "spec": pod_spec(owner, tier, settings),
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


def pod_spec(owner: Owner, tier: Tier, settings: Settings) -> Manifest:
    """The spec of a tier's pods."""
    spec = tier.spec
    model_volumes, model_mounts, model_path = _model_volume(spec)
    adapters = {
        adapter.name: _mounted(
            adapter.parsed_source, f"adapter-{index}", f"{ADAPTER_FOLDER}/{adapter.name}"
        )
        for index, adapter in enumerate(spec.model.lora or [])
    }
    adapter_volumes = [volume for volumes, _, _ in adapters.values() for volume in volumes]
    adapter_mounts = [mount for _, mounts, _ in adapters.values() for mount in mounts]
    adapter_paths = {name: path for name, (_, _, path) in adapters.items()}
    scratch, scratch_mount = scratch_volume()
    volumes = [
        scratch,
        {
            "name": "state-token",
            "secret": {"secretName": token_secret_name(owner)},
        },
        *model_volumes,
        *adapter_volumes,
    ]
    mounts = [
        scratch_mount,
        {"name": "state-token", "mountPath": STATE_TOKEN_FOLDER, "readOnly": True},
        *model_mounts,
        *adapter_mounts,
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
        "securityContext": pod_security(
            settings, has_claim=any("persistentVolumeClaim" in volume for volume in volumes)
        ),
        "terminationGracePeriodSeconds": grace_seconds(spec),
        "containers": [
            _container(tier, settings, mounts)
            | {"args": worker_arguments(owner, tier, model_path, adapter_paths)}
        ],
        "volumes": volumes,
        **placement(spec.pod),
    }
    pod["affinity"] = _away_from_quarantine(owner, pod.get("affinity") or {})
    device = node_requirements(spec.gpu, _resource(tier))
    if device:
        pod["affinity"] = _on_nodes_with(device, pod.get("affinity") or {})
    if spec.pod.runtime_class_name is not None:
        pod["runtimeClassName"] = spec.pod.runtime_class_name
    if spec.pod.topology_spread:
        pod["topologySpreadConstraints"] = [
            spread.document()
            | {
                "labelSelector": {"matchLabels": selector(owner.name, tier.name)},
                "matchLabelKeys": ["pod-template-hash"],
            }
            for spread in spec.pod.topology_spread
        ]
    return pod


def _resource(tier: Tier) -> str:
    return tier.resource or resource_of(tier.gpu, None)


def _on_nodes_with(device: list[Manifest], affinity: Manifest) -> Manifest:
    """The affinity with further conditions in each of its terms, one of which must hold."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    of_nodes = affinity.get("nodeAffinity") or {}
    terms = (of_nodes.get(required) or {}).get("nodeSelectorTerms")
    narrowed: list[Manifest] = [{"matchExpressions": device}]
    if terms is not None:
        # A term that says nothing holds for no node, and would hold for some with this.
        narrowed = [
            {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *device]}
            for term in terms
            if any(term.values())
        ] or [{}]
    return {**affinity, "nodeAffinity": {**of_nodes, required: {"nodeSelectorTerms": narrowed}}}


def grace_seconds(spec: DeepSeekDeploymentSpec) -> int:
    """How long a pod may take to end."""
    return ENDPOINT_SECONDS + spec.recovery.drain_seconds + EXIT_SECONDS


def _container(tier: Tier, settings: Settings, mounts: list[Manifest]) -> Manifest:
    """The worker's container but for its command line."""
    spec = tier.spec
    ready = {"path": "/health/ready", "port": "http"}
    container: Manifest = {
        "name": CONTAINER,
        "image": worker_image(spec, settings),
        "imagePullPolicy": pull_policy(spec, settings),
        "env": _environment(spec),
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "resources": _resources(tier),
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


def worker_arguments(
    owner: Owner, tier: Tier, model_path: str, adapter_paths: Mapping[str, str]
) -> list[str]:
    """The worker's command line; paths are those in its container."""
    spec = tier.spec
    arguments = [
        "serve",
        f"--model={model_path}",
        f"--served-model-name={spec.model.served_name or owner.name}",
        f"--port={PORT}",
        f"--device={'cpu' if spec.gpu.mode == 'cpu' else 'cuda'}",
        f"--weights={spec.model.weights}",
        f"--kv-cache={spec.model.kv_cache}",
        f"--drain-seconds={spec.recovery.drain_seconds}",
        f"--retries-per-batch={spec.recovery.retries_per_batch}",
        f"--state-token-file={STATE_TOKEN_FOLDER}/{TOKEN_KEY}",
        _memory_limit(spec),
    ]
    if spec.model.max_context_tokens is not None:
        arguments.append(f"--max-context-tokens={spec.model.max_context_tokens}")
    arguments += [f"--lora={name}={path}" for name, path in adapter_paths.items()]
    if tier.primary is not None:
        # The answers of a fallback name it and the model that was asked for.
        arguments.append(f"--model-id={model_name(spec.model.parsed_source)}")
        arguments.append(f"--instead-of={model_name(tier.primary.parsed_source)}")
    if spec.security.api_key_secret is not None:
        arguments.append(f"--api-key-file={API_KEY_FOLDER}/{spec.security.api_key_secret.key}")
    return arguments + list(spec.pod.extra_args or [])


def model_name(source: Source) -> str:
    """A model's name for clients: the last part of its source, without hosts and secrets."""
    match source:
        case PackageSource(name=name):
            return name
        case HubSource(repository=repository):
            return repository
        case OciSource(image=image, path=path):
            return PurePosixPath(path or image).name
        case PvcSource(claim=claim, path=path):
            return PurePosixPath(path or claim).name
        case HttpsSource(url=url):
            return PurePosixPath(urlsplit(url).path).name or "model"
        case NodePathSource(path=path):
            return PurePosixPath(path).name


def _memory_limit(spec: DeepSeekDeploymentSpec) -> str:
    """A share of the device, of a vGPU's memory, or on a CPU of the container's limit."""
    percent = spec.gpu.memory_limit_percent
    if spec.gpu.memory_gib is not None:
        return f"--memory-limit-bytes={spec.gpu.memory_gib * 2**30 * percent // 100}"
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


def _resources(tier: Tier) -> Manifest:
    spec = tier.spec
    resources: dict[str, Any] = {}
    if spec.pod.resources is not None:
        resources = spec.pod.resources.document()
    devices = requests_of(spec.gpu, _resource(tier))
    for part in ("requests", "limits") if devices else ():
        resources[part] = {**resources.get(part, {}), **devices}
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
    if not isinstance(source, Downloaded):
        return _mounted(source, "model", MODEL_FOLDER)
    volume = {"persistentVolumeClaim": {"claimName": claim_name(spec), "readOnly": True}}
    mount = {"name": "model", "mountPath": CACHE_FOLDER, "readOnly": True}
    return [{"name": "model", **volume}], [mount], f"{CACHE_FOLDER}/{cache_name(source)}"


def _mounted(
    source: Mounted, volume_name: str, folder: str
) -> tuple[list[Manifest], list[Manifest], str]:
    """The same for a source that is not downloaded."""
    volume: Manifest
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
    mount = {"name": volume_name, "mountPath": folder, "readOnly": True}
    return [{"name": volume_name, **volume}], [mount], f"{folder}/{path}" if path else folder


def _node_folder(path: str) -> tuple[str, str | None]:
    """The folder to mount and the file in it: a single file is reached through its folder."""
    pure = PurePosixPath(path)
    if pure.suffix in {".gguf", ".safetensors"}:
        return str(pure.parent), pure.name
    return path, None
