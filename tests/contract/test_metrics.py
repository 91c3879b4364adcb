"""Names, types, units and labels of the metrics."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from cluster import programs
from deepseek_contract import metrics
from deepseek_contract.metrics import OPERATOR_METRICS, WORKER_METRICS, Metric

ALL = (*WORKER_METRICS, *OPERATOR_METRICS)


def test_every_metric_is_listed_once() -> None:
    defined = [value for value in vars(metrics).values() if isinstance(value, Metric)]

    assert sorted(metric.name for metric in ALL) == sorted(metric.name for metric in defined)
    assert len({metric.name for metric in ALL}) == len(ALL)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_follow_the_customs_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch("deepseek_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created"))
    for unit in ("bytes", "seconds", "percent"):
        assert (metric.unit == unit) == metric.name.removesuffix("_total").endswith(f"_{unit}")
    assert metric.help.endswith(".")


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_only_histograms_have_buckets_and_they_grow(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.type == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert not metric.label_values or len(metric.labels) == 1


MATCHERS = 'namespace="team",deployment="chat",tier="primary"'
ELSEWHERE = MATCHERS.replace("team", "other")
DEMAND = metrics.GPU_MEMORY_DEMAND_PERCENT.name
# Case: by the labels of a target its demand and Prometheus' `up`, a sample each 15 s; seconds from
# the start; what the query then gives by pod.
QUERIES: dict[str, tuple[dict[str, tuple[str, str]], int, dict[str, float]]] = {
    "each pod counts by itself": (
        {'pod="a"': ("150x8", "1x8"), 'pod="b"': ("20x8", "1x8")}, 120, {"a": 150, "b": 20},
    ),
    "a scrape that failed is bridged": ({'pod="a"': ("150 _x3", "1 0x3")}, 45, {"a": 150}),
    "one that keeps failing is not": ({'pod="a"': ("150 _x8", "1 0x8")}, 90, {}),
    "a pod that was replaced is gone at once": (
        {
            'pod="old"': ("150 150 stale", "1 1 stale"),
            'pod="new"': ("_ _ 140x4", "_ _ 1x4"),
        },
        45,
        {"new": 140},
    ),
    "a pod that two jobs scrape counts once": (
        {'pod="a",job="one"': ("150x8", "1x8"), 'pod="a",job="two"': ("150x8", "1x8")},
        120,
        {"a": 150},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def promtool() -> Path:
    return programs.ensure(["promtool"])["promtool"]


@pytest.mark.control_plane
@pytest.mark.parametrize("case", QUERIES)
def test_the_autoscaler_s_query_gives_each_pod_s_last_value(
    case: str, tmp_path: Path, promtool: Path
) -> None:
    targets, seconds, expected = QUERIES[case]
    theirs = {f'{ELSEWHERE},pod="a"': ("70x8", "1x8")}
    ours = {f"{MATCHERS},{labels}": values for labels, values in targets.items()}
    question = {
        "expr": metrics.value_of_each_pod(DEMAND, MATCHERS),
        "eval_time": f"{seconds}s",
        "exp_samples": [
            {"labels": f'{{pod="{pod}"}}', "value": value} for pod, value in expected.items()
        ],
    }
    test = {
        "interval": "15s",
        "input_series": [
            {"series": f"{name}{{{labels}}}", "values": values[place]}
            for labels, values in (ours | theirs).items()
            for place, name in enumerate((DEMAND, "up"))
        ],
        "promql_expr_test": [question],
    }
    file = tmp_path / "test.yaml"
    # Samples are only put in up to the last whole interval before the question.
    file.write_text(json.dumps({"evaluation_interval": "15s", "tests": [test]}))

    done = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
