"""Conditions, counts and history from what is observed."""

from datetime import timedelta

import pytest
from scenes import CPU, HUB, NOW, Simulation, condition, ended, pod_of, unschedulable, waiting

from deepseek_contract.status import REASONS, DeepSeekDeploymentStatus
from deepseek_operator.kinds import Reference
from deepseek_operator.observed import Observed
from deepseek_operator.recovery import CAUSE_ANNOTATION, QUARANTINE_LABEL, REASON_ANNOTATION
from deepseek_operator.status import Refusal, invalid_status, is_transition, notes, status_of

SOURCE = "deepseek.dev/model-source"


def settled(document: dict | None = None) -> Simulation:
    cluster = Simulation(document or dict(CPU))
    cluster.settle()
    return cluster


def status(cluster: Simulation, *refusals: Refusal) -> dict:
    return status_of(cluster.spec, cluster.observed(), cluster.plan(), refusals, cluster.now)


# What the Deployment's counts say of three wanted pods, and whether that is Ready.
ROLLOUTS = {
    "all pods are current and answer": ({}, "True", "Available"),
    "old pods still serve, no new one yet": (
        {"updatedReplicas": 0}, "False", "RolloutInProgress",
    ),
    "one of three is new": (
        {"updatedReplicas": 1, "replicas": 4}, "False", "RolloutInProgress",
    ),
    "all new pods answer, one old pod is left": ({"replicas": 4}, "False", "RolloutInProgress"),
    "the controller has not seen the last change": (
        {"observedGeneration": 0}, "False", "RolloutInProgress",
    ),
    "no pod answers yet": (
        {"readyReplicas": 0, "availableReplicas": 0}, "False", "RolloutInProgress",
    ),
    "as many as needed answer": ({"readyReplicas": 1, "availableReplicas": 1}, "True", "Available"),
    "nothing is known": (
        {"observedGeneration": 0, "replicas": 0, "updatedReplicas": 0},
        "False", "RolloutInProgress",
    ),
}  # fmt: skip


class TestReady:
    @pytest.mark.parametrize(("counts", "value", "reason"), ROLLOUTS.values(), ids=ROLLOUTS)
    def test_ready_follows_live_pods_of_the_current_generation(
        self, counts: dict, value: str, reason: str
    ) -> None:
        """Case A17, and what else a rollout looks like."""
        cluster = settled({"replicas": 3, **CPU})
        cluster.roll_out(**counts)

        ready = condition(status(cluster), "Ready")

        assert (ready["status"], ready["reason"]) == (value, reason)

    def test_pods_that_stopped_answering_are_not_ready(self) -> None:
        cluster = settled()
        cluster.roll_out(readyReplicas=0, availableReplicas=0)
        cluster.pods = [pod_of(containers=[{"state": {"running": {}}, "started": True}])]

        assert condition(status(cluster), "Ready")["reason"] == "PodsNotReady"

    def test_ready_says_where_and_as_what(self) -> None:
        cluster = settled()
        cluster.roll_out()

        message = condition(status(cluster), "Ready")["message"]

        assert "http://chat.team.svc:80/v1" in message

    @pytest.mark.parametrize(("needed", "value"), [(1, "True"), (2, "True"), (3, "False")])
    def test_as_many_pods_have_to_answer_as_min_available_says(
        self, needed: int, value: str
    ) -> None:
        cluster = settled({"replicas": 3, "minAvailable": needed, **CPU})
        cluster.roll_out(readyReplicas=2, availableReplicas=2)

        assert condition(status(cluster), "Ready")["status"] == value

    def test_nothing_that_answers_is_never_ready(self) -> None:
        cluster = settled({"minAvailable": 0, **CPU})
        cluster.roll_out(readyReplicas=0, availableReplicas=0)

        assert condition(status(cluster), "Ready")["status"] == "False"

    def test_no_replicas_is_scaled_to_zero(self) -> None:
        cluster = settled({"replicas": 0, **CPU})
        cluster.roll_out()

        assert condition(status(cluster), "Ready")["reason"] == "ScaledToZero"
        assert condition(status(cluster), "Progressing")["reason"] == "RolloutComplete"

    def test_a_model_that_is_not_there_is_the_reason(self) -> None:
        cluster = settled(HUB)

        ready = condition(cluster.status, "Ready")

        assert ready["reason"] == "ModelNotCached"

    def test_pods_of_another_model_do_not_make_it_ready(self) -> None:
        cluster = settled()
        cluster.roll_out()
        cluster.document = HUB
        cluster.settle()

        assert condition(cluster.status, "Ready")["status"] == "False"
        assert condition(cluster.status, "Progressing")["reason"] == "RolloutInProgress"

    @pytest.mark.parametrize(
        ("pod", "reason", "words"),
        [
            (
                pod_of(conditions=unschedulable("0/3 nodes are available")),
                "Unschedulable", "0/3 nodes are available",
            ),
            (
                pod_of(containers=[waiting("ErrImagePull", "no such host")]),
                "ImageUnavailable", "no such host",
            ),
            (
                pod_of(
                    containers=[
                        waiting("CrashLoopBackOff")
                        | {"lastState": ended('{"reason": "ModelTooLarge", "message": "4 GiB"}')}
                    ]
                ),
                "ModelTooLarge", "4 GiB",
            ),
            (pod_of(containers=[{"state": {"running": {}}}]), "ModelLoading", "reading its model"),
        ],
        ids=["no node", "no image", "too large", "loading"],
    )  # fmt: skip
    def test_the_pods_trouble_is_the_reason(self, pod: dict, reason: str, words: str) -> None:
        cluster = settled()
        cluster.roll_out(readyReplicas=0, availableReplicas=0)
        cluster.pods = [pod]

        ready = condition(status(cluster), "Ready")

        assert ready["reason"] == reason
        assert words in ready["message"]

    def test_a_missing_secret_is_the_reason(self) -> None:
        cluster = settled()
        cluster.missing_secrets = ("spec.security.apiKeySecret names Secret keys: create it.",)
        cluster.roll_out(readyReplicas=0, availableReplicas=0)

        assert condition(status(cluster), "Ready")["reason"] == "SecretMissing"

    def test_a_name_that_is_taken_is_the_reason(self) -> None:
        cluster = settled()
        cluster.roll_out()
        service = Reference("Service", "team", "chat")

        new = status(cluster, Refusal(service, "Service chat exists.", is_taken=True))

        assert condition(new, "Ready")["reason"] == "NameTaken"
        assert condition(new, "Progressing")["reason"] == "ApplyRefused"

    def test_a_refused_change_does_not_deny_that_the_old_pods_serve(self) -> None:
        cluster = settled()
        cluster.roll_out()
        service = Reference("Service", "team", "chat")

        new = status(cluster, Refusal(service, "port is taken"))

        assert condition(new, "Ready")["status"] == "True"
        assert condition(new, "Progressing")["reason"] == "ApplyRefused"

    def test_a_child_that_cannot_be_made_is_the_reason(self) -> None:
        cluster = Simulation()

        new = status(cluster, Refusal(Reference("Service", "team", "chat"), "exceeded quota"))

        assert condition(new, "Ready")["reason"] == "ApplyRefused"


