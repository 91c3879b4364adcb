"""The plan of one object, on a cluster that is only a dictionary."""

import copy
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import (
    CHECKSUM,
    CPU,
    HUB,
    NOW,
    SETTINGS,
    Simulation,
    condition,
    pod_of,
    unschedulable,
    waiting,
)

from deepseek_operator.kinds import Reference
from deepseek_operator.loader import MODEL_LABEL
from deepseek_operator.plan import REFUSAL_CHECK_SECONDS, is_owned_by, plan
from deepseek_operator.render import HASH_ANNOTATION, cache_name
from deepseek_operator.rollout import Rollout
from deepseek_operator.status import status_of
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


def claim(phase: str = "Bound", modes: tuple[str, ...] = ("ReadWriteOnce",)) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights", "namespace": "team", "uid": "uid-of-weights"},
        "spec": {"accessModes": list(modes)},
        "status": {"phase": phase},
    }


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


class TestModelSources:
    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("package://smollm2", "InWorkerImage"),
            ("oci://registry.example/tiny:1", "InImageVolume"),
            ("nodePath:///srv/tiny", "OnNode"),
        ],
    )
    def test_what_is_with_the_pod_may_start_at_once(self, source: str, reason: str) -> None:
        todo = Simulation({"model": {"source": source}, **CPU}).plan()

        assert (todo.model.status, todo.model.reason) == ("True", reason)
        assert "Deployment" in {m["kind"] for m in todo.apply}

    def test_an_image_volume_that_cannot_be_pulled_is_the_models_condition(self) -> None:
        image = "registry.example/tiny:1"
        message = f'Back-off pulling image "{image}"'
        cluster = Simulation({"model": {"source": f"oci://{image}"}, **CPU})
        cluster.pods = [pod_of(containers=[waiting("ImagePullBackOff", message)])]

        model = cluster.plan().model

        assert (model.status, model.reason) == ("False", "ImageUnavailable")
        assert message in model.message

    def test_the_workers_image_missing_is_not_the_models_fault(self) -> None:
        cluster = Simulation({"model": {"source": "oci://registry.example/tiny:1"}, **CPU})
        cluster.pods = [pod_of(containers=[waiting("ErrImagePull", "worker:9 not found")])]

        assert cluster.plan().model.reason == "InImageVolume"

    def test_a_node_path_that_pod_security_forbids_is_cache_forbidden(self) -> None:
        cluster = Simulation({"model": {"source": "nodePath:///srv/tiny"}, **CPU})
        cluster.settle()
        words = (
            'pods "chat-primary-1" is forbidden: violates PodSecurity "restricted:latest":'
            ' restricted volume types (volume "model" uses restricted volume type "hostPath")'
        )
        cluster.deployment["status"] = {
            "conditions": [{"type": "ReplicaFailure", "status": "True", "message": words}]
        }

        model = cluster.plan().model

        assert model.reason == "CacheForbidden"
        assert "PodSecurity" in model.message

    @pytest.mark.parametrize(
        ("live", "reason", "status"),
        [
            (None, "ClaimMissing", "False"),
            (claim("Pending"), "ClaimPending", "False"),
            (claim(), "OnVolume", "True"),
        ],
    )
    def test_a_claim_of_somebody_else(self, live: dict | None, reason: str, status: str) -> None:
        cluster = Simulation({"model": {"source": "pvc://weights"}, **CPU}, foreign_claim=live)

        todo = cluster.plan()

        assert (todo.model.reason, todo.model.status) == (reason, status)
        # A volume that waits for its first consumer needs the pod, so pods are made anyway.
        assert "Deployment" in {m["kind"] for m in todo.apply}
        assert (todo.requeue_after_seconds is None) == (status == "True")

    @pytest.mark.parametrize(
        ("live", "reason", "status"),
        [
            (None, "ClaimMissing", "False"),
            (claim("Pending"), "ClaimPending", "False"),
            (claim(), "InWorkerImage", "True"),
        ],
    )
    def test_a_claim_of_an_adapter(self, live: dict | None, reason: str, status: str) -> None:
        lora = [{"name": "terse", "source": "pvc://adapters/terse"}]
        cluster = Simulation({"model": {"lora": lora}, **CPU}, foreign_claim=live)

        todo = cluster.plan()

        assert (todo.model.reason, todo.model.status) == (reason, status)
        if live is None:
            assert "no PersistentVolumeClaim adapters" in todo.model.message
            assert "change the source of 'terse' in spec.model.lora" in todo.model.message

    def test_a_one_node_volume_is_told_only_when_a_second_node_is_needed(self) -> None:
        cluster = Simulation(
            {"model": {"source": "pvc://weights"}, "replicas": 2, **CPU}, foreign_claim=claim()
        )
        cluster.pods = [pod_of("a", node="node-1", ready=True), pod_of("b", node="node-1")]
        fits = cluster.plan().model
        cluster.pods[1] = pod_of("b", conditions=unschedulable())

        does_not_fit = cluster.plan().model

        assert fits.reason == "OnVolume"
        assert does_not_fit.reason == "SingleNodeVolume"
        assert "node-1" in does_not_fit.message

    def test_a_many_node_volume_is_never_the_reason(self) -> None:
        cluster = Simulation(
            {"model": {"source": "pvc://weights"}, "replicas": 2, **CPU},
            foreign_claim=claim(modes=("ReadWriteMany",)),
        )
        cluster.pods = [pod_of("a", node="node-1"), pod_of("b", conditions=unschedulable())]

        assert cluster.plan().model.reason == "OnVolume"


