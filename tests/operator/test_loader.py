"""The parts of a model's cache."""

import json
from datetime import UTC, datetime

import pytest
from scenes import CHECKSUM, SETTINGS, ended, pod_of, spec_of

from deepseek_operator import loader
from deepseek_operator.render import Owner

OWNER = Owner("team", "chat", "uid-of-chat")
CLAIM = {"metadata": {"name": "model-1", "namespace": "team", "uid": "uid-of-claim"}}


def job(model: dict | None = None, pod: dict | None = None, **options: object) -> dict:
    spec = spec_of({"model": {"source": "hf://org/tiny@v1", **(model or {})}, "pod": pod or {}})
    return loader.job(OWNER, "model-1", spec, SETTINGS, CLAIM, **options)


def ports(source: str, endpoint: str = "https://huggingface.co") -> set[int]:
    settings = SETTINGS.model_copy(update={"hugging_face_endpoint": endpoint})
    spec = spec_of({"model": {"source": source}})
    policy = loader.network_policy("team", "model-1", spec, settings, CLAIM)
    return {port["port"] for port in policy["spec"]["egress"][1]["ports"]}


class TestJob:
    def test_it_loads_the_source_into_a_folder_of_its_own(self) -> None:
        container = job()["spec"]["template"]["spec"]["containers"][0]

        assert container["args"][:3] == [
            "load", "--source=hf://org/tiny@v1", "--destination=/cache/model-1",
        ]  # fmt: skip

    def test_it_keeps_the_restricted_pod_security_standard(self) -> None:
        pod = job()["spec"]["template"]["spec"]

        assert pod["securityContext"]["runAsNonRoot"] is True
        security = pod["containers"][0]["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert pod["automountServiceAccountToken"] is False

    def test_a_failed_pod_ends_the_attempt(self) -> None:
        assert job()["spec"]["backoffLimit"] == 0
        assert job()["spec"]["template"]["spec"]["restartPolicy"] == "Never"

    def test_it_belongs_to_the_volume_and_outlives_the_object(self) -> None:
        (reference,) = job()["metadata"]["ownerReferences"]

        assert (reference["kind"], reference["uid"]) == ("PersistentVolumeClaim", "uid-of-claim")

    def test_a_token_and_certificates_are_files(self) -> None:
        pod = job(
            {"credentialsSecret": {"name": "s", "key": "k"}, "certificateAuthority": {"name": "c"}}
        )["spec"]["template"]["spec"]

        container = pod["containers"][0]
        assert "--token-file=/etc/deepseek/credentials/k" in container["args"]
        assert {"name": "SSL_CERT_FILE", "value": "/etc/deepseek/ca/ca.crt"} in container["env"]
        assert {volume["name"] for volume in pod["volumes"]} >= {"credentials", "ca"}

    def test_it_runs_where_the_workers_will(self) -> None:
        pod = job(pod={"nodeSelector": {"zone": "a"}})["spec"]["template"]["spec"]

        assert pod["nodeSelector"] == {"zone": "a"}

    def test_later_attempts_have_names_of_their_own(self) -> None:
        assert job()["metadata"]["name"] == "model-1"
        assert job(number=3)["metadata"]["name"] == "model-1-3"


class TestAttempts:
    def test_the_latest_comes_first_and_deleted_ones_do_not_count(self) -> None:
        jobs = [job(), job(number=3), job(number=2)]
        jobs[2]["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"

        assert [attempt.number for attempt in loader.attempts(jobs)] == [3, 1]

    def test_phase_and_time_come_from_the_conditions(self) -> None:
        failed = job()
        failed["status"] = {
            "conditions": [
                {"type": "Complete", "status": "False"},
                {
                    "type": "Failed",
                    "status": "True",
                    "lastTransitionTime": "2026-05-01T12:00:00Z",
                },
            ]
        }

        (attempt,) = loader.attempts([failed])

        assert attempt.phase == "failed"
        assert attempt.failed_at == datetime(2026, 5, 1, 12, tzinfo=UTC)
        assert loader.attempts([job()])[0].phase == "running"

    def test_the_last_failure_travels_with_the_next_attempt(self) -> None:
        failure = loader.Failure("DiskFull", "no room")

        (attempt,) = loader.attempts([job(number=2, last_failure=failure)])

        assert attempt.previous_failure == failure

    @pytest.mark.parametrize("text", ["", "x", "[]", '{"reason": 1}', "7"])
    def test_annotations_that_somebody_wrote_over_are_read_as_nothing(self, text: str) -> None:
        odd = job(number=2)
        odd["metadata"]["annotations"] = {
            loader.ATTEMPT_ANNOTATION: text, loader.FAILURE_ANNOTATION: text,
        }  # fmt: skip

        (attempt,) = loader.attempts([odd])

        assert attempt.previous_failure is None

    @pytest.mark.parametrize(
        ("state", "reason", "words"),
        [
            (ended('{"reason": "NoSpace", "message": "full"}'), "DiskFull", "full"),
            (ended('{"reason": "Else", "message": "odd"}'), "DownloadFailed", "odd"),
            (ended("no JSON"), "DownloadFailed", "no JSON"),
            (ended(""), "DownloadFailed", "exit code 1"),
            (ended("", reason="OOMKilled"), "DownloadFailed", "memory"),
        ],
        ids=["known", "unknown", "text", "silence", "killed"],
    )
    def test_a_failure_is_read_from_the_pods_last_words(
        self, state: dict, reason: str, words: str
    ) -> None:
        (attempt,) = loader.attempts([job()])
        pod = pod_of(
            labels={"batch.kubernetes.io/job-name": "model-1"}, containers=[{"state": state}]
        )

        failure = loader.failure_of(attempt, [pod_of("another"), pod])

        assert failure.reason == reason
        assert words in failure.message

    def test_without_a_pod_the_reason_is_unknown(self) -> None:
        (attempt,) = loader.attempts([job()])

        assert loader.failure_of(attempt, []).reason == "DownloadFailed"

    def test_pauses_double_up_to_five_minutes(self) -> None:
        assert [loader.retry_seconds(n) for n in (1, 2, 3, 6, 50)] == [10, 20, 40, 300, 300]


class TestPolicy:
    def test_only_dns_and_the_source_are_reached_and_nobody_comes_in(self) -> None:
        spec = spec_of({"model": {"source": "hf://org/tiny"}})

        policy = loader.network_policy("team", "model-1", spec, SETTINGS, CLAIM)["spec"]

        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert "ingress" not in policy
        assert {port["port"] for port in policy["egress"][0]["ports"]} == {53}

    @pytest.mark.parametrize(
        ("source", "endpoint", "wanted"),
        [
            ("hf://org/tiny", "https://huggingface.co", {443}),
            ("hf://org/tiny", "http://mirror.example:8081", {443, 8081}),
            (f"https://x.example/f#sha256={CHECKSUM}", "https://huggingface.co", {443}),
            (f"https://x.example:8443/f#sha256={CHECKSUM}", "https://huggingface.co", {8443}),
        ],
    )
    def test_the_ports_are_those_of_the_source(
        self, source: str, endpoint: str, wanted: set[int]
    ) -> None:
        assert ports(source, endpoint) == wanted


def test_the_wish_changes_with_what_an_attempt_is_made_from() -> None:
    def wish(**model: object) -> str:
        return loader.wish(spec_of({"model": {"source": "hf://org/tiny", **model}}), SETTINGS)

    assert wish() == wish(servedName="x")
    assert wish() != wish(credentialsSecret={"name": "s"})
    assert json.loads(wish())
