"""The status: reasons, and the shape that the API server stores."""

import re
from typing import get_args

import pytest

from deepseek_contract.status import (
    REASONS,
    Condition,
    ConditionType,
    DeepSeekDeploymentStatus,
)


def test_every_condition_has_reasons_in_the_form_that_kubernetes_wants() -> None:
    assert set(REASONS) == set(get_args(ConditionType))
    for reasons in REASONS.values():
        assert len(set(reasons)) == len(reasons)
        assert all(re.fullmatch("[A-Z][A-Za-z]+", reason) for reason in reasons)


def test_a_status_of_a_newer_operator_is_read_over() -> None:
    status = DeepSeekDeploymentStatus.parse({"replicas": 1, "newField": {}})

    assert status.document() == {"replicas": 1}


@pytest.mark.control_plane
def test_the_api_server_stores_the_whole_status(api_server: object) -> None:
    path = "/apis/deepseek.dev/v1alpha1/namespaces/default/deepseekdeployments"
    time = "2026-01-02T03:04:05Z"
    document = {
        "apiVersion": "deepseek.dev/v1alpha1",
        "kind": "DeepSeekDeployment",
        "metadata": {"name": "with-status"},
        "spec": {},
    }
    status = {
        "observedGeneration": 1,
        "conditions": [
            Condition(
                type=kind,
                status="True",
                reason=reasons[0],
                message="a message",
                last_transition_time=time,
                observed_generation=1,
            ).document()
            for kind, reasons in REASONS.items()
        ],
        "activeModel": "package://smollm2",
        "replicas": 2,
        "readyReplicas": 1,
        "selector": "deepseek.dev/deployment=with-status",
        "memory": {
            "predictedBytes": {"weights": 2**40},
            "measuredBytes": {"weights": 2**40},
            "limitBytes": 2**41,
            "usedPercent": 50,
        },
        "recovery": {"level": 1, "batchRetries": 3, "nodeSwitches": 0, "degradations": 0},
        "history": [{"time": time, "message": "It became ready."}],
    }
    created = api_server.create(path, document, dry_run=False).body  # type: ignore[attr-defined]

    answer = api_server.replace(f"{path}/with-status/status", created | {"status": status})  # type: ignore[attr-defined]

    api_server.client.delete(f"{path}/with-status")  # type: ignore[attr-defined]
    assert answer.is_accepted, answer.message
    assert answer.body["status"] == status
    assert DeepSeekDeploymentStatus.parse(status).document() == status
