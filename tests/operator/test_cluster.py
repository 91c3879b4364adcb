"""What the operator remembers of the cluster, and whom a change concerns."""

import copy
from typing import Any

import pytest
from aiohttp import web
from scenes import CPU, HUB, SETTINGS, owner_of, spec_of
from scripted import Script, api_of, json_answer, refusal

from deepseek_operator.cluster import Cluster, Name
from deepseek_operator.errors import ClusterBusyError
from deepseek_operator.kinds import WATCHED_KINDS
from deepseek_operator.loader import MODEL_LABEL
from deepseek_operator.plan import ModelState, Plan
from deepseek_operator.render import DEPLOYMENT_LABEL, MANAGED_BY, MANAGED_BY_LABEL, cache_name
from deepseek_operator.settings import Settings
from deepseek_operator.status import Note

CHAT = Name("team", "chat")
MODEL = ModelState("True", "InWorkerImage", "it is there")


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
        return Plan(apply=apply, create=create, delete=(), model=MODEL)

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
            cluster.notice("ADDED", owner_of(status={"activeModel": "package://x", "replicas": 1}))
            await cluster.write_status(CHAT, {"replicas": 2})

        assert script.requests[0][3] == {"status": {"replicas": 2, "activeModel": None}}

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
