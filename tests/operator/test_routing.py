"""The HTTPRoute of an object, and what Gateways say of it."""

import asyncio
import copy
from typing import Any

import pytest
import yaml
from real import Server, eventually
from scenes import CPU, SETTINGS, Simulation, condition, owner_of, spec_of
from scripted import Script, api_of, json_answer
from test_controller import dsd, make_ready, quiet, reason

from cluster import programs
from conftest import Start
from deepseek_operator.cluster import Cluster, Name
from deepseek_operator.kinds import DEEPSEEK_DEPLOYMENT, HTTP_ROUTE, Manifest, Reference
from deepseek_operator.render import Owner
from deepseek_operator.routing import http_route, route_state, without_retries

OWNER = Owner("team", "chat", "uid-of-chat")
WITH_API = SETTINGS.model_copy(update={"gateway_api": True})
ROUTE: dict[str, Any] = {"gateways": [{"name": "public", "namespace": "edge"}]}


def document(**route: Any) -> dict[str, Any]:
    return {**copy.deepcopy(CPU), "routing": {"httpRoute": {**ROUTE, **route}}}


def rendered(**route: Any) -> Manifest:
    found = http_route(OWNER, spec_of(document(**route)))
    assert found is not None
    return found["spec"]


def live(*conditions: tuple[str, str], retry: bool = False, parents: int = 1) -> Manifest:
    told = [
        {"type": kind, "status": value, "reason": "R", "message": "m"} for kind, value in conditions
    ]
    parent = {"parentRef": {"name": "public"}, "conditions": told}
    rule = {"retry": {"attempts": 2}} if retry else {}
    return {"spec": {"rules": [rule]}, "status": {"parents": [parent] * parents}}


class TestRoute:
    def test_it_leads_from_the_gateways_to_the_service(self) -> None:
        spec = rendered()

        assert spec["parentRefs"] == [
            {
                "group": "gateway.networking.k8s.io", "kind": "Gateway",
                "name": "public", "namespace": "edge",
            }
        ]  # fmt: skip
        assert spec["rules"] == [{"backendRefs": [{"name": "chat", "port": 80}]}]

    @pytest.mark.parametrize(
        "changes",
        [
            {"gateways": [{"name": "other"}]},
            {"gateways": [{"name": "public", "namespace": "edge", "sectionName": "https"}]},
            {"hostnames": ["chat.example"]},
            {"timeoutSeconds": 60},
            {"retryAttempts": 2},
        ],
        ids=str,
    )
    def test_every_field_reaches_it(self, changes: dict) -> None:
        assert rendered(**changes) != rendered()

    def test_what_a_pod_that_ends_answers_is_retried(self) -> None:
        assert rendered(retryAttempts=2)["rules"][0]["retry"] == {
            "attempts": 2, "codes": [502, 503, 504],
        }  # fmt: skip

    def test_retries_can_be_left_out(self) -> None:
        with_retries = http_route(OWNER, spec_of(document(retryAttempts=2, timeoutSeconds=5)))
        assert with_retries is not None

        plainer = without_retries(with_retries)

        assert plainer is not None
        assert plainer["metadata"] == with_retries["metadata"]
        assert plainer["spec"]["rules"][0].keys() == {"backendRefs", "timeouts"}
        assert without_retries(plainer) is None

    def test_an_object_without_one_has_none(self) -> None:
        assert http_route(OWNER, spec_of(CPU)) is None
        assert route_state(spec_of(CPU), None, WITH_API) is None


