"""What the operator remembers of the cluster, and whom a change concerns."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from scenes import CPU, HUB, SETTINGS, owner_of, pod_of, spec_of
from scripted import Script, api_of, json_answer, refusal

from deepseek_operator import degrade_case
from deepseek_operator.autoscale import ExternalMetrics
from deepseek_operator.cluster import Cluster, Name
from deepseek_operator.errors import ClusterBusyError, ConflictError
from deepseek_operator.kinds import WATCHED_KINDS, Manifest
from deepseek_operator.loader import MODEL_LABEL
from deepseek_operator.plan import Plan
from deepseek_operator.pods import creation_refusal
from deepseek_operator.recovery import QUARANTINE_LABEL, Decision, Ending, Sick
from deepseek_operator.render import (
    DEPLOYMENT_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    TIER_LABEL,
    cache_name,
)
from deepseek_operator.settings import Settings
from deepseek_operator.status import Note

CHAT = Name("team", "chat")
ON_PRIMARY = degrade_case.Decision({}, False, "PrimaryServing", "", degrade_case.Memory())


def at(version: int, manifest: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(manifest)
    made["metadata"]["resourceVersion"] = str(version)
    return made


def service(version: int = 2, *, uid: str = "s", owner: str = "chat") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "chat",
            "namespace": "team",
            "uid": uid,
            "resourceVersion": str(version),
            "labels": {DEPLOYMENT_LABEL: owner, MANAGED_BY_LABEL: MANAGED_BY},
            "ownerReferences": [{"uid": f"uid-of-{owner}"}],
        },
        "spec": {"type": "ClusterIP"},
    }


def job(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": "j",
            "resourceVersion": "9",
            "labels": {MODEL_LABEL: name, MANAGED_BY_LABEL: MANAGED_BY},
        },
    }


@pytest.fixture
def woken() -> list[Name]:
    return []


@pytest.fixture
def cluster(woken: list[Name]) -> Cluster:
    # No request is made by what these tests call.
    return Cluster(None, SETTINGS, woken.append)  # type: ignore[arg-type]


def remembered(cluster: Cluster) -> Any:
    return cluster._remembered(CHAT, spec_of(CPU), None, ())


class TestNotice:
    def test_a_child_concerns_its_object(self, cluster: Cluster) -> None:
        assert cluster.notice("ADDED", service()) == {CHAT}

    def test_the_same_version_again_is_no_news(self, cluster: Cluster) -> None:
        cluster.notice("ADDED", service(5))

        assert cluster.notice("MODIFIED", service(5)) == set()

    def test_what_is_read_counts_though_a_watch_told_the_same_version_without_a_field(
        self, cluster: Cluster
    ) -> None:
        """A watch that is older than the CRD's schema leaves out what that has got since."""
        cluster.notice("ADDED", owner_of())
        cluster.notice("MODIFIED", service(5))
        whole = service(5)
        whole["spec"]["type"] = "NodePort"

        concerned = cluster.notice(None, whole)
        late = cluster.notice("MODIFIED", service(5))

        (child,) = remembered(cluster).children.values()
        assert concerned == {CHAT}
        assert late == set()
        assert child["spec"]["type"] == "NodePort"

    def test_an_older_version_changes_nothing(self, cluster: Cluster) -> None:
        cluster.notice("ADDED", owner_of())
        new = service(10)
        new["spec"]["type"] = "NodePort"
        cluster.notice("MODIFIED", new)

        cluster.notice("MODIFIED", service(9))

        (child,) = remembered(cluster).children.values()
        assert child["spec"]["type"] == "NodePort"

    def test_a_newer_version_with_the_same_content_wakes_nobody(self, cluster: Cluster) -> None:
        cluster.notice("ADDED", service(5))

        assert cluster.notice("MODIFIED", service(6)) == set()

    def test_a_deletion_concerns_the_object_and_is_remembered(self, cluster: Cluster) -> None:
        cluster.notice("ADDED", owner_of())
        cluster.notice("ADDED", service(5))

        concerned = cluster.notice("DELETED", service(7))
        late_answer = cluster.notice("MODIFIED", service(6))

        assert concerned == {CHAT}
        assert late_answer == set()
        assert remembered(cluster).children == {}

    def test_an_object_that_lost_its_label_and_got_it_back_is_seen(self, cluster: Cluster) -> None:
        """The watch says DELETED of an object that lives on without its label."""
        cluster.notice("ADDED", owner_of())
        cluster.notice("ADDED", service(5))
        cluster.notice("DELETED", service(6))

        assert cluster.notice("ADDED", service(8)) == {CHAT}
        assert len(remembered(cluster).children) == 1

    def test_an_object_made_anew_under_the_same_name_replaces_the_old_one(
        self, cluster: Cluster
    ) -> None:
        cluster.notice("ADDED", owner_of())
        cluster.notice("ADDED", service(5, uid="old"))
        cluster.notice("ADDED", service(8, uid="new"))

        # The old one's end arrives late.
        assert cluster.notice("DELETED", service(7, uid="old")) == set()
        assert len(remembered(cluster).children) == 1

    def test_a_label_that_moves_concerns_both_objects(self, cluster: Cluster) -> None:
        cluster.notice("ADDED", service(5, owner="chat"))

        assert cluster.notice("MODIFIED", service(6, owner="other")) == {
            CHAT, Name("team", "other"),
        }  # fmt: skip

    def test_a_part_of_a_cache_concerns_every_object_of_its_source(self, cluster: Cluster) -> None:
        cluster.notice("ADDED", owner_of(HUB, name="a"))
        cluster.notice("ADDED", owner_of(HUB, name="b"))
        cluster.notice("ADDED", owner_of(CPU, name="c"))
        name = cache_name(spec_of(HUB).model.parsed_source) or ""

        assert cluster.notice("ADDED", job(name)) == {Name("team", "a"), Name("team", "b")}

    def test_an_object_that_changed_its_source_is_no_longer_concerned(
        self, cluster: Cluster
    ) -> None:
        cluster.notice("ADDED", owner_of(HUB))
        cluster.notice("MODIFIED", at(2, owner_of(CPU)))
        name = cache_name(spec_of(HUB).model.parsed_source) or ""

        assert cluster.notice("ADDED", job(name)) == set()

    def test_own_status_writes_are_taken_in_and_wake_nobody(self, cluster: Cluster) -> None:
        cluster.notice("ADDED", owner_of())

        assert cluster.notice("MODIFIED", at(2, owner_of(status={"replicas": 1}))) == set()
        assert (cluster.owner(CHAT) or {})["status"] == {"replicas": 1}

    def test_an_object_that_is_going_is_nobodys_work(self, cluster: Cluster) -> None:
        going = owner_of()
        going["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"
        cluster.notice("ADDED", going)

        assert cluster.owner(CHAT) is None
        assert cluster.names == [CHAT]

    def test_a_child_without_our_labels_concerns_nobody(self, cluster: Cluster) -> None:
        odd = service()
        odd["metadata"]["labels"] = {}

        assert cluster.notice("ADDED", odd) == set()


def listing(objects: dict[str, list[dict[str, Any]]]) -> Script:
    def answer(request: web.Request) -> web.Response:
        items = objects.get(request.path.rsplit("/", 1)[-1], [])
        return json_answer({"metadata": {"resourceVersion": "50"}, "items": items})

    return Script(answer)


class TestResync:
    async def test_what_was_missed_is_found(self, woken: list[Name]) -> None:
        script = listing({"deepseekdeployments": [owner_of()], "services": [service()]})

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            first = await cluster.resync()
            again = await cluster.resync()
            script.answers = listing({"deepseekdeployments": [owner_of()]}).answers
            after = await cluster.resync()

        assert (first, again, after) == ({CHAT}, set(), {CHAT})
        assert remembered(cluster).children == {}

    async def test_every_kind_is_listed_in_every_served_namespace(self, woken: list[Name]) -> None:
        script = listing({})

        async with api_of(script) as (api, _):
            await Cluster(api, Settings(watch_namespaces=("a", "b")), woken.append).resync()

        paths = [path for _, path, _, _ in script.requests]
        assert len(paths) == 2 * len(WATCHED_KINDS)
        assert all("/namespaces/a/" in path or "/namespaces/b/" in path for path in paths)


class TestWrites:
    def plan(self, *apply: dict[str, Any], create: tuple[dict[str, Any], ...] = ()) -> Plan:
        return Plan(
            apply=apply,
            create=create,
            delete=(),
            models={},
            tiers=(),
            scaling={},
            decision=ON_PRIMARY,
            rollouts={},
        )

    async def test_an_object_of_somebody_else_is_left_alone(self, woken: list[Name]) -> None:
        theirs = service(uid="theirs")
        theirs["metadata"]["ownerReferences"] = []
        conflict = {
            "kind": "Status",
            "message": "conflict with kubectl",
            "details": {"causes": [{"reason": "FieldManagerConflict"}]},
        }
        script = Script(json_answer(conflict, 409), json_answer({"items": [theirs]}))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            (refused,), failure = await cluster.carry_out(CHAT, self.plan(service()))

        assert refused.is_taken
        assert failure is None
        assert [method for method, *_ in script.requests] == ["PATCH", "GET"]
        assert script.requests[0][2]["force"] == "false"
        assert script.requests[1][2] == {"fieldSelector": "metadata.name=chat"}

    async def test_a_child_of_another_object_whose_name_comes_out_the_same_is_left_alone(
        self, woken: list[Name]
    ) -> None:
        """The fallback `x-small` of `chat` and the fallback `small` of `chat-x`: one name."""
        theirs = service(owner="chat-x")
        script = Script(json_answer({}))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            cluster.notice("ADDED", theirs)
            (refused,), failure = await cluster.carry_out(CHAT, self.plan(service()))

        assert refused.is_taken
        assert failure is None
        assert script.requests == []

    async def test_an_own_child_that_lost_its_label_is_taken_back(self, woken: list[Name]) -> None:
        conflict = {"kind": "Status", "details": {"causes": [{"reason": "FieldManagerConflict"}]}}
        script = Script(
            json_answer(conflict, 409), json_answer({"items": [service()]}), json_answer(service(9))
        )

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            refusals, _ = await cluster.carry_out(CHAT, self.plan(service()))

        assert refusals == []
        assert script.requests[-1][2]["force"] == "true"

    async def test_a_service_account_of_somebody_else_is_left_alone(
        self, woken: list[Name]
    ) -> None:
        account = {**service(), "kind": "ServiceAccount"}
        theirs = copy.deepcopy(account)
        theirs["metadata"]["ownerReferences"] = []
        script = Script(refusal(409, "AlreadyExists"), json_answer({"items": [theirs]}))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            (refused,), _ = await cluster.carry_out(CHAT, self.plan(create=(account,)))

        assert refused.is_taken
        assert [method for method, *_ in script.requests] == ["POST", "GET"]

    async def test_an_own_service_account_that_lost_its_label_is_taken_back(
        self, woken: list[Name]
    ) -> None:
        account = {**service(), "kind": "ServiceAccount"}
        script = Script(
            refusal(409, "AlreadyExists"), json_answer({"items": [account]}), json_answer(account)
        )

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            refusals, _ = await cluster.carry_out(CHAT, self.plan(create=(account,)))

        assert refusals == []
        assert [method for method, *_ in script.requests] == ["POST", "GET", "PATCH"]

    async def test_what_the_server_refuses_is_told_and_the_rest_is_written(
        self, woken: list[Name]
    ) -> None:
        account = {**service(), "kind": "ServiceAccount"}

        def answer(request: web.Request) -> web.Response:
            if request.method == "GET":
                return json_answer({"items": []})
            if "services" in request.path:
                return refusal(422)
            return json_answer({**account, "metadata": account["metadata"] | {"uid": "a"}})

        async with api_of(Script(answer)) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            (refused,), failure = await cluster.carry_out(
                CHAT, self.plan(service(), create=(account,))
            )

        assert "made up: 422" in refused.message
        assert failure is None
        assert [key.kind for key in remembered(cluster).children] == ["ServiceAccount"]

    async def test_a_server_that_fails_for_long_is_the_queues_business(
        self, woken: list[Name]
    ) -> None:
        async with api_of(Script(refusal(503)), Settings(api_retries=0)) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            (refused,), failure = await cluster.carry_out(CHAT, self.plan(service()))

        assert isinstance(failure, ClusterBusyError)
        assert "made up: 503" in refused.message

    async def test_what_an_admission_webhook_changes_is_tolerated(self, woken: list[Name]) -> None:
        changed = service(7)
        changed["spec"]["type"] = "NodePort"
        script = Script(json_answer(changed))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            cluster.notice("ADDED", service(3))
            wanted = service()
            del wanted["metadata"]["resourceVersion"]
            await cluster.carry_out(CHAT, self.plan(wanted))

        ((key, left),) = remembered(cluster).tolerated.items()
        assert key.kind == "Service"
        assert left == ("spec.type='NodePort'",)

    async def test_a_newer_spec_in_the_answer_to_a_status_write_wakes_the_object(
        self, woken: list[Name]
    ) -> None:
        """The event that tells of it comes later, and is no news then."""
        script = Script(json_answer(at(9, owner_of({**CPU, "replicas": 5}))))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            await cluster.write_status(CHAT, {"replicas": 1})

        assert woken == [CHAT]

    async def test_fields_that_are_gone_are_taken_out_of_the_status(
        self, woken: list[Name]
    ) -> None:
        script = Script(json_answer(at(9, owner_of())))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            degrade = {"phase": "blocked", "since": "2026-05-01T12:00:00Z"}
            before = {"activeModel": "package://x", "replicas": 1, "degrade": degrade}
            cluster.notice("ADDED", owner_of(status=before))
            await cluster.write_status(CHAT, {"replicas": 2, "degrade": {"phase": "primary"}})

        degrade = {"phase": "primary", "since": None}
        wanted = {"replicas": 2, "activeModel": None, "degrade": degrade}
        assert script.requests[0][3] == {"status": wanted}

    async def test_and_out_of_the_parts_of_the_status(self, woken: list[Name]) -> None:
        script = Script(json_answer(at(9, owner_of())))
        old = {"recovery": {"level": 2, "message": "a pod moves"}, "memory": {"a": {"b": 1}}}

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of(status=old))
            await cluster.write_status(CHAT, {"recovery": {"level": 0}, "memory": {"a": {"c": 2}}})

        assert script.requests[0][3]["status"] == {
            "recovery": {"level": 0, "message": None},
            "memory": {"a": {"b": None, "c": 2}},
        }

    @pytest.mark.parametrize("status", [404, 403])
    async def test_events_are_posted_as_far_as_that_works(
        self, woken: list[Name], status: int
    ) -> None:
        script = Script(refusal(status))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            await cluster.post(CHAT, [Note("Normal", "Available", "it answers")])

        body = script.requests[0][3]
        assert (body["reason"], body["type"]) == ("Available", "Normal")
        assert body["involvedObject"]["uid"] == "uid-of-chat"

    async def test_the_token_is_random_and_kept_nowhere(self, woken: list[Name]) -> None:
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": service()["metadata"] | {"name": "chat-state-token"},
        }
        written = []

        async def handler(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            written.append(body["data"]["token"])
            return json_answer(body)

        async with api_of(handler) as (api, _):
            for _ in range(2):
                cluster = Cluster(api, Settings(), woken.append)
                cluster.notice("ADDED", owner_of())
                await cluster.carry_out(CHAT, self.plan(create=(secret,)))

        assert len(set(written)) == 2
        assert all(len(token) > 40 for token in written)
        assert written[-1] not in str(cluster._objects)

    async def test_referenced_secrets_that_are_missing_are_named(self, woken: list[Name]) -> None:
        spec = spec_of({**CPU, "security": {"apiKeySecret": {"name": "keys", "key": "list"}}})
        keys = {"metadata": {"name": "keys"}, "data": {"other": "eA=="}}
        script = Script(json_answer({"items": []}), json_answer({"items": [keys]}))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            absent = await cluster.observe(CHAT, spec)
            without_key = await cluster.observe(CHAT, spec)

        assert absent is not None
        assert without_key is not None
        assert "names Secret keys, which is not there" in absent.missing_secrets[0]
        assert "has no key list" in without_key.missing_secrets[0]

    async def test_an_authority_that_is_missing_is_named(self, woken: list[Name]) -> None:
        model = {"source": "hf://org/tiny@main", "certificateAuthority": {"name": "ca"}}
        spec = spec_of({**CPU, "model": model})
        other = {"metadata": {"name": "ca"}, "data": {"other": "PEM"}}
        script = Script(json_answer({"items": []}), json_answer({"items": [other]}))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            absent = await cluster.observe(CHAT, spec)
            without_key = await cluster.observe(CHAT, spec)

        assert absent is not None
        assert without_key is not None
        (words,) = absent.missing_authorities.values()
        assert "names ConfigMap ca, which is not there" in words
        assert "no key ca.crt" in str(without_key.missing_authorities)

    async def test_a_job_without_a_pod_is_asked_about(self, woken: list[Name]) -> None:
        name = cache_name(spec_of(HUB).model.parsed_source) or ""
        events = [
            {"involvedObject": {"uid": "j"}, "lastTimestamp": "2026-05-01T12:00:00Z",
             "message": "older"},
            {"involvedObject": {"uid": "j"}, "lastTimestamp": "2026-05-01T12:00:05Z",
             "message": "exceeded quota"},
            {"involvedObject": {"uid": "another"}, "lastTimestamp": "2026-05-01T12:00:09Z",
             "message": "of the job before"},
        ]  # fmt: skip
        script = Script(json_answer({"items": events}))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of(HUB))
            cluster.notice("ADDED", job(name))
            refused = await cluster.observe(CHAT, spec_of(HUB))
            running = at(10, job(name)) | {"status": {"active": 1}}
            cluster.notice("MODIFIED", running)
            asked = len(script.requests)
            going = await cluster.observe(CHAT, spec_of(HUB))

        assert refused is not None
        assert going is not None
        assert refused.loader_refusals == {name: "exceeded quota"}
        assert script.requests[0][2]["fieldSelector"] == (
            f"involvedObject.name={name},reason=FailedCreate"
        )
        assert going.loader_refusals == {}
        assert len(script.requests) == asked