class TestDownload:
    def test_volume_then_policy_and_job_then_deployment(self) -> None:
        cluster = Simulation(HUB)
        rounds = []
        for _ in range(3):
            todo = cluster.reconcile()
            rounds.append(sorted(m["kind"] for m in (*todo.apply, *todo.create)))
            if "Job" in rounds[-1]:
                cluster.finish_job("Complete")

        assert "PersistentVolumeClaim" in rounds[0]
        assert "Deployment" not in rounds[0]
        assert rounds[1] == ["Job", "NetworkPolicy"]
        assert rounds[2] == ["Deployment"]
        assert cluster.plan().model.reason == "Downloaded"

    def test_two_objects_of_one_source_share_one_download(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        cluster.finish_job("Complete")
        cluster.settle()

        cluster.name = "other"
        todo = cluster.plan()

        assert not {"Job", "PersistentVolumeClaim"} & {
            m["kind"] for m in (*todo.apply, *todo.create)
        }
        assert "Deployment" in {m["kind"] for m in todo.apply}

    def test_a_lost_record_of_the_download_does_not_hold_back_a_running_deployment(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        job = cluster.finish_job("Complete")
        cluster.settle()
        del cluster.objects[Reference("Job", "team", job["metadata"]["name"])]
        cluster.deployment["spec"]["replicas"] = 7

        todo = cluster.plan()

        assert [m["kind"] for m in todo.create] == ["Job"]
        assert [m["kind"] for m in todo.apply] == ["Deployment"]

    def test_a_change_of_model_leaves_the_old_pods_alone_until_the_new_model_is_there(self) -> None:
        cluster = Simulation()
        cluster.settle()
        before = copy.deepcopy(cluster.deployment)

        cluster.document = HUB
        cluster.settle()
        waiting_for = copy.deepcopy(cluster.deployment)
        cluster.finish_job("Complete")
        cluster.settle()

        assert waiting_for == before
        assert cluster.deployment["spec"]["template"]["metadata"]["annotations"] == {
            "deepseek.dev/model-source": HUB["model"]["source"]
        }

    @pytest.mark.parametrize(
        ("word", "reason"),
        [
            ("NotFound", "ModelNotFound"),
            ("CredentialsRefused", "AccessDenied"),
            ("ChecksumMismatch", "ChecksumMismatch"),
            ("NoSpace", "DiskFull"),
            ("Unreachable", "DownloadFailed"),
        ],
    )
    def test_a_failure_is_told_in_the_loaders_words_and_tried_again_later(
        self, word: str, reason: str
    ) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        job = cluster.finish_job("Failed")
        cluster.loader_pods = [loader_pod(job, f'{{"reason": "{word}", "message": "so it is."}}')]

        todo = cluster.plan()

        assert todo.is_empty
        assert (todo.model.reason, todo.model.may_start) == (reason, False)
        assert "so it is." in todo.model.message
        assert todo.requeue_after_seconds == 10

    def test_the_next_attempt_has_a_new_number_and_remembers_the_failure(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        job = cluster.finish_job("Failed")
        cluster.loader_pods = [loader_pod(job, '{"reason": "NoSpace", "message": "full."}')]
        cluster.now = NOW + timedelta(seconds=11)

        todo = cluster.plan()
        cluster.carry_out(todo)
        cluster.loader_pods = []

        name = cache_name(cluster.spec.model.parsed_source)
        assert [m["metadata"]["name"] for m in todo.create] == [f"{name}-2"]
        assert [live["metadata"]["name"] for live in todo.delete] == [name]
        assert cluster.plan().model.reason == "DiskFull"

    def test_it_heals_by_itself(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        cluster.finish_job("Failed")
        cluster.now = NOW + timedelta(seconds=11)
        cluster.settle()
        cluster.finish_job("Complete")

        cluster.settle()

        assert cluster.status["conditions"][-1]["reason"] == "Downloaded"
        assert "Deployment" in {key.kind for key in cluster.objects}

    def test_pauses_grow_with_the_attempts(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        pauses = []
        for _ in range(7):
            cluster.finish_job("Failed", at=cluster.now)
            pauses.append(cluster.plan().requeue_after_seconds)
            cluster.now += timedelta(seconds=pauses[-1] + 1)
            cluster.settle()

        assert pauses == [10, 20, 40, 80, 160, 300, 300]

    def test_other_credentials_are_tried_at_once(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        cluster.finish_job("Failed")

        cluster.document = copy.deepcopy(HUB)
        cluster.document["model"]["credentialsSecret"] = {"name": "token"}
        todo = cluster.plan()

        assert len(todo.create) == 1
        volumes = todo.create[0]["spec"]["template"]["spec"]["volumes"]
        assert "token" in {volume.get("secret", {}).get("secretName") for volume in volumes}

    def test_a_running_attempt_is_not_disturbed_by_another_object_with_other_wishes(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()

        cluster.name = "other"
        cluster.document = {**copy.deepcopy(HUB), "pod": {"image": "worker:2"}}
        todo = cluster.plan()

        assert not [m for m in todo.create if m["kind"] == "Job"]
        assert not todo.delete

    def test_a_job_of_a_volume_that_is_gone_does_not_count(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        cluster.finish_job("Complete")
        cluster.settle()
        name = cache_name(cluster.spec.model.parsed_source)

        cluster.child("PersistentVolumeClaim", name)["metadata"]["uid"] = "a-new-one"
        todo = cluster.plan()

        assert todo.model.may_start is False

    def test_a_claim_of_ones_own_is_used_and_never_written(self) -> None:
        document = copy.deepcopy(HUB)
        document["model"]["cache"] = {"existingClaim": "weights"}
        cluster = Simulation(document, foreign_claim=claim())

        cluster.settle()

        assert not [key for key in cluster.objects if key.kind == "PersistentVolumeClaim"]
        assert [key for key in cluster.objects if key.kind == "Job"]

    def test_a_claim_of_ones_own_that_is_missing_holds_the_pods_back(self) -> None:
        document = copy.deepcopy(HUB)
        document["model"]["cache"] = {"existingClaim": "weights"}

        todo = Simulation(document).plan()

        assert (todo.model.reason, todo.model.may_start) == ("ClaimMissing", False)
        assert "Deployment" not in {m["kind"] for m in todo.apply}

    def test_a_cache_may_grow_and_does_not_shrink(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        name = cache_name(cluster.spec.model.parsed_source)
        sizes = []
        for size in (200, 50):
            cluster.document = copy.deepcopy(HUB)
            cluster.document["model"]["cache"] = {"sizeGiB": size}
            cluster.settle()
            live = cluster.child("PersistentVolumeClaim", name)
            sizes.append(live["spec"]["resources"]["requests"]["storage"])

        assert sizes == ["200Gi", "200Gi"]

    @pytest.mark.parametrize(
        ("pod", "reason"),
        [
            (pod_of(containers=[waiting("ImagePullBackOff", "no such image")]), "ImageUnavailable"),
            (pod_of(conditions=unschedulable()), "Waiting"),
            (
                pod_of(conditions=unschedulable("persistentvolumeclaim is not bound")),
                "ClaimPending",
            ),
            (pod_of(phase="Running"), "Downloading"),
        ],
        ids=["image", "no node", "no volume", "running"],
    )
    def test_what_the_loader_waits_for_is_told(self, pod: dict, reason: str) -> None:
        cluster = Simulation(HUB)
        cluster.settle()

        pod["metadata"]["labels"] = {MODEL_LABEL: cache_name(cluster.spec.model.parsed_source)}
        cluster.loader_pods = [pod]

        assert cluster.plan().model.reason == reason

    def test_a_pod_that_is_refused_is_told_before_an_older_failure(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        name = cache_name(cluster.spec.model.parsed_source) or ""
        waiting_now = cluster.plan()

        words = "pods is forbidden: exceeded quota: none"
        observed = replace(cluster.observed(), loader_refusals={name: words})
        refused = plan(cluster.spec, observed, SETTINGS, NOW)
        status = status_of(cluster.spec, observed, refused, [], NOW)

        assert waiting_now.model.reason == "Downloading"
        # Nobody tells when the pod may come, so it is looked for.
        assert waiting_now.requeue_after_seconds == REFUSAL_CHECK_SECONDS
        assert refused.model.reason == "CreationRefused"
        assert words in refused.model.message
        assert not refused.model.may_start
        assert condition(status, "QuotaExceeded")["status"] == "True"

    def test_a_missing_authority_is_told_and_looked_for(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        source = cluster.spec.model.source

        observed = replace(cluster.observed(), missing_authorities={source: "make ConfigMap c."})
        told = plan(cluster.spec, observed, SETTINGS, NOW)

        assert (told.model.reason, told.model.message) == ("ConfigMapMissing", "make ConfigMap c.")
        assert told.requeue_after_seconds is not None

    def test_a_job_that_has_its_pod_is_not_looked_at_again(self) -> None:
        cluster = Simulation(HUB)
        cluster.settle()
        for live in cluster.objects.values():
            if live["kind"] == "Job":
                live["status"] = {"active": 1}

        assert cluster.plan().requeue_after_seconds is None

    def test_a_missing_token_secret_is_told(self) -> None:
        cluster = Simulation(HUB, missing_secrets=("Secret token is not there: create it.",))
        cluster.reconcile()
        cluster.reconcile()

        model = cluster.plan().model

        assert model.reason == "SecretMissing"
        assert "create it" in model.message


def loader_pod(job: dict, message: str) -> dict:
    labels = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    state = {"terminated": {"exitCode": 11, "reason": "Error", "message": message}}
    return pod_of(
        "loader", labels=labels, containers=[{"name": "loader", "state": state}], phase="Failed"
    )
