"""The manifests of one object: fixed names, legal labels, restricted pods, every field used."""

import copy
import re
import typing
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from scenes import (
    CHECKSUM,
    CPU,
    NOW,
    SETTINGS,
    Simulation,
    condition,
    owner_of,
    pod_of,
    spec_of,
)
from test_workers import after, answer

from deepseek_contract.deployment import (
    NAME_MAX_LENGTH,
    DeepSeekDeployment,
    DeepSeekDeploymentSpec,
)
from deepseek_operator.kinds import Manifest
from deepseek_operator.observed import Observed
from deepseek_operator.render import (
    Owner,
    cache_name,
    claim_name,
    deployment,
    desired_state,
    has_foreign_claim,
    selector,
    with_hash,
)
from deepseek_operator.status import status_of
from deepseek_operator.tiers import tiers_of
from deepseek_worker.config import EngineConfig
from deepseek_worker.main import parser

OWNER = Owner("team", "chat", "uid-of-chat")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAMES = st.from_regex(rf"[a-z]([-a-z0-9]{{0,{NAME_MAX_LENGTH - 2}}}[a-z0-9])?", fullmatch=True)


def render(document: dict | None = None, **settings: Any) -> dict[str, Manifest]:
    installation = SETTINGS.model_copy(update=settings)
    return {m["kind"]: m for m in desired_state(OWNER, spec_of(document), installation)}


def pod_spec(document: dict | None = None, **settings: Any) -> Manifest:
    return render(document, **settings)["Deployment"]["spec"]["template"]["spec"]


def arguments(document: dict | None = None) -> list[str]:
    return pod_spec(document)["containers"][0]["args"]


class TestNames:
    @given(NAMES)
    @example("n" * NAME_MAX_LENGTH)
    def test_every_legal_name_gives_legal_children(self, name: str) -> None:
        """Cases A13 and A15: no name or label is too long or ends with a dash."""
        for child in desired_state(Owner("n" * 63, name, "uid"), spec_of(), SETTINGS):
            metadata = child["metadata"]
            # Only a Secret's name goes into no label and no name of another object.
            longest = 253 if child["kind"] == "Secret" else 63
            assert DNS_LABEL.fullmatch(metadata["name"]), metadata["name"]
            assert len(metadata["name"]) <= longest, metadata["name"]
            template = child.get("spec", {}).get("template", {}).get("metadata", {})
            for labels in (metadata["labels"], template.get("labels", {})):
                assert all(LABEL.fullmatch(value) for value in labels.values()), labels

    @pytest.mark.parametrize(
        "name",
        ["a" * 53, "a" * 63, "a" * 64, "a" * 253, "a.b", "-a", "a-", "a_b", "1a", "A", ""],
    )
    def test_every_other_name_is_refused_with_the_object(self, name: str) -> None:
        document = {
            "apiVersion": "deepseek.dev/v1alpha1",
            "kind": "DeepSeekDeployment",
            "metadata": {"name": name},
            "spec": {},
        }

        with pytest.raises(ValidationError, match="1 to 52"):
            DeepSeekDeployment.parse(document)

    def test_a_model_name_with_slash_and_colon_is_in_no_label(self) -> None:
        children = render({"model": {"servedName": "org/model:tag"}, **CPU})

        for child in children.values():
            assert "org/model:tag" not in child["metadata"]["labels"].values()


