"""The HTTP API: who may ask, what for, and how the answer goes back.

Thin: bodies are read by `openai.py`, answers are grown by `generation.py` and written by
`rendering.py`. Everything runs on the event loop of an API process; the engine is in another.
"""

import asyncio
import logging
import string
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from deepseek_worker import health, openapi, prompts
from deepseek_worker.answers import (
    ErrorBody,
    ErrorDetail,
    encode,
    error_answer,
    model_list,
)
from deepseek_worker.board import Board
from deepseek_worker.client import EngineClient
from deepseek_worker.config import ServerConfig
from deepseek_worker.delivery import EventStream, Record, Renderer, read_body, whole_answer
from deepseek_worker.errors import (
    BodyTooLarge,
    QueueFull,
    RequestError,
    Unauthorized,
    Unavailable,
    UnknownModel,
    WorkerError,
)
from deepseek_worker.generation import Choice, Generation
from deepseek_worker.metrics import CONTENT_TYPE, Metrics
from deepseek_worker.openai import (
    ChatRequest,
    CompletionRequest,
)
from deepseek_worker.pace import Pace
from deepseek_worker.progress import Progress
from deepseek_worker.prompts import Model
from deepseek_worker.rendering import ChatRenderer, CompletionRenderer, Head
from deepseek_worker.response_events import ResponseRenderer
from deepseek_worker.responses import parse_response, renamed
from deepseek_worker.secret_files import SecretFile
from deepseek_worker.sequence import Structure
from deepseek_worker.structure import chat_structure, completion_structure
from deepseek_worker.tokens import detokenize, parse_detokenize, parse_tokenize, tokenize
from deepseek_worker.validation import parse_chat, parse_completion, shortened

# Room for a full context of escaped text, and for many short prompts at once.
MIN_BODY_BYTES = 8 << 20
BODY_BYTES_PER_TOKEN = 64
# Above this, tokenizing takes long enough to be worth a thread.
INLINE_CHARACTERS = 4096
RETRY_SECONDS = 2
# A step on a GPU takes milliseconds; on a CPU a long chunk beside other programs takes seconds.
STALL_SECONDS = {"cuda": 10.0}
LONGEST_STALL_SECONDS = 60.0

_P = ParamSpec("_P")
_T = TypeVar("_T")
logger = logging.getLogger(__name__)


