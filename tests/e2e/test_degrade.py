"""A GPU is taken away and given back: a fallback serves meanwhile, and clients see no failure.

The workers are real and compute on the CPU. The GPU is a number that a node publishes, and a policy
of this test lets pods that ask for one compute without it.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from site_under_test import DSD, Namespace, Site, eventually

pytestmark = pytest.mark.e2e

GPU = "nvidia.com/gpu"
AFTER_SECONDS = 5
POLICY = "compute-without-gpu"
ARGUMENTS = "object.spec.containers[0].args"


@pytest.fixture
def gpu_node(site: Site) -> Iterator[str]:
    """A node with one GPU to count, whose pods compute on the CPU."""
    node = json.loads(site.kubectl("get", "nodes", "-o", "json"))["items"][0]["metadata"]["name"]
    publish(site, node, "1")
    site.kubectl("apply", "-f", "-", stdin=json.dumps(policy()))
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "greedy"},
        "value": 1000,
    }
    site.kubectl("apply", "-f", "-", stdin=json.dumps(priority))
    # A moment passes until the API server goes by them; a pod of before would find no GPU.
    eventually(lambda: arguments_of_a_pod(site) == ["--device=cpu"], "the policy is in force")
    yield node
    site.kubectl("delete", "mutatingadmissionpolicybindings,mutatingadmissionpolicies", POLICY)
    site.kubectl("delete", "priorityclass", "greedy", "--ignore-not-found")
    publish(site, node, None)


def publish(site: Site, node: str, number: str | None) -> None:
    amounts = {"status": {"capacity": {GPU: number}, "allocatable": {GPU: number}}}
    site.kubectl(
        "patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(amounts)
    )


def arguments_of_a_pod(site: Site) -> list[str]:
    """What the API server would make of a worker's arguments."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "asked", "namespace": "default"},
        "spec": {
            "priorityClassName": "greedy",
            "containers": [{"name": "c", "image": "none", "args": ["--device=cuda"]}],
        },
    }
    made = site.kubectl(
        "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod)
    )
    found: list[str] = json.loads(made)["spec"]["containers"][0]["args"]
    return found


def policy() -> dict:
    replaced = f'{ARGUMENTS}.map(a, a == "--device=cuda" ? "--device=cpu" : a)'
    patch = f'[JSONPatch{{op: "replace", path: "/spec/containers/0/args", value: {replaced}}}]'
    group = "admissionregistration.k8s.io/v1"
    pods = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods"],
    }
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": group,
                "kind": "MutatingAdmissionPolicy",
                "metadata": {"name": POLICY},
                "spec": {
                    "reinvocationPolicy": "Never",
                    "failurePolicy": "Fail",
                    "matchConstraints": {"resourceRules": [pods]},
                    "matchConditions": [
                        {"name": "worker", "expression": f"has({ARGUMENTS})"},
                        {"name": "gpu", "expression": f'"--device=cuda" in {ARGUMENTS}'},
                    ],
                    "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
                },
            },
            {
                "apiVersion": group,
                "kind": "MutatingAdmissionPolicyBinding",
                "metadata": {"name": POLICY},
                "spec": {"policyName": POLICY},
            },
        ],
    }


@dataclass
class Client:
    """Asks every 200 ms over connections that it keeps."""

    url: str
    name: str
    answers: list[tuple[float, str, str | None]] = field(default_factory=list)
    """When, the model that answered, and the model that was meant."""
    failures: list[tuple[float, str]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = {"model": self.name, "prompt": "Hi", "max_tokens": 1, "temperature": 0}
        with httpx.Client(timeout=60) as client:
            while not self._ended.wait(0.2):
                now = time.monotonic()
                try:
                    answer = client.post(f"{self.url}/completions", json=body)
                except httpx.HTTPError as error:
                    self.failures.append((now, repr(error)))
                    continue
                if answer.status_code == 200:
                    degraded = answer.headers.get("x-deepseek-degraded")
                    self.answers.append((now, answer.json()["model"], degraded))
                else:
                    self.failures.append((now, answer.text))

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()


def test_a_fallback_serves_while_others_hold_the_gpu(
    site: Site, namespace: Namespace, gpu_node: str
) -> None:
    name = namespace.serve(
        gpu={"mode": "whole"},
        fallbacks=[
            {
                "name": "small",
                "model": {"source": "package://smollm2", "maxContextTokens": 256},
                "gpu": {"mode": "cpu"},
            }
        ],
        degrade={"afterSeconds": AFTER_SECONDS},
        promote={"afterSeconds": AFTER_SECONDS},
        recovery={"drainSeconds": 5},
    )
    namespace.wait_ready(name)
    namespace.wait_reason(name, "PrimaryServing", type_="Degraded")

    namespace.apply(greedy())
    namespace.wait_reason(name, "FallbackServing", "Degraded")
    models = f"{namespace.url(name)}/models"
    # The nodes' proxies hear of its pod when the operator does, or after it.
    eventually(lambda: httpx.get(models, timeout=20).is_success, "the fallback is reached")
    client = Client(namespace.url(name), name)
    with client.asking():
        eventually(lambda: len(client.answers) > 10, "the fallback answers")
        too_long = {"model": name, "prompt": "Hi " * 400, "max_tokens": 1}
        refused = httpx.post(f"{namespace.url(name)}/completions", json=too_long, timeout=20)
        namespace.kubectl("delete", "pod", "greedy", "--grace-period=1")
        namespace.wait_reason(name, "PrimaryServing", "Degraded")
        # The fallback's pod is gone, and those that kept their connection to it are elsewhere.
        eventually(lambda: len(namespace.pods(name)) == 1, "one pod")
        answered = len(client.answers)
        eventually(lambda: len(client.answers) > answered + 20, "answers after that")

    assert client.failures == []
    assert {model for _, model, _ in client.answers} == {name, "smollm2"}
    assert client.answers[0][1:] == ("smollm2", "smollm2")
    assert client.answers[-1][1:] == (name, None)
    assert refused.status_code == 400
    assert "The service is degraded" in refused.text
    found = namespace.get(DSD, name)["status"]
    story = "\n".join(f"{entry['time']} {entry['message']}" for entry in found["history"])
    assert found["degrade"] == {
        "phase": "primary",
        "attempts": 0,
        "generation": 0,
        "degradations": 1,
    }, story
    for words in ("Degraded (FallbackStarting)", "Degraded (Promoting)", "Not degraded"):
        assert words in story, story
    reasons = {event["reason"] for event in namespace.items("events")}
    assert {"FallbackStarting", "FallbackServing", "Promoting", "PrimaryServing"} <= reasons


def greedy() -> dict:
    """A pod of somebody more important, for which the scheduler ends the primary."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 65534,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "pause",
        "image": "localhost/pause:v1",
        "imagePullPolicy": "IfNotPresent",
        "securityContext": security,
        "resources": {"limits": {GPU: "1"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "greedy"},
        "spec": {"priorityClassName": "greedy", "containers": [container]},
    }
