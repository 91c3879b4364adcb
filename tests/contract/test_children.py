"""What is taken of an object when it is applied, the API server takes of its children as well."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from crd_documents import Document, variations
from pydantic import ValidationError

import crds
from cluster import programs
from deepseek_contract.deployment import NAME_MAX_LENGTH, DeepSeekDeployment, DeepSeekDeploymentSpec
from deepseek_operator import autoscale, loader
from deepseek_operator.autoscale import ScaledTier
from deepseek_operator.kinds import KIND_OF, SCALED_OBJECT
from deepseek_operator.render import Owner, cache_name, desired_state
from deepseek_operator.routing import http_route
from deepseek_operator.settings import Settings
from deepseek_operator.tiers import tiers_of

pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(600)]

OWNER = Owner("default", "a" * NAME_MAX_LENGTH, "uid-of-the-object")
SETTINGS = Settings(gateway_api=True)
NOT_ASKED = {"DeepSeekDeployment", "Pod", SCALED_OBJECT.kind}
"""No children, and those of KEDA, whose CRD is not here."""


def children(spec: DeepSeekDeploymentSpec) -> Iterator[Document]:
    """All that an object can have, its fallbacks and caches too."""
    tiers = [tier.with_replicas(max(1, tier.replicas)) for tier in tiers_of(spec)]
    yield from desired_state(OWNER, spec, SETTINGS, tiers)
    for tier in tiers:
        scaler = autoscale.autoscaler(ScaledTier(OWNER, tier), SETTINGS)
        if scaler is not None:
            yield scaler
        cache = cache_name(tier.model.parsed_source)
        if cache is not None:
            claim = loader.volume_claim(OWNER.namespace, cache, tier.spec, None)
            yield claim
            live = {**claim, "metadata": {**claim["metadata"], "uid": "uid-of-the-claim"}}
            yield loader.network_policy(OWNER.namespace, cache, tier.spec, SETTINGS, live)
            yield loader.job(OWNER, cache, tier.spec, SETTINGS, live)
    route = http_route(OWNER, spec)
    if route is not None:
        yield route


def accepted() -> Iterator[tuple[Document, DeepSeekDeploymentSpec]]:
    """Specs on each limit of each place, as far as they are right."""
    version = crds.custom_resource_definition(crds.DEPLOYMENT)["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    head = {
        "apiVersion": "deepseek.dev/v1alpha1",
        "kind": "DeepSeekDeployment",
        "metadata": {"name": OWNER.name},
    }
    for spec in variations(schema, "spec"):
        try:
            yield spec, DeepSeekDeployment.parse({**head, "spec": copy.deepcopy(spec)}).spec
        except ValidationError:
            continue


def test_children_of_all_that_is_taken_are_taken(api_server: Any) -> None:
    name = "gateway.networking.k8s.io_httproutes.yaml"
    definition = programs.sources("gateway-api") / "config/crd/experimental" / name
    api_server.install(yaml.safe_load(definition.read_text()), version="v1")
    asked: set[str] = set()
    refused: list[str] = []

    for spec, parsed in accepted():
        for child in children(parsed):
            text = json.dumps(child, sort_keys=True)
            if text in asked:
                continue
            asked.add(text)
            answer = api_server.create(KIND_OF[child["kind"]].path(OWNER.namespace), child)
            if not answer.is_accepted:
                refused.append(f"{spec}\n{answer.message}")

    assert not refused, "\n".join(refused)
    assert {json.loads(text)["kind"] for text in asked} >= KIND_OF.keys() - NOT_ASKED
