"""What only shows later becomes a condition that says what to do, and heals by itself."""

import json

import pytest

from cluster.errors import ClusterError
from site_under_test import DSD, Namespace, eventually

pytestmark = pytest.mark.e2e


def patch(namespace: Namespace, name: str, **spec: object) -> None:
    namespace.kubectl("patch", DSD, name, "--type=merge", "-p", json.dumps({"spec": spec}))


def test_a_missing_image_is_said_and_heals_with_a_right_one(namespace: Namespace) -> None:
    namespace.serve("imageless", pod={"image": "localhost/no-such-image:1"})

    message = namespace.wait_reason("imageless", "ImageUnavailable")

    assert "localhost/no-such-image:1" in message
    patch(namespace, "imageless", pod={"image": None})
    namespace.wait_ready("imageless")


def test_a_model_that_the_image_lacks_is_said_and_heals(namespace: Namespace) -> None:
    namespace.serve("modelless", model={"source": "package://no-such-model"})

    message = namespace.wait_reason("modelless", "ModelUnusable")

    assert "no-such-model" in message
    patch(namespace, "modelless", model={"source": "package://smollm2"})
    namespace.wait_ready("modelless")


def test_a_model_larger_than_its_memory_is_said_before_the_kernel_kills_it(
    namespace: Namespace,
) -> None:
    resources = {"limits": {"memory": "600Mi"}}
    namespace.serve("large", pod={"resources": resources})

    message = namespace.wait_reason("large", "ModelTooLarge")

    assert "memory" in message
    patch(namespace, "large", pod={"resources": {"limits": {"memory": "3Gi"}}})
    namespace.wait_ready("large")


def test_gpus_that_no_node_has_are_said(namespace: Namespace) -> None:
    namespace.serve("gpued", gpu={"mode": "whole"})

    message = namespace.wait_reason("gpued", "Unschedulable")

    assert "nvidia.com/gpu" in message


def test_a_quota_that_refuses_pods_is_said_and_heals_when_it_grows(namespace: Namespace) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": "0"}},
    }
    namespace.apply(quota)
    namespace.serve("refused")

    namespace.wait_reason("refused", "CreationRefused", type_="QuotaExceeded")
    namespace.apply(quota | {"spec": {"hard": {"pods": "5"}}})

    namespace.wait_ready("refused")


def test_a_quota_that_refuses_the_loader_is_said(namespace: Namespace) -> None:
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "pods"},
            "spec": {"hard": {"pods": "0"}},
        }
    )
    namespace.serve("unloaded", model={"source": "hf://organisation/model"})

    message = namespace.wait_reason("unloaded", "CreationRefused", type_="ModelCached")

    assert "exceeded quota" in message


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"replicas": -1}, "spec.replicas"),
        ({"model": {"source": "ftp://somewhere"}}, "spec.model.source"),
        ({"fallbacks": [{"model": {"source": "package://small"}}]}, "spec.fallbacks"),
        ({"autoscaling": {"minReplicas": 4, "maxReplicas": 3}}, "spec.autoscaling"),
        ({"gpu": {"mode": "mig"}}, "spec.gpu"),
        ({"pod": {"resources": {"limits": {"cpu": "banana"}}}}, "spec.pod.resources.limits"),
        ({"modle": {}}, "modle"),
    ],
    ids=["a number", "a source", "fallbacks", "autoscaling", "a mode", "a quantity", "a typo"],
)
def test_a_wrong_object_is_refused_when_it_is_applied(
    namespace: Namespace, spec: dict[str, object], said: str
) -> None:
    with pytest.raises(ClusterError) as refusal:
        namespace.serve("wrong", **spec)

    assert said in str(refusal.value)


def test_a_name_that_children_could_not_carry_is_refused(namespace: Namespace) -> None:
    with pytest.raises(ClusterError, match="52"):
        namespace.serve("n" * 53)


def test_one_bad_object_does_not_hold_up_others(namespace: Namespace) -> None:
    namespace.serve("bad", pod={"image": "localhost/no-such-image:1"})
    namespace.serve("good", replicas=0)

    eventually(lambda: namespace.condition("good").get("reason") == "ScaledToZero", "good")
