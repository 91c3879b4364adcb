"""What a volume says of the model in it: an image, a folder of the node, a claim."""

import pytest
from scenes import CPU, Simulation, claim, pod_of, unschedulable, waiting


def test_an_image_volume_that_cannot_be_pulled_is_the_models_condition() -> None:
    image = "registry.example/tiny:1"
    message = f'Back-off pulling image "{image}"'
    cluster = Simulation({"model": {"source": f"oci://{image}"}, **CPU})
    cluster.pods = [pod_of(containers=[waiting("ImagePullBackOff", message)])]

    model = cluster.plan().model

    assert (model.status, model.reason) == ("False", "ImageUnavailable")
    assert message in model.message


def test_the_workers_image_missing_is_not_the_models_fault() -> None:
    cluster = Simulation({"model": {"source": "oci://registry.example/tiny:1"}, **CPU})
    cluster.pods = [pod_of(containers=[waiting("ErrImagePull", "worker:9 not found")])]

    assert cluster.plan().model.reason == "InImageVolume"


def test_a_node_path_that_pod_security_forbids_is_cache_forbidden() -> None:
    cluster = Simulation({"model": {"source": "nodePath:///srv/tiny"}, **CPU})
    cluster.settle()
    words = (
        'pods "chat-primary-1" is forbidden: violates PodSecurity "restricted:latest":'
        ' restricted volume types (volume "model" uses restricted volume type "hostPath")'
    )
    cluster.deployment["status"] = {
        "conditions": [{"type": "ReplicaFailure", "status": "True", "message": words}]
    }

    model = cluster.plan().model

    assert model.reason == "CacheForbidden"
    assert "PodSecurity" in model.message


@pytest.mark.parametrize(
    ("live", "reason", "status"),
    [
        (None, "ClaimMissing", "False"),
        (claim("Pending"), "ClaimPending", "False"),
        (claim(), "OnVolume", "True"),
    ],
)
def test_a_claim_of_somebody_else(live: dict | None, reason: str, status: str) -> None:
    cluster = Simulation({"model": {"source": "pvc://weights"}, **CPU}, foreign_claim=live)

    todo = cluster.plan()

    assert (todo.model.reason, todo.model.status) == (reason, status)
    # A volume that waits for its first consumer needs the pod, so pods are made anyway.
    assert "Deployment" in {m["kind"] for m in todo.apply}
    assert (todo.requeue_after_seconds is None) == (status == "True")


def test_a_one_node_volume_is_told_only_when_a_second_node_is_needed() -> None:
    cluster = Simulation(
        {"model": {"source": "pvc://weights"}, "replicas": 2, **CPU}, foreign_claim=claim()
    )
    cluster.pods = [pod_of("a", node="node-1", ready=True), pod_of("b", node="node-1")]
    fits = cluster.plan().model
    cluster.pods[1] = pod_of("b", conditions=unschedulable())

    does_not_fit = cluster.plan().model

    assert fits.reason == "OnVolume"
    assert does_not_fit.reason == "SingleNodeVolume"
    assert "node-1" in does_not_fit.message


def test_a_many_node_volume_is_never_the_reason() -> None:
    cluster = Simulation(
        {"model": {"source": "pvc://weights"}, "replicas": 2, **CPU},
        foreign_claim=claim(modes=("ReadWriteMany",)),
    )
    cluster.pods = [pod_of("a", node="node-1"), pod_of("b", conditions=unschedulable())]

    assert cluster.plan().model.reason == "OnVolume"
