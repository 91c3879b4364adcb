"""What is kept of an object, and which changes count."""

import copy
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from real import Server, eventually
from scenes import owner_of

from deepseek_operator.fleet import charges_of, limits_of
from deepseek_operator.kinds import POD, Manifest
from deepseek_operator.render import CONTAINER_SECURITY
from deepseek_operator.views import matters, view


def deployment(**status: object) -> dict:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "chat-primary",
            "namespace": "team",
            "uid": "u",
            "resourceVersion": "7",
            "managedFields": [{"manager": "kubectl"}],
            "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": "{}",
                "deployment.kubernetes.io/revision": "1",
            },
        },
        "spec": {"replicas": 1},
        "status": {
            "replicas": 1,
            "conditions": [
                {"type": "Available", "status": "True", "lastUpdateTime": "now", "message": "m"}
            ],
            **status,
        },
    }


def test_bulky_fields_are_dropped() -> None:
    kept = view(deployment())

    assert "managedFields" not in kept["metadata"]
    assert kept["metadata"]["annotations"] == {"deployment.kubernetes.io/revision": "1"}
    assert kept["status"]["conditions"] == [{"type": "Available", "status": "True", "message": "m"}]


def test_a_token_never_stays_in_memory() -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s", "namespace": "n", "uid": "u", "resourceVersion": "1"},
        "type": "Opaque",
        "immutable": True,
        "data": {"token": "c2VjcmV0", "empty": ""},
    }

    kept = view(secret)

    assert kept["keys"] == ["token"]
    assert "c2VjcmV0" not in str(kept)


def test_of_a_pod_only_its_place_and_state_are_kept() -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "1"},
        "spec": {"nodeName": "node", "containers": [{"name": "worker"}]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "containerStatuses": [
                {"name": "worker", "image": "x", "started": True, "state": {"running": {}}}
            ],
        },
    }

    kept = view(pod)

    assert kept["spec"] == {"nodeName": "node"}
    assert kept["status"]["containers"] == [
        {"name": "worker", "started": True, "state": {"running": {}}}
    ]


def starting_pod(**parts: Any) -> Manifest:
    """A worker whose node told of it twice; somebody else wrote later."""
    container = {"name": "worker", "started": True, "ready": False, "state": {"running": {}}}
    node = {"f:status": {"f:phase": {}, "f:containerStatuses": {}}}
    fields = [
        {"manager": "kubelet", "time": "2026-05-01T12:00:00Z", "fieldsV1": node},
        {"manager": "kubelet", "time": "2026-05-01T12:00:07Z", "fieldsV1": node},
        {
            "manager": "gate",
            "time": "2026-05-01T12:00:09Z",
            "fieldsV1": {"f:status": {"f:conditions": {}}},
        },
        {"manager": "scheduler", "fieldsV1": {"f:spec": {"f:nodeName": {}}}},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "managedFields": fields},
        "status": {"phase": "Running", "containerStatuses": [container | parts]},
    }


def test_of_a_worker_that_has_started_it_is_kept_when_its_node_told() -> None:
    assert view(starting_pod())["toldAt"] == "2026-05-01T12:00:07Z"
    assert "toldAt" not in view(starting_pod(ready=True))
    assert "toldAt" not in view(starting_pod(started=False))