class TestPod:
    def test_it_keeps_the_restricted_pod_security_standard(self) -> None:
        pod = pod_spec()
        container = pod["containers"][0]

        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod["automountServiceAccountToken"] is False

    def test_no_user_or_group_is_named_without_a_volume(self) -> None:
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod_spec()["securityContext"].keys()

    @pytest.mark.parametrize(("group", "named"), [(1000, True), (None, False)])
    def test_a_claim_is_readable_for_the_group_of_the_settings(
        self, group: int | None, named: bool
    ) -> None:
        pod = pod_spec({"model": {"source": "pvc://weights"}, **CPU}, volume_group=group)

        assert ("fsGroup" in pod["securityContext"]) is named

    def test_a_gpu_is_asked_for_whole(self) -> None:
        resources = pod_spec({})["containers"][0]["resources"]

        assert resources == {
            "requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"},
        }  # fmt: skip
        assert "--device=cuda" in arguments({})

    def test_a_cpu_pod_asks_for_no_gpu(self) -> None:
        assert "nvidia.com/gpu" not in str(pod_spec())
        assert "--device=cpu" in arguments()

    def test_memory_on_a_cpu_is_a_share_of_the_containers_limit(self) -> None:
        document = {
            "gpu": {"mode": "cpu", "memoryLimitPercent": 50},
            "pod": {"resources": {"limits": {"memory": "2Gi", "cpu": "1500m"}}},
        }

        assert "--memory-limit-bytes=1073741824" in arguments(document)
        environment = pod_spec(document)["containers"][0]["env"]
        assert {"name": "OMP_NUM_THREADS", "value": "2"} in environment

    def test_without_a_limit_it_is_a_share_of_the_device(self) -> None:
        assert "--memory-limit-percent=90" in arguments()

    def test_a_variable_of_the_object_wins_over_ours(self) -> None:
        document = {**CPU, "pod": {"env": [{"name": "HOME", "value": "/data"}]}}

        environment = pod_spec(document)["containers"][0]["env"]

        assert environment == [{"name": "HOME", "value": "/data"}]

    def test_a_pod_ends_after_its_service_forgot_it_and_its_requests_are_done(self) -> None:
        pod = pod_spec({"recovery": {"drainSeconds": 120}, **CPU})

        sleep = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert "--drain-seconds=120" in pod["containers"][0]["args"]
        assert pod["terminationGracePeriodSeconds"] > sleep + 120

    def test_the_state_token_is_a_file(self) -> None:
        pod = pod_spec()

        assert {"name": "state-token", "secret": {"secretName": "chat-state-token"}} in pod[
            "volumes"
        ]
        assert "--state-token-file=/etc/deepseek/state-token/token" in arguments()

    def test_api_keys_are_mounted_by_their_key_alone(self) -> None:
        document = {"security": {"apiKeySecret": {"name": "keys", "key": "list"}}, **CPU}

        volume = next(v for v in pod_spec(document)["volumes"] if v["name"] == "api-keys")

        assert volume["secret"] == {
            "secretName": "keys", "items": [{"key": "list", "path": "list"}],
        }  # fmt: skip
        assert "--api-key-file=/etc/deepseek/api-keys/list" in arguments(document)

    def test_spread_rules_are_about_the_objects_own_pods(self) -> None:
        spread = pod_spec({**CPU, "pod": {"topologySpread": [{"topologyKey": "zone"}]}})[
            "topologySpreadConstraints"
        ]

        assert spread[0]["labelSelector"] == {"matchLabels": selector("chat", "primary")}

    @pytest.mark.parametrize(
        ("rollout", "mode", "surge"),
        [
            ("auto", "cpu", 1), ("auto", "whole", 0), ("surge", "whole", 1), ("replace", "cpu", 0),
        ],
    )  # fmt: skip
    def test_a_rollout_surges_or_replaces_one_at_a_time(
        self, rollout: str, mode: str, surge: int
    ) -> None:
        deployment = render({"rollout": rollout, "gpu": {"mode": mode}})["Deployment"]

        assert deployment["spec"]["strategy"]["rollingUpdate"] == {
            "maxSurge": surge, "maxUnavailable": 1 - surge,
        }  # fmt: skip


