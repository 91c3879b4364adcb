"""A person applies one object, and an OpenAI client gets answers."""

import json
import time
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from demo import PROMPT, ask
from site_under_test import DSD, PATIENCE_SECONDS, Namespace, Site, eventually

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def served(site: Site) -> Iterator[Namespace]:
    with site.place("serving") as namespace:
        namespace.serve()
        namespace.wait_ready("smollm2")
        yield namespace


def test_the_model_knows_the_capital_of_france(served: Namespace) -> None:
    completion, answer, model = ask(served.url("smollm2"))

    assert "Paris" in completion
    assert answer.strip()
    assert model == "smollm2"


def test_a_stream_ends_with_its_usage(served: Namespace) -> None:
    with OpenAI(base_url=served.url("smollm2"), api_key="none") as client:
        chunks = list(
            client.completions.create(
                model="smollm2", prompt=PROMPT, max_tokens=6, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip

    assert "Paris" in "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_state_needs_the_token_that_only_the_operator_and_the_worker_have(
    served: Namespace,
) -> None:
    address = served.url("smollm2").removesuffix("/v1")

    assert httpx.get(f"{address}/state", timeout=60).status_code == 401
    wrong = {"Authorization": "Bearer x"}
    assert httpx.get(f"{address}/state", headers=wrong, timeout=60).status_code == 401


def test_the_operator_is_let_in_and_the_status_shows_the_workers_memory(
    served: Namespace,
) -> None:
    """The worker's NetworkPolicy lets the operator ask for /state, which nobody else may."""
    memory = eventually(lambda: served.get(DSD, "smollm2")["status"].get("memory"), "status.memory")

    assert set(memory["predictedBytes"]) == set(memory["measuredBytes"])
    assert 0 < memory["usedPercent"] <= 100
    wide = served.kubectl("get", "dsd", "smollm2", "-o", "wide")
    assert "MEMORY%" in wide.splitlines()[0]


def test_what_the_table_shows_is_true(served: Namespace) -> None:
    table = served.kubectl("get", "dsd", "smollm2")

    assert table.splitlines()[0].split()[:2] == ["NAME", "READY"]
    assert table.splitlines()[1].split()[:3] == ["smollm2", "True", "Available"]


def test_prometheus_and_the_external_metrics_api_have_the_workers_memory(
    served: Namespace,
) -> None:
    path = (
        "/apis/external.metrics.k8s.io/v1beta1/namespaces/serving/"
        "deepseek_gpu_memory_used_percent?labelSelector=deployment%3Dsmollm2"
    )

    items = eventually(
        lambda: json.loads(served.kubectl("get", "--raw", path))["items"], "a series"
    )

    assert len(items) == 1


def test_kept_connections_spread_over_new_replicas(served: Namespace) -> None:
    with httpx.Client(base_url=served.url("smollm2"), timeout=60) as client:
        request = {"model": "smollm2", "prompt": "Hello", "max_tokens": 1}
        assert client.post("/completions", json=request).status_code == 200

        served.kubectl("scale", "dsd/smollm2", "--replicas=2")
        served.wait_replicas("smollm2", 2)
        newest = max(served.pods("smollm2"), key=lambda pod: pod["metadata"]["creationTimestamp"])
        metrics = f"http://{newest['status']['podIP']}:8000/metrics"

        # One client, one kept connection at a time: kube-proxy chooses anew for each connection,
        # so each of them misses the new pod with a probability of one half.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while 'finish_reason="length"' not in httpx.get(metrics, timeout=60).text:
            assert client.post("/completions", json=request).status_code == 200
            assert time.monotonic() < deadline, "the new pod got no request"

    served.kubectl("scale", "dsd/smollm2", "--replicas=1")
    eventually(lambda: len(served.pods("smollm2")) == 1, "one pod is left")


def test_a_rolling_change_under_load_fails_no_request(served: Namespace) -> None:
    served.wait_ready("smollm2")
    before = {pod["metadata"]["uid"] for pod in served.pods("smollm2")}
    served.kubectl(
        "patch", "dsd", "smollm2", "--type=merge",
        "-p", json.dumps({"spec": {"pod": {"env": [{"name": "ROLLED", "value": "1"}]}}}),
    )  # fmt: skip
    codes = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while {pod["metadata"]["uid"] for pod in served.pods("smollm2")} & before:
        answer = httpx.post(
            f"{served.url('smollm2')}/completions",
            json={"model": "smollm2", "prompt": "Hello", "max_tokens": 1},
            timeout=60,
        )
        codes.append(answer.status_code)
        assert time.monotonic() < deadline, "the old pod is still there"

    assert set(codes) == {200}
