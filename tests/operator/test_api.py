"""Requests: how they are counted, repeated and given up."""

from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from scripted import Script, api_of, json_answer, refusal

from deepseek_operator import api as api_module
from deepseek_operator.api import (
    LONGEST_PAUSE_SECONDS,
    LONGEST_RETRY_AFTER_SECONDS,
    Attributes,
    attributes_of,
    pause_seconds,
)
from deepseek_operator.errors import ClusterBusyError, ConflictError, NotFoundError, RefusedError
from deepseek_operator.kinds import DEPLOYMENT, POD, SERVICE, Manifest
from deepseek_operator.settings import Settings

SERVICE_X = {"kind": "Service", "metadata": {"namespace": "team", "name": "x"}}

REQUESTS = [
    ("GET", "/api/v1/pods", {}, "list", "pods"),
    ("GET", "/api/v1/pods", {"watch": "true"}, "watch", "pods"),
    ("GET", "/api/v1/namespaces/team/pods", {"watch": "1"}, "watch", "pods"),
    ("GET", "/api/v1/namespaces/team/pods/x", {}, "get", "pods"),
    ("GET", "/api/v1/namespaces/team/pods/x/log", {}, "get", "pods/log"),
    ("GET", "/api/v1/namespaces", {}, "list", "namespaces"),
    ("GET", "/api/v1/namespaces/team", {}, "get", "namespaces"),
    ("POST", "/api/v1/namespaces/team/events", {}, "create", "events"),
    ("PATCH", "/apis/apps/v1/namespaces/t/deployments/x", {}, "patch", "deployments.apps"),
    (
        "PATCH", "/apis/deepseek.dev/v1alpha1/namespaces/t/deepseekdeployments/x/status", {},
        "patch", "deepseekdeployments.deepseek.dev/status",
    ),
    ("PUT", "/apis/coordination.k8s.io/v1/namespaces/t/leases/x", {}, "update",
     "leases.coordination.k8s.io"),
    ("DELETE", "/apis/batch/v1/namespaces/t/jobs/x", {}, "delete", "jobs.batch"),
    ("GET", "/apis/batch/v1/jobs", {"watch": "false"}, "list", "jobs.batch"),
    ("GET", "/apis", {}, "get", "/apis"),
    ("GET", "/api/v1", {}, "get", "/api/v1"),
    ("GET", "/apis/apps/v1", {}, "get", "/apis/apps/v1"),
    ("GET", "/version", {}, "get", "/version"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "FIRST_PAUSE_SECONDS", 0.001)


@pytest.mark.parametrize(("method", "path", "query", "verb", "resource"), REQUESTS)
def test_a_request_is_counted_as_rbac_sees_it(
    method: str, path: str, query: dict, verb: str, resource: str
) -> None:
    assert attributes_of(method, path, query) == Attributes(verb, resource)


@given(st.integers(0, 50), st.one_of(st.none(), st.floats(0, 1e6)), st.floats(0, 1))
def test_pauses_are_bounded_and_never_shorter_than_asked(
    attempt: int, asked: float | None, jitter: float
) -> None:
    pause = pause_seconds(attempt, asked, lambda: jitter)

    assert 0 < pause <= max(LONGEST_PAUSE_SECONDS, LONGEST_RETRY_AFTER_SECONDS + 0.2)
    if asked is not None:
        assert pause >= min(asked, LONGEST_RETRY_AFTER_SECONDS)


class TestRetries:
    @pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
    async def test_a_busy_server_is_asked_again(self, status: int) -> None:
        script = Script(refusal(status), refusal(status), json_answer({"a": 1}))

        async with api_of(script) as (api, counted):
            answer = await api.request("GET", "/x")

        assert answer == {"a": 1}
        assert [code for _, code in counted] == [str(status), str(status), "200"]

    async def test_after_its_tries_the_error_reaches_the_caller(self) -> None:
        script = Script(refusal(503))

        async with api_of(script, Settings(api_retries=3)) as (api, _):
            with pytest.raises(ClusterBusyError, match="made up: 503"):
                await api.request("GET", "/x")

        assert len(script.requests) == 4

    @pytest.mark.parametrize("status", [400, 403, 422])
    async def test_a_refusal_is_not_repeated(self, status: int) -> None:
        script = Script(refusal(status))

        async with api_of(script) as (api, _):
            with pytest.raises(RefusedError):
                await api.request("PATCH", "/x")

        assert len(script.requests) == 1

    async def test_a_conflict_of_a_patch_is_a_race_inside_the_server(self) -> None:
        script = Script(refusal(409), refusal(409), json_answer({"a": 1}))

        async with api_of(script) as (api, _):
            assert await api.apply(SERVICE, SERVICE_X) == {"a": 1}

    async def test_a_conflict_of_a_replacement_is_the_callers_news(self) -> None:
        script = Script(refusal(409))

        async with api_of(script) as (api, _):
            with pytest.raises(ConflictError):
                await api.replace(SERVICE, SERVICE_X)

        assert len(script.requests) == 1

    async def test_retry_after_is_obeyed_in_both_its_forms(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[float | None] = []
        monkeypatch.setattr(
            api_module, "pause_seconds", lambda _attempt, seconds: asked.append(seconds) or 0.0
        )
        old_style = json_answer(
            {"kind": "Status", "details": {"retryAfterSeconds": 7}, "message": "m"}, 429
        )
        script = Script(
            refusal(429, **{"Retry-After": "3"}),
            old_style,
            refusal(503, **{"Retry-After": "soon"}),
            json_answer({}),
        )

        async with api_of(script, Settings(api_retries=3)) as (api, _):
            await api.request("GET", "/x")

        assert asked == [3.0, 7.0, None]

    async def test_a_long_pause_is_left_to_the_caller(self) -> None:
        script = Script(refusal(429, **{"Retry-After": "20"}))

        async with api_of(script) as (api, _):
            with pytest.raises(ClusterBusyError) as caught:
                await api.request("GET", "/x")

        assert caught.value.retry_after_seconds == 20
        assert len(script.requests) == 1

    async def test_a_conflict_about_the_owners_of_fields_is_news(self) -> None:
        conflict = {"kind": "Status", "details": {"causes": [{"reason": "FieldManagerConflict"}]}}
        script = Script(json_answer(conflict, 409))

        async with api_of(script) as (api, _):
            with pytest.raises(ConflictError):
                await api.apply(SERVICE, SERVICE_X, force=False)

        assert len(script.requests) == 1
        assert script.requests[0][2]["force"] == "false"

    async def test_a_broken_connection_is_tried_again(self) -> None:
        def cut(request: web.Request) -> web.Response:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        script = Script(cut, json_answer({"a": 1}))

        async with api_of(script) as (api, counted):
            assert await api.request("GET", "/x") == {"a": 1}

        assert ("error" in [code for _, code in counted]) or len(script.requests) == 2

    @pytest.mark.parametrize("body", [b"\x1f\x8b\x08 not unpacked", b"[]", b""])
    async def test_what_is_no_object_is_asked_for_again(self, body: bytes) -> None:
        script = Script(web.Response(body=body), json_answer({"a": 1}))

        async with api_of(script) as (api, _):
            assert await api.request("GET", "/x") == {"a": 1}

        script = Script(web.Response(body=body))
        async with api_of(script, Settings(api_retries=1)) as (api, _):
            with pytest.raises(ClusterBusyError, match="no JSON object"):
                await api.request("GET", "/x")

    async def test_an_answer_that_is_no_json_is_shown_as_far_as_it_helps(self) -> None:
        script = Script(web.Response(text="<html>gateway</html>", status=403))

        async with api_of(script) as (api, _):
            with pytest.raises(RefusedError, match="<html>gateway"):
                await api.request("GET", "/x")


class TestVerbs:
    async def test_an_object_that_is_not_there_is_none(self) -> None:
        async with api_of(Script(refusal(404))) as (api, _):
            assert await api.get(SERVICE, "team", "x") is None

    @pytest.mark.parametrize("items", [[], [{"metadata": {"name": "x"}}]])
    async def test_an_object_is_found_by_a_list_of_one(self, items: list) -> None:
        script = Script(json_answer({"items": items}))

        async with api_of(script) as (api, _):
            found = await api.find(SERVICE, "team", "x")

        assert script.requests[0][1:3] == (
            "/api/v1/namespaces/team/services", {"fieldSelector": "metadata.name=x"},
        )  # fmt: skip
        assert found == (
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}} if items else None
        )

    async def test_an_object_that_exists_is_not_created(self) -> None:
        async with api_of(Script(refusal(409, "AlreadyExists"))) as (api, _):
            assert await api.create(SERVICE, SERVICE_X) is None

    async def test_apply_takes_over_our_fields(self) -> None:
        script = Script(json_answer({}))

        async with api_of(script) as (api, _):
            await api.apply(SERVICE, SERVICE_X)

        method, path, query, body = script.requests[0]
        assert (method, path) == ("PATCH", "/api/v1/namespaces/team/services/x")
        assert query["fieldManager"] == "deepseek-operator"
        assert query["force"] == "true"
        assert body == SERVICE_X

    async def test_a_deletion_is_of_one_object_and_in_the_background(self) -> None:
        script = Script(json_answer({"kind": "Status", "status": "Success"}))

        async with api_of(script) as (api, _):
            await api.delete(SERVICE, "team", "x", uid="u", grace_seconds=0)

        body = script.requests[0][3]
        assert body["preconditions"] == {"uid": "u"}
        assert body["propagationPolicy"] == "Background"
        assert body["gracePeriodSeconds"] == 0

    def left(self, uid: str = "u", **metadata: Any) -> Manifest:
        metadata = {"name": "x", "namespace": "team", "uid": uid, **metadata}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}

    async def deletion(self, *answers: web.Response) -> Manifest | None:
        async with api_of(Script(*answers)) as (api, _):
            return await api.delete(POD, "team", "x", uid="u")

    @pytest.mark.parametrize(
        "metadata",
        [
            {"deletionTimestamp": "2026-05-01T12:00:00Z", "deletionGracePeriodSeconds": 30},
            {"deletionTimestamp": "2026-05-01T12:00:00Z", "finalizers": ["a/b"]},
            {
                "deletionTimestamp": "2026-05-01T12:00:00Z",
                "deletionGracePeriodSeconds": 0,
                "finalizers": ["a/b"],
            },
        ],
        ids=["time to end", "finalizers", "finalizers after its time"],
    )
    async def test_what_stays_after_a_deletion_is_told(self, metadata: Manifest) -> None:
        pod = self.left(**metadata)

        assert await self.deletion(json_answer(pod)) == pod

    async def test_what_is_gone_after_a_deletion_is_told(self) -> None:
        status = {"kind": "Status", "status": "Success", "metadata": {}, "details": {"uid": "u"}}
        last = self.left(deletionTimestamp="2026-05-01T12:00:00Z", deletionGracePeriodSeconds=0)
        another = {"metadata": {}, "items": [self.left(uid="another")]}

        assert await self.deletion(json_answer(status)) is None
        assert await self.deletion(json_answer(last)) is None
        assert await self.deletion(refusal(404, "NotFound")) is None
        assert await self.deletion(refusal(409, "Conflict"), json_answer(another)) is None
        assert await self.deletion(refusal(409, "Conflict"), json_answer({"items": None})) is None

    async def test_a_deletion_of_a_kind_that_is_not_served_tells_nothing_of_the_object(
        self,
    ) -> None:
        with pytest.raises(NotFoundError):
            await self.deletion(web.Response(text="404 page not found", status=404))

    async def test_a_deletion_that_conflicts_though_the_uid_is_right_is_an_error(self) -> None:
        items = {"metadata": {}, "items": [self.left()]}
        going = self.left(deletionTimestamp="2026-05-01T12:00:00Z")

        with pytest.raises(ConflictError):
            await self.deletion(refusal(409, "Conflict"), json_answer(items))
        found = await self.deletion(refusal(409, "Conflict"), json_answer({"items": [going]}))
        assert found == going