class TestModelVolume:
    @pytest.mark.parametrize(
        ("source", "volume", "path"),
        [
            ("package://smollm2", None, "/models/smollm2"),
            (
                "oci://registry.example/tiny:1#path=a/b.gguf",
                {"image": {"reference": "registry.example/tiny:1", "pullPolicy": "IfNotPresent"}},
                "/model/a/b.gguf",
            ),
            (
                "pvc://weights/tiny",
                {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
                "/model/tiny",
            ),
            (
                "nodePath:///srv/models/tiny",
                {"hostPath": {"path": "/srv/models/tiny", "type": "Directory"}},
                "/model",
            ),
            (
                "nodePath:///srv/models/tiny.gguf",
                {"hostPath": {"path": "/srv/models", "type": "Directory"}},
                "/model/tiny.gguf",
            ),
        ],
        ids=["image", "oci", "claim", "folder of the node", "file of the node"],
    )
    def test_each_source_has_its_volume(self, source: str, volume: dict | None, path: str) -> None:
        document = {"model": {"source": source}, **CPU}

        volumes = [v for v in pod_spec(document)["volumes"] if v["name"] == "model"]

        assert volumes == ([{"name": "model", **volume}] if volume else [])
        assert f"--model={path}" in arguments(document)

    def test_a_downloaded_model_is_read_from_its_cache(self) -> None:
        spec = spec_of({"model": {"source": "hf://org/tiny"}})
        name = cache_name(spec.model.parsed_source)

        assert claim_name(spec) == name
        assert not has_foreign_claim(spec)
        assert f"--model=/cache/{name}" in arguments({"model": {"source": "hf://org/tiny"}})

    def test_the_cache_depends_on_the_source_alone(self) -> None:
        sources = [
            "hf://org/tiny", "hf://org/tiny@v1", "hf://org/other",
            f"https://x.example/f#sha256={CHECKSUM}", f"https://x.example/f#sha256={'b' * 64}",
        ]  # fmt: skip

        names = {cache_name(spec_of({"model": {"source": s}}).model.parsed_source) for s in sources}

        assert len(names) == len(sources)


class TestAdapters:
    DOCUMENT: typing.ClassVar = {
        "model": {
            "source": "pvc://models/base",
            "lora": [
                {"name": "terse", "source": "pvc://adapters/terse"},
                {"name": "sql", "source": "oci://registry.example/sql:1"},
                {"name": "own", "source": "package://own"},
                {"name": "file", "source": "nodePath:///srv/a/adapter_model.safetensors"},
            ],
        },
        **CPU,
    }

    def test_each_has_its_volume_and_its_flag(self) -> None:
        pod = pod_spec(self.DOCUMENT)
        volumes = {v.pop("name"): v for v in copy.deepcopy(pod["volumes"])}
        mounts = {m["name"]: m for m in pod["containers"][0]["volumeMounts"]}

        assert [a for a in arguments(self.DOCUMENT) if a.startswith("--lora")] == [
            "--lora=terse=/adapters/terse/terse",
            "--lora=sql=/adapters/sql",
            "--lora=own=/models/own",
            "--lora=file=/adapters/file/adapter_model.safetensors",
        ]
        assert volumes["adapter-0"] == {
            "persistentVolumeClaim": {"claimName": "adapters", "readOnly": True}
        }
        assert volumes["adapter-1"]["image"]["reference"] == "registry.example/sql:1"
        assert volumes["adapter-3"] == {"hostPath": {"path": "/srv/a", "type": "Directory"}}
        assert {n: m["mountPath"] for n, m in mounts.items() if n.startswith("adapter")} == {
            "adapter-0": "/adapters/terse",
            "adapter-1": "/adapters/sql",
            "adapter-3": "/adapters/file",
        }
        assert all(m["readOnly"] for n, m in mounts.items() if n.startswith("adapter"))

    def test_the_worker_reads_them_from_its_command_line(self) -> None:
        given = parser().parse_args(arguments(self.DOCUMENT))

        config = EngineConfig(model=given.model, lora=given.lora)

        assert {a.name: str(a.path) for a in config.lora} == {
            "terse": "/adapters/terse/terse",
            "sql": "/adapters/sql",
            "own": "/models/own",
            "file": "/adapters/file/adapter_model.safetensors",
        }

    def test_a_claim_of_an_adapter_alone_needs_the_volumes_group(self) -> None:
        lora = [{"name": "a", "source": "pvc://adapters"}]
        with_, without = (
            pod_spec({"model": {"lora": adapters}, **CPU})["securityContext"]
            for adapters in (lora, None)
        )

        assert "fsGroup" in with_
        assert "fsGroup" not in without

    def test_a_fallback_has_none(self) -> None:
        spec = spec_of(
            self.DOCUMENT
            | {
                "gpu": {"mode": "whole"},
                "fallbacks": [
                    {"name": "small", "model": {"source": "package://a"}, "gpu": {"mode": "cpu"}}
                ],
            }
        )

        primary, fallback = (
            deployment(OWNER, tier, SETTINGS)["spec"]["template"]["spec"]["containers"][0]["args"]
            for tier in tiers_of(spec)
        )

        assert any(a.startswith("--lora") for a in primary)
        assert not any(a.startswith("--lora") for a in fallback)


class TestQuarantine:
    REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
    AWAY: typing.ClassVar = {
        "labelSelector": {"matchLabels": {"deepseek.dev/quarantine": "chat"}},
        "topologyKey": "kubernetes.io/hostname",
    }

    def test_pods_keep_away_from_nodes_that_one_of_them_had_to_leave(self) -> None:
        affinity = pod_spec(CPU)["affinity"]

        assert affinity == {"podAntiAffinity": {self.REQUIRED: [self.AWAY]}}

    def test_beside_what_people_ask_for(self) -> None:
        theirs = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "zone"}
        node = {self.REQUIRED: {"nodeSelectorTerms": [{"matchFields": []}]}}
        wanted = {"podAntiAffinity": {self.REQUIRED: [theirs]}}
        wanted["nodeAffinity"] = node

        affinity = pod_spec({"pod": {"affinity": wanted}, **CPU})["affinity"]

        assert affinity["podAntiAffinity"][self.REQUIRED] == [theirs, self.AWAY]
        assert set(affinity) == {"podAntiAffinity", "nodeAffinity"}


