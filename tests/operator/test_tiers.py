"""The tiers of an object: what each takes from it, and what it has of its own."""

import pytest
from scenes import CHECKSUM, CPU, SETTINGS, spec_of

from deepseek_contract.deployment import DeepSeekDeploymentSpec
from deepseek_contract.source import parse_source
from deepseek_operator.kinds import Manifest
from deepseek_operator.render import Owner, desired_state, model_name, selector
from deepseek_operator.tiers import PRIMARY, tiers_of

OWNER = Owner("team", "chat", "uid-of-chat")
SMALL = {"name": "small", "model": {"source": "package://tiny"}, "gpu": {"mode": "cpu"}}
TINY = {"name": "tiny", "model": {"source": "hf://org/tiny@v1", "maxContextTokens": 64}}
DOCUMENT = {
    "model": {"source": "package://smollm2", "servedName": "org/chat", "maxContextTokens": 512},
    "gpu": {"mode": "whole"},
    "replicas": 3,
    "pod": {"nodeSelector": {"disk": "ssd"}, "topologySpread": [{"topologyKey": "zone"}]},
    "fallbacks": [SMALL, TINY],
}


def spec() -> DeepSeekDeploymentSpec:
    return spec_of(DOCUMENT)


def deployments(counts: dict[str, int]) -> dict[str, Manifest]:
    tiers = tiers_of(spec(), counts)
    return {
        m["metadata"]["labels"]["deepseek.dev/tier"]: m
        for m in desired_state(OWNER, spec(), SETTINGS, tiers)
        if m["kind"] == "Deployment"
    }


def test_the_primary_comes_first_and_the_fallbacks_keep_their_order() -> None:
    assert [(tier.name, tier.rank) for tier in tiers_of(spec())] == [
        (PRIMARY, 0), ("small", 1), ("tiny", 2),
    ]  # fmt: skip


def test_the_primary_of_an_object_is_the_object() -> None:
    (primary, *_) = tiers_of(spec())

    assert primary.spec is not None
    assert primary.spec == spec()


def test_a_fallback_has_its_own_model_and_gpu_under_the_objects_name() -> None:
    small = tiers_of(spec())[1]

    assert small.model.source == "package://tiny"
    assert small.model.max_context_tokens is None
    assert small.model.served_name == "org/chat"
    assert small.gpu.mode == "cpu"
    assert small.spec.pod == spec().pod


def test_without_more_said_only_the_primary_has_pods() -> None:
    assert [tier.replicas for tier in tiers_of(spec())] == [3, 0, 0]
    assert [tier.replicas for tier in tiers_of(spec(), {PRIMARY: 0, "tiny": 2})] == [0, 0, 2]


def test_a_tier_without_pods_has_no_deployment_but_the_primary_always_does() -> None:
    assert deployments({}).keys() == {PRIMARY}
    assert deployments({PRIMARY: 0, "small": 1}).keys() == {PRIMARY, "small"}
    assert deployments({PRIMARY: 0}).keys() == {PRIMARY}


def test_selectors_of_tiers_are_disjoint_and_the_service_selects_all() -> None:
    """Case B06: each selector matches the pods of one tier only."""
    tiers = deployments({"small": 1, "tiny": 1})
    pods = {
        name: deployment["spec"]["template"]["metadata"]["labels"]
        for name, deployment in tiers.items()
    }

    for name, deployment in tiers.items():
        wanted = deployment["spec"]["selector"]["matchLabels"].items()
        assert [other for other in pods if wanted <= pods[other].items()] == [name]
        spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]
        assert spread["labelSelector"] == {"matchLabels": selector("chat", name)}
    (service,) = [m for m in desired_state(OWNER, spec(), SETTINGS) if m["kind"] == "Service"]
    assert all(service["spec"]["selector"].items() <= labels.items() for labels in pods.values())


@pytest.mark.parametrize(
    ("tier", "flags"),
    [
        (
            "small",
            {"--model=/models/tiny", "--device=cpu", "--model-id=tiny", "--instead-of=smollm2"},
        ),
        ("tiny", {"--max-context-tokens=64", "--device=cuda"}),
    ],
)
def test_every_tier_answers_to_the_objects_name(tier: str, flags: set[str]) -> None:
    (container,) = deployments({tier: 1})[tier]["spec"]["template"]["spec"]["containers"]

    assert {"--served-model-name=org/chat", *flags} <= set(container["args"])


def test_the_primary_is_nobodys_stand_in() -> None:
    (container,) = deployments({})[PRIMARY]["spec"]["template"]["spec"]["containers"]

    assert not [flag for flag in container["args"] if flag.startswith(("--model-id", "--instead"))]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("package://smollm2", "smollm2"),
        ("hf://org/tiny@v1", "org/tiny"),
        ("oci://registry.example:5000/models/r1:v1", "r1:v1"),
        ("oci://registry.example/models/r1:v1#path=a/b.gguf", "b.gguf"),
        ("pvc://weights", "weights"),
        ("pvc://weights/r1/7b", "7b"),
        (f"https://user.example/a/m.gguf?token=secret#sha256={CHECKSUM}", "m.gguf"),
        ("nodePath:///srv/models/tiny", "tiny"),
    ],
)
def test_a_models_name_tells_nothing_about_where_it_is(source: str, name: str) -> None:
    assert model_name(parse_source(source)) == name


def test_an_object_without_fallbacks_has_one_tier() -> None:
    assert [tier.name for tier in tiers_of(spec_of(CPU))] == [PRIMARY]