@dataclass
class Worker:
    """What the routes share; `model` changes once, while the worker starts."""

    config: ServerConfig
    engine: EngineClient
    board: Board
    metrics: Metrics
    served_name: str
    model_id: str
    version: str
    created: int
    """When the worker started, in Unix seconds."""
    adapters: tuple[str, ...] = ()
    """Names of the model's LoRA adapters."""
    state_token: SecretFile | None = None
    api_keys: SecretFile | None = None
    model: Model | None = None
    is_ending: bool = False
    """SIGTERM came: what asks still gets its answer for a moment, but no more is wanted."""
    pace: Pace = field(default_factory=Pace)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "text"))

    @property
    def stall_seconds(self) -> float:
        """How long the engine may take for one step."""
        if self.config.stall_seconds is not None:
            return self.config.stall_seconds
        device = self.model.device if self.model is not None else ""
        return STALL_SECONDS.get(device, LONGEST_STALL_SECONDS)

    @property
    def progress(self) -> Progress:
        """The engine's, for the rest of the world: who is about to end counts as draining."""
        progress = self.engine.progress()
        if self.is_ending and progress.phase == "ready":
            return replace(progress, phase="draining")
        return progress

    def identity(self, adapter: str | None = None) -> dict[str, str]:
        """Headers that say which model or adapter answers, and whether another one was meant."""
        headers = {"x-deepseek-model": _header(adapter or self.model_id)}
        if self.config.instead_of is not None:
            headers["x-deepseek-degraded"] = _header(self.config.instead_of)
        return headers

    @property
    def degraded(self) -> str:
        """A sentence for what only the model that was meant might do; empty if that is this one."""
        if self.config.instead_of is None:
            return ""
        return (
            f"The service is degraded: {self.model_id} answers instead of"
            f" {self.config.instead_of}; ask again later, or for less."
        )

    async def loaded_model(self) -> Model:
        """The model.

        Raises:
            Unavailable: it is still loading.
        """
        if self.model is None:
            await self.engine.refresh()
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
        app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.one_model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health/live", self.live),
                Route("/health/ready", self.ready),
                Route("/metrics", self.metrics),
                Route("/state", self.state),
                Route("/version", self.version),
                Route("/openapi.json", self.openapi),
            ],
            exception_handlers={
                WorkerError: self._refuse,
                HTTPException: _no_such_route,
                ClientDisconnect: _nobody_there,
                Exception: _internal_error,
            },
        )
        # A redirect would name the scheme and host that it sees, which a proxy may have changed.
        app.router.redirect_slashes = False
        return app

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
        adapter = self._require_model(asked.model)
        model = await self._worker.loaded_model()
        given = asked.prompts
        token_ids = await self._unhurried(asked, prompts.encode_prompts, model, given)
        echoes = [prompts.echo(model, prompt) if asked.echo else "" for prompt in given]
        head = self._head("cmpl", adapter)
        structure = await self._compiled(completion_structure(asked))
        choices = prompts.choices(
            model, asked, token_ids, head.id, structure=structure, adapter=adapter
        )
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
        head = self._head("chatcmpl", self._require_model(asked.model))
        renderer = ChatRenderer(head, asked, (await self._worker.loaded_model()).texts)
        return await self._chat(request, asked, head, renderer, started_at)

    async def _chat(
        self,
        request: Request,
        asked: ChatRequest,
        head: Head,
        renderer: Renderer,
        started_at: float,
    ) -> Response:
        model = await self._worker.loaded_model()
        conversation = await self._unhurried(asked, prompts.encode_chat, model, asked)
        start = conversation.start
        structure = chat_structure(asked, start, model.chat_format.call_form, model.grammar_marker)
        choices = prompts.choices(
            model,
            asked,
            [conversation.token_ids],
            head.id,
            start=start,
            structure=await self._compiled(structure),
            adapter=self._require_model(asked.model),
        )
        return await self._answer(request, asked, choices, renderer, started_at)

    async def responses(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        started_at = time.monotonic()
        asked, chat = parse_response(await self._admit(request))
        head = self._head("resp", self._require_model(asked.model), "_")
        renderer = ResponseRenderer(head, asked)
        try:
            return await self._chat(request, chat, head, renderer, started_at)
        except RequestError as error:
            raise renamed(error) from error

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        asked = parse_tokenize(await self._admit(request))
        self._require_model(asked.model or self._worker.served_name)
        return _json(await self._in_thread(tokenize, await self._worker.loaded_model(), asked))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        asked = parse_detokenize(await self._admit(request))
        self._require_model(asked.model or self._worker.served_name)
        return _json(await self._in_thread(detokenize, await self._worker.loaded_model(), asked))

    async def live(self, _: Request) -> Response:
        """`GET /health/live`: whether only a restart could help."""
        worker = self._worker
        await worker.engine.refresh()
        verdict = health.liveness(worker.progress, time.time(), worker.stall_seconds)
        return _json(verdict, 200 if verdict.ok else 503)

    async def ready(self, _: Request) -> Response:
        """`GET /health/ready`: whether requests are answered."""
        worker = self._worker
        await worker.engine.refresh()
        verdict = health.readiness(
            worker.progress,
            time.time(),
            worker.stall_seconds,
            is_warm=worker.board.is_warm,
        )
        return _json(verdict, 200 if verdict.ok else 503)

    async def metrics(self, _: Request) -> Response:
        """`GET /metrics`."""
        await self._worker.engine.refresh()
        return Response(self._worker.metrics.render(), media_type=CONTENT_TYPE)

    async def state(self, request: Request) -> Response:
        """`GET /state`, for the operator alone."""
        worker = self._worker
        if worker.state_token is None:
            raise HTTPException(404)
        if not worker.state_token.accepts(_bearer(request)):
            raise Unauthorized("GET /state needs the token of --state-token-file.")
        await worker.engine.refresh()
        state = health.worker_state(
            served_name=worker.served_name,
            model_id=worker.model_id,
            device=worker.model.device if worker.model else "unknown",
            progress=worker.progress,
            stats=worker.engine.stats(),
            is_warm=worker.board.is_warm,
            now=time.time(),
            stall_seconds=worker.stall_seconds,
        )
        return Response(state.model_dump_json(), media_type="application/json")

    async def version(self, _: Request) -> Response:
        """`GET /version`."""
        return Response(encode({"version": self._worker.version}), media_type="application/json")

    async def openapi(self, _: Request) -> Response:
        """`GET /openapi.json`."""
        return Response(encode(openapi.document()), media_type="application/json")

    def _model_list(self) -> Any:
        worker = self._worker
        limit = worker.model.max_context_tokens if worker.model else None
        names = worker.served_name, worker.model_id
        return model_list(names, worker.adapters, worker.created, limit)

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

    def _require_model(self, name: str) -> str | None:
        """The adapter of that name; None for the model alone.

        Raises:
            UnknownModel: there is neither.
        """
        worker = self._worker
        if name in worker.adapters:
            return name
        if name not in (worker.served_name, worker.model_id):
            known = ", ".join(f"'{one}'" for one in (worker.served_name, *worker.adapters))
            verb = "do" if worker.adapters else "does"
            raise UnknownModel(
                f"The model '{shortened(name)}' does not exist here; {known} {verb}.", "model"
            )
        return None

    def _head(self, kind: str, adapter: str | None, joint: str = "-") -> Head:
        model = adapter or self._worker.model_id
        return Head(f"{kind}{joint}{uuid.uuid4().hex}", int(time.time()), model)

    async def _unhurried(
        self,
        asked: CompletionRequest | ChatRequest,
        work: Callable[_P, _T],
        *arguments: _P.args,
        **options: _P.kwargs,
    ) -> _T:
        """Read long texts beside the event loop, and short ones at once."""
        if prompts.num_characters(asked) <= INLINE_CHARACTERS:
            return work(*arguments, **options)
        return await self._in_thread(work, *arguments, **options)

    async def _in_thread(
        self, work: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs
    ) -> _T:
        work_now = partial(work, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._worker.threads, work_now)

    async def _compiled(self, structure: Structure | None) -> Structure | None:
        """The same, once the engine's process has made a grammar of it.

        Raises:
            InvalidRequest: it cannot be kept, or takes too long to compile.
        """
        if structure is not None:
            await self._worker.engine.compile(structure)
        return structure

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        choices: list[Choice],
        renderer: Renderer,
        started_at: float,
    ) -> Response:
        worker = self._worker
        generation = Generation(worker.engine, worker.metrics, choices, started_at)
        generation.start()
        headers = {
            "x-request-id": choices[0].request.request_id.rpartition("-")[0],
            **worker.identity(choices[0].request.adapter),
        }
        record = Record(
            request.scope["path"], headers["x-request-id"], generation, started_at, worker.pace
        )
        if asked.stream:
            return EventStream(generation, renderer, record, headers)
        return await whole_answer(request, generation, renderer, record, headers)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, WorkerError)  # noqa: S101 - registered for it alone
        status, body = error_answer(error, self._worker.degraded)
        headers = self._worker.identity()
        if isinstance(error, QueueFull):
            stats = self._worker.engine.stats()
            # The requests that end elsewhere make room here too.
            waiting = stats.num_waiting // self._worker.board.num_rows if stats else 0
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


def _header(name: str) -> str:
    """A name as a header can hold it, percent-encoded where it is more than plain ASCII."""
    return quote(name, safe=f" {string.punctuation}")


def _bearer(request: Request) -> bytes:
    """The token as it was sent: a header's bytes are UTF-8 or not, which is the client's choice."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip().encode("latin-1") if kind.lower() == "bearer" else b""


def _json(body: Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, "application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it alone
    allowed = (error.headers or {}).get("Allow")
    hint = f"use {allowed}" if allowed else "GET /openapi.json lists what is"
    path = shortened(request.scope["path"])
    message = f"{request.method} {path} is not served here; {hint}."
    body = ErrorBody(ErrorDetail(message, "invalid_request_error", None, "unknown_url"))
    return _json(body, error.status_code, dict(error.headers or {}))


async def _nobody_there(_: Request, __: Exception) -> Response:
    # Nobody reads this; 499 is what proxies write down for it.
    return Response(status_code=499)


async def _internal_error(_: Request, __: Exception) -> Response:
    body = error_answer(WorkerError("The worker failed; its log says why."))[1]
    # uvicorn closes the connection after an exception, which clients have to know.
    return _json(body, 500, {"connection": "close"})