class TestRefusedPods:
    OVER_QUOTA = 'pods "chat-primary-7f-b" is forbidden: exceeded quota: gpus'

    def deployment(self, words: str) -> Manifest:
        """The primary's, whose pods are refused since noon."""
        condition = {
            "type": "ReplicaFailure",
            "status": "True",
            "reason": "FailedCreate",
            "message": words,
            "lastTransitionTime": "2026-05-01T12:00:00Z",
        }
        made = service() | {"kind": "Deployment", "apiVersion": "apps/v1"}
        made["metadata"] |= {"name": "chat-primary", "uid": "d"}
        return made | {"spec": {}, "status": {"conditions": [condition]}}

    def event(self, owner: str, second: int, message: str) -> Manifest:
        return {
            "involvedObject": {"kind": "ReplicaSet", "name": owner},
            "lastTimestamp": f"2026-05-01T12:00:{second:02}Z",
            "message": message,
        }

    async def told(self, words: str, *events: Manifest) -> tuple[str | None, list[Any]]:
        """Why the primary's pods are refused, and what was asked for that."""
        script = Script(json_answer({"items": list(events)}))
        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), lambda _: None)
            cluster.notice("ADDED", owner_of())
            cluster.notice("ADDED", self.deployment(words))
            seen = await cluster.observe(CHAT, spec_of())
            assert seen is not None
            later = cluster.glance(CHAT, spec_of(), seen)
        assert later is not None
        assert creation_refusal(later.deployment()) == creation_refusal(seen.deployment())
        return creation_refusal(seen.deployment()), script.requests

    async def test_the_newest_reason_counts_and_not_the_first(self) -> None:
        words, asked = await self.told(
            "the object has been modified",
            self.event("chat-primary-7f", 1, f"Error creating: {self.OVER_QUOTA}"),
            self.event("chat-primary-7f", 0, "Error creating: the object has been modified"),
            self.event("chat-primary-x-7f", 9, "Error creating: another Deployment's"),
        )

        assert words == self.OVER_QUOTA
        assert asked[0][2] == {
            "fieldSelector": "involvedObject.kind=ReplicaSet,reason=FailedCreate"
        }

    async def test_events_that_were_counted_together_are_read_too(self) -> None:
        message = f"(combined from similar events): Error creating: {self.OVER_QUOTA}"

        words, _ = await self.told("at first", self.event("chat-primary-7f", 5, message))

        assert words == self.OVER_QUOTA

    async def test_what_was_told_before_the_refusal_is_over(self) -> None:
        earlier = self.event("chat-primary-7f", 0, "Error creating: for another reason")
        earlier["lastTimestamp"] = "2026-05-01T11:59:59Z"

        words, _ = await self.told("violates PodSecurity", earlier)

        assert words == "violates PodSecurity"

    async def test_a_refusal_for_a_quota_is_asked_no_more_about(self) -> None:
        words, asked = await self.told(self.OVER_QUOTA)

        assert words == self.OVER_QUOTA
        assert asked == []


