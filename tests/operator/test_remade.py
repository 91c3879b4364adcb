"""An object that is deleted and made again under its name before the operator has looked."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from scenes import CPU, condition, owner_of
from scripted import api_of, json_answer

from deepseek_operator.cluster import Name
from deepseek_operator.controller import Controller
from deepseek_operator.health import Health
from deepseek_operator.kinds import Manifest
from deepseek_operator.metrics import Metrics
from deepseek_operator.render import PIN_ANNOTATION
from deepseek_operator.settings import Settings

CHAT = Name("team", "chat")
SMALL = {"name": "small", "model": {"source": "package://small"}, **CPU}
_versions = itertools.count(100)


@dataclass
class Site:
    """An API server that takes everything, and a controller that is told of objects by hand."""

    owner: Manifest = field(default_factory=dict)
    statuses: list[dict[str, Any]] = field(default_factory=list)
    children: list[Manifest] = field(default_factory=list)
    before_a_write: Callable[[], None] = lambda: None
    controller: Controller = field(init=False)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return json_answer({"items": []})
        self.before_a_write()
        body = await request.json()
        if request.path.endswith("/chat/status"):
            self.statuses.append(body["status"])
            return json_answer(self.owner)
        metadata = body["metadata"]
        child = {**body, "metadata": {"uid": f"uid-{metadata['name']}", **metadata, **version()}}
        self.children.append(child)
        return json_answer(child)

    def tell(self, event: str, uid: str, **annotations: str) -> None:
        self.owner = owner_of({**CPU, "fallbacks": [SMALL]})
        self.owner["metadata"] |= {"uid": uid, "annotations": annotations, **version()}
        self.controller.cluster.notice(event, self.owner)

    def remake(self) -> None:
        """Another one gets the name; the children of the first are collected."""
        self.tell("DELETED", "uid-of-the-old-one")
        self.tell("ADDED", "uid-of-the-new-one")
        for child in self.children:
            self.controller.cluster.notice("DELETED", child)


def version() -> dict[str, str]:
    return {"resourceVersion": str(next(_versions))}


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    made, settings = Site(), Settings()
    async with api_of(made) as (api, _):
        made.controller = Controller(api, settings, Health(settings.watch_seconds, Metrics()))
        # Only what a test asks for is reconciled.
        made.controller.queue.add = lambda _: None  # type: ignore[method-assign]
        yield made


async def test_the_new_one_does_not_take_over_what_was_decided_for_the_old_one() -> None:
    async with site() as made:
        made.tell("ADDED", "uid-of-the-old-one")
        await made.controller.reconcile(CHAT)
        await made.controller.reconcile(CHAT)
        # A moment later the old one goes to its fallback, which its status may not tell yet.
        made.tell("MODIFIED", "uid-of-the-old-one", **{PIN_ANNOTATION: "small"})
        await made.controller.reconcile(CHAT)

        made.remake()
        await made.controller.reconcile(CHAT)
        await made.controller.reconcile(CHAT)

    old, new = made.statuses
    assert condition(old, "Degraded")["status"] == "False"
    assert condition(new, "Degraded")["status"] == "False"
    assert "degrade" not in new


async def test_the_status_of_the_old_one_is_not_written_to_the_new_one() -> None:
    async with site() as made:
        made.tell("ADDED", "uid-of-the-old-one")
        await made.controller.reconcile(CHAT)

        def replaced() -> None:
            made.before_a_write = lambda: None
            made.remake()

        made.tell("MODIFIED", "uid-of-the-old-one", **{PIN_ANNOTATION: "small"})
        made.before_a_write = replaced
        await made.controller.reconcile(CHAT)

    assert made.statuses == []
