"""Names, types, units and labels of the metrics."""

import re

import pytest

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