def success(uid: str) -> web.Response:
    return json_answer({"kind": "Status", "status": "Success", "details": {"uid": uid}})


class TestDeletes:
    """What an own delete did is known at once, however late the watch tells of it."""

    async def deleted(
        self, woken: list[Name], *answers: Any, live: Manifest | None = None
    ) -> Cluster:
        async with api_of(Script(*answers)) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            cluster.notice("ADDED", live or service(5))
            todo = replace(TestWrites().plan(), delete=(live or service(5),))
            await cluster.carry_out(CHAT, todo)
        return cluster

    @pytest.mark.parametrize(
        "answer", [success("s"), refusal(404, "NotFound")], ids=["deleted", "gone already"]
    )
    async def test_what_is_gone_is_known_and_does_not_come_back(
        self, woken: list[Name], answer: web.Response
    ) -> None:
        cluster = await self.deleted(woken, answer)
        after = dict(remembered(cluster).children)

        # The watch tells of changes before the end, then of the end, then a list that began early.
        late = [
            cluster.notice("MODIFIED", service(6)),
            cluster.notice("MODIFIED", service(7)),
            cluster.notice("DELETED", service(8)),
            cluster.notice(None, service(7)),
        ]

        assert after == {}
        assert late == [set()] * 4
        assert remembered(cluster).children == {}
        # As the watch's own word would have done.
        assert woken == [CHAT]

    async def test_another_object_of_the_name_is_seen_at_once(self, woken: list[Name]) -> None:
        cluster = await self.deleted(woken, success("s"))

        concerned = cluster.notice("ADDED", service(9, uid="new"))
        late = cluster.notice("DELETED", service(8))

        (child,) = remembered(cluster).children.values()
        assert (concerned, late) == ({CHAT}, set())
        assert child["metadata"]["uid"] == "new"

    async def test_another_object_that_was_heard_of_before_the_answer_stays(
        self, woken: list[Name]
    ) -> None:
        clusters: list[Cluster] = []

        def answer(request: web.Request) -> web.Response:
            # Meanwhile somebody made it anew, and the watch was quicker than the answer.
            clusters[0].notice("ADDED", service(9, uid="new"))
            return refusal(404, "NotFound")

        async with api_of(Script(answer)) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            clusters.append(cluster)
            cluster.notice("ADDED", owner_of())
            cluster.notice("ADDED", service(5))
            await cluster.carry_out(CHAT, replace(TestWrites().plan(), delete=(service(5),)))

        (child,) = remembered(cluster).children.values()
        assert child["metadata"]["uid"] == "new"

    async def test_one_whose_name_another_has_is_gone(self, woken: list[Name]) -> None:
        items = {"metadata": {}, "items": [service(9, uid="new")]}

        cluster = await self.deleted(woken, refusal(409, "Conflict"), json_answer(items))

        # Whether the other one is ours is for the watch by our label to say.
        assert remembered(cluster).children == {}
        assert cluster.notice("ADDED", service(9, uid="new")) == {CHAT}

    async def test_what_its_finalizers_keep_is_there_and_going(self, woken: list[Name]) -> None:
        going = service(6)
        going["metadata"] |= {
            "deletionTimestamp": "2026-05-01T12:00:00Z", "finalizers": ["somebody/s"],
        }  # fmt: skip

        cluster = await self.deleted(woken, json_answer(going))
        (child,) = remembered(cluster).children.values()
        after = cluster.notice("DELETED", service(8))

        assert "deletionTimestamp" in child["metadata"]
        assert after == {CHAT}

    async def test_a_pod_that_has_time_to_end_is_going_and_a_forced_one_is_gone(
        self, woken: list[Name]
    ) -> None:
        pod = pod_of("chat-primary-0", node="n1")
        going = at(6, pod_of("chat-primary-0", node="n1", deleting=True))
        going["metadata"]["deletionGracePeriodSeconds"] = 30
        forced = copy.deepcopy(going)
        forced["metadata"]["deletionGracePeriodSeconds"] = 0
        found = []

        for answer in (going, forced):
            async with api_of(Script(json_answer(answer))) as (api, _):
                cluster = Cluster(api, Settings(), woken.append)
                cluster.notice("ADDED", owner_of())
                cluster.notice("ADDED", pod)
                ladder = Decision(end=(Ending(pod, 0, "its node is lost"),))
                await cluster.carry_out(CHAT, replace(TestWrites().plan(), ladder=ladder))
                found.append(
                    [p["metadata"].get("deletionTimestamp") for p in remembered(cluster).pods]
                )

        assert found == [["2026-05-01T12:00:00Z"], []]

    async def test_where_the_kind_is_not_served_a_later_version_is_believed(
        self, woken: list[Name]
    ) -> None:
        """A CRD that goes takes its objects along; a proxy's word is none about the object."""
        cluster = await self.deleted(
            woken, web.Response(text="404 page not found", status=404), live=service(5)
        )
        gone = dict(remembered(cluster).children)
        late = cluster.notice("MODIFIED", service(5))

        assert (gone, late) == ({}, set())
        assert cluster.notice("MODIFIED", service(6)) == {CHAT}

    async def test_all_whom_it_concerns_are_woken(self, woken: list[Name]) -> None:
        """A Job of a cache that two objects share."""
        name = cache_name(spec_of(HUB).model.parsed_source) or ""
        async with api_of(Script(success("j"))) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of(HUB, name="a"))
            cluster.notice("ADDED", owner_of(HUB, name="b"))
            cluster.notice("ADDED", job(name))
            await cluster.carry_out(
                Name("team", "a"), replace(TestWrites().plan(), delete=(job(name),))
            )

        assert set(woken) == {Name("team", "a"), Name("team", "b")}