class TestLists:
    def page(self, name: str, token: str = "") -> web.Response:
        metadata = {"resourceVersion": "7", "continue": token}
        return json_answer({"metadata": metadata, "items": [{"metadata": {"name": name}}]})

    async def names(self, script: Script) -> list[str]:
        found = []
        async with api_of(script) as (api, _):
            async for items, version in api.chunks(POD, "team", "a=b"):
                assert version == "7"
                assert all(item["kind"] == "Pod" for item in items)
                found += [item["metadata"]["name"] for item in items]
        return found

    async def test_they_come_in_chunks(self) -> None:
        script = Script(self.page("a", "next"), self.page("b"))

        assert await self.names(script) == ["a", "b"]
        assert script.requests[0][2] == {"limit": "500", "labelSelector": "a=b"}
        assert script.requests[1][2]["continue"] == "next"

    async def test_one_that_grew_too_old_begins_again(self) -> None:
        script = Script(
            self.page("a", "next"), refusal(410, "Expired"), self.page("a"), self.page("b")
        )

        assert await self.names(script) == ["a", "a"]

    async def test_a_kind_that_is_not_there_is_an_error(self) -> None:
        with pytest.raises(NotFoundError):
            await self.names(Script(refusal(404)))

    async def test_an_empty_list_may_be_null(self) -> None:
        script = Script(json_answer({"metadata": {}, "items": None}))

        async with api_of(script) as (api, _):
            assert [chunk async for chunk in api.chunks(DEPLOYMENT, None)] == [([], "0")]
