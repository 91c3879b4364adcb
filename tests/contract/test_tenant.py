"""What a DeepSeekTenant says; the agreement test has its values, place by place."""

from typing import Any

import pytest
from pydantic import ValidationError

from deepseek_contract.tenant import DeepSeekTenant, DeepSeekTenantSpec

PATH = "/apis/deepseek.dev/v1alpha1/deepseektenants"
SPEC: dict[str, Any] = {"namespaces": ["a", "b"], "gpuMemory": {"maxPercent": 40}}
TENANT = {
    "apiVersion": "deepseek.dev/v1alpha1",
    "kind": "DeepSeekTenant",
    "metadata": {"name": "team"},
    "spec": SPEC,
}


def test_a_tenant_is_refused_until_quotas_are_dealt_out() -> None:
    with pytest.raises(ValidationError, match="DeepSeekTenant is not available in this version"):
        DeepSeekTenant.parse(TENANT)


@pytest.mark.control_plane
def test_the_api_server_refuses_a_tenant_until_quotas_are_dealt_out(api_server: Any) -> None:
    answer = api_server.create(PATH, TENANT)

    assert not answer.is_accepted
    assert "DeepSeekTenant is not available in this version" in answer.message


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
