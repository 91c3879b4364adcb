"""Whom a change of the fleet wakes."""

import asyncio

import pytest
from kubernetes.aio.client.configuration import Configuration
from scenes import owner_of, pod_of
from test_fleet import node

from deepseek_operator import controller as controller_module
from deepseek_operator.api import Api
from deepseek_operator.cluster import Name
from deepseek_operator.controller import Controller
from deepseek_operator.health import Health
from deepseek_operator.kinds import Manifest
from deepseek_operator.metrics import Metrics
from deepseek_operator.recovery import QUARANTINE_LABEL
from deepseek_operator.settings import Settings


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> list[Name]:
    monkeypatch.setattr(controller_module, "FLEET_SECONDS", 0.01)
    return []


async def controller_of(woken: list[Name], *manifests: Manifest) -> Controller:
    """A controller whose queue only tells what was put into it."""
    settings = Settings()
    api = Api(Configuration(), settings, lambda _what, _code: None)
    made = Controller(api, settings, Health(settings.watch_seconds, Metrics()))
    await api.close()
    made.queue.add = woken.append  # type: ignore[method-assign]
    for manifest in manifests:
        made.cluster.notice("ADDED", manifest)
    made.fleet.notice_node(None, node("a"))
    made.fleet.notice_node(None, node("b"))
    await changed(made)
    woken.clear()
    return made


async def changed(made: Controller) -> None:
    made.fleet_changed()
    await asyncio.sleep(0.05)


def pod_on(place: str) -> Manifest:
    """A pod that was bound and of which no kubelet has said anything."""
    found = pod_of(node=place)
    found["status"]["conditions"] = []
    return found


async def test_who_has_a_pod_on_a_node_is_told_when_it_is_lost_and_when_it_is_back(
    woken: list[Name],
) -> None:
    made = await controller_of(woken, owner_of(), pod_on("a"))

    made.fleet.notice_node("MODIFIED", node("b", ready=False))
    await changed(made)
    others = list(woken)
    made.fleet.notice_node("MODIFIED", node("a", ready=False))
    await changed(made)
    lost = list(woken)
    await changed(made)
    nothing_new = list(woken)
    made.fleet.notice_node("MODIFIED", node("a"))
    await changed(made)

    chat = Name("team", "chat")
    assert (others, lost, nothing_new, woken) == ([], [chat], [chat], [chat, chat])


async def test_a_node_that_is_deleted_is_lost_and_pods_in_quarantine_count(
    woken: list[Name],
) -> None:
    jailed = pod_on("a")
    jailed["metadata"]["labels"] = {QUARANTINE_LABEL: "chat"}
    made = await controller_of(woken, owner_of(), jailed)

    made.fleet.notice_node("DELETED", node("a"))
    await changed(made)

    assert woken == [Name("team", "chat")]
