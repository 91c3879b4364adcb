"""An API server that answers as it is told: for answers that a healthy one does not give."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration

from deepseek_operator.api import Api, Attributes
from deepseek_operator.settings import Settings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Script:
    """Answers in order; the last one is repeated. Keeps what was asked."""

    def __init__(self, *answers: web.Response | Callable[[web.Request], web.Response]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path, dict(request.query), body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(request) if callable(answer) else _copy(answer)


def _copy(answer: web.Response) -> web.Response:
    headers = {k: v for k, v in answer.headers.items() if k.lower() != "content-length"}
    return web.Response(body=answer.body, status=answer.status, headers=headers)


def json_answer(body: Any, status: int = 200, **headers: str) -> web.Response:
    return web.json_response(body, status=status, headers=headers)


def refusal(status: int, reason: str = "", **headers: str) -> web.Response:
    body = {"kind": "Status", "code": status, "reason": reason, "message": f"made up: {status}"}
    return json_answer(body, status, **headers)


@asynccontextmanager
async def api_of(
    handler: Handler, settings: Settings | None = None
) -> AsyncIterator[tuple[Api, list[tuple[Attributes, str]]]]:
    """A client of the scripted server, and what it counted."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    counted: list[tuple[Attributes, str]] = []
    async with TestServer(app) as server:
        configuration = Configuration()
        configuration.host = str(server.make_url("")).rstrip("/")
        api = Api(configuration, settings or Settings(), lambda *what: counted.append(what))
        try:
            yield api, counted
        finally:
            await api.close()
