"""What a DeepSeekTenant says; the agreement test has its values, place by place."""

import re
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from deepseek_contract.status import TENANT_REASONS, Condition, TenantConditionType
from deepseek_contract.tenant import DeepSeekTenant, DeepSeekTenantSpec, DeepSeekTenantStatus

PATH = "/apis/deepseek.dev/v1alpha1/deepseektenants"
SPEC: dict[str, Any] = {"namespaces": ["a", "b"], "gpuMemory": {"maxPercent": 40}}
TENANT = {
    "apiVersion": "deepseek.dev/v1alpha1",
    "kind": "DeepSeekTenant",
    "metadata": {"name": "team"},
    "spec": SPEC,
}


def test_a_tenant_is_read_as_it_was_written() -> None:
    assert DeepSeekTenant.parse(TENANT).spec.namespaces == ["a", "b"]


@pytest.mark.control_plane
def test_the_api_server_stores_the_whole_status(api_server: Any) -> None:
    time = "2026-01-02T03:04:05Z"
    status = {
        "observedGeneration": 1,
        "conditions": [
            Condition(
                type=kind,
                status="True",
                reason=reason,
                message="a message",
                last_transition_time=time,
                observed_generation=1,
            ).document()
            for kind, (reason, *_) in TENANT_REASONS.items()
        ],
        "quota": {"bytes": 2**45, "percent": 40},
        "used": {"bytes": 2**44, "percent": 20},
        "pastUsed": {"bytes": 0, "percent": 0},
        "pastUsedTime": time,
    }
    created = api_server.create(PATH, TENANT, dry_run=False).body

    answer = api_server.replace(f"{PATH}/team/status", created | {"status": status})

    api_server.client.delete(f"{PATH}/team")
    assert answer.is_accepted, answer.message
    assert answer.body["status"] == status
    assert DeepSeekTenantStatus.parse(status).document() == status


def test_every_condition_has_reasons_in_the_form_that_kubernetes_wants() -> None:
    assert set(TENANT_REASONS) == set(get_args(TenantConditionType))
    for reasons in TENANT_REASONS.values():
        assert len(set(reasons)) == len(reasons)
        assert all(re.fullmatch("[A-Z][A-Za-z]+", reason) for reason in reasons)


def test_what_is_not_written_has_a_default() -> None:
    assert DeepSeekTenantSpec.parse(SPEC).document() == {
        "namespaces": ["a", "b"],
        "gpuMemory": {"minPercent": 0, "maxPercent": 40},
        "weight": 100,
        "partition": {"mode": "whole"},
        "dynamic": {"enabled": True, "halfLife": "24h", "interval": "1m", "graceSeconds": 120},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpuMemory": {"minPercent": 50, "maxPercent": 40}}, "may not be above maxPercent"),
        ({"gpuMemory": {"maxPercent": 0}}, "greater than or equal to 1"),
        ({"gpuMemory": {"maxPercent": 101}}, "less than or equal to 100"),
        ({"namespaces": []}, "at least 1"),
        ({"namespaces": ["a", "a"]}, "names a namespace twice"),
        ({"partition": {"mode": "mig"}}, "that mode needs it"),
        ({"partition": {"migProfile": "1g.18gb"}}, "mode is whole"),
        ({"dynamic": {"halfLife": "a day"}}, "pattern"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeepSeekTenantSpec.parse(SPEC | change)
