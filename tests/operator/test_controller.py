"""The operator against a real API server: what a person sees who applies an object."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fault_proxy import FaultProxy
from real import Operator, Server, eventually
from responder import add_node, bind
from scenes import condition

from conftest import Start
from deepseek_operator.kinds import (
    AUTOSCALER,
    CHILD_KINDS,
    DEEPSEEK_DEPLOYMENT,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    JOB,
    NETWORK_POLICY,
    NODE,
    POD,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    VOLUME_CLAIM,
    Kind,
    Manifest,
)
from deepseek_operator.render import MANAGED_BY_SELECTOR

pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(300)]

CPU = {"gpu": {"mode": "cpu"}}
QUOTA = Kind("", "v1", "resourcequotas", "ResourceQuota")
FALLBACK = {
    "fallbacks": [{"name": "small", "model": {"source": "package://tiny"}, "gpu": {"mode": "cpu"}}]
}
RICH = {
    "model": {"source": "oci://registry.example/tiny:1", "servedName": "org/tiny:1"},
    "replicas": 2,
    "minAvailable": 2,
    "security": {"apiKeySecret": {"name": "keys"}},
    "routing": {"service": {"type": "NodePort", "port": 8080, "annotations": {"a/b": "c"}}},
    "recovery": {"drainSeconds": 5},
    "pod": {
        "resources": {
            "limits": {"cpu": "1500m", "memory": "0.5Gi"}, "requests": {"cpu": 1, "memory": "1Mi"},
        },
        "env": [
            {"name": "A", "value": "b"},
            {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "extraArgs": ["--seed=1"],
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "topologySpread": [{"topologyKey": "kubernetes.io/hostname"}],
        "imagePullSecrets": [{"name": "pull"}],
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "podAffinityTerm": {"topologyKey": "zone"}}
                ]
            }
        },
    },
}  # fmt: skip


def dsd(namespace: str, name: str = "chat", spec: dict[str, Any] | None = None) -> Manifest:
    return {
        "apiVersion": "deepseek.dev/v1alpha1",
        "kind": "DeepSeekDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": CPU if spec is None else spec,
    }


def children(server: Server, namespace: str) -> set[tuple[str, str]]:
    found = set()
    for kind in CHILD_KINDS:
        items = server.must("GET", kind.path(namespace), labelSelector=MANAGED_BY_SELECTOR)["items"]
        found |= {(kind.kind, item["metadata"]["name"]) for item in items}
    return found


def wanted_children(name: str = "chat") -> set[tuple[str, str]]:
    return {
        ("Deployment", f"{name}-primary"),
        ("Service", name),
        ("ServiceAccount", name),
        ("Secret", f"{name}-state-token"),
        ("PodDisruptionBudget", name),
        ("NetworkPolicy", name),
    }


def complete(server: Server, namespace: str, name: str = "chat") -> None:
    eventually(
        lambda: children(server, namespace) >= wanted_children(name), what=f"children of {name}"
    )


def status_of(server: Server, namespace: str, name: str = "chat") -> Manifest:
    live = server.get(DEEPSEEK_DEPLOYMENT, namespace, name)
    return (live or {}).get("status") or {}


def reason(server: Server, namespace: str, kind: str = "Ready", name: str = "chat") -> str:
    return str(condition(status_of(server, namespace, name), kind)["reason"])


def pods(server: Server, namespace: str) -> list[Manifest]:
    return [p for p in server.list(POD, namespace) if "deletionTimestamp" not in p["metadata"]]


def refuse_pods(server: Server, namespace: str, *, but: int = 0) -> None:
    """A quota that takes no more pods than these."""
    metadata = {"name": "few", "namespace": namespace}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata}
    server.apply({**quota, "spec": {"hard": {"pods": str(but)}}})
    eventually(
        lambda: "pods" in (server.get(QUOTA, namespace, "few") or {})["status"]["used"],
        what="the quota is counted",
    )


def make_ready(server: Server, namespace: str) -> int:
    """Play the kubelet: every pod runs and answers; returns how many do now."""
    for pod in pods(server, namespace):
        if not is_ready(pod):
            ready = [{"type": "Ready", "status": "True", "lastTransitionTime": _now()}]
            changes = {"status": {"phase": "Running", "conditions": ready}}
            with contextlib.suppress(AssertionError):
                server.patch(POD, namespace, pod["metadata"]["name"], changes, "status")
    return sum(is_ready(pod) for pod in pods(server, namespace))


def is_ready(pod: Manifest) -> bool:
    return bool((pod["status"].get("conditions") or [{}])[-1].get("status") == "True")


def pin(server: Server, namespace: str, name: str, tier: str | None) -> None:
    changes = {"metadata": {"annotations": {"deepseek.dev/pin": tier}}}
    server.patch(DEEPSEEK_DEPLOYMENT, namespace, name, changes)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextlib.contextmanager
def kubelet(server: Server, namespace: str) -> Iterator[None]:
    """A thread that makes pods ready as they come."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.1):
            make_ready(server, namespace)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def settled(server: Server, operator: Operator, namespace: str, name: str = "chat") -> None:
    """Wait until the object is Ready and the operator has nothing left to write."""
    complete(server, namespace, name)
    serve(server, namespace, name)
    quiet(operator)