class TestNetworkPolicy:
    def test_own_operator_and_prometheus_namespaces_come_in_and_dns_goes_out(self) -> None:
        policy = render(namespace="operators", prometheus_namespaces=("metrics",))["NetworkPolicy"]

        spec = policy["spec"]
        labels = render()["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert spec["podSelector"]["matchLabels"].items() <= labels.items()
        # A quarantined pod loses these, and is to stay under the policy.
        assert not spec["podSelector"]["matchLabels"].keys() & selector("chat", "primary").keys()
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        (ingress,) = spec["ingress"]
        assert ingress["ports"] == [{"protocol": "TCP", "port": 8000}]
        assert ingress["from"][0] == {"podSelector": {}}
        names = ingress["from"][1]["namespaceSelector"]["matchExpressions"][0]["values"]
        assert names == ["metrics", "operators"]
        (egress,) = spec["egress"]
        assert {port["port"] for port in egress["ports"]} == {53}

    def test_clients_of_other_namespaces_are_let_in_by_the_settings(self) -> None:
        policy = render(client_namespaces=("gateway",))["NetworkPolicy"]

        assert "gateway" in str(policy["spec"]["ingress"][0]["from"])

    @pytest.mark.parametrize(
        ("document", "settings"),
        [
            ({"routing": {"service": {"type": "LoadBalancer"}}, **CPU}, {}),
            (CPU, {"client_namespaces": ("*",)}),
        ],
        ids=["service outside the cluster", "everybody"],
    )
    def test_it_is_open_where_clients_come_from_anywhere(
        self, document: dict, settings: dict
    ) -> None:
        policy = render(document, **settings)["NetworkPolicy"]

        assert "from" not in policy["spec"]["ingress"][0]


class TestOtherChildren:
    def test_the_service_selects_the_pods_of_every_tier(self) -> None:
        assert render()["Service"]["spec"]["selector"] == selector("chat")

    def test_one_pod_at_a_time_may_be_evicted_and_a_broken_one_always(self) -> None:
        spec = render()["PodDisruptionBudget"]["spec"]

        assert spec["maxUnavailable"] == 1
        assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"

    def test_children_go_with_their_object_and_hold_up_nothing(self) -> None:
        for child in render().values():
            (reference,) = child["metadata"]["ownerReferences"]
            assert reference["uid"] == OWNER.uid
            assert reference["controller"] is True
            assert reference["blockOwnerDeletion"] is False
            assert "finalizers" not in child["metadata"]

    def test_the_hash_is_of_all_else(self) -> None:
        one = with_hash({"kind": "X", "metadata": {"name": "a"}, "spec": {"b": 1, "c": 2}})
        same = with_hash({"spec": {"c": 2, "b": 1}, "metadata": {"name": "a"}, "kind": "X"})
        other = with_hash({"kind": "X", "metadata": {"name": "a"}, "spec": {"b": 1}})

        assert one == same
        assert one["metadata"]["annotations"] != other["metadata"]["annotations"]


# For each field that can be set in this version, two documents that differ in it alone.
CHANGES: dict[str, tuple[dict, dict]] = {
    "model.source": ({"model": {"source": "package://a"}}, {"model": {"source": "package://b"}}),
    "model.servedName": ({}, {"model": {"servedName": "other"}}),
    "model.lora": (
        {"model": {"lora": [{"name": "a", "source": "oci://a/b"}]}},
        {"model": {"lora": [{"name": "a", "source": "oci://a/c"}]}},
    ),
    "model.weights": ({}, {"model": {"weights": "bf16"}}),
    "model.kvCache": ({}, {"model": {"kvCache": "bf16"}}),
    "model.maxContextTokens": ({}, {"model": {"maxContextTokens": 512}}),
    "gpu.mode": ({}, {"gpu": {"mode": "cpu"}}),
    "gpu.memoryLimitPercent": ({}, {"gpu": {"memoryLimitPercent": 50}}),
    "replicas": ({}, {"replicas": 3}),
    "minAvailable": ({"replicas": 3}, {"replicas": 3, "minAvailable": 2}),
    "rollout": ({}, {"rollout": "surge"}),
    "recovery.drainSeconds": ({}, {"recovery": {"drainSeconds": 60}}),
    "recovery.retriesPerBatch": ({}, {"recovery": {"retriesPerBatch": 1}}),
    "recovery.nodeSwitchesPerHour": ({}, {"recovery": {"nodeSwitchesPerHour": 0}}),
    "security.apiKeySecret.name": (
        {"security": {"apiKeySecret": {"name": "a"}}},
        {"security": {"apiKeySecret": {"name": "b"}}},
    ),
    "security.apiKeySecret.key": (
        {"security": {"apiKeySecret": {"name": "a"}}},
        {"security": {"apiKeySecret": {"name": "a", "key": "b"}}},
    ),
}  # fmt: skip
_HUB = "hf://org/tiny"
for _field, _value in {
    "credentialsSecret.name": {"credentialsSecret": {"name": "b"}},
    "credentialsSecret.key": {"credentialsSecret": {"name": "a", "key": "b"}},
    "certificateAuthority.name": {"certificateAuthority": {"name": "b"}},
    "certificateAuthority.key": {"certificateAuthority": {"name": "a", "key": "b"}},
    "cache.existingClaim": {"cache": {"existingClaim": "weights"}},
    "cache.storageClassName": {"cache": {"storageClassName": "fast"}},
    "cache.sizeGiB": {"cache": {"sizeGiB": 7}},
    "cache.accessMode": {"cache": {"accessMode": "ReadWriteMany"}},
}.items():
    _part = _field.split(".")[0]
    _before = {_part: {"name": "a"}} if _part != "cache" else {}
    CHANGES[f"model.{_field}"] = (
        {"model": {"source": _HUB, **_before}}, {"model": {"source": _HUB, **_value}},
    )  # fmt: skip
for _field, _value in {"type": "NodePort", "port": 81, "annotations": {"a/b": "c"}}.items():
    CHANGES[f"routing.service.{_field}"] = ({}, {"routing": {"service": {_field: _value}}})
_SCALED: dict[str, Any] = {"minReplicas": 2, "maxReplicas": 5}
for _field, _value in {
    "minReplicas": 1,
    "maxReplicas": 6,
    "gpuMemoryPercent": 70,
    "metric": "used",
    "queuedRequestsPerReplica": 4,
    "provider": "none",
    "behavior.scaleUp.stabilizationWindowSeconds": 30,
    "behavior.scaleUp.selectPolicy": "Min",
    "behavior.scaleUp.policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    "behavior.scaleDown.stabilizationWindowSeconds": 600,
    "behavior.scaleDown.selectPolicy": "Disabled",
    "behavior.scaleDown.policies": [{"type": "Percent", "value": 10, "periodSeconds": 60}],
}.items():
    _path = _field.split(".")
    _change: Any = _value
    for _step in reversed(_path):
        _change = {_step: _change}
    CHANGES[f"autoscaling.{_field}"] = (
        {"autoscaling": _SCALED}, {"autoscaling": _SCALED | _change},
    )  # fmt: skip
for _field, _value in {
    "image": "worker:2",
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "pull"}],
    "resources": {"limits": {"cpu": "2"}},
    "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
    "extraArgs": ["--seed=7"],
    "nodeSelector": {"disk": "ssd"},
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
            ]
        }
    },
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "topologySpread": [{"topologyKey": "zone", "maxSkew": 2}],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
}.items():
    CHANGES[f"pod.{_field}"] = ({}, {"pod": {_field: _value}})