# What there is, and what is said of it.
STATES = {
    "nothing yet": (None, {}, "Unknown", "Waiting"),
    "no gateway has looked": (live(parents=0), {}, "Unknown", "Waiting"),
    "taken": (live(("Accepted", "True"), ("ResolvedRefs", "True")), {}, "True", "Accepted"),
    "not taken": (live(("Accepted", "False")), {}, "False", "NotAccepted"),
    "no backend": (
        live(("Accepted", "True"), ("ResolvedRefs", "False")), {}, "False", "NotAccepted",
    ),
    "retries were dropped": (
        live(("Accepted", "True")), {"retryAttempts": 2}, "True", "RetryUnsupported",
    ),
    "retries are there": (
        live(("Accepted", "True"), retry=True), {"retryAttempts": 2}, "True", "Accepted",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("found", "route", "status", "word"), STATES.values(), ids=STATES)
def test_what_gateways_say_is_passed_on(
    found: Manifest | None, route: dict, status: str, word: str
) -> None:
    state = route_state(spec_of(document(**route)), found, WITH_API)

    assert state is not None
    assert (state.status, state.reason) == (status, word)


def test_an_installation_without_the_api_says_so_and_writes_no_route() -> None:
    cluster = Simulation(document())
    cluster.settle()

    routed = condition(cluster.status, "Routed")

    assert (routed["status"], routed["reason"]) == ("False", "GatewayApiMissing")
    assert "settings.gatewayApi" in routed["message"]
    assert Reference("HTTPRoute", "team", "chat") not in cluster.objects


def test_a_route_comes_and_goes_with_its_field() -> None:
    cluster = Simulation(document(), settings=WITH_API)
    cluster.settle()
    there = Reference("HTTPRoute", "team", "chat") in cluster.objects

    cluster.document = copy.deepcopy(CPU)
    cluster.settle()

    assert there
    assert Reference("HTTPRoute", "team", "chat") not in cluster.objects
    assert "Routed" not in {entry["type"] for entry in cluster.status["conditions"]}


@pytest.mark.control_plane
@pytest.mark.timeout(300)
class TestWithTheCrds:
    """No Gateway runs here: the API's own CRDs are checked, of both channels."""

    def test_both_channels_take_the_route_and_the_standard_one_has_no_retries(
        self, server: Server, namespace: str, start: Start
    ) -> None:
        """Each channel is installed while the operator runs."""
        folder = programs.sources("gateway-api") / "config/crd"
        name = "gateway.networking.k8s.io_httproutes.yaml"
        path = HTTP_ROUTE.path(namespace)
        operator = start(GATEWAY_API="true", RESYNC_SECONDS="1")
        spec = document(timeoutSeconds=60, retryAttempts=2, hostnames=["chat.example"])
        server.apply(dsd(namespace, spec=spec))
        eventually(lambda: make_ready(server, namespace))
        eventually(lambda: reason(server, namespace, "Routed") == "ApplyRefused")
        server.apply(yaml.safe_load((folder / "standard" / name).read_text()))
        eventually(lambda: server.ask("GET", path).status_code == 200)

        standard = eventually(lambda: server.get(HTTP_ROUTE, namespace, "chat"))
        take(server, namespace)
        eventually(lambda: reason(server, namespace, "Routed") == "RetryUnsupported")
        quiet(operator)
        strict = {**copy.deepcopy(standard), "metadata": {"name": "strict", "namespace": namespace}}
        answer = server.ask("POST", path, strict, fieldValidation="Strict", dryRun="All")
        eventually(lambda: operator.requests()["watch", HTTP_ROUTE.resource])
        server.apply(yaml.safe_load((folder / "experimental" / name).read_text()))
        strict["spec"]["rules"][0]["retry"] = {"attempts": 1}
        eventually(
            lambda: "retry" in server.must("POST", path, strict, dryRun="All")["spec"]["rules"][0]
        )
        eventually(lambda: reason(server, namespace, "Routed") == "Accepted")

        assert answer.status_code == 201, answer.text
        assert standard["spec"]["rules"][0]["timeouts"] == {"request": "60s"}
        assert "retry" not in standard["spec"]["rules"][0]
        both = server.get(HTTP_ROUTE, namespace, "chat")
        assert both is not None
        assert both["spec"]["rules"][0]["retry"]["attempts"] == 2
        without = {"spec": {"routing": {"httpRoute": None}}}
        server.patch(DEEPSEEK_DEPLOYMENT, namespace, "chat", without)
        eventually(lambda: server.get(HTTP_ROUTE, namespace, "chat") is None)
        assert operator.stop() == 0


def test_a_kind_that_comes_is_watched_and_what_it_did_not_take_is_tried_again() -> None:
    """The index of the OpenAPI documents tells by a hash when a CRD changes."""
    group = "apis/gateway.networking.k8s.io/v1"

    def index(url: str | None = None) -> Any:
        return json_answer({"paths": {group: {"serverRelativeURL": url}} if url else {}})

    script = Script(index(), index(), index("?hash=a"), index("?hash=a"), index("?hash=b"), index())
    woken: list[Name] = []

    async def look() -> tuple[list[bool], list[int]]:
        async with api_of(script, WITH_API) as (api, _):
            cluster = Cluster(api, WITH_API, wake=woken.append)
            cluster.notice("ADDED", owner_of(document()))
            told, wakes = [], []
            for _ in range(6):
                woken.clear()
                told.append(await cluster.rediscover())
                wakes.append(len(woken))
        return told, wakes

    told, wakes = asyncio.run(look())

    assert told == [False, False, True, False, False, False]
    assert wakes == [0, 0, 1, 0, 1, 1]


def test_without_kinds_of_others_nothing_is_asked() -> None:
    script = Script(json_answer({}))

    async def look() -> bool:
        async with api_of(script) as (api, _):
            return await Cluster(api, SETTINGS, wake=lambda _: None).rediscover()

    assert asyncio.run(look()) is False
    assert script.requests == []


def take(server: Server, namespace: str) -> None:
    """Play the Gateway's controller."""
    told = {
        "type": "Accepted", "status": "True", "reason": "Accepted", "message": "",
        "lastTransitionTime": "2026-05-01T12:00:00Z",
    }  # fmt: skip
    parent = {
        "parentRef": {"name": "public", "namespace": "edge"},
        "controllerName": "example.com/it",
        "conditions": [told],
    }
    server.patch(HTTP_ROUTE, namespace, "chat", {"status": {"parents": [parent]}}, "status")
