"""Degrade and promote with the real API server, scheduler and controllers, on simulated nodes.

kwok plays the kubelets. Each test has nodes of its own, told apart by a label, and a second or two
stand for the minutes of a real installation.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real import (
    Killer,
    Operator,
    Server,
    connect,
    eventually,
    install_crds,
    log_end,
    replayed,
)
from scenes import condition

from cluster import ControlPlane
from deepseek_operator.kinds import DEEPSEEK_DEPLOYMENT, DEPLOYMENT, POD, Kind, Manifest

pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(600)]

GPU = "nvidia.com/gpu"
LIMIT_SECONDS = 180
"""A minute is enough on a machine that has nothing else to do."""
SEEN_SECONDS = 10
"""For how long a passing state lasts that a test has to see on a busy machine."""
QUOTA = Kind("", "v1", "resourcequotas", "ResourceQuota")
ADMISSION = ("admissionregistration.k8s.io", "v1")
POLICY = Kind(*ADMISSION, "validatingadmissionpolicies", "ValidatingAdmissionPolicy")
BINDING = Kind(*ADMISSION, "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding")
NODES = "/api/v1/nodes"
SMALL = {"name": "small", "model": {"source": "package://tiny"}, "gpu": {"count": 1}}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Server]:
    """A control plane with a scheduler and kwok, and CRDs that take more than one GPU a pod."""
    components = ("kube-controller-manager", "kube-scheduler", "kwok")
    with ControlPlane("degrade-tests", components=components) as plane:
        found = connect(plane)
        install_crds(found, any_gpu_count=True)
        yield found
        found.client.close()


@pytest.fixture(scope="module")
def operator(fleet: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    fleet.namespace("deepseek-system")
    folder = tmp_path_factory.mktemp("operator")
    started = Operator(fleet, "deepseek-system", folder, cluster_wide=True)
    started.install()
    started.start()
    yield started
    started.stop(signal.SIGKILL)


class Place:
    """A namespace with nodes of its own."""

    def __init__(
        self, server: Server, name: str, operator: Operator, *, is_killed: bool = False
    ) -> None:
        self.server, self.name, self.operator = server, name, operator
        self.is_killed = is_killed
        """Whether the operator is killed again and again meanwhile."""
        server.namespace(name)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        eventually(lambda: server.ask("GET", account).status_code == 200)

    def node(self, gpus: int) -> str:
        name = f"{self.name}-node"
        amounts = {"cpu": "32", "memory": "64Gi", "pods": "110", GPU: str(gpus)}
        self.server.must(
            "POST",
            NODES,
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                    "labels": {"place": self.name},
                },
                "status": {"capacity": amounts, "allocatable": amounts},
            },
        )
        return name

    def serve(self, name: str = "chat", **spec: Any) -> None:
        whole = {
            "model": {"source": "package://smollm2"},
            "gpu": {"count": 2},
            "fallbacks": [SMALL],
            "degrade": {"afterSeconds": 2},
            "promote": {"afterSeconds": 3},
            "recovery": {"drainSeconds": 1},
            "pod": {"nodeSelector": {"place": self.name}},
        }
        self.server.apply(
            {
                "apiVersion": "deepseek.dev/v1alpha1",
                "kind": "DeepSeekDeployment",
                "metadata": {"name": name, "namespace": self.name},
                "spec": whole | spec,
            }
        )

    def take(self, gpus: int, name: str = "greedy") -> None:
        """Somebody's pod that holds GPUs, and minds no cordon."""
        container = {"name": "c", "image": "x", "resources": {"limits": {GPU: str(gpus)}}}
        self.server.must(
            "POST",
            POD.path(self.name),
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": self.name},
                "spec": {
                    "containers": [container],
                    "nodeSelector": {"place": self.name},
                    "terminationGracePeriodSeconds": 0,
                    "tolerations": [{"operator": "Exists"}],
                },
            },
        )

    def give_back(self, name: str = "greedy") -> None:
        self.server.delete(POD, self.name, name, gracePeriodSeconds="0")

    def lose(self, gpus: int, name: str = "chat") -> None:
        """End the primary's pod, and hold GPUs before its successor gets them."""
        node = f"{NODES}/{self.name}-node"
        cordon = {"spec": {"unschedulable": True}}
        self.server.must("PATCH", node, cordon, content_type="application/merge-patch+json")
        self.end_primary(name)
        self.take(gpus)
        greedy = POD.path(self.name, "greedy")
        eventually(lambda: self.server.must("GET", greedy)["spec"].get("nodeName"))
        self.server.must(
            "PATCH", node, {"spec": {"unschedulable": None}},
            content_type="application/merge-patch+json",
        )  # fmt: skip

    def pods(self, tier: str, name: str = "chat") -> list[Manifest]:
        labels = f"deepseek.dev/deployment={name},deepseek.dev/tier={tier}"
        items: list[Manifest] = self.server.must("GET", POD.path(self.name), labelSelector=labels)[
            "items"
        ]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def end_primary(self, name: str = "chat") -> None:
        for pod in self.pods("primary", name):
            self.server.delete(POD, self.name, pod["metadata"]["name"], gracePeriodSeconds="0")

    def used_of_quota(self) -> str | None:
        quota = self.server.get(QUOTA, self.name, "gpus") or {}
        return ((quota.get("status") or {}).get("used") or {}).get(f"requests.{GPU}")

    def forbid_primary(self) -> None:
        """Let a policy of the cluster refuse the primary's pods here."""
        here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.name}}}
        pods = {
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "resources": ["pods"],
                    "operations": ["CREATE"],
                }
            ]
        }
        is_other = "object.metadata.?labels[?'deepseek.dev/tier'].orValue('') != 'primary'"
        for kind, spec in (
            (POLICY, {
                "matchConstraints": pods,
                "validations": [{"expression": is_other, "message": "not today"}],
            }),
            (BINDING, {
                "policyName": self.name,
                "validationActions": ["Deny"],
                "matchResources": here,
            }),
        ):  # fmt: skip
            self.server.must(
                "POST",
                kind.path(None),
                {
                    "apiVersion": f"{kind.group}/{kind.version}",
                    "kind": kind.kind,
                    "metadata": {"name": self.name},
                    "spec": spec,
                },
            )
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "asks", "labels": {"deepseek.dev/tier": "primary"}},
            "spec": {"containers": [{"name": "c", "image": "x"}]},
        }
        path = POD.path(self.name)
        self.eventually(
            lambda: "not today" in self.server.ask("POST", path, pod, dryRun="All").text,
            "the policy is in force",
        )

    def allow_primary(self) -> None:
        for kind in (BINDING, POLICY):
            answer = self.server.ask("DELETE", kind.path(None, self.name))
            assert answer.status_code == 200, answer.text

    def refusal(self, name: str = "chat") -> str:
        """Why the primary's pods are refused, as its Deployment says."""
        live = self.server.get(DEPLOYMENT, self.name, f"{name}-primary") or {}
        conditions = (live.get("status") or {}).get("conditions") or []
        return "".join(c["message"] for c in conditions if c["type"] == "ReplicaFailure")

    def num_ready(self, tier: str, name: str = "chat") -> int:
        return sum(
            any(c["type"] == "Ready" and c["status"] == "True" for c in found)
            for pod in self.pods(tier, name)
            if (found := pod["status"].get("conditions") or [])
        )

    def status(self, name: str = "chat") -> Manifest:
        live = self.server.get(DEEPSEEK_DEPLOYMENT, self.name, name)
        return (live or {}).get("status") or {}

    def degraded(self, name: str = "chat") -> str:
        return str(condition(self.status(name), "Degraded")["reason"])

    def until(self, reason: str, name: str = "chat") -> None:
        """Wait for a state that lasts."""
        self.eventually(lambda: self.degraded(name) == reason, f"{name} is {reason}")

    def eventually(self, check: Callable[[], bool], what: str) -> None:
        eventually(
            check,
            seconds=(2 if self.is_killed else 1) * LIMIT_SECONDS,
            what=f"{what} in {self.name}",
        )

    def picture(self) -> str:
        return self.server.picture_of(self.name) + log_end(self.operator.log_file)

    def passes(self, reason: str) -> None:
        """Wait for a state that is over before an operator that was killed may look."""
        if not self.is_killed:
            self.until(reason)

    def tiers(self) -> dict[str, int]:
        return {
            live["metadata"]["labels"]["deepseek.dev/tier"]: live["spec"]["replicas"]
            for live in self.server.list(DEPLOYMENT, self.name)
        }


