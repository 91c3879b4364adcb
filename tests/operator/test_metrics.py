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

    told = {
        dict(key[1:])["type"]
        for key in samples(metrics)
        if key[0] == "deepseek_deployment_condition"
    }
    assert told == {"Progressing"}


def test_an_object_that_is_gone_has_no_series() -> None:
    metrics = Metrics()
    metrics.tell("team", "chat", 3, STATUS)
    metrics.tell("team", "stays", 3, STATUS)

    metrics.forget("team", "chat")
    metrics.forget("team", "never-seen")

    labels = [dict(key[1:]) for key in samples(metrics)]
    assert {found["deployment"] for found in labels if "deployment" in found} == {"stays"}


def test_the_ladder_is_told_until_the_object_is_gone() -> None:
    metrics = Metrics()
    labels = (("deployment", "chat"), ("namespace", "team"))

    metrics.tell("team", "chat", 3, STATUS | {"recovery": {"level": 2}})
    metrics.switched_node("team", "chat", "NodeSilent")
    metrics.switched_node("team", "chat", "NodeSilent")
    metrics.switched_node("team", "other", "DeviceFault")
    told = samples(metrics)
    metrics.forget("team", "chat")
    left = samples(metrics)

    switches = ("deepseek_node_switches_total", ("cause", "NodeSilent"), *labels)
    assert told["deepseek_recovery_level", *labels] == 2
    assert told[switches] == 2
    assert switches not in left
    assert any(key[0] == "deepseek_node_switches_total" for key in left)


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


def degraded(reason: str) -> dict:
    return {"conditions": [{"type": "Degraded", "status": "True", "reason": reason}]}


def test_changes_of_the_serving_model_are_counted_by_their_reason() -> None:
    metrics = Metrics()

    metrics.switched("team", "chat", {}, degraded("PrimaryServing"))
    metrics.switched("team", "chat", degraded("PrimaryServing"), degraded("FallbackServing"))
    metrics.switched("team", "chat", degraded("FallbackServing"), degraded("FallbackServing"))
    metrics.switched("team", "chat", degraded("FallbackServing"), degraded("PrimaryServing"))

    name = "deepseek_deployment_tier_transitions_total"
    found = {
        dict(key[1:])["reason"]: value for key, value in samples(metrics).items() if key[0] == name
    }
    assert found == {"FallbackServing": 1, "PrimaryServing": 1}
    metrics.tell("team", "chat", 1, STATUS)
    metrics.forget("team", "chat")
    assert not [key for key in samples(metrics) if key[0] == name]


def test_a_tenant_has_three_series_until_it_is_gone() -> None:
    metrics = Metrics()

    metrics.tell_tenant("a", quota=10, used=5, past_used=2.5)
    metrics.keep_tenants({"a"})
    there = metrics.text().decode()
    metrics.keep_tenants(())

    assert 'deepseek_tenant_quota_bytes{tenant="a"} 10.0' in there
    assert 'deepseek_tenant_used_bytes{tenant="a"} 5.0' in there
    assert 'deepseek_tenant_past_used_bytes{tenant="a"} 2.5' in there
    assert 'tenant="a"' not in metrics.text().decode()