@pytest.mark.control_plane
def test_the_api_server_dates_what_a_node_tells(server: Server, namespace: str) -> None:
    """Each time anew, and not when somebody else writes."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "worker", "namespace": namespace},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {"name": "worker", "image": "worker", "securityContext": CONTAINER_SECURITY}
            ],
        },
    }
    server.must("POST", POD.path(namespace), pod)

    def told(*, started: bool) -> str:
        container = {
            "name": "worker", "image": "worker", "imageID": "", "restartCount": 0,
            "ready": False, "started": started, "state": {"running": {"startedAt": None}},
        }  # fmt: skip
        changes = {"status": {"phase": "Running", "containerStatuses": [container]}}
        server.must(
            "PATCH",
            POD.path(namespace, "worker", "status"),
            changes,
            content_type="application/strategic-merge-patch+json",
            fieldManager="kubelet",
        )
        live = server.get(POD, namespace, "worker")
        assert live is not None
        return str(view(live).get("toldAt"))

    loading = told(started=False)
    begun = told(started=True)
    # Such times have whole seconds: a later one is to be told apart.
    time.sleep(1.1)
    again = told(started=True)
    labelled = server.patch(POD, namespace, "worker", {"metadata": {"labels": {"a": "b"}}})

    assert loading == "None"
    assert begun == again == view(labelled)["toldAt"]
    age = datetime.now(UTC) - datetime.fromisoformat(begun)
    assert timedelta(seconds=1) < age < timedelta(seconds=60)


def test_what_a_pod_may_use_is_kept() -> None:
    resources = {"limits": {"cpu": "1"}}
    sidecar = {"name": "proxy", "restartPolicy": "Always", "resources": resources}
    pod = starting_pod()
    pod["spec"] = {
        "containers": [{"name": "worker", "image": "x", "resources": resources}],
        "initContainers": [sidecar],
        "overhead": {"cpu": "250m"},
    }

    assert limits_of(view(pod)["spec"]) == limits_of(pod["spec"]) == {"cpu": 2250}
    assert "image" not in str(view(pod)["spec"])


@pytest.mark.control_plane
def test_a_pod_has_the_limits_that_a_limit_range_gives_it(server: Server, namespace: str) -> None:
    """What a quota counts of it is in the pod itself, so no LimitRange has to be read."""
    limits = {"type": "Container", "default": {"cpu": "3"}, "defaultRequest": {"cpu": "2"}}
    server.apply(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "usual", "namespace": namespace},
            "spec": {"limits": [limits]},
        }
    )
    container = {"name": "worker", "image": "worker", "securityContext": CONTAINER_SECURITY}
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "worker", "namespace": namespace},
        "spec": {"securityContext": security, "containers": [container]},
    }

    def charged() -> tuple[int | None, int | None]:
        made = server.must("POST", POD.path(namespace), pod, dryRun="All")
        charges = charges_of(view(made)["spec"])
        return charges.get("requests.cpu"), charges.get("limits.cpu")

    # Admission learns of a LimitRange a moment later.
    eventually(lambda: charged() == (2000, 3000))


def test_of_a_job_the_template_is_not_kept() -> None:
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j", "namespace": "n", "uid": "u", "resourceVersion": "1"},
        "spec": {"template": {}},
        "status": {"active": 1, "startTime": "now"},
    }

    assert view(job)["status"] == {"active": 1}
    assert "spec" not in view(job)


def test_a_new_version_alone_does_not_matter() -> None:
    old = view(deployment())
    new = copy.deepcopy(old)
    new["metadata"]["resourceVersion"] = "8"

    assert not matters(old, new)
    assert matters(None, new)


def test_a_childs_status_matters() -> None:
    assert matters(view(deployment()), view(deployment(readyReplicas=1)))


def test_the_objects_own_status_does_not_matter() -> None:
    """Case A03: status writes, ours or anybody's, wake nobody."""
    assert not matters(view(owner_of()), view(owner_of(status={"replicas": 3})))


def test_the_objects_spec_labels_and_annotations_matter() -> None:
    old = view(owner_of())
    changed = [copy.deepcopy(old) for _ in range(3)]
    changed[0]["spec"]["replicas"] = 9
    changed[1]["metadata"]["labels"] = {"a": "b"}
    changed[2]["metadata"]["annotations"] = {"deepseek.dev/pin": "primary"}

    assert all(matters(old, new) for new in changed)


def test_of_the_owners_of_fields_only_those_of_replicas_are_kept() -> None:
    live = deployment()
    owned = {"fieldsV1": {"f:spec": {"f:replicas": {}, "f:template": {}}}}
    live["metadata"]["managedFields"] = [
        {"manager": "kube-controller-manager", "subresource": "scale", **owned},
        {"manager": "deepseek-operator", **owned},
        {"manager": "kube-controller-manager", "fieldsV1": {"f:status": {"f:replicas": {}}}},
        {"manager": "kubectl", "fieldsV1": {"f:spec": {"f:paused": {}}}},
    ]

    kept = view(live)

    assert kept["replicaManagers"] == ["deepseek-operator", "kube-controller-manager"]
    assert "managedFields" not in kept["metadata"]
    assert matters(view(deployment()), kept)


def test_the_numbers_that_an_autoscaler_sees_do_not_matter() -> None:
    live: dict[str, Any] = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat-primary", "namespace": "team", "uid": "h"},
        "spec": {"maxReplicas": 3},
        "status": {"desiredReplicas": 1, "currentReplicas": 1, "currentMetrics": [{"a": 1}]},
    }
    more = copy.deepcopy(live)
    more["status"]["currentMetrics"] = [{"a": 2}]
    wanted = copy.deepcopy(more)
    wanted["status"]["desiredReplicas"] = 2

    assert not matters(view(live), view(more))
    assert matters(view(live), view(wanted))