@pytest.fixture
def place(fleet: Server, operator: Operator, request: pytest.FixtureRequest) -> Iterator[Place]:
    is_killed = getattr(request, "param", False)
    words = request.function.__name__.removeprefix("test_").replace("_", "-")[:40].rstrip("-")
    name = f"{words}-killed" if is_killed else words
    killing = Killer(operator, name) if is_killed else contextlib.nullcontext()
    with killing:
        yield Place(fleet, name, operator, is_killed=is_killed)


def served(place: Place, gpus: int, **spec: Any) -> None:
    place.node(gpus)
    place.serve(**spec)
    place.eventually(lambda: place.num_ready("primary") == 1, "the primary answers")
    place.until("PrimaryServing")


@replayed("place", killed_always=True)
def test_capacity_goes_and_comes_back(place: Place) -> None:
    served(place, 4, promote={"afterSeconds": SEEN_SECONDS})

    place.take(1, "first")
    place.lose(2)
    place.until("FallbackServing")
    degraded = place.tiers()
    place.give_back()
    place.passes("Promoting")
    both = (place.num_ready("primary"), place.num_ready("small"))
    place.until("PrimaryServing")

    assert degraded == {"primary": 1, "small": 1}
    assert place.is_killed or both == (1, 1)
    place.eventually(lambda: place.tiers() == {"primary": 1}, "the primary serves alone")
    assert place.num_ready("primary") == 1
    assert place.status()["degrade"] == {
        "phase": "primary",
        "attempts": 0,
        "generation": 0,
        "degradations": 1,
    }
    ready = condition(place.status(), "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "Available")


@replayed("place")
def test_a_swap_on_the_fallbacks_own_unit(place: Place) -> None:
    served(place, 2, promote={"afterSeconds": SEEN_SECONDS, "strategy": "swap"})

    place.lose(1)
    place.until("FallbackServing")
    place.give_back()
    place.passes("PromotionBlockedByFallback")
    place.until("PrimaryServing")

    place.eventually(lambda: place.num_ready("primary") == 1, "the primary answers")
    assert place.tiers() == {"primary": 1}


@replayed("place")
def test_nothing_at_all_is_no_capacity(place: Place) -> None:
    served(place, 2)

    place.lose(2)
    place.until("NoCapacity")
    place.give_back()
    place.until("PrimaryServing")

    assert place.tiers() == {"primary": 1}


@replayed("place")
def test_a_quota_is_the_limit(place: Place) -> None:
    served(place, 4)
    over_quota(place)

    place.end_primary()
    place.until("FallbackServing")
    degraded = place.tiers()
    ready = condition(place.status(), "Ready")["reason"]
    place.give_back()
    place.until("PrimaryServing")

    assert degraded["small"] == 1
    assert ready == "FallbackAvailable"
    place.eventually(lambda: place.tiers() == {"primary": 1}, "the primary serves alone")


def test_a_quota_is_the_limit_also_where_something_else_refused_the_first_pod(place: Place) -> None:
    served(place, 4, degrade={"afterSeconds": 4 * SEEN_SECONDS})
    over_quota(place)

    place.forbid_primary()
    place.end_primary()
    place.eventually(lambda: "not today" in place.refusal(), "pods are refused for a policy")
    place.allow_primary()
    place.eventually(
        lambda: "exceeded quota" in condition(place.status(), "Degraded")["message"],
        "the quota is what is waited for",
    )
    place.until("FallbackServing")


@replayed("place")
def test_a_policy_refuses_the_primary(place: Place) -> None:
    served(place, 4)

    place.forbid_primary()
    place.end_primary()
    place.until("FallbackServing")
    told = condition(place.status(), "Degraded")["message"]
    place.allow_primary()
    place.until("PrimaryServing")

    assert "not today" in told
    place.eventually(lambda: place.tiers() == {"primary": 1}, "the primary serves alone")


def over_quota(place: Place) -> None:
    """A quota that the running pods exceed, so that the primary's next one is refused for sure.

    A quota that has room while pods come and go would not do: what is used is counted after the
    fact, and of two pods that race for the rest sometimes both get in.
    """
    place.take(2)
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus", "namespace": place.name},
        "spec": {"hard": {f"requests.{GPU}": "3"}},
    }

    def is_exceeded() -> bool:
        # A pod that the quota's controller had not heard of is counted minutes later, or anew.
        place.server.delete(QUOTA, place.name, "gpus")
        place.server.must("POST", QUOTA.path(place.name), quota)
        with contextlib.suppress(AssertionError):
            eventually(lambda: place.used_of_quota() is not None, seconds=20)
        return place.used_of_quota() == "4"

    place.eventually(is_exceeded, "the quota is exceeded")


@replayed("place")
def test_one_free_unit_is_not_promised_twice(place: Place) -> None:
    place.node(5)
    names = ("one", "two")
    for name in names:
        place.serve(name)
    for name in names:
        place.eventually(lambda name=name: place.num_ready("primary", name) == 1, f"{name} answers")

    node = f"{NODES}/{place.name}-node"
    for cordoned in (True, None):
        changes = {"spec": {"unschedulable": cordoned}}
        place.server.must("PATCH", node, changes, content_type="application/merge-patch+json")
        if cordoned:
            for name in names:
                place.end_primary(name)
            place.server.must(
                "PATCH", f"{node}/status", {"status": {"allocatable": {GPU: "1"}}},
                content_type="application/merge-patch+json",
            )  # fmt: skip
    place.eventually(
        lambda: sorted(map(place.degraded, names)) == ["FallbackServing", "NoCapacity"],
        "one is on its fallback, the other one finds no place",
    )

    asked = [live["metadata"]["labels"] for live in place.server.list(DEPLOYMENT, place.name)]
    assert [labels["deepseek.dev/tier"] for labels in asked].count("small") == 1
