"""What the loop of the tenants does when the API server does not answer as it should."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from scenes import owner_of
from scripted import api_of, json_answer, refusal

from deepseek_operator import tenancy as tenancy_module
from deepseek_operator.cluster import Cluster, Name
from deepseek_operator.errors import ClusterBusyError
from deepseek_operator.fleet import Fleet
from deepseek_operator.kinds import Manifest
from deepseek_operator.metrics import Metrics
from deepseek_operator.settings import Settings
from deepseek_operator.tenancy import Tenancy

GPU = "nvidia.com/gpu"
CARD_MIB = 81920


@dataclass
class Store:
    """Keeps what is applied, and fails as it is told."""

    failing: dict[str, int] = field(default_factory=dict)
    """Status by a part of the path."""
    objects: dict[str, Manifest] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    version: int = 100

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        path, method = request.path, request.method
        self.requests.append((method, path))
        for part, status in self.failing.items():
            if part in path:
                return refusal(status)
        if method == "DELETE":
            if path not in self.objects:
                return refusal(404, "NotFound")
            uid = self.objects.pop(path)["metadata"]["uid"]
            return json_answer({"kind": "Status", "status": "Success", "details": {"uid": uid}})
        if method == "GET":
            found = self.objects.get(f"{path}/{request.query['fieldSelector'].partition('=')[2]}")
            return json_answer({"metadata": {}, "items": [found] if found else []})
        body = json.loads(await request.text())
        self.version += 1
        old = self.objects.get(path, {})
        metadata = {
            **old.get("metadata", {}), "uid": f"uid-of-{path}",
            **body.get("metadata", {}), "resourceVersion": str(self.version),
        }  # fmt: skip
        self.objects[path] = {**old, **body, "metadata": metadata}
        return json_answer(self.objects[path])

    def hard(self, namespace: str) -> int:
        path = f"/api/v1/namespaces/{namespace}/resourcequotas/deepseek-tenant"
        return int(self.objects[path]["spec"]["hard"][f"requests.{GPU}"])

    def writes(self, part: str) -> list[str]:
        return [path for method, path in self.requests if method != "GET" and part in path]


@dataclass
class Scene:
    """A tenancy over a store, with ten cards."""

    store: Store
    tenancy: Tenancy
    fleet: Fleet
    cluster: Cluster
    woken: list[Name]

    def tenant(self, name: str, least: int, most: int, *namespaces: str) -> None:
        path = f"/apis/deepseek.dev/v1alpha1/deepseektenants/{name}/status"
        manifest: Manifest = {
            "apiVersion": "deepseek.dev/v1alpha1",
            "kind": "DeepSeekTenant",
            "metadata": {
                "name": name, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "namespaces": list(namespaces or (name,)),
                "gpuMemory": {"minPercent": least, "maxPercent": most},
            },
        }  # fmt: skip
        self.store.objects[path] = manifest
        self.tenancy.notice("ADDED", manifest)

    def nodes(self, cards: int, labels: dict[str, str] | None = None) -> None:
        given = {f"{GPU}.memory": str(CARD_MIB), f"{GPU}.count": str(cards)}
        self.fleet.notice_node(
            None,
            {
                "metadata": {"name": "node1", "labels": given if labels is None else labels},
                "status": {"allocatable": {GPU: str(cards)}},
            },
        )

    def serves(self, namespace: str, replicas: int, running: int = 0) -> None:
        manifest = owner_of({"replicas": replicas}, namespace=namespace)
        manifest["metadata"]["uid"] += namespace
        manifest["metadata"]["resourceVersion"] = str(1000 + replicas)
        manifest["metadata"]["generation"] = 1000 + replicas
        self.cluster.notice("MODIFIED", manifest)
        self.tenancy.wish(Name(namespace, "chat"), {"primary": replicas})
        for number in range(running):
            self.fleet.notice_pod(None, worker(namespace, number))

    def status(self, name: str) -> dict[str, tuple[str, str]]:
        path = f"/apis/deepseek.dev/v1alpha1/deepseektenants/{name}/status"
        conditions = self.store.objects[path]["status"]["conditions"]
        return {c["type"]: (c["status"], c["reason"]) for c in conditions}


def worker(namespace: str, number: int) -> Manifest:
    return {
        "metadata": {
            "name": f"chat-{number}",
            "namespace": namespace,
            "labels": {
                "app.kubernetes.io/managed-by": "deepseek-operator",
                "deepseek.dev/deployment": "chat",
                "deepseek.dev/tier": "primary",
            },
        },
        "spec": {
            "nodeName": "node1",
            "containers": [{"name": "c", "resources": {"limits": {GPU: "1"}}}],
        },
        "status": {"phase": "Running"},
    }


@asynccontextmanager
async def scene(**failing: int) -> AsyncIterator[Scene]:
    store = Store(failing=dict(failing))
    settings = Settings(api_retries=0)
    async with api_of(store, settings) as (api, _):
        woken: list[Name] = []
        fleet = Fleet()
        fleet.is_known = True
        cluster = Cluster(api, settings, wake=lambda _name: None)
        tenancy = Tenancy(api, cluster, fleet, Metrics(), wake=woken.append)
        found = Scene(store, tenancy, fleet, cluster, woken)
        found.nodes(10)
        yield found


async def test_a_second_look_writes_nothing() -> None:
    async with scene() as here:
        here.tenant("a", 20, 60)
        here.serves("a", 3, running=3)
        await here.tenancy.look()
        before = len(here.store.requests)

        for _ in range(3):
            await here.tenancy.look()

        assert len(here.store.requests) == before
        assert here.store.hard("a") == 6


async def test_what_grows_is_written_after_what_becomes_smaller() -> None:
    async with scene() as here:
        here.tenant("a", 0, 100)
        here.tenant("b", 0, 100)
        here.serves("a", 9)
        await here.tenancy.look()
        assert (here.store.hard("a"), here.store.hard("b")) == (10, 0)
        here.serves("a", 1)
        here.serves("b", 8)
        here.store.requests.clear()

        await here.tenancy.look()

        assert (here.store.hard("a"), here.store.hard("b")) == (2, 8)
        assert [path.split("/")[4] for path in here.store.writes("resourcequotas")] == ["a", "b"]


async def test_where_making_smaller_fails_nothing_grows() -> None:
    async with scene() as here:
        here.tenant("a", 0, 100)
        here.tenant("b", 0, 100)
        here.serves("a", 9)
        await here.tenancy.look()
        here.serves("a", 1)
        here.serves("b", 8)
        here.store.failing["/namespaces/a/"] = 503

        with pytest.raises(ClusterBusyError):
            await here.tenancy.look()
        assert here.store.hard("b") == 0

        here.store.failing.clear()
        await here.tenancy.look()
        assert (here.store.hard("a"), here.store.hard("b")) == (2, 8)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, "NamespaceMissing"),
        (403, "ApplyRefused"),
        (422, "ApplyRefused"),
        (409, "ApplyRefused"),
    ],
)
async def test_a_refusal_is_a_condition_and_no_storm(status: int, reason: str) -> None:
    async with scene() as here:
        here.tenant("a", 0, 60, "a", "bad")
        here.store.failing["/namespaces/bad/"] = status

        for _ in range(5):
            await here.tenancy.look()

        assert here.status("a")["Ready"] == ("False", reason)
        assert len(here.store.writes("/namespaces/bad/")) == 1
        assert here.store.hard("a") == 3
        assert len(here.store.writes("deepseektenants")) == 1


async def test_one_tenants_refused_status_holds_up_no_other() -> None:
    async with scene() as here:
        here.tenant("a", 0, 30)
        here.tenant("b", 0, 30)
        here.store.failing["deepseektenants/a/"] = 422

        for _ in range(3):
            await here.tenancy.look()

        assert here.status("b")["Ready"] == ("True", "QuotaDealt")
        assert here.store.hard("a") == 3
        assert len(here.store.writes("deepseektenants/a/")) == 1


async def test_events_during_an_outage_make_no_storm_of_tries() -> None:
    async with scene() as here:
        here.tenant("a", 0, 30)
        here.store.failing["/"] = 503
        running = asyncio.create_task(here.tenancy.run())
        for _ in range(35):
            here.tenancy.look_soon()
            await asyncio.sleep(0.1)
        running.cancel()

        # At 0, 2 and 6 seconds, whatever happens in between.
        assert 1 <= len(here.store.requests) <= 3


async def test_limits_hold_although_nothing_can_be_written() -> None:
    async with scene() as here:
        here.tenant("a", 0, 40)
        here.serves("a", 6, running=6)
        here.store.failing["/"] = 503

        with pytest.raises(ClusterBusyError):
            await here.tenancy.look()

        limit = here.tenancy.limits(Name("a", "chat"))["primary"]
        assert (limit.now, limit.soon) == (6, 4)
        assert here.woken == [Name("a", "chat")]


async def test_a_node_whose_labels_stop_making_sense_counts_as_before() -> None:
    async with scene() as here:
        here.tenant("a", 0, 60)
        await here.tenancy.look()
        here.nodes(10, labels={})

        await here.tenancy.look()

        assert here.status("a")["NodesContradict"] == ("True", "ContradictoryLabels")
        assert here.store.hard("a") == 6


async def test_a_tenant_that_is_not_understood_keeps_its_quotas() -> None:
    async with scene() as here:
        here.tenant("a", 0, 60)
        await here.tenancy.look()
        path = "/apis/deepseek.dev/v1alpha1/deepseektenants/a/status"
        broken = here.store.objects[path] | {"spec": {"namespaces": ["a"]}}
        broken["metadata"] = broken["metadata"] | {"generation": 2, "resourceVersion": "999"}
        here.tenancy.notice("MODIFIED", broken)

        await here.tenancy.look()

        assert here.status("a") == {"Ready": ("False", "InvalidSpec")}
        assert here.store.hard("a") == 6


async def test_a_namespace_that_a_tenant_gives_up_loses_its_quota() -> None:
    async with scene() as here:
        here.tenant("a", 0, 60, "a", "b")
        await here.tenancy.look()
        give_up(here, "a")

        await here.tenancy.look()

        assert [p for p in here.store.objects if "/namespaces/b/" in p] == []
        assert here.store.hard("a") == 6


def quota_of(store: Store, namespace: str, version: int, uid: str = "") -> Manifest:
    """A namespace's quota as a watch tells of it."""
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/deepseek-tenant"
    found: Manifest = json.loads(json.dumps(store.objects[path]))
    found["kind"] = "ResourceQuota"
    found["metadata"]["resourceVersion"] = str(version)
    found["metadata"]["uid"] = uid or found["metadata"]["uid"]
    return found


