"""The operator's metrics."""

from prometheus_client.parser import text_string_to_metric_families

from deepseek_contract.metrics import OPERATOR_METRICS
from deepseek_operator.api import Attributes
from deepseek_operator.metrics import Metrics

STATUS = {"conditions": [{"type": "Ready", "status": "True"}], "readyReplicas": 2}


def samples(metrics: Metrics) -> dict[tuple, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_exactly_the_metrics_of_the_contract_are_registered() -> None:
    families = text_string_to_metric_families(Metrics().text().decode())

    told = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert told == {metric.name for metric in OPERATOR_METRICS}


def test_requests_are_counted_as_roles_spell_them() -> None:
    metrics = Metrics()

    metrics.count_request(Attributes("watch", "deployments.apps"), "200")

    labels = (("code", "200"), ("resource", "deployments.apps"), ("verb", "watch"))
    assert samples(metrics)["deepseek_operator_api_requests_total", *labels] == 1


def test_each_condition_has_one_status_that_holds() -> None:
    metrics = Metrics()

    metrics.tell("team", "chat", 3, STATUS)

    found = {
        dict(key[1:])["status"]: value
        for key, value in samples(metrics).items()
        if key[0] == "deepseek_deployment_condition"
    }
    assert found == {"True": 1, "False": 0, "Unknown": 0}


def test_a_condition_that_is_no_longer_told_has_no_series() -> None:
    metrics = Metrics()
    metrics.tell("team", "chat", 3, STATUS)

    metrics.tell("team", "chat", 3, {"conditions": [{"type": "Progressing", "status": "True"}]})

    assert not [key for key in samples(metrics) if ("type", "Ready") in key]


def test_an_object_that_is_gone_has_no_series() -> None:
    metrics = Metrics()
    metrics.tell("team", "chat", 3, STATUS)

    metrics.forget("team", "chat")
    metrics.forget("team", "never-seen")

    assert not [key for key in samples(metrics) if ("deployment", "chat") in key]


def test_work_and_failures_are_counted() -> None:
    metrics = Metrics()

    metrics.reconciled(0.2)
    metrics.failed("ClusterBusyError")
    metrics.heard(7.0)
    metrics.lead(is_leader=True)

    found = samples(metrics)
    assert found["deepseek_operator_reconcile_duration_seconds_count",] == 1
    assert found["deepseek_operator_reconcile_errors_total", ("reason", "ClusterBusyError")] == 1
    assert found["deepseek_operator_last_event_timestamp_seconds",] == 7
    assert found["deepseek_operator_leader",] == 1