class TestQuarantine:
    def pod(self, **labels: str) -> Manifest:
        found = pod_of("chat-primary-1", ready=True, node="n1")
        found["metadata"]["labels"] = {MANAGED_BY_LABEL: MANAGED_BY, **labels}
        return found

    def test_a_quarantined_pod_still_belongs_to_its_object(self, cluster: Cluster) -> None:
        cluster.notice("ADDED", owner_of())
        cluster.notice("ADDED", self.pod(**{DEPLOYMENT_LABEL: "chat", TIER_LABEL: "primary"}))

        concerned = cluster.notice("MODIFIED", at(2, self.pod(**{QUARANTINE_LABEL: "chat"})))

        assert concerned == {CHAT}
        assert remembered(cluster).pods == ()
        assert len(remembered(cluster).quarantined) == 1

    async def test_a_pod_is_quarantined_and_ended_before_anything_else(
        self, woken: list[Name]
    ) -> None:
        pod = self.pod(**{DEPLOYMENT_LABEL: "chat", TIER_LABEL: "primary"})
        ladder = Decision(
            quarantine=(Sick(pod, "NodeSilent", "it is silent"),),
            end=(Ending(pod_of("chat-primary-0"), 0, "its node is lost"),),
        )
        script = Script(json_answer(at(5, self.pod(**{QUARANTINE_LABEL: "chat"}))))

        async with api_of(script) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            cluster.notice("ADDED", pod)
            todo = replace(TestWrites().plan(), ladder=ladder)
            refusals, failure = await cluster.carry_out(CHAT, todo)

        bodies = {method: body for method, _, _, body in script.requests}
        assert (refusals, failure) == ([], None)
        assert bodies["PATCH"]["metadata"]["labels"] == {
            DEPLOYMENT_LABEL: None, TIER_LABEL: None, QUARANTINE_LABEL: "chat",
        }  # fmt: skip
        assert bodies["PATCH"]["metadata"]["ownerReferences"][0]["uid"] == "uid-of-chat"
        assert bodies["DELETE"]["gracePeriodSeconds"] == 0
        assert bodies["DELETE"]["preconditions"] == {"uid": "uid-of-chat-primary-0"}
        assert len(remembered(cluster).quarantined) == 1

    @pytest.mark.parametrize(("status", "fails"), [(404, False), (409, False), (403, True)])
    async def test_what_cannot_be_moved_holds_up_nothing_else(
        self, woken: list[Name], status: int, fails: bool
    ) -> None:
        pod = self.pod(**{DEPLOYMENT_LABEL: "chat", TIER_LABEL: "primary"})
        ladder = Decision(quarantine=(Sick(pod, "NodeSilent", "it is silent"),))

        def answer(request: web.Request) -> web.Response:
            is_pod = "/pods/" in request.path
            return refusal(status) if is_pod else json_answer(service(9))

        async with api_of(Script(answer), Settings(api_retries=0)) as (api, _):
            cluster = Cluster(api, Settings(), woken.append)
            cluster.notice("ADDED", owner_of())
            todo = replace(TestWrites().plan(service()), ladder=ladder)
            refusals, failure = await cluster.carry_out(CHAT, todo)

        assert refusals == []
        assert (failure is not None) is fails
        assert [key.kind for key in remembered(cluster).children] == ["Service"]