def give_up(here: Scene, *left: str) -> None:
    """Tenant a keeps only these namespaces."""
    path = "/apis/deepseek.dev/v1alpha1/deepseektenants/a/status"
    changed = json.loads(json.dumps(here.store.objects[path]))
    changed["spec"]["namespaces"] = list(left)
    changed["metadata"] |= {"generation": 2, "resourceVersion": "999"}
    here.tenancy.notice("MODIFIED", changed)


async def test_a_quota_is_deleted_once_though_the_watch_lags() -> None:
    async with scene() as here:
        here.tenant("a", 0, 60, "a", "b")
        await here.tenancy.look()
        late = quota_of(here.store, "b", 900)
        give_up(here, "a")
        await here.tenancy.look()

        here.tenancy.notice("MODIFIED", late)
        await here.tenancy.look()
        here.tenancy.notice("DELETED", late)
        await here.tenancy.look()

        deletions = [path for method, path in here.store.requests if method == "DELETE"]
        assert len(deletions) == 1


async def test_the_late_end_of_a_quota_hides_no_newer_one() -> None:
    async with scene() as here:
        here.tenant("a", 0, 60, "a", "b")
        await here.tenancy.look()
        old, new = quota_of(here.store, "b", 900), quota_of(here.store, "b", 950, uid="new")
        here.tenancy.notice("ADDED", new)

        here.tenancy.notice("DELETED", old)
        give_up(here, "a")
        await here.tenancy.look()

        # It is known, so it goes with the namespace.
        assert ("DELETE", "/api/v1/namespaces/b/resourcequotas/deepseek-tenant") in (
            here.store.requests
        )