CHANGES["gpu.migProfile"] = (
    {"gpu": {"mode": "mig", "migProfile": "1g.18gb"}},
    {"gpu": {"mode": "mig", "migProfile": "2g.35gb"}},
)
CHANGES["gpu.memoryGiB"] = (
    {"gpu": {"mode": "vgpu", "memoryGiB": 10}}, {"gpu": {"mode": "vgpu", "memoryGiB": 20}},
)  # fmt: skip
# Which of a tenant's deployments give way first: test_quota, and test_tenancy at a real server.
_BETWEEN_OBJECTS = frozenset({"priority"})
# Parts of the pod's settings that are pasted into the template as they are.
_PASTED = ("pod.",)
# What the fields of the tiers do shows when capacity goes: test_degrade.py. For the route:
# test_routing.py.
_ELSEWHERE = ("fallbacks", "degrade", "promote", "routing.httpRoute")
_REFUSED = ("gpu.count", "memory")


def fields_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        parts = [
            part
            for part in (field.annotation, *typing.get_args(field.annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        if path.startswith((*_REFUSED, *_ELSEWHERE)):
            continue
        if parts and not path.startswith(_PASTED):
            found += fields_of(parts[0], f"{path}.")
        else:
            found.append(path)
    return found


def outcome(document: dict) -> tuple[Any, Any, Any]:
    """All manifests that the object leads to, its status with one of three pods ready, and
    whether a pod whose device broke is moved."""
    claim = {
        "metadata": {"name": "weights", "uid": "u"}, "spec": {}, "status": {"phase": "Bound"},
    }  # fmt: skip
    cluster = Simulation(copy.deepcopy(document), foreign_claim=claim)
    written = []
    for _ in range(4):
        todo = cluster.reconcile()
        written.append((todo.apply, todo.create))
        if any(m["kind"] == "Job" for m in todo.create):
            cluster.finish_job("Complete")
    cluster.roll_out(availableReplicas=1)
    observed = cluster.observed()
    status = status_of(cluster.spec, observed, cluster.plan(), [], NOW)
    broken = pod_of(ready=True, node="n1")
    cluster.pods = [broken]
    reading = after(answer(phase="failed", reason="DeviceFault"))
    cluster.readings = {broken["metadata"]["uid"]: reading}
    moved = len(cluster.plan().ladder.quarantine)
    return written, condition(status, "Ready")["status"], moved


class TestEveryField:
    """Case A08: what can be edited reaches a child or the status; all else is refused."""

    def test_the_table_names_every_field_of_the_schema(self) -> None:
        assert set(CHANGES) | _BETWEEN_OBJECTS == set(fields_of(DeepSeekDeploymentSpec))

    @pytest.mark.parametrize("field", CHANGES)
    def test_a_change_has_an_effect(self, field: str) -> None:
        before, after = CHANGES[field]

        assert outcome(before) != outcome(after)

    @pytest.mark.parametrize(
        "document",
        [
            {"gpu": {"count": 2}},
            {"gpu": {"mode": "dra"}},
            {"memory": {"hostKvGiB": 1}},
        ],
        ids=str,
    )
    def test_what_comes_later_is_refused(self, document: dict) -> None:
        whole = {
            "apiVersion": "deepseek.dev/v1alpha1",
            "kind": "DeepSeekDeployment",
            "metadata": {"name": "chat"},
            "spec": document,
        }

        with pytest.raises(ValidationError, match="not available in this version"):
            DeepSeekDeployment.parse(whole)


def test_an_object_as_it_is_stored_renders_like_the_one_that_was_written() -> None:
    stored = owner_of(CPU)["spec"]

    assert desired_state(OWNER, DeepSeekDeploymentSpec.from_stored(stored), SETTINGS) == (
        desired_state(OWNER, spec_of(CPU), SETTINGS)
    )
    assert Observed(owner_of(CPU)).identity == OWNER
