"""Pod settings are pasted into a pod as they are written."""

from typing import Any

import pytest
from crd_documents import variations
from pydantic import ValidationError

import crds
from deepseek_contract.pod import TUNING_FLAGS, PodSettings
from deepseek_worker.config import EngineConfig, ServerConfig

# Flags of `serve` that the operator sets from fields of the object, or leaves at their default.
SET_BY_THE_OPERATOR = {
    "--api-key-file",
    "--device",
    "--drain-seconds",
    "--host",
    "--instead-of",
    "--kv-cache",
    "--load-format",
    "--log-format",
    "--lora",
    "--max-context-tokens",
    "--memory-limit-bytes",
    "--memory-limit-percent",
    "--model",
    "--model-id",
    "--port",
    "--retries-per-batch",
    "--served-model-name",
    "--state-token-file",
    "--weights",
}


def test_settings_come_out_in_the_words_of_kubernetes() -> None:
    written = {
        "imagePullSecrets": [{"name": "registry"}],
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"requests": {"cpu": "500m", "memory": 1024}},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
                ]
            }
        },
    }

    assert PodSettings.parse(written).document() == written


def test_every_flag_of_the_worker_is_either_the_operators_or_for_tuning() -> None:
    fields = {**EngineConfig.model_fields, **ServerConfig.model_fields}
    flags = {f"--{name.replace('_', '-')}" for name in fields}
    switches = {"--no-prefix-cache"}

    assert flags | switches == SET_BY_THE_OPERATOR | set(TUNING_FLAGS)
    assert not SET_BY_THE_OPERATOR & set(TUNING_FLAGS)


def deployment_with(pod: PodSettings) -> dict[str, Any]:
    """A Deployment whose pods have these settings, as the operator pastes them."""
    settings = pod.document()
    container = {"name": "worker", "image": settings.pop("image", "worker")}
    for field in ("env", "resources", "imagePullPolicy"):
        if field in settings:
            container[field] = settings.pop(field)
    container["args"] = settings.pop("extraArgs", [])
    labels = {"app": "worker"}
    spread = [
        constraint | {"labelSelector": {"matchLabels": labels}}
        for constraint in settings.pop("topologySpread", [])
    ]
    pod_spec = settings | {"containers": [container], "topologySpreadConstraints": spread}
    template = {"metadata": {"labels": labels}, "spec": pod_spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "worker"},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }


@pytest.mark.control_plane
def test_whatever_is_accepted_here_kubernetes_accepts_in_a_deployment(api_server: Any) -> None:
    version = crds.custom_resource_definition(crds.DEPLOYMENT)["spec"]["versions"][0]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    accepted = []
    for settings in variations(spec["properties"]["pod"], "pod"):
        try:
            accepted.append(PodSettings.parse(settings))
        except ValidationError:
            continue

    refused = []
    for pod in accepted:
        path = "/apis/apps/v1/namespaces/default/deployments"
        answer = api_server.create(path, deployment_with(pod))
        if not answer.is_accepted:
            refused.append(f"{pod.document()}: {answer.message}")

    assert not refused, "\n".join(refused)
    assert len(accepted) > 250
