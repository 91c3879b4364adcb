"""The plan of one object, on a cluster that is only a dictionary."""

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import CHECKSUM, CPU, NOW, Simulation, claim, pod_of

from deepseek_operator.kinds import Reference, is_owned_by
from deepseek_operator.plan import plan
from deepseek_operator.render import HASH_ANNOTATION
from deepseek_operator.rollout import Rollout
from test_degrade import SMALL

CHILDREN = {
    Reference("Deployment", "team", "chat-primary"),
    Reference("NetworkPolicy", "team", "chat"),
    Reference("PodDisruptionBudget", "team", "chat"),
    Reference("Secret", "team", "chat-state-token"),
    Reference("Service", "team", "chat"),
    Reference("ServiceAccount", "team", "chat"),
}

SOURCES = st.sampled_from(
    [
        "package://smollm2",
        "oci://registry.example/models/tiny:1#path=tiny",
        "pvc://weights/tiny",
        "hf://org/tiny",
        "hf://org/tiny@v1",
        f"https://files.example/tiny.gguf#sha256={CHECKSUM}",
        "nodePath:///srv/models/tiny.gguf",
    ]
)
SPECS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"source": SOURCES},
            optional={"maxContextTokens": st.integers(16, 4096), "servedName": st.just("a/b:c")},
        ),
        "gpu": st.one_of(
            st.just({"mode": "cpu"}),
            st.fixed_dictionaries({}, optional={"memoryLimitPercent": st.integers(1, 100)}),
        ),
        "replicas": st.integers(0, 5),
    },
    optional={
        "minAvailable": st.integers(0, 5),
        "rollout": st.sampled_from(["auto", "surge", "replace"]),
        "routing": st.sampled_from(
            [{"service": {"type": "LoadBalancer", "port": 8080, "annotations": {"a/b": "c"}}}, {}]
        ),
        "security": st.just({"apiKeySecret": {"name": "keys"}}),
        "pod": st.fixed_dictionaries(
            {},
            optional={
                "resources": st.just(
                    {"limits": {"cpu": "1500m", "memory": "1.5Gi"}, "requests": {"cpu": 1}}
                ),
                "env": st.just([{"name": "A", "value": "b"}]),
                "extraArgs": st.just(["--max-running-requests=4"]),
                "nodeSelector": st.just({"disk": "ssd"}),
                "topologySpread": st.just([{"topologyKey": "zone"}]),
                "imagePullSecrets": st.just([{"name": "pull"}]),
                "tolerations": st.just([{"key": "gpu", "operator": "Exists"}]),
            },
        ),
    },
)


