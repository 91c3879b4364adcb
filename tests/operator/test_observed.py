"""One object and what belongs to it, as the plan asks for it."""

from dataclasses import replace

from scenes import HUB, Simulation, pod_of

from deepseek_operator.pods import creation_refusal
from deepseek_operator.render import selector
from deepseek_operator.tiers import tiers_of
from test_degrade import SMALL

REFUSED = {"type": "ReplicaFailure", "status": "True", "message": "an older reason"}


def test_a_deployment_whose_pods_are_refused_has_the_newest_words() -> None:
    cluster = Simulation()
    cluster.settle()
    cluster.deployment["status"] = {"conditions": [REFUSED]}

    observed = cluster.observed()
    told = replace(observed, pod_refusals={"chat-primary": "exceeded quota"})

    assert creation_refusal(observed.deployment()) == "an older reason"
    assert creation_refusal(told.deployment()) == "exceeded quota"


def test_a_tier_has_its_own_pods_and_its_own_foreign_autoscalers() -> None:
    cluster = Simulation({"fallbacks": [SMALL]})
    cluster.settle()
    cluster.pods = [pod_of("a"), pod_of("b", labels=selector("chat", "small"))]

    observed = replace(cluster.observed(), foreign_autoscalers={"chat-primary": ("theirs",)})
    primary, small = map(observed.scaled, tiers_of(cluster.spec))

    assert [pod["metadata"]["name"] for pod in primary.pods] == ["a"]
    assert [pod["metadata"]["name"] for pod in small.pods] == ["b"]
    assert (primary.foreign, small.foreign) == (("theirs",), ())
    assert primary.deployment == cluster.deployment


def test_a_download_without_pod_is_seen() -> None:
    cluster = Simulation(HUB)
    before = cluster.observed()
    cluster.settle()

    assert not before.has_loader_without_pod
    assert cluster.observed().has_loader_without_pod
    cluster.finish_job("Complete")
    assert not cluster.observed().has_loader_without_pod
