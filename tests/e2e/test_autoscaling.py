"""Load scales the pods, by memory or by waiting requests, and nobody's request fails for it."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from load import Load, answered_by, external_metric, watched_count
from site_under_test import Namespace, Site, eventually

pytestmark = pytest.mark.e2e

PAGE_BYTES = 16 * 30 * 2 * 3 * 64 * 4
"""16 tokens, of which the model keeps keys and values in 30 layers of 3 heads of 64 numbers."""
SHORT_WINDOWS = {
    "scaleUp": {"stabilizationWindowSeconds": 0},
    "scaleDown": {
        "stabilizationWindowSeconds": 5,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 5}],
    },
}
DEMAND = "deepseek_gpu_memory_demand_percent"
PRIMARY = "scaled-primary"


def pool(num_pages: int) -> str:
    return f"--kv-cache-bytes={num_pages * PAGE_BYTES}"


def serve(namespace: Namespace, *arguments: str, **scaling: Any) -> None:
    namespace.serve(
        "scaled",
        autoscaling={"behavior": SHORT_WINDOWS} | scaling,
        recovery={"drainSeconds": 30},
        pod={
            "extraArgs": list(arguments),
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "resources": {"requests": {"cpu": "10m", "memory": "256Mi"}},
        },
    )
    namespace.wait_ready("scaled")


def wanted(namespace: Namespace) -> int:
    return int(namespace.get("deployment", PRIMARY)["spec"]["replicas"])


def means(namespace: Namespace) -> dict[str, float]:
    """What the HPA last saw of each metric, as a mean a pod."""
    found = namespace.get("hpa", PRIMARY)["status"].get("currentMetrics") or []
    values = {
        metric["external"]["metric"]["name"]: metric["external"]["current"].get("averageValue", "0")
        for metric in found
        if metric.get("external")
    }
    return {
        name: float(value[:-1]) / 1000 if value.endswith("m") else float(value)
        for name, value in values.items()
    }


def test_load_on_the_memory_scales_from_one_pod_to_three_and_back(
    namespace: Namespace, record_property: Callable[[str, object], None]
) -> None:
    # Ten requests of ten pages each are more than three times the pool.
    serve(namespace, pool(32), maxReplicas=3)
    namespace.wait_reason("scaled", "Scaling", "ScalingActive")
    assert wanted(namespace) == 1
    assert list(external_metric(namespace, DEMAND, "scaled").values()) == [0]

    url = namespace.url("scaled")
    with Load(url, "scaled", 2, prompt_words=2, max_tokens=2, pause_seconds=0.3) as steady:
        started_at = time.monotonic()
        with Load(url, "scaled", 10, prompt_words=30, max_tokens=8) as heavy:
            eventually(lambda: wanted(namespace) == 3, "three pods are wanted")
            scaled_seconds = time.monotonic() - started_at
            assert sum(external_metric(namespace, DEMAND, "scaled").values()) > 160
            namespace.wait_replicas("scaled", 3)
            pods = namespace.pods("scaled")
            eventually(lambda: all(answered_by(pod) for pod in pods), "each of three pods answers")
        ended_at = time.monotonic()
        eventually(lambda: wanted(namespace) == 1, "one pod is wanted")
        back_seconds = time.monotonic() - ended_at
        eventually(lambda: len(namespace.pods("scaled")) == 1, "one pod is left")
        eventually(
            lambda: len(namespace.items("pods")) == 1, "those that ended have done their work"
        )
    record_property("seconds until three were wanted", round(scaled_seconds, 1))
    record_property("seconds until one was wanted", round(back_seconds, 1))

    assert heavy.failures + steady.failures == []
    assert heavy.answered > 10
    assert namespace.condition("scaled")["status"] == "True"

    # The end of autoscaling: the autoscaler goes, and the spec's number counts.
    namespace.kubectl("patch", "dsd", "scaled", "--type=merge", "-p",
                      json.dumps({"spec": {"autoscaling": None, "replicas": 0}}))  # fmt: skip
    eventually(lambda: wanted(namespace) == 0, "no pod is wanted")
    assert namespace.items("hpa") == []


@pytest.fixture(scope="module")
def queueing(site: Site) -> Iterator[Namespace]:
    """A deployment whose pods compute two requests at a time."""
    with site.place("queueing") as found:
        serve(found, "--max-running-requests=2", maxReplicas=2, queuedRequestsPerReplica=4)
        found.wait_reason("scaled", "Scaling", "ScalingActive")
        yield found


def test_short_requests_scale_by_the_queue_while_the_pool_is_nearly_empty(
    queueing: Namespace,
) -> None:
    with Load(queueing.url("scaled"), "scaled", 12, prompt_words=2, max_tokens=8) as load:
        eventually(lambda: wanted(queueing) == 2, "two pods are wanted")
        seen = means(queueing)
        queueing.wait_replicas("scaled", 2)
    eventually(lambda: wanted(queueing) == 1, "one pod is wanted")

    assert load.failures == []
    assert seen["deepseek_requests_waiting"] > 4
    assert seen[DEMAND] < 20


def test_a_metrics_api_that_is_down_or_another_s_holds_the_count_and_is_told(
    queueing: Namespace,
) -> None:
    queueing.wait_reason("scaled", "Scaling", "ScalingActive")
    monitoring = queueing.site.in_namespace("monitoring")

    monitoring.kubectl("scale", "deployment/prometheus-adapter", "--replicas=0")
    try:
        down = queueing.wait_reason("scaled", "ProviderUnavailable", "ScalingActive")
        count = wanted(queueing)
    finally:
        monitoring.kubectl("scale", "deployment/prometheus-adapter", "--replicas=1")
    queueing.wait_reason("scaled", "Scaling", "ScalingActive")
    held_by(queueing.site, "keda-operator-metrics-apiserver")
    try:
        taken = queueing.wait_reason("scaled", "ProviderUnavailable", "ScalingActive")
    finally:
        held_by(queueing.site, "prometheus-adapter")
    queueing.wait_reason("scaled", "Scaling", "ScalingActive")

    assert "monitoring/prometheus-adapter does not answer" in down
    assert "is held by the Service monitoring/keda-operator-metrics-apiserver" in taken
    assert count == 1
    assert queueing.condition("scaled")["status"] == "True"


def held_by(site: Site, service: str) -> None:
    """Let the external metrics API be that of another Service."""
    site.kubectl(
        "patch", "apiservice", "v1beta1.external.metrics.k8s.io", "--type=merge",
        "-p", json.dumps({"spec": {"service": {"namespace": "monitoring", "name": service}}}),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("percent", "pods", "clients"), [(90, 2, 8), (60, 4, 13)])
def test_a_rolling_update_under_load_fails_nothing_and_moves_no_count(
    namespace: Namespace, percent: int, pods: int, clients: int
) -> None:
    # A request of ten pages is 15.6 percent of a pool of 64. Pods are not scraped at one moment, so
    # a client that goes from one to another may count in both, or in none: 6 to 11 requests want
    # two pods at 90 percent each, 12 to 15 four at 60.
    patient = {"scaleDown": {"stabilizationWindowSeconds": 60}}
    serve(namespace, pool(64), maxReplicas=8, gpuMemoryPercent=percent, behavior=patient)
    namespace.wait_reason("scaled", "Scaling", "ScalingActive")

    url = namespace.url("scaled")
    with Load(url, "scaled", clients, prompt_words=30, max_tokens=8) as load:
        eventually(lambda: wanted(namespace) == pods, f"{pods} pods are wanted")
        namespace.wait_replicas("scaled", pods, seconds=300)
        before = {pod["metadata"]["uid"] for pod in namespace.pods("scaled")}
        time.sleep(15)
        with watched_count(namespace, PRIMARY) as counts:
            environment = [{"name": "ROLLED", "value": "1"}]
            namespace.kubectl("patch", "dsd", "scaled", "--type=merge", "-p",
                              json.dumps({"spec": {"pod": {"env": environment}}}))  # fmt: skip
            eventually(
                lambda: not before & {pod["metadata"]["uid"] for pod in namespace.pods("scaled")},
                "all pods are new",
                seconds=600,
            )
            namespace.wait_ready("scaled", seconds=300)

    assert load.failures == []
    assert counts == [pods], namespace.kubectl("describe", "dsd,hpa")


@pytest.mark.long
def test_without_prometheus_the_count_is_held_under_load(namespace: Namespace) -> None:
    serve(namespace, pool(32), maxReplicas=2)
    monitoring = namespace.site.in_namespace("monitoring")

    with Load(namespace.url("scaled"), "scaled", 8, prompt_words=30, max_tokens=8) as load:
        namespace.wait_replicas("scaled", 2)
        monitoring.kubectl("scale", "deployment/prometheus", "--replicas=0")
        try:
            said = namespace.wait_reason("scaled", "MetricUnavailable", "ScalingActive")
            with watched_count(namespace, PRIMARY) as held:
                time.sleep(30)
        finally:
            monitoring.kubectl("scale", "deployment/prometheus", "--replicas=1")
        namespace.wait_reason("scaled", "Scaling", "ScalingActive")

    assert "the number of pods stays as it is" in said
    assert held == [2]
    assert load.failures == []
    eventually(lambda: wanted(namespace) == 1, "one pod is wanted")