class TestWorkers:
    def secret(self, token: str = "c2VjcmV0", **labels: str) -> Manifest:
        metadata = service()["metadata"] | {"name": "chat-state-token"}
        metadata["labels"] = {**metadata["labels"], **labels}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata,
                "data": {"token": token}}  # fmt: skip

    def pod(self, address: str = "10.1.2.3", **changes: Any) -> Manifest:
        found = pod_of("chat-primary-1", ready=True, node="n1")
        found["metadata"]["labels"] |= {MANAGED_BY_LABEL: MANAGED_BY}
        container = {"name": "worker", "state": {"running": {}}}
        found["status"] |= {"podIP": address, "containerStatuses": [container], **changes}
        return found

    def targets(self, cluster: Cluster, *manifests: Manifest) -> list[tuple[str, str]]:
        for manifest in manifests:
            cluster.notice("ADDED", manifest)
        return [(target.url, target.token) for target in cluster.workers()]

    def test_a_running_pod_is_asked_with_the_token_of_its_object(self, cluster: Cluster) -> None:
        found = self.targets(cluster, owner_of(), self.secret(), self.pod())

        assert found == [("http://10.1.2.3:8000/state", "secret")]

    def test_an_address_of_six_groups_gets_brackets(self, cluster: Cluster) -> None:
        found = self.targets(cluster, owner_of(), self.secret(), self.pod("fd00::1"))

        assert found == [("http://[fd00::1]:8000/state", "secret")]

    @pytest.mark.parametrize(
        "changes",
        [
            {"phase": "Pending"},
            {"podIP": None},
            {"containerStatuses": [{"name": "worker", "state": {"waiting": {}}}]},
        ],
        ids=["not started", "no address", "restarting"],
    )
    def test_what_does_not_run_is_not_asked(
        self, cluster: Cluster, changes: dict[str, Any]
    ) -> None:
        assert self.targets(cluster, owner_of(), self.secret(), self.pod(**changes)) == []

    @pytest.mark.parametrize("token", ["", "not base64!", "/w=="])
    def test_without_a_usable_token_nobody_is_asked(self, cluster: Cluster, token: str) -> None:
        found = self.targets(cluster, owner_of(), self.secret(token), self.pod())

        assert [url for url, told in found if told] == []

    def test_another_address_serves_simulated_fleets(self, woken: list[Name]) -> None:
        settings = Settings(worker_state_url="http://127.0.0.1:9/{namespace}/{pod}")
        cluster = Cluster(None, settings, woken.append)  # type: ignore[arg-type]

        found = self.targets(cluster, owner_of(), self.secret(), self.pod())

        assert found == [("http://127.0.0.1:9/team/chat-primary-1", "secret")]