def serve(server: Server, namespace: str, name: str = "chat") -> None:
    """Play the kubelet until every pod answers: `Available` is said from minAvailable on."""

    def is_whole() -> bool:
        make_ready(server, namespace)
        status = status_of(server, namespace, name)
        is_available = reason(server, namespace, name=name) == "Available"
        return is_available and status["readyReplicas"] == status["wantedReplicas"]

    eventually(is_whole, what=f"every pod of {name} is Ready")


def quiet(operator: Operator) -> dict[tuple[str, str], int]:
    """Wait until the operator writes nothing for longer than it ever delays a status.

    That is a second, and what a busy machine takes to write it.
    """
    before: dict[tuple[str, str], int] | None = None

    def is_quiet() -> bool:
        nonlocal before
        now = operator.writes()
        before, same = now, now == before
        return same

    eventually(is_quiet, every=2.0, what="quiet")
    assert before is not None
    return before


class TestFromObjectToPods:
    def test_an_object_gets_its_children_and_becomes_ready(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start()

        server.apply(dsd(namespace))
        settled(server, operator, namespace)

        status = status_of(server, namespace)
        assert children(server, namespace) == wanted_children()
        assert condition(status, "Ready")["status"] == "True"
        assert status["observedGeneration"] == 1
        assert (status["replicas"], status["readyReplicas"]) == (1, 1)
        assert status["activeModel"] == "package://smollm2"
        events = [
            event["reason"]
            for event in server.list(EVENT, namespace)
            if event["involvedObject"]["kind"] == "DeepSeekDeployment"
        ]
        assert events == ["Available"]
        # kopf leaves no mark of its own.
        metadata = (server.get(DEEPSEEK_DEPLOYMENT, namespace, "chat") or {})["metadata"]
        assert "annotations" not in metadata
        assert "finalizers" not in metadata

    def test_a_rich_object_comes_back_from_the_server_as_it_was_applied(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start()

        server.apply(dsd(namespace, spec=RICH))
        complete(server, namespace)
        eventually(lambda: reason(server, namespace) == "SecretMissing")
        before = quiet(operator)
        server.patch(
            DEEPSEEK_DEPLOYMENT, namespace, "chat", {"metadata": {"labels": {"touched": "yes"}}}
        )
        time.sleep(1)

        assert "came back from the API server" not in operator.log
        assert operator.writes() == before
        assert reason(server, namespace) == "SecretMissing"

    @pytest.mark.parametrize("length", [1, 40, 52])
    def test_every_legal_name_works(
        self, server: Server, namespace: str, start: Start, length: int
    ) -> None:
        """Case A13."""
        start()
        name = ("a" + "-b" * 26)[: length - 1] + "x" if length > 1 else "x"

        server.apply(dsd(namespace, name))

        complete(server, namespace, name)

    @pytest.mark.parametrize("name", ["a" * 53, "a" * 63, "a" * 64, "a" * 253, "a.b", "1a"])
    def test_every_other_name_is_refused_at_once(
        self, server: Server, namespace: str, name: str
    ) -> None:
        answer = server.ask("POST", DEEPSEEK_DEPLOYMENT.path(namespace), dsd(namespace, name))

        assert answer.status_code == 422
        assert "1 to 52" in answer.text or "RFC 1123" in answer.text

    @pytest.mark.parametrize(
        "amount",
        [
            "banana", "", "10 GiB", "1e3", "-1Gi", ".5", "1Ki1", "0", "1.5.1", "9999999999Ti",
        ],
    )  # fmt: skip
    def test_a_bad_amount_is_refused_at_once(
        self, server: Server, namespace: str, amount: str
    ) -> None:
        """Case A16: it never reaches the operator."""
        spec = {**CPU, "pod": {"resources": {"limits": {"memory": amount}}}}

        answer = server.ask("POST", DEEPSEEK_DEPLOYMENT.path(namespace), dsd(namespace, spec=spec))

        assert answer.status_code == 422
        assert "resources" in answer.text

    def test_scale_sets_the_number_of_pods(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start()
        server.apply(dsd(namespace))
        settled(server, operator, namespace)

        server.patch(
            DEEPSEEK_DEPLOYMENT, namespace, "chat", {"spec": {"replicas": 3}}, subresource="scale"
        )

        eventually(lambda: make_ready(server, namespace) == 3)
        scale = server.must("GET", DEEPSEEK_DEPLOYMENT.path(namespace, "chat", "scale"))
        assert "deepseek.dev/deployment=chat" in scale["status"]["selector"]


class TestDrift:
    CHANGES: tuple[tuple[Kind, str, Manifest], ...] = (
        (SERVICE, "chat", {"spec": {"selector": {"extra": "x"}}}),
        (DEPLOYMENT, "chat-primary", {"spec": {"replicas": 4}}),
        (DEPLOYMENT, "chat-primary", {"spec": {"template": {"metadata": {"annotations": None}}}}),
        (NETWORK_POLICY, "chat", {"spec": {"ingress": [{}]}}),
        (DISRUPTION_BUDGET, "chat", {"spec": {"maxUnavailable": 3}}),
        (SERVICE_ACCOUNT, "chat", {"automountServiceAccountToken": True}),
        (SECRET, "chat-state-token", {"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}),
        (SERVICE, "chat", {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}}),
        (SERVICE, "chat", {"metadata": {"ownerReferences": []}}),
        (SERVICE_ACCOUNT, "chat", {"metadata": {"labels": {"app.kubernetes.io/managed-by": "x"}}}),
    )

    def test_every_child_is_made_again_and_every_field_set_back(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start()
        server.apply(dsd(namespace))
        settled(server, operator, namespace)
        token = (server.get(SECRET, namespace, "chat-state-token") or {})["data"]

        for kind, name, changes in self.CHANGES:
            good = server.get(kind, namespace, name) or {}
            server.patch(kind, namespace, name, changes)
            eventually(
                lambda kind=kind, name=name, good=good: (
                    _ours(server.get(kind, namespace, name)) == _ours(good)
                ),
                what=f"{kind.kind} {changes} is set back",
            )
        kept = (server.get(SECRET, namespace, "chat-state-token") or {})["data"]
        for child, name in wanted_children():
            kind = next(k for k in CHILD_KINDS if k.kind == child)
            old = (server.get(kind, namespace, name) or {})["metadata"]["uid"]
            server.delete(kind, namespace, name, propagationPolicy="Background")
            eventually(
                lambda kind=kind, name=name, old=old: (
                    (server.get(kind, namespace, name) or {})["metadata"]["uid"] != old
                ),
                what=f"{child} is made again",
            )

        assert kept == token
        assert (server.get(SECRET, namespace, "chat-state-token") or {})["data"] != token

    def test_other_peoples_fields_stay(self, server: Server, namespace: str, start: Start) -> None:
        operator = start()
        server.apply(dsd(namespace))
        settled(server, operator, namespace)

        server.patch(SERVICE, namespace, "chat", {"metadata": {"labels": {"team": "red"}}})
        server.patch(SERVICE, namespace, "chat", {"spec": {"sessionAffinity": "ClientIP"}})
        time.sleep(1)

        live = server.get(SERVICE, namespace, "chat") or {}
        assert live["metadata"]["labels"]["team"] == "red"
        assert live["spec"]["sessionAffinity"] == "ClientIP"

    def test_wiped_annotations_and_a_new_image_roll_one_deployment(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Case A20."""
        operator = start()
        server.apply(dsd(namespace))
        settled(server, operator, namespace)

        live = server.get(DEEPSEEK_DEPLOYMENT, namespace, "chat") or {}
        live["metadata"].pop("annotations", None)
        live["spec"]["pod"] = {"image": "worker:2"}
        server.must("PUT", DEEPSEEK_DEPLOYMENT.path(namespace, "chat"), live)
        with kubelet(server, namespace):
            eventually(
                lambda: (
                    [p["spec"]["containers"][0]["image"] for p in pods(server, namespace)]
                    == ["worker:2"]
                ),
                what="only the new pod is left",
            )

        names = {item["metadata"]["name"] for item in server.list(DEPLOYMENT, namespace)}
        assert names == {"chat-primary"}


def _ours(live: Manifest | None) -> Manifest:
    """A child without what the server counts."""
    live = dict(live or {})
    metadata = {k: live["metadata"].get(k) for k in ("labels", "ownerReferences")}
    live.pop("status", None)
    return {**live, "metadata": metadata}


class TestQuiet:
    def test_status_written_by_others_wakes_nobody(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Case A03, in both halves: our own status writes, and somebody else's."""
        operator = start()
        server.apply(dsd(namespace))
        settled(server, operator, namespace)
        before = operator.writes()

        time.sleep(2)
        idle = operator.writes()
        for number in range(15):
            changes = {"status": {"replicas": number}}
            server.patch(DEEPSEEK_DEPLOYMENT, namespace, "chat", changes, "status")
            time.sleep(0.1)

        assert idle == before
        assert operator.writes() == before

    @pytest.mark.parametrize(
        "seeds",
        [range(5), pytest.param(range(5, 20), marks=pytest.mark.long)],
        ids=["some", "the rest of twenty"],
    )
    def test_the_last_of_many_quick_edits_wins(
        self, server: Server, namespace: str, start: Start, seeds: range
    ) -> None:
        """Case A11, over an API server that takes 200 ms."""
        with FaultProxy(server.plane, latency_seconds=(0.2, 0.2)) as proxy:
            operator = start(address=proxy.address)
            server.apply(dsd(namespace))
            complete(server, namespace)
            for seed in seeds:
                values = random.Random(seed).choices(range(6), k=20)
                for value in values:
                    changes = {"spec": {"replicas": value}}
                    server.patch(DEEPSEEK_DEPLOYMENT, namespace, "chat", changes)
                    time.sleep(0.03)
                eventually(
                    lambda last=values[-1]: len(pods(server, namespace)) == last,
                    what=f"{values[-1]} pods after {values}",
                )
            operator.stop()

    def test_overlapping_edits_keep_as_many_pods_as_the_rollout_allows(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Case A18."""
        start()
        server.apply(dsd(namespace, spec={**CPU, "replicas": 3, "rollout": "replace"}))
        lowest = 3
        serve(server, namespace)
        with kubelet(server, namespace):
            for number in range(3):
                changes = {"spec": {"pod": {"image": f"worker:{number}"}}}
                server.patch(DEEPSEEK_DEPLOYMENT, namespace, "chat", changes)
                until = time.monotonic() + 0.7
                while time.monotonic() < until:
                    live = server.get(DEPLOYMENT, namespace, "chat-primary") or {}
                    lowest = min(lowest, live["status"].get("availableReplicas", 0))
                    time.sleep(0.05)
            eventually(
                lambda: (
                    {p["spec"]["containers"][0]["image"] for p in pods(server, namespace)}
                    == {"worker:2"}
                ),
            )
        serve(server, namespace)

        assert lowest >= 2


class TestRefusals:
    def test_a_name_that_is_taken_is_told_and_heals(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        theirs = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "chat", "namespace": namespace},
            "spec": {"ports": [{"port": 5432}], "selector": {"app": "database"}},
        }
        server.apply(theirs)
        start()

        server.apply(dsd(namespace))
        eventually(lambda: reason(server, namespace) == "NameTaken")
        untouched = server.get(SERVICE, namespace, "chat") or {}
        server.delete(SERVICE, namespace, "chat")
        eventually(lambda: ("Service", "chat") in children(server, namespace))

        assert untouched["spec"]["selector"] == {"app": "database"}
        assert "ownerReferences" not in untouched["metadata"]
        eventually(lambda: reason(server, namespace) != "NameTaken")

    def test_two_objects_that_come_to_one_name_do_not_take_it_from_each_other(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """The fallback `x-primary` of chat has the name that the primary of chat-x has."""
        operator = start()
        server.apply(dsd(namespace, "chat-x"))
        complete(server, namespace, "chat-x")
        fallback = {**FALLBACK["fallbacks"][0], "name": "x-primary"}

        server.apply(dsd(namespace, spec={**CPU, "fallbacks": [fallback]}))
        complete(server, namespace)
        pin(server, namespace, "chat", "x-primary")

        eventually(lambda: reason(server, namespace) == "NameTaken")
        theirs = server.get(DEPLOYMENT, namespace, "chat-x-primary") or {}
        assert theirs["metadata"]["labels"]["deepseek.dev/deployment"] == "chat-x"
        assert theirs["metadata"]["generation"] == 1
        pin(server, namespace, "chat", None)
        eventually(lambda: reason(server, namespace) != "NameTaken")
        quiet(operator)

    def test_a_quota_is_told_and_heals(self, server: Server, namespace: str, start: Start) -> None:
        refuse_pods(server, namespace)
        start()

        server.apply(dsd(namespace))
        # A pod may be refused first because its ServiceAccount is not known to admission yet.
        eventually(lambda: reason(server, namespace, "QuotaExceeded") == "CreationRefused")
        refused = status_of(server, namespace)
        server.delete(QUOTA, namespace, "few")
        serve(server, namespace)

        assert condition(refused, "QuotaExceeded")["status"] == "True"
        assert condition(refused, "Ready")["reason"] == "CreationRefused"
        assert "exceeded quota: few" in condition(refused, "Ready")["message"]
        assert reason(server, namespace, "QuotaExceeded") == "WithinQuota"

    def test_a_folder_of_the_node_is_forbidden_by_pod_security(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        start()

        server.apply(dsd(namespace, spec={**CPU, "model": {"source": "nodePath:///srv/models"}}))

        eventually(lambda: reason(server, namespace, "ModelCached") == "CacheForbidden")
        assert reason(server, namespace) == "CreationRefused"
        assert "hostPath" in condition(status_of(server, namespace), "ModelCached")["message"]

    def test_one_bad_object_holds_up_no_other(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        start()
        for number in range(8):
            server.apply(
                {
                    "apiVersion": "v1",
                    "kind": "ServiceAccount",
                    "metadata": {"name": f"bad-{number}", "namespace": namespace},
                }
            )
            server.apply(dsd(namespace, f"bad-{number}"))

        server.apply(dsd(namespace, "good"))

        complete(server, namespace, "good")


class TestDownload:
    def end_loader(self, server: Server, namespace: str, phase: str, message: str = "") -> None:
        """Play the kubelet for the loader's pod that has not ended yet."""
        pod = next(p for p in pods(server, namespace) if p["status"]["phase"] == "Pending")
        state = {"exitCode": int(phase == "Failed"), "message": message, "reason": "Error"}
        container = {
            "name": "loader", "image": "x", "imageID": "x", "ready": False, "restartCount": 0,
            "state": {"terminated": state},
        }  # fmt: skip
        changes = {"status": {"phase": phase, "containerStatuses": [container]}}
        server.patch(POD, namespace, pod["metadata"]["name"], changes, "status")

    def test_a_failure_is_told_and_heals_and_the_model_is_fetched_once(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        operator = start()
        spec = {**CPU, "model": {"source": "hf://org/tiny@v1"}}

        server.apply(dsd(namespace, spec=spec))
        eventually(lambda: len(pods(server, namespace)) == 1, what="the loader's pod")
        (claim,) = server.list(VOLUME_CLAIM, namespace)
        held_back = children(server, namespace)
        words = '{"reason": "ChecksumMismatch", "message": "model.gguf is damaged."}'
        self.end_loader(server, namespace, "Failed", words)
        eventually(lambda: reason(server, namespace, "ModelCached") == "ChecksumMismatch")
        told = condition(status_of(server, namespace), "ModelCached")["message"]
        eventually(
            lambda: (
                [j["metadata"]["name"] for j in server.list(JOB, namespace)]
                == [f"{claim['metadata']['name']}-2"]
            ),
            what="the second attempt, and it alone",
        )
        eventually(lambda: any(p["status"]["phase"] == "Pending" for p in pods(server, namespace)))
        self.end_loader(server, namespace, "Succeeded")
        eventually(lambda: reason(server, namespace, "ModelCached") == "Downloaded")
        complete(server, namespace)
        server.apply(dsd(namespace, "second", spec))
        complete(server, namespace, "second")

        assert ("Deployment", "chat-primary") not in held_back
        assert "model.gguf is damaged" in told
        assert len(server.list(JOB, namespace)) == 1
        assert "ownerReferences" not in claim["metadata"]
        server.delete(DEEPSEEK_DEPLOYMENT, namespace, "chat")
        server.delete(DEEPSEEK_DEPLOYMENT, namespace, "second")
        eventually(lambda: not server.list(DEPLOYMENT, namespace))
        assert len(server.list(VOLUME_CLAIM, namespace)) == 1
        operator.stop()

    def test_a_quota_that_refuses_the_loader_is_told_and_heals(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        refuse_pods(server, namespace)
        start()

        server.apply(dsd(namespace, spec={**CPU, "model": {"source": "hf://org/tiny@v1"}}))
        eventually(
            lambda: condition(status_of(server, namespace), "QuotaExceeded")["status"] == "True"
        )
        told = status_of(server, namespace)
        server.delete(QUOTA, namespace, "few")
        eventually(
            lambda: reason(server, namespace, "ModelCached") == "Downloading",
            what="the Job's controller tries again, and the condition follows",
            seconds=120,
        )

        assert condition(told, "ModelCached")["reason"] == "CreationRefused"
        assert "exceeded quota: few" in condition(told, "ModelCached")["message"]
        assert condition(told, "QuotaExceeded")["status"] == "True"
        assert condition(told, "Ready")["reason"] == "ModelNotCached"
        assert reason(server, namespace, "QuotaExceeded") == "WithinQuota"

    def test_a_policy_that_refuses_the_loader_is_told(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Pod security, a LimitRange and the like: whatever the API server says is quoted."""
        limits = Kind("", "v1", "limitranges", "LimitRange")
        server.apply(
            {
                "apiVersion": "v1",
                "kind": "LimitRange",
                "metadata": {"name": "small", "namespace": namespace},
                "spec": {"limits": [{"type": "Container", "max": {"memory": "128Mi"}}]},
            }
        )
        start()

        server.apply(dsd(namespace, spec={**CPU, "model": {"source": "hf://org/tiny@v1"}}))

        eventually(
            lambda: (
                "maximum memory usage per Container is 128Mi"
                in condition(status_of(server, namespace), "ModelCached")["message"]
            )
        )
        assert reason(server, namespace, "ModelCached") == "CreationRefused"
        server.delete(limits, namespace, "small")

    def test_a_missing_certificate_authority_is_named_and_heals(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        start()
        model = {"source": "hf://org/tiny@v1", "certificateAuthority": {"name": "trusted"}}

        server.apply(dsd(namespace, spec={**CPU, "model": model}))
        eventually(lambda: reason(server, namespace, "ModelCached") == "ConfigMapMissing")
        told = condition(status_of(server, namespace), "ModelCached")["message"]
        server.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "trusted", "namespace": namespace},
                "data": {"ca.crt": "PEM"},
            }
        )

        eventually(lambda: reason(server, namespace, "ModelCached") == "Downloading")
        assert "ConfigMap trusted, which is not there" in told


class TestRights:
    @pytest.fixture
    def node(self, server: Server, namespace: str) -> Iterator[str]:
        """A pod on a node that is not there would be ended by Kubernetes, if a little later."""
        add_node(server, namespace)
        yield namespace
        server.must("DELETE", NODE.path(None, namespace))

    def break_device(self, server: Server, namespace: str, node: str) -> None:
        """Play a worker that ends again and again because of its device."""
        name = "deepseek.dev/deployment"
        pod = next(
            p for p in pods(server, namespace) if p["metadata"]["labels"].get(name) == "chat"
        )
        bind(server, pod, node)
        words = '{"reason": "MemoryHeld", "message": "somebody holds it"}'
        container = {
            "name": "worker", "image": "x", "imageID": "x", "ready": False, "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "message": words}},
        }  # fmt: skip
        changes = {"status": {"phase": "Running", "containerStatuses": [container]}}
        server.patch(POD, namespace, pod["metadata"]["name"], changes, "status")

    def test_the_calls_are_those_of_the_role_and_no_others(
        self, server: Server, namespace: str, start: Start, node: str
    ) -> None:
        """Case F14, for the operator's part: the API server's own log is compared with the role."""
        from deepseek_operator.permissions import OWN_NAMESPACE, SERVED_NAMESPACES

        operator = start()
        server.apply(dsd(namespace))
        settled(server, operator, namespace)
        refuse_pods(server, namespace, but=1)
        server.apply(
            dsd(
                namespace,
                "cached",
                {
                    **CPU,
                    "model": {
                        "source": "hf://org/tiny",
                        "certificateAuthority": {"name": "trusted"},
                    },
                    "security": {"apiKeySecret": {"name": "keys"}},
                },
            )
        )
        eventually(lambda: len(server.list(JOB, namespace)) == 1)
        eventually(lambda: operator.requests()["list", "events"])
        server.delete(QUOTA, namespace, "few")
        eventually(lambda: len(pods(server, namespace)) == 2)
        TestDownload().end_loader(server, namespace, "Failed")
        eventually(lambda: server.list(JOB, namespace)[0]["metadata"]["name"].endswith("-2"))
        eventually(lambda: operator.requests()["delete", "jobs.batch"])
        scaled = dsd(namespace, "scaled", CPU | {"autoscaling": {"maxReplicas": 2}})
        server.apply(scaled)
        eventually(lambda: server.list(AUTOSCALER, namespace))
        scaled["spec"] = CPU
        server.apply(scaled)
        eventually(lambda: not server.list(AUTOSCALER, namespace))
        # A fallback that a person pins and lets go again is deleted.
        tiers = {**CPU, **FALLBACK, "promote": {"afterSeconds": 1}}
        server.apply(dsd(namespace, "tiers", tiers))
        pin(server, namespace, "tiers", "small")
        with kubelet(server, namespace):
            eventually(lambda: reason(server, namespace, "Degraded", "tiers") == "Pinned")
            eventually(lambda: server.get(DEPLOYMENT, namespace, "tiers-small"))
            pin(server, namespace, "tiers", None)
            eventually(lambda: operator.requests()["delete", "deployments.apps"])
        stripped = {"metadata": {"labels": {"app.kubernetes.io/name": None}}}
        server.patch(SECRET, namespace, "chat-state-token", stripped)
        server.patch(SERVICE_ACCOUNT, namespace, "chat", stripped)
        eventually(lambda: operator.requests()["patch", "secrets"])
        eventually(lambda: operator.requests()["patch", "serviceaccounts"])
        self.break_device(server, namespace, node)
        eventually(lambda: operator.requests()["patch", "pods"], what="it is quarantined")
        eventually(lambda: operator.requests()["delete", "pods"], what="and ended")
        operator.stop()

        used: dict[tuple[str, str], set[str]] = {}
        refused = []
        for event in server.audit(operator.user):
            target = event.get("objectRef")
            if not target or "resource" not in target:
                continue
            name = "/".join(filter(None, (target["resource"], target.get("subresource"))))
            key = (target.get("apiGroup", ""), name)
            verbs = used.setdefault(key, set())
            verbs.add(event["verb"])
            if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
                verbs.add("create")
            if event["responseStatus"]["code"] == 403:
                refused.append(event)
        allowed = {
            (rule.group, rule.resource): set(rule.verbs)
            for rule in (*SERVED_NAMESPACES, *OWN_NAMESPACE)
        }
        assert used == allowed
        assert refused == []