class TestChildren:
    def test_a_new_object_gets_all_its_children_at_once(self) -> None:
        todo = Simulation().plan()

        written = {
            Reference(m["kind"], m["metadata"]["namespace"], m["metadata"]["name"])
            for m in (*todo.apply, *todo.create)
        }
        assert written == CHILDREN

    @given(SPECS)
    def test_applying_a_plan_leaves_nothing_to_plan(self, document: dict) -> None:
        cluster = Simulation(document, foreign_claim=claim())

        cluster.settle()

        assert cluster.plan().is_empty

    @given(SPECS, SPECS)
    def test_a_changed_spec_settles_too(self, before: dict, after: dict) -> None:
        cluster = Simulation(before, foreign_claim=claim())
        cluster.settle()

        cluster.document = after
        cluster.settle()

        assert cluster.plan().is_empty

    @pytest.mark.parametrize("missing", sorted(CHILDREN), ids=str)
    def test_a_deleted_child_is_made_again(self, missing: Reference) -> None:
        cluster = Simulation()
        cluster.settle()

        del cluster.objects[missing]
        todo = cluster.plan()

        assert [m["kind"] for m in (*todo.apply, *todo.create)] == [missing.kind]

    def test_a_child_that_is_being_deleted_is_waited_for(self) -> None:
        cluster = Simulation()
        cluster.settle()

        cluster.deployment["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"

        assert cluster.plan().is_empty

    @pytest.mark.parametrize(
        "child", sorted(CHILDREN - {Reference("ServiceAccount", "team", "chat")})
    )
    def test_a_field_set_by_somebody_else_is_set_back(self, child: Reference) -> None:
        cluster = Simulation()
        cluster.settle()

        live = cluster.objects[child]
        live["metadata"]["labels"]["app.kubernetes.io/instance"] = "theirs"
        todo = cluster.plan()

        assert [m["kind"] for m in todo.apply] == [child.kind]

    def test_a_key_added_to_the_selector_of_the_service_is_removed(self) -> None:
        cluster = Simulation()
        cluster.settle()

        cluster.child("Service", "chat")["spec"]["selector"]["extra"] = "x"

        assert [m["kind"] for m in cluster.plan().apply] == ["Service"]

    def test_what_others_add_beside_our_fields_stays(self) -> None:
        cluster = Simulation()
        cluster.settle()

        cluster.deployment["metadata"]["labels"]["team"] = "red"
        template = cluster.deployment["spec"]["template"]["spec"]
        template["containers"].append({"name": "sidecar", "image": "proxy"})
        template["dnsPolicy"] = "ClusterFirst"

        assert cluster.plan().is_empty

    def test_a_field_that_is_no_longer_wanted_is_applied_away(self) -> None:
        cluster = Simulation({**CPU, "pod": {"nodeSelector": {"disk": "ssd"}}})
        cluster.settle()

        cluster.document = copy.deepcopy(CPU)
        todo = cluster.plan()

        assert [m["kind"] for m in todo.apply] == ["Deployment"]
        assert "nodeSelector" not in todo.apply[0]["spec"]["template"]["spec"]

    def test_wiped_annotations_of_a_child_are_put_back_and_nothing_else_happens(self) -> None:
        cluster = Simulation()
        cluster.settle()

        for live in cluster.objects.values():
            live["metadata"]["annotations"] = {}
        todo = cluster.plan()

        assert len(todo.apply) == len(CHILDREN)
        assert not todo.create
        assert not todo.delete

    def test_annotations_wiped_together_with_an_image_change_roll_the_same_deployment(self) -> None:
        """Case A20: no memory in annotations, so no second Deployment."""
        cluster = Simulation()
        cluster.settle()

        cluster.document = {**CPU, "pod": {"image": "worker:2"}}
        for live in cluster.objects.values():
            live["metadata"]["annotations"] = {}
        cluster.settle()

        deployments = [key for key in cluster.objects if key.kind == "Deployment"]
        assert deployments == [Reference("Deployment", "team", "chat-primary")]
        container = cluster.deployment["spec"]["template"]["spec"]["containers"][0]
        assert container["image"] == "worker:2"

    def test_a_deviation_that_came_with_the_answer_to_our_apply_is_tolerated(self) -> None:
        """An admission webhook of the cluster wins; writing again would go on for ever."""
        cluster = Simulation()
        cluster.settle()
        key = Reference("Service", "team", "chat")
        cluster.objects[key]["spec"]["type"] = "NodePort"

        observed = cluster.observed()
        object.__setattr__(observed, "tolerated", {key: ("spec.type='NodePort'",)})

        assert plan(cluster.spec, observed, cluster.settings, NOW).is_empty

    def test_what_a_webhook_makes_of_the_pods_is_no_rollout_that_never_ends(self) -> None:
        """It would keep a fallback serving for ever."""
        cluster = Simulation({"rollout": "viaFallback", "fallbacks": [SMALL]})
        cluster.settle()
        cluster.roll_out()
        cluster.pods = [pod_of(ready=True, node="a")]
        (container,) = cluster.deployment["spec"]["template"]["spec"]["containers"]
        container["image"] = "mirror/worker:1"
        key = Reference("Deployment", "team", "chat-primary")
        left = "spec.template.spec.containers[worker].image='mirror/worker:1'"

        def rollout(*tolerated: str) -> Rollout:
            observed = replace(cluster.observed(), tolerated={key: tolerated})
            return plan(cluster.spec, observed, cluster.settings, NOW).rollouts["primary"]

        assert rollout().goes_via_fallback
        assert not rollout(left).goes_via_fallback
        cluster.document["pod"] = {"image": "worker:2"}
        assert rollout(left).goes_via_fallback

    def test_the_token_is_made_once(self) -> None:
        cluster = Simulation()
        first = cluster.reconcile()

        second = cluster.plan()

        assert [m["kind"] for m in first.create] == ["ServiceAccount", "Secret"]
        assert "data" not in first.create[1]
        assert second.is_empty

    def test_a_secret_without_its_token_gets_one(self) -> None:
        cluster = Simulation()
        cluster.settle()

        cluster.child("Secret", "chat-state-token")["keys"] = []

        assert [m["kind"] for m in cluster.plan().create] == ["Secret"]

    def test_two_objects_have_children_of_different_names_and_disjoint_selectors(self) -> None:
        one, two = Simulation(name="chat"), Simulation(name="chat-primary")
        one.settle()
        two.settle()

        assert not one.objects.keys() & two.objects.keys()
        pods = two.deployment["spec"]["template"]["metadata"]["labels"]
        for key, live in one.objects.items():
            selector = live.get("spec", {}).get("selector")
            if selector and key.kind in {"Deployment", "Service"}:
                wanted = selector.get("matchLabels", selector)
                assert any(pods.get(name) != value for name, value in wanted.items())

    def test_a_missing_secret_is_looked_for_again(self) -> None:
        cluster = Simulation(missing_secrets=("Secret keys is not there.",))

        assert cluster.plan().requeue_after_seconds == 15

    def test_ownership_is_read_from_owner_references(self) -> None:
        cluster = Simulation()
        cluster.settle()

        assert is_owned_by(cluster.deployment, "uid-of-chat")
        assert not is_owned_by(cluster.deployment, "somebody-else")

    def test_every_child_carries_its_hash(self) -> None:
        cluster = Simulation()
        cluster.settle()

        assert all(
            len(live["metadata"]["annotations"][HASH_ANNOTATION]) == 16
            for live in cluster.objects.values()
        )
