"""A model's download, from its volume to the attempt that fetched it."""

import copy
from dataclasses import replace
from datetime import timedelta

import pytest
from scenes import (
    HUB,
    NOW,
    SETTINGS,
    Simulation,
    claim,
    condition,
    pod_of,
    unschedulable,
    waiting,
)

from deepseek_operator.kinds import Reference
from deepseek_operator.loader import MODEL_LABEL
from deepseek_operator.plan import REFUSAL_CHECK_SECONDS, plan
from deepseek_operator.render import cache_name
from deepseek_operator.status import status_of


def loader_pod(job: dict, message: str) -> dict:
    labels = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    state = {"terminated": {"exitCode": 11, "reason": "Error", "message": message}}
    return pod_of(
        "loader", labels=labels, containers=[{"name": "loader", "state": state}], phase="Failed"
    )


def test_volume_then_policy_and_job_then_deployment() -> None:
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


def test_two_objects_of_one_source_share_one_download() -> None:
    cluster = Simulation(HUB)
    cluster.settle()
    cluster.finish_job("Complete")
    cluster.settle()

    cluster.name = "other"
    todo = cluster.plan()

    assert not {"Job", "PersistentVolumeClaim"} & {m["kind"] for m in (*todo.apply, *todo.create)}
    assert "Deployment" in {m["kind"] for m in todo.apply}


def test_a_lost_record_of_the_download_does_not_hold_back_a_running_deployment() -> None:
    cluster = Simulation(HUB)
    cluster.settle()
    job = cluster.finish_job("Complete")
    cluster.settle()
    del cluster.objects[Reference("Job", "team", job["metadata"]["name"])]
    cluster.deployment["spec"]["replicas"] = 7

    todo = cluster.plan()

    assert [m["kind"] for m in todo.create] == ["Job"]
    assert [m["kind"] for m in todo.apply] == ["Deployment"]


def test_a_change_of_model_leaves_the_old_pods_alone_until_the_new_model_is_there() -> None:
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
    word: str, reason: str
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


def test_the_next_attempt_has_a_new_number_and_remembers_the_failure() -> None:
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


def test_it_heals_by_itself() -> None:
    cluster = Simulation(HUB)
    cluster.settle()
    cluster.finish_job("Failed")
    cluster.now = NOW + timedelta(seconds=11)
    cluster.settle()
    cluster.finish_job("Complete")

    cluster.settle()

    assert cluster.status["conditions"][-1]["reason"] == "Downloaded"
    assert "Deployment" in {key.kind for key in cluster.objects}


def test_pauses_grow_with_the_attempts() -> None:
    cluster = Simulation(HUB)
    cluster.settle()
    pauses = []
    for _ in range(7):
        cluster.finish_job("Failed", at=cluster.now)
        pauses.append(cluster.plan().requeue_after_seconds)
        cluster.now += timedelta(seconds=pauses[-1] + 1)
        cluster.settle()

    assert pauses == [10, 20, 40, 80, 160, 300, 300]


def test_other_credentials_are_tried_at_once() -> None:
    cluster = Simulation(HUB)
    cluster.settle()
    cluster.finish_job("Failed")

    cluster.document = copy.deepcopy(HUB)
    cluster.document["model"]["credentialsSecret"] = {"name": "token"}
    todo = cluster.plan()

    assert len(todo.create) == 1
    volumes = todo.create[0]["spec"]["template"]["spec"]["volumes"]
    assert "token" in {volume.get("secret", {}).get("secretName") for volume in volumes}


def test_a_running_attempt_is_not_disturbed_by_another_object_with_other_wishes() -> None:
    cluster = Simulation(HUB)
    cluster.settle()

    cluster.name = "other"
    cluster.document = {**copy.deepcopy(HUB), "pod": {"image": "worker:2"}}
    todo = cluster.plan()

    assert not [m for m in todo.create if m["kind"] == "Job"]
    assert not todo.delete


def test_a_job_of_a_volume_that_is_gone_does_not_count() -> None:
    cluster = Simulation(HUB)
    cluster.settle()
    cluster.finish_job("Complete")
    cluster.settle()
    name = cache_name(cluster.spec.model.parsed_source)

    cluster.child("PersistentVolumeClaim", name)["metadata"]["uid"] = "a-new-one"
    todo = cluster.plan()

    assert todo.model.may_start is False


def test_a_claim_of_ones_own_is_used_and_never_written() -> None:
    document = copy.deepcopy(HUB)
    document["model"]["cache"] = {"existingClaim": "weights"}
    cluster = Simulation(document, foreign_claim=claim())

    cluster.settle()

    assert not [key for key in cluster.objects if key.kind == "PersistentVolumeClaim"]
    assert [key for key in cluster.objects if key.kind == "Job"]


def test_a_claim_of_ones_own_that_is_missing_holds_the_pods_back() -> None:
    document = copy.deepcopy(HUB)
    document["model"]["cache"] = {"existingClaim": "weights"}

    todo = Simulation(document).plan()

    assert (todo.model.reason, todo.model.may_start) == ("ClaimMissing", False)
    assert "create it, or change spec.model.cache.existingClaim." in todo.model.message
    assert "Deployment" not in {m["kind"] for m in todo.apply}


def test_a_cache_may_grow_and_does_not_shrink() -> None:
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
def test_what_the_loader_waits_for_is_told(pod: dict, reason: str) -> None:
    cluster = Simulation(HUB)
    cluster.settle()

    pod["metadata"]["labels"] = {MODEL_LABEL: cache_name(cluster.spec.model.parsed_source)}
    cluster.loader_pods = [pod]

    assert cluster.plan().model.reason == reason


def test_a_pod_that_is_refused_is_told_before_an_older_failure() -> None:
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


def test_a_missing_authority_is_told_and_looked_for() -> None:
    cluster = Simulation(HUB)
    cluster.settle()
    source = cluster.spec.model.source

    observed = replace(cluster.observed(), missing_authorities={source: "make ConfigMap c."})
    told = plan(cluster.spec, observed, SETTINGS, NOW)

    assert (told.model.reason, told.model.message) == ("ConfigMapMissing", "make ConfigMap c.")
    assert told.requeue_after_seconds is not None


def test_a_job_that_has_its_pod_is_not_looked_at_again() -> None:
    cluster = Simulation(HUB)
    cluster.settle()
    for live in cluster.objects.values():
        if live["kind"] == "Job":
            live["status"] = {"active": 1}

    assert cluster.plan().requeue_after_seconds is None


def test_a_missing_token_secret_is_told() -> None:
    cluster = Simulation(HUB, missing_secrets=("Secret token is not there: create it.",))
    cluster.reconcile()
    cluster.reconcile()

    model = cluster.plan().model

    assert model.reason == "SecretMissing"
    assert "create it" in model.message