class TestQuota:
    def refused(self, words: str) -> Simulation:
        cluster = settled()
        cluster.roll_out(replicas=0, updatedReplicas=0, readyReplicas=0, availableReplicas=0)
        cluster.deployment["status"]["conditions"] = [
            {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": words}
        ]
        return cluster

    def test_a_refusal_for_quota_is_told_twice(self) -> None:
        words = 'pods "x" is forbidden: exceeded quota: gpus, requested: 1, used: 4, limited: 4'

        new = status(self.refused(words))

        assert condition(new, "QuotaExceeded")["status"] == "True"
        assert condition(new, "Ready")["reason"] == "CreationRefused"
        assert "exceeded quota: gpus" in condition(new, "Ready")["message"]
        assert condition(new, "Progressing")["reason"] == "RolloutBlocked"

    def test_a_refusal_for_pod_security_is_not_a_quota(self) -> None:
        new = status(self.refused("violates PodSecurity restricted"))

        assert condition(new, "QuotaExceeded")["status"] == "False"
        assert condition(new, "Ready")["reason"] == "CreationRefused"


class TestCounts:
    def test_replicas_are_counted_for_scale(self) -> None:
        cluster = settled({"replicas": 3, **CPU})
        cluster.roll_out(updatedReplicas=1, readyReplicas=3)

        new = status(cluster)

        assert new["replicas"] == 3
        assert new["readyReplicas"] == 1
        assert new["selector"] == "deepseek.dev/deployment=chat,deepseek.dev/tier=primary"

    def test_the_active_model_is_the_one_that_answers(self) -> None:
        cluster = settled()
        silent = status(cluster)
        cluster.pods = [pod_of(ready=True, annotations={SOURCE: "package://old"})]
        old = status(cluster)
        cluster.pods.append(pod_of("b", ready=True, annotations={SOURCE: "package://smollm2"}))

        assert "activeModel" not in silent
        assert old["activeModel"] == "package://old"
        assert status(cluster)["activeModel"] == "package://smollm2"

    def test_the_status_is_what_the_contract_allows(self) -> None:
        cluster = settled()
        cluster.roll_out()

        parsed = DeepSeekDeploymentStatus.parse(status(cluster))

        assert parsed.conditions
        for entry in parsed.conditions:
            assert entry.reason in REASONS[entry.type]


class TestHistory:
    def test_what_people_write_on_pods_keeps_the_status_as_the_contract_allows(self) -> None:
        """The API server would refuse all of it, for as long as the pod is there."""
        cluster = settled()
        cluster.roll_out()
        odd = {SOURCE: "x" * 3000, CAUSE_ANNOTATION: "the GPU's fan", REASON_ANNOTATION: "y" * 5000}
        cluster.pods = [pod_of(ready=True, annotations=odd)]
        labels = {QUARANTINE_LABEL: "chat"}
        cluster.quarantined = [pod_of("sick", labels=labels, annotations=odd, node="a")]

        found = DeepSeekDeploymentStatus.parse(status(cluster))

        assert found.recovery is not None
        assert found.recovery.switches is not None

    def test_a_transition_time_moves_only_with_the_status(self) -> None:
        cluster = settled()
        cluster.now = NOW + timedelta(minutes=5)
        cluster.pods = [pod_of(conditions=unschedulable())]
        cluster.status = status(cluster)
        not_yet = condition(cluster.status, "Ready")["lastTransitionTime"]
        cluster.roll_out()

        now = condition(status(cluster), "Ready")["lastTransitionTime"]

        assert not_yet == "2026-05-01T12:00:00Z"
        assert now == "2026-05-01T12:05:00Z"

    def test_an_unchanged_cluster_gives_an_unchanged_status(self) -> None:
        cluster = settled()
        cluster.roll_out()
        cluster.status = status(cluster)
        cluster.now = NOW + timedelta(hours=1)

        assert status(cluster) == cluster.status

    def test_a_lost_status_comes_back_but_for_its_history(self) -> None:
        cluster = settled()
        cluster.roll_out()
        before = status(cluster)

        cluster.status = {}
        after = status(cluster)

        for part in ("observedGeneration", "replicas", "readyReplicas", "selector"):
            assert after[part] == before[part]
        assert condition(after, "Ready")["reason"] == "Available"

    def test_history_holds_the_last_ten_changes_in_words(self) -> None:
        cluster = settled()
        for minute in range(12):
            cluster.now = NOW + timedelta(minutes=minute)
            cluster.roll_out(availableReplicas=minute % 2, readyReplicas=minute % 2)
            cluster.status = status(cluster)

        history = cluster.status["history"]

        assert len(history) == 10
        assert history[0]["time"] == "2026-05-01T12:11:00Z"
        assert history[0]["message"].startswith("Ready (Available): 1 of 1 pods answer")
        assert history[1]["message"].startswith("Not ready (RolloutInProgress): 1 of 1")

    def test_events_are_posted_for_changes_only_and_have_the_conditions_reason(self) -> None:
        cluster = settled()
        before = status(cluster)
        cluster.roll_out()
        cluster.status = before
        after = status(cluster)

        told = notes(before, after)

        assert [(note.type, note.reason) for note in told] == [("Normal", "Available")]
        assert notes(after, after) == []

    def test_bad_news_are_warnings(self) -> None:
        cluster = settled()
        cluster.pods = [pod_of(conditions=unschedulable())]

        told = notes(cluster.status, status(cluster))

        assert [(note.type, note.reason) for note in told] == [("Warning", "Unschedulable")]

    def test_what_lies_on_the_way_is_no_event(self) -> None:
        cluster = settled()

        assert condition(cluster.status, "Ready")["reason"] == "RolloutInProgress"
        assert notes({}, cluster.status) == []

    def test_a_start_is_no_event_and_one_that_does_not_get_ready_is(self) -> None:
        cluster = settled()
        cluster.roll_out(readyReplicas=0, availableReplicas=0)
        running = {"running": {"startedAt": "2026-05-01T11:59:00Z"}}
        pod = pod_of(containers=[{"state": running, "started": False}], phase="Running")
        pod["status"]["conditions"][-1]["lastTransitionTime"] = "2026-05-01T11:58:00Z"
        cluster.pods = [pod]
        loading = cluster.status = status(cluster)

        pod["status"]["containers"][0]["started"] = True
        pod["toldAt"] = "2026-05-01T12:00:00Z"
        begun, todo = status(cluster), cluster.plan()
        cluster.now = NOW + timedelta(seconds=todo.requeue_after_seconds or 0)
        late = status(cluster)

        assert not is_transition(loading, begun)
        assert notes(loading, begun) == []
        assert todo.requeue_after_seconds == 10
        assert [(note.type, note.reason) for note in notes(begun, late)] == [
            ("Warning", "PodsNotReady")
        ]
        assert cluster.plan().requeue_after_seconds is None

    def test_other_words_for_the_same_state_are_no_transition(self) -> None:
        cluster = settled()
        cluster.pods = [pod_of(conditions=unschedulable("0/3 nodes"))]
        cluster.status = status(cluster)
        cluster.pods = [pod_of(conditions=unschedulable("0/4 nodes"))]

        again = status(cluster)

        assert again != cluster.status
        assert not is_transition(cluster.status, again)
        assert is_transition({}, again)


def test_a_spec_that_is_not_understood_is_said_so() -> None:
    observed = Observed(Simulation().observed().owner)

    new = invalid_status(observed, "spec.replicas: not a number.", NOW)

    assert condition(new, "Ready")["reason"] == "InvalidSpec"
    assert "spec.replicas: not a number" in condition(new, "Ready")["message"]