async def test_the_late_end_of_a_tenant_hides_no_newer_one() -> None:
    async with scene() as here:
        here.tenant("a", 0, 60)
        old = here.store.objects["/apis/deepseek.dev/v1alpha1/deepseektenants/a/status"]
        new = {**old, "metadata": old["metadata"] | {"uid": "new", "resourceVersion": "5"}}
        here.tenancy.notice("ADDED", new)

        here.tenancy.notice(
            "DELETED", {**old, "metadata": old["metadata"] | {"resourceVersion": "4"}}
        )
        await here.tenancy.look()

        assert here.store.hard("a") == 6


@pytest.mark.parametrize("status", [403, 404, 409])
async def test_a_quota_that_may_not_be_deleted_makes_no_storm(status: int) -> None:
    async with scene() as here:
        here.tenant("a", 0, 60, "a", "b")
        await here.tenancy.look()
        give_up(here, "a")
        here.store.failing["/namespaces/b/resourcequotas/"] = status

        for _ in range(5):
            await here.tenancy.look()

        deletions = [path for method, path in here.store.requests if method == "DELETE"]
        assert len(deletions) == 1


async def test_a_quota_that_could_not_be_deleted_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenancy_module, "AGAIN_SECONDS", 0.0)
    async with scene() as here:
        here.tenant("a", 0, 60, "a", "b")
        await here.tenancy.look()
        give_up(here, "a")
        here.store.failing["/namespaces/b/resourcequotas/"] = 403
        await here.tenancy.look()
        here.store.failing.clear()

        await here.tenancy.look()

        assert [p for p in here.store.objects if "/namespaces/b/" in p] == []


async def test_an_old_event_does_not_undo_what_was_written() -> None:
    async with scene() as here:
        here.tenant("a", 0, 60)
        await here.tenancy.look()
        path = "/api/v1/namespaces/a/resourcequotas/deepseek-tenant"
        old = json.loads(json.dumps(here.store.objects[path]))
        old["kind"] = "ResourceQuota"
        old["metadata"]["resourceVersion"] = "1"
        old["spec"]["hard"] = {}
        here.store.requests.clear()

        here.tenancy.notice("MODIFIED", old)
        await here.tenancy.look()

        assert here.store.requests == []


async def test_what_a_person_changes_in_a_quota_is_set_back_at_once() -> None:
    async with scene() as here:
        here.tenant("a", 0, 60)
        await here.tenancy.look()
        path = "/api/v1/namespaces/a/resourcequotas/deepseek-tenant"
        raised = json.loads(json.dumps(here.store.objects[path]))
        raised["kind"] = "ResourceQuota"
        raised["metadata"]["resourceVersion"] = "999"
        raised["spec"]["hard"][f"requests.{GPU}"] = "10"

        here.tenancy.notice("MODIFIED", raised)
        await here.tenancy.look()

        assert here.store.hard("a") == 6
