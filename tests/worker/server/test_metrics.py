"""What Prometheus reads, before, during and after load."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import programs
from deepseek_contract.metrics import VLLM_ALIASES, WORKER_METRICS


@pytest.fixture(scope="module")
def promtool() -> Path:
    return programs.ensure(["promtool"])["promtool"]


def check(promtool: Path, text: str) -> None:
    result = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))
    assert text.endswith("\n")


def test_the_text_is_what_prometheus_accepts_at_any_load(api: Any, promtool: Path) -> None:
    api.engine.step_seconds = 0.05
    check(promtool, api.get("/metrics").text)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(api.complete, max_tokens=200) for _ in range(4)]
        api.wait_until(lambda: api.stats().num_running == 4)
        check(promtool, api.get("/metrics").text)
        api.engine.step_seconds = 0
        assert all(answer.result().status_code == 200 for answer in answers)
    api.complete(n=0)

    check(promtool, api.get("/metrics").text)


def test_every_metric_of_the_contract_is_there_and_no_other(api: Any) -> None:
    api.complete(n=0)

    text = api.get("/metrics").text

    described = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert described == {metric.name: metric.type for metric in WORKER_METRICS}
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    assert helps == {metric.name: metric.help for metric in WORKER_METRICS}


def test_while_the_model_loads_there_are_metrics_too(scripted: Any, promtool: Path) -> None:
    with scripted.running(loaded=False) as server:
        text = server.get("/metrics").text

    check(promtool, text)
    assert "deepseek_engine_last_step_timestamp_seconds" in text
    assert "deepseek_kv_pages" not in text


def test_requests_and_tokens_are_counted_once(scripted: Any) -> None:
    with scripted.running() as server:
        server.complete(prompt=["ab", "cd"], max_tokens=3)
        server.complete(max_tokens=50, stop="d")
        server.chat(stream=True, max_tokens=2)
        server.complete(temperature=9)
        server.complete(model="other")
        server.wait_until_idle()

        counted = {
            name: server.metric(name)
            for name in (
                'deepseek_requests_total{finish_reason="length"}',
                'deepseek_requests_total{finish_reason="stop"}',
                'deepseek_requests_total{finish_reason="abort"}',
                'deepseek_requests_rejected_total{reason="InvalidRequest"}',
                'deepseek_requests_rejected_total{reason="UnknownModel"}',
                "deepseek_time_to_first_token_seconds_count",
                "deepseek_inter_token_latency_seconds_count",
                "deepseek_request_duration_seconds_count",
                'deepseek_kv_pages{state="free"}',
                'deepseek_kv_pages{state="held"}',
                "deepseek_requests_running",
            )
        }

    # Two answers of three tokens, one of four that ends at its stop string, one of two.
    assert list(counted.values()) == [3, 1, 0, 1, 1, 4, 2 + 2 + 3 + 1, 4, 64, 0, 0]


def test_waiting_requests_are_demand(api: Any) -> None:
    api.engine.max_running = 1
    api.engine.step_seconds = 0.5
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(api.complete, prompt="x" * 236, max_tokens=20) for _ in range(8)]
        api.wait_until(lambda: api.stats().num_waiting == 7)
        demand = api.metric("deepseek_gpu_memory_demand_percent")
        api.engine.step_seconds = 0
        assert all(answer.result().status_code == 200 for answer in answers)

    # Eight times sixteen pages over a pool of 64.
    assert demand == 200


def test_vllm_s_names_are_there_when_asked_for(scripted: Any) -> None:
    with scripted.running(metrics_aliases="vllm") as server:
        server.complete(max_tokens=3)
        server.chat(max_tokens=2)
        server.wait_until_idle()
        text = server.get("/metrics").text

    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    labels = (("engine", "0"), ("model_name", "tiny"))
    assert values["vllm:num_requests_running", *labels] == 0
    assert values["vllm:kv_cache_usage_perc", *labels] == 0
    assert values["vllm:generation_tokens_total", *labels] == 5
    assert values["vllm:prompt_tokens_total", *labels] == values["deepseek_prompt_tokens_total",]
    length = (labels[0], ("finished_reason", "length"), labels[1])
    assert values["vllm:request_success_total", *length] == 2
    assert values["vllm:time_to_first_token_seconds_count", *labels] == 2
    named = {family.name for family in text_string_to_metric_families(text)}
    assert {alias.removesuffix("_total") for alias, _ in VLLM_ALIASES} <= named
    # Every bucket of ours is one of theirs.
    ours = re.findall(r'deepseek_inter_token_latency_seconds_bucket{le="(.*?)"}', text)
    theirs = re.findall(r'vllm:inter_token_latency_seconds_bucket{.*?le="(.*?)".*?}', text)
    assert ours == theirs


def test_vllm_s_names_wait_for_the_engine_too(scripted: Any) -> None:
    with scripted.running(loaded=False, metrics_aliases="vllm") as server:
        text = server.get("/metrics").text

    assert "vllm:request_success_total" in text
    assert "vllm:num_requests_running" not in text
