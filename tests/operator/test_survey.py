"""The fleet is what the API server has: listed, watched, listed again when a watch is too old."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_kube_config
from real import Server
from scripted import api_of, json_answer, refusal
from test_fleet import GPU, node, pod

from deepseek_operator import survey as survey_module
from deepseek_operator.api import Api
from deepseek_operator.errors import RefusedError
from deepseek_operator.fleet import Fleet
from deepseek_operator.kinds import NODE, POD, Manifest
from deepseek_operator.settings import Settings
from deepseek_operator.survey import Survey

_versions = itertools.count(10)


def at(manifest: Manifest) -> Manifest:
    manifest["metadata"]["resourceVersion"] = str(next(_versions))
    return manifest


class Site:
    """Answers lists from `objects`, and watches from a script of events for each."""

    def __init__(self, *objects: Manifest) -> None:
        self.objects = list(objects)
        self.watches: list[list[tuple[str, Manifest]] | int] = []
        self.queries: list[tuple[str, dict[str, str]]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rpartition("/")[2]
        self.queries.append((kind, dict(request.query)))
        if "watch" not in request.query:
            wanted = [
                m for m in self.objects if ("allocatable" in m["status"]) == (kind == "nodes")
            ]
            return json_answer({"metadata": {"resourceVersion": "9"}, "items": wanted})
        if kind == "nodes" or not self.watches:
            await asyncio.sleep(60)
        script = self.watches.pop(0)
        if isinstance(script, int):
            return refusal(script)
        lines = [json.dumps({"type": kind, "object": event}) for kind, event in script]
        return web.Response(text="\n".join(lines) + "\n")


@contextlib.asynccontextmanager
async def surveyed(site: Site) -> AsyncIterator[tuple[Fleet, list[str]]]:
    fleet, news = Fleet(), []
    async with api_of(site) as (api, _):
        survey = Survey(api, fleet, Settings(), [lambda: news.append("changed")])
        await survey.list_once()
        task = asyncio.create_task(survey.run())
        try:
            yield fleet, news
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(check: Callable[[], bool], seconds: float = 60) -> None:
    for _ in range(int(seconds * 100)):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "AGAIN_SECONDS", 0.01)


async def test_what_is_listed_is_known_before_anything_else() -> None:
    site = Site(at(node()), at(pod("x", gpus=3)))

    async with surveyed(site) as (fleet, news):
        assert fleet.is_known
        assert fleet.free("a", GPU) == 5
        assert news
    fields = {query.get("fieldSelector", "") for kind, query in site.queries if kind == "pods"}
    assert fields == {"status.phase!=Succeeded,status.phase!=Failed"}


async def test_events_are_followed_and_told_where_units_change() -> None:
    site = Site(at(node()))
    site.watches = [
        [
            ("ADDED", at(pod("x", gpus=2))),
            ("BOOKMARK", {"metadata": {"resourceVersion": "77"}}),
        ]
    ]

    async with surveyed(site) as (fleet, _):
        await until(lambda: fleet.free("a", GPU) == 6)
        await until(lambda: ("pods", "77") in versions(site))


def versions(site: Site) -> list[tuple[str, str]]:
    return [(kind, query.get("resourceVersion", "")) for kind, query in site.queries]


@pytest.mark.parametrize(
    "answer",
    [410, [("ERROR", {"kind": "Status", "code": 410, "message": "too old"})]],
    ids=["by HTTP", "in the stream"],
)
async def test_a_watch_that_is_too_old_is_listed_again(answer: list | int) -> None:
    """Case A22."""
    site = Site(at(node()), at(pod("x", gpus=2)))
    site.watches = [answer]

    async with surveyed(site) as (fleet, _):
        site.objects = [site.objects[0], at(pod("y", gpus=1))]
        await until(lambda: fleet.free("a", GPU) == 7)


async def test_a_server_that_fails_is_asked_again() -> None:
    site = Site(at(node()))
    site.watches = [500, 503, [("ADDED", at(pod("x", gpus=2)))]]

    async with surveyed(site) as (fleet, _):
        await until(lambda: fleet.free("a", GPU) == 6)
        listings = [query for kind, query in site.queries if "watch" not in query]
    assert len(listings) == 2


async def test_an_object_that_is_not_understood_stops_nothing() -> None:
    site = Site(at(node()))
    site.watches = [[("ADDED", {"metadata": {"resourceVersion": "99"}})]]

    async with surveyed(site) as (fleet, _):
        site.objects.append(at(pod("x", gpus=2)))
        await until(lambda: fleet.free("a", GPU) == 6)


@pytest.mark.parametrize("memory", ["1Pi", "3E", "500u"])
async def test_an_amount_of_any_size_holds_up_no_start(memory: str) -> None:
    odd = at(pod("odd", gpus=1))
    odd["spec"]["containers"][0]["resources"]["limits"]["memory"] = memory
    site = Site(at(node()), odd)

    async with surveyed(site) as (fleet, _):
        assert fleet.free("a", GPU) == 7


async def test_without_rights_it_says_so() -> None:
    async def refuse(_request: web.Request) -> web.StreamResponse:
        return refusal(403)

    async with api_of(refuse) as (api, _):
        fleet = Fleet()
        with pytest.raises(RefusedError):
            await Survey(api, fleet, Settings()).list_once()
        assert not fleet.is_known


@pytest.mark.control_plane
@pytest.mark.timeout(120)
async def test_a_real_server_is_followed(server: Server, namespace: str) -> None:
    configuration = Configuration()
    await load_kube_config(str(server.plane.kubeconfig), client_configuration=configuration)
    api = Api(configuration, Settings(), lambda *_: None)
    fleet, name = Fleet(), f"node-of-{namespace}"
    survey = Survey(api, fleet, Settings())
    await survey.list_once()
    task = asyncio.create_task(survey.run())
    try:
        made = node(name, gpus=4)
        server.must("POST", NODE.path(None), {"kind": "Node", "apiVersion": "v1", **made})
        server.must(
            "PATCH", f"{NODE.path(None)}/{name}/status", {"status": made["status"]},
            content_type="application/merge-patch+json",
        )  # fmt: skip
        await until(lambda: fleet.free(name, GPU) == 4)
        server.must("POST", POD.path(namespace), foreign_pod(namespace, name))
        await until(lambda: fleet.free(name, GPU) == 1)
        server.delete(POD, namespace, "foreign", gracePeriodSeconds="0")
        await until(lambda: fleet.free(name, GPU) == 4)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()
        server.ask("DELETE", f"{NODE.path(None)}/{name}")


def foreign_pod(namespace: str, node_name: str) -> Manifest:
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "c", "image": "x", "securityContext": security,
        # The API server stores 1Pi.
        "resources": {"limits": {GPU: "3", "memory": "1024Ti"}},
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "foreign", "namespace": namespace},
        "spec": {"nodeName": node_name, "containers": [container]},
    }
