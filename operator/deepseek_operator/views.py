"""What is kept in memory of each kind of object, and which changes of it matter.

Pure. A view holds what the plan and the status read and nothing else, so that thousands of
objects fit into little memory, and so that two equal views mean: nothing to do.
"""

from __future__ import annotations

from typing import Any

from deepseek_operator.kinds import (
    AUTOSCALER,
    DEEPSEEK_DEPLOYMENT,
    DEPLOYMENT,
    HTTP_ROUTE,
    JOB,
    POD,
    SCALED_OBJECT,
    SECRET,
    VOLUME_CLAIM,
    Manifest,
)

_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "annotations",
    "ownerReferences",
)
_BULKY_ANNOTATIONS = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})
_DEPLOYMENT_STATUS = (
    "observedGeneration",
    "replicas",
    "updatedReplicas",
    "readyReplicas",
    "availableReplicas",
    "terminatingReplicas",
)
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")


def view(manifest: Manifest) -> Manifest:
    """The part of an object that is kept."""
    kind = manifest["kind"]
    kept: Manifest = {
        "apiVersion": manifest["apiVersion"],
        "kind": kind,
        "metadata": _metadata(manifest),
    }
    status = manifest.get("status") or {}
    if kind == POD.kind:
        spec = manifest.get("spec") or {}
        kept["spec"] = _pod_spec(spec)
        kept["status"] = _pod_status(status)
        if any(map(_has_yet_to_answer, kept["status"].get("containers") or [])):
            kept |= _told_at(manifest)
        return kept
    if kind == SECRET.kind:
        # The values never stay in memory.
        kept["keys"] = sorted(key for key, value in (manifest.get("data") or {}).items() if value)
        kept |= _some(manifest, ("type", "immutable"))
        return kept
    if kind == JOB.kind:
        kept["status"] = _some(status, ("active", "succeeded", "failed")) | _conditions(status)
        return kept
    kept |= {
        key: value
        for key, value in manifest.items()
        if key not in {"apiVersion", "kind", "metadata", "status"}
    }
    if kind == DEPLOYMENT.kind:
        kept["replicaManagers"] = _replica_managers(manifest)
        kept["status"] = _some(status, _DEPLOYMENT_STATUS) | _conditions(status)
    elif kind == AUTOSCALER.kind:
        kept["status"] = _some(status, ("desiredReplicas",)) | _conditions(status)
    elif kind == SCALED_OBJECT.kind:
        kept["status"] = _conditions(status)
    elif kind == HTTP_ROUTE.kind:
        kept["status"] = _some(status, ("parents",))
    elif kind == VOLUME_CLAIM.kind:
        kept["status"] = _some(status, ("phase", "capacity"))
    elif kind == DEEPSEEK_DEPLOYMENT.kind:
        kept["status"] = status
    return kept


def matters(old: Manifest | None, new: Manifest) -> bool:
    """Whether a change from one view to the next can change what there is to do.

    A DeepSeekDeployment's own status does not count: the operator writes it, and whoever else
    does must not keep the operator busy.
    """
    if old is None:
        return True
    return _essence(old) != _essence(new)


def _replica_managers(deployment: Manifest) -> list[str]:
    """Who owns `spec.replicas`, by the names under which they write."""
    return sorted(
        {
            entry.get("manager", "")
            for entry in deployment["metadata"].get("managedFields") or []
            if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        }
    )


def _has_yet_to_answer(container: Manifest) -> bool:
    return bool(container.get("started") and not container.get("ready"))


def _told_at(pod: Manifest) -> Manifest:
    """When the pod's node told something new of it last; no condition has the time of a start."""
    times = [
        entry["time"]
        for entry in pod["metadata"].get("managedFields") or []
        if "f:containerStatuses" in ((entry.get("fieldsV1") or {}).get("f:status") or {})
        and entry.get("time")
    ]
    return {"toldAt": max(times)} if times else {}


def _essence(kept: Manifest) -> Manifest:
    essence = dict(kept)
    essence["metadata"] = {
        key: value for key, value in kept["metadata"].items() if key != "resourceVersion"
    }
    if kept["kind"] == DEEPSEEK_DEPLOYMENT.kind:
        essence.pop("status", None)
    return essence


def _metadata(manifest: Manifest) -> Manifest:
    metadata = _some(manifest["metadata"], _METADATA)
    annotations = metadata.get("annotations")
    if annotations:
        metadata["annotations"] = {
            key: value for key, value in annotations.items() if key not in _BULKY_ANNOTATIONS
        }
    return metadata


def _some(mapping: Manifest, keys: tuple[str, ...]) -> Manifest:
    return {key: mapping[key] for key in keys if mapping.get(key) is not None}


def _conditions(status: Manifest) -> Manifest:
    conditions = [_some(condition, _CONDITION) for condition in status.get("conditions") or []]
    return {"conditions": conditions} if conditions else {}


def _pod_spec(spec: Manifest) -> Manifest:
    """Its node, and what it may use, which admission may have added to."""
    kept = _some(spec, ("nodeName", "overhead", "resources"))
    for kind in ("initContainers", "containers"):
        containers = [
            _some(container, ("resources", "restartPolicy")) for container in spec.get(kind) or []
        ]
        if any(containers):
            kept[kind] = containers
    return kept


def _pod_status(status: Manifest) -> Manifest:
    kept = _some(status, ("phase", "reason", "message", "podIP")) | _conditions(status)
    containers: list[dict[str, Any]] = [
        _some(container, ("name", "ready", "started", "state", "lastState", "restartCount"))
        for container in (
            *(status.get("initContainerStatuses") or []),
            *(status.get("containerStatuses") or []),
        )
    ]
    if containers:
        kept["containers"] = containers
    return kept
