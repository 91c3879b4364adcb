"""The HTTP API: who may ask, what for, and how the answer goes back.

Thin: bodies are read by `openai.py`, answers are grown by `generation.py` and written by
`rendering.py`. Everything runs on the event loop, away from the engine's thread.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from deepseek_worker import health, prompts
from deepseek_worker.answers import (
    ErrorBody,
    ErrorDetail,
    encode,
    error_answer,
    model_list,
)
from deepseek_worker.config import ServerConfig
from deepseek_worker.delivery import EventStream, Record, read_body, whole_answer
from deepseek_worker.driver import EngineThread
from deepseek_worker.errors import (
    BodyTooLarge,
    QueueFull,
    Unauthorized,
    Unavailable,
    UnknownModel,
    WorkerError,
)
from deepseek_worker.generation import Choice, Courier, Generation
from deepseek_worker.metrics import CONTENT_TYPE, Metrics
from deepseek_worker.openai import (
    ChatRequest,
    CompletionRequest,
)
from deepseek_worker.pace import Pace
from deepseek_worker.prompts import Model
from deepseek_worker.rendering import ChatRenderer, CompletionRenderer, Head
from deepseek_worker.secret_files import SecretFile
from deepseek_worker.validation import parse_chat, parse_completion

# Room for a full context of escaped text, and for many short prompts at once.
MIN_BODY_BYTES = 8 << 20
BODY_BYTES_PER_TOKEN = 64
# Above this, tokenizing takes long enough to be worth a thread.
INLINE_CHARACTERS = 4096
RETRY_SECONDS = 2

_P = ParamSpec("_P")
_T = TypeVar("_T")
logger = logging.getLogger(__name__)


@dataclass
class Worker:
    """What the routes share; `model` and `is_warm` change once, while the worker starts."""

    config: ServerConfig
    engine: EngineThread
    courier: Courier
    metrics: Metrics
    served_name: str
    model_id: str
    version: str
    state_token: SecretFile | None = None
    api_keys: SecretFile | None = None
    model: Model | None = None
    is_warm: bool = False
    pace: Pace = field(default_factory=Pace)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "text"))
    created: int = field(default_factory=lambda: int(time.time()))

    def loaded_model(self) -> Model:
        """The model.

        Raises:
            Unavailable: it is still loading.
        """
        if self.model is None:
            progress = self.engine.progress()
            raise Unavailable(
                f"The model is loading ({100 * progress.loading_progress:.0f} %); "
                "/health/ready tells when it answers."
            )
        return self.model


class Api:
    """The routes."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def application(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.one_model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/health/live", self.live),
                Route("/health/ready", self.ready),
                Route("/metrics", self.metrics),
                Route("/state", self.state),
                Route("/version", self.version),
            ],
            exception_handlers={
                WorkerError: self._refuse,
                HTTPException: _no_such_route,
                ClientDisconnect: _nobody_there,
                Exception: _internal_error,
            },
        )

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        self._require_key(request)
        return _json(self._model_list())

    async def one_model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`."""
        self._require_key(request)
        name = request.path_params["name"]
        self._require_model(name)
        return _json(next(card for card in self._model_list().data if card.id == name))

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        started_at = time.monotonic()
        asked = parse_completion(await self._admit(request))
        self._require_model(asked.model)
        model = self._worker.loaded_model()
        token_ids = await self._unhurried(asked, prompts.encode_prompts, model, asked.prompts)
        echoes = [prompts.echo(model, prompt) if asked.echo else "" for prompt in asked.prompts]
        head = self._head("cmpl")
        choices = prompts.choices(model, asked, token_ids, head.id)
        renderer = CompletionRenderer(
            head,
            asked,
            model.texts,
            model.shown_bytes,
            [echo for echo in echoes for _ in range(asked.num_choices)],
        )
        return await self._answer(request, asked, choices, renderer, started_at)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        started_at = time.monotonic()
        asked = parse_chat(await self._admit(request))
        self._require_model(asked.model)
        model = self._worker.loaded_model()
        token_ids = await self._unhurried(asked, prompts.encode_chat, model, asked)
        head = self._head("chatcmpl")
        choices = prompts.choices(model, asked, [token_ids], head.id)
        renderer = ChatRenderer(head, asked, model.texts)
        return await self._answer(request, asked, choices, renderer, started_at)

    async def live(self, _: Request) -> Response:
        """`GET /health/live`: whether only a restart could help."""
        worker = self._worker
        verdict = health.liveness(
            worker.engine.progress(), time.time(), worker.config.stall_seconds
        )
        return _json(verdict, 200 if verdict.ok else 503)

    async def ready(self, _: Request) -> Response:
        """`GET /health/ready`: whether requests are answered."""
        worker = self._worker
        verdict = health.readiness(
            worker.engine.progress(),
            time.time(),
            worker.config.stall_seconds,
            is_warm=worker.is_warm,
        )
        return _json(verdict, 200 if verdict.ok else 503)

    async def metrics(self, _: Request) -> Response:
        """`GET /metrics`."""
        return Response(self._worker.metrics.render(), media_type=CONTENT_TYPE)

    async def state(self, request: Request) -> Response:
        """`GET /state`, for the operator alone."""
        worker = self._worker
        if worker.state_token is None:
            raise HTTPException(404)
        if not worker.state_token.accepts(_bearer(request)):
            raise Unauthorized("GET /state needs the token of --state-token-file.")
        state = health.worker_state(
            served_name=worker.served_name,
            model_id=worker.model_id,
            device=worker.model.device if worker.model else "unknown",
            progress=worker.engine.progress(),
            stats=worker.engine.stats(),
            is_warm=worker.is_warm,
        )
        return Response(state.model_dump_json(), media_type="application/json")

    async def version(self, _: Request) -> Response:
        """`GET /version`."""
        return Response(encode({"version": self._worker.version}), media_type="application/json")

    def _model_list(self) -> Any:
        worker = self._worker
        limit = worker.model.max_context_tokens if worker.model else None
        return model_list((worker.served_name, worker.model_id), worker.created, limit)

    async def _admit(self, request: Request) -> bytes:
        self._require_key(request)
        model = self._worker.model
        context_bytes = BODY_BYTES_PER_TOKEN * model.max_context_tokens if model else 0
        return await read_body(request, max(MIN_BODY_BYTES, context_bytes))

    def _require_key(self, request: Request) -> None:
        keys = self._worker.api_keys
        if keys is not None and not keys.accepts(_bearer(request)):
            raise Unauthorized(
                "Incorrect or missing API key; send it as 'Authorization: Bearer KEY'."
            )

    def _require_model(self, name: str) -> None:
        worker = self._worker
        if name not in (worker.served_name, worker.model_id):
            raise UnknownModel(
                f"The model '{name}' does not exist here; '{worker.served_name}' does.", "model"
            )

    def _head(self, kind: str) -> Head:
        return Head(f"{kind}-{uuid.uuid4().hex}", int(time.time()), self._worker.model_id)

    async def _unhurried(
        self,
        asked: CompletionRequest | ChatRequest,
        work: Callable[_P, _T],
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> _T:
        """Read long texts beside the event loop, and short ones at once."""
        work_now = partial(work, *arguments, **options)
        if prompts.num_characters(asked) <= INLINE_CHARACTERS:
            return work_now()
        return await asyncio.get_running_loop().run_in_executor(self._worker.threads, work_now)

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        choices: list[Choice],
        renderer: ChatRenderer | CompletionRenderer,
        started_at: float,
    ) -> Response:
        worker = self._worker
        generation = Generation(worker.engine, worker.courier, worker.metrics, choices, started_at)
        generation.start()
        headers = {
            "x-request-id": choices[0].request.request_id.rpartition("-")[0],
            "x-deepseek-model": worker.model_id,
        }
        record = Record(
            request.scope["path"], headers["x-request-id"], generation, started_at, worker.pace
        )
        if asked.stream:
            return EventStream(generation, renderer, record, headers)
        return await whole_answer(request, generation, renderer, record, headers)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, WorkerError)  # noqa: S101 - registered for it alone
        status, body = error_answer(error)
        headers = {"x-deepseek-model": self._worker.model_id}
        if isinstance(error, QueueFull):
            stats = self._worker.engine.stats()
            waiting = stats.num_waiting if stats else 0
            headers["retry-after"] = str(self._worker.pace.seconds_until_free(waiting))
        elif isinstance(error, Unavailable):
            headers["retry-after"] = str(RETRY_SECONDS)
        elif isinstance(error, Unauthorized):
            headers["www-authenticate"] = "Bearer"
        elif isinstance(error, BodyTooLarge):
            # The rest of the body is not read.
            headers["connection"] = "close"
        if request.scope["path"].startswith("/v1/"):
            self._worker.metrics.request_rejected(error.reason)
        if status >= 500:
            logger.warning(
                "Request failed", extra={"path": request.scope["path"], "error": str(error)}
            )
        return _json(body, status, headers)


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _json(body: Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, "application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it alone
    path = request.scope["path"]
    message = f"{request.method} {path} is not served here: {error.detail}."
    body = ErrorBody(ErrorDetail(message, "invalid_request_error", None, "unknown_url"))
    return _json(body, error.status_code, dict(error.headers or {}))


async def _nobody_there(_: Request, __: Exception) -> Response:
    # Nobody reads this; 499 is what proxies write down for it.
    return Response(status_code=499)


async def _internal_error(_: Request, __: Exception) -> Response:
    body = error_answer(WorkerError("The worker failed; its log says why."))[1]
    # uvicorn closes the connection after an exception, which clients have to know.
    return _json(body, 500, {"connection": "close"})