def autoscaler(name: str, target: str, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-of-{name}", **metadata},
        "spec": {"scaleTargetRef": {"kind": "Deployment", "name": target}},
    }


def deployment(*managers: str) -> dict[str, Any]:
    owned = {"fieldsV1": {"f:spec": {"f:replicas": {}}}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "chat-primary",
            "namespace": "team",
            "uid": "d",
            "resourceVersion": "3",
            "labels": {DEPLOYMENT_LABEL: "chat", MANAGED_BY_LABEL: MANAGED_BY},
            "managedFields": [{"manager": manager, **owned} for manager in managers],
        },
        "spec": {"replicas": 2},
    }


class TestScaling:
    """What has to be looked up because nobody watches it."""

    SCALED = CPU | {"autoscaling": {"maxReplicas": 3}}

    async def test_the_server_of_the_metrics_is_looked_up_once_for_all(
        self, woken: list[Name]
    ) -> None:
        service = {"namespace": "keda", "name": "keda-metrics"}
        available = {"type": "Available", "status": "True"}
        found = {"spec": {"service": service}, "status": {"conditions": [available]}}
        script = Script(json_answer(found))
        async with api_of(script) as (api, _):
            cluster = Cluster(api, SETTINGS, woken.append)
            cluster.notice("ADDED", owner_of(self.SCALED))

            for _round in range(5):
                observed = await cluster.observe(CHAT, spec_of(self.SCALED))

        assert observed is not None
        assert observed.external_metrics == ExternalMetrics(True, "keda/keda-metrics")
        assert [path for _, path, *_ in script.requests] == [
            "/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.external.metrics.k8s.io"
        ]

    @pytest.mark.parametrize(
        ("answer", "expected"),
        [
            (refusal(404), ExternalMetrics(True)),
            (refusal(403), ExternalMetrics()),
        ],
    )
    async def test_a_server_that_is_not_there_or_not_to_be_seen(
        self, woken: list[Name], answer: web.Response, expected: ExternalMetrics
    ) -> None:
        async with api_of(Script(answer)) as (api, _):
            cluster = Cluster(api, SETTINGS, woken.append)
            cluster.notice("ADDED", owner_of(self.SCALED))

            observed = await cluster.observe(CHAT, spec_of(self.SCALED))

        assert observed is not None
        assert observed.external_metrics == expected

    async def test_who_serves_some_namespaces_does_not_look_at_the_cluster(
        self, woken: list[Name], cluster: Cluster
    ) -> None:
        few = Cluster(
            None,  # type: ignore[arg-type]
            Settings(watch_namespaces=("team",)),
            woken.append,
        )
        few.notice("ADDED", owner_of(self.SCALED))

        observed = await few.observe(CHAT, spec_of(self.SCALED))

        assert observed is not None
        assert not observed.external_metrics.is_visible

    async def test_autoscalers_of_others_are_found_by_what_they_have_written(
        self, woken: list[Name]
    ) -> None:
        listed = {
            "items": [
                autoscaler("theirs", "chat-primary"),
                autoscaler("other", "something-else"),
                autoscaler("ours", "chat-primary", ownerReferences=[{"uid": "uid-of-chat"}]),
            ]
        }
        script = Script(json_answer(listed))
        async with api_of(script) as (api, _):
            cluster = Cluster(api, SETTINGS, woken.append)
            cluster.notice("ADDED", owner_of(CPU))
            cluster.notice("ADDED", deployment("deepseek-operator"))
            quiet = await cluster.observe(CHAT, spec_of(CPU))
            asked_before = len(script.requests)
            cluster.notice("MODIFIED", at(4, deployment("kube-controller-manager")))
            found = await cluster.observe(CHAT, spec_of(CPU))

        assert quiet is not None
        assert found is not None
        assert (quiet.foreign_autoscalers, asked_before) == ({}, 0)
        assert found.foreign_autoscalers == {"chat-primary": ("theirs",)}

    async def test_a_count_for_an_older_state_is_not_sent_again(self, woken: list[Name]) -> None:
        script = Script(refusal(409, "Conflict"))
        manifest = at(3, deployment("deepseek-operator"))
        async with api_of(script) as (api, _):
            cluster = Cluster(api, SETTINGS, woken.append)
            cluster.notice("ADDED", owner_of(CPU))
            cluster.notice("ADDED", deployment("deepseek-operator"))
            plan = Plan(
                apply=(manifest,),
                create=(),
                delete=(),
                models={},
                tiers=(),
                scaling={},
                decision=ON_PRIMARY,
                rollouts={},
            )

            _refusals, failure = await cluster.carry_out(CHAT, plan)

        assert isinstance(failure, ConflictError)
        assert len(script.requests) == 1

    async def test_keda_may_come_later(self, woken: list[Name]) -> None:
        def answer(request: web.Request) -> web.Response:
            if "scaledobjects" in request.path:
                return refusal(404)
            return json_answer({"items": [], "metadata": {"resourceVersion": "1"}})

        async with api_of(Script(answer)) as (api, counted):
            cluster = Cluster(api, Settings(keda=True), woken.append)

            await cluster.resync()

        assert ("list", "scaledobjects.keda.sh") in {(a.verb, a.resource) for a, _ in counted}
