"""The HTTP API: who may ask, what for, and how the answer goes back.

Thin: bodies are read by `openai.py`, answers are grown by `generation.py` and written by
`rendering.py`. Everything runs on the event loop, away from the engine's thread.
"""

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from deepseek_worker import health
from deepseek_worker.answers import (
    DONE,
    ErrorBody,
    ErrorDetail,
    TokenTexts,
    Usage,
    encode,
    error_answer,
    event,
    model_list,
    usage,
)
from deepseek_worker.config import ServerConfig
from deepseek_worker.detokenizer import Detokenizer
from deepseek_worker.driver import EngineThread
from deepseek_worker.errors import (
    BodyTooLarge,
    InvalidRequest,
    QueueFull,
    RequestTooLarge,
    Unauthorized,
    Unavailable,
    UnknownModel,
    WorkerError,
)
from deepseek_worker.generation import Choice, ClientGone, Courier, Generation, Piece
from deepseek_worker.metrics import CONTENT_TYPE, Metrics
from deepseek_worker.openai import (
    ChatRequest,
    CompletionRequest,
    Prompt,
    check_token_ids,
    parse_chat,
    parse_completion,
    sampling_params,
)
from deepseek_worker.pace import Pace
from deepseek_worker.rendering import ChatRenderer, CompletionRenderer, Head
from deepseek_worker.secret_files import SecretFile
from deepseek_worker.sequence import Request as EngineRequest
from deepseek_worker.sequence import SamplingParams
from deepseek_worker.tokenizer import Tokenizer

# Room for a full context of escaped text, and for many short prompts at once.
MIN_BODY_BYTES = 8 << 20
BODY_BYTES_PER_TOKEN = 64
BODY_SECONDS = 60.0
# Above this, tokenizing takes long enough to be worth a thread.
INLINE_CHARACTERS = 4096
RETRY_SECONDS = 2
RESERVED_TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt"})

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """What the server knows of the loaded model."""

    tokenizer: Tokenizer
    max_context_tokens: int
    vocab_size: int
    """Token ids are below it; the tokenizer may know fewer."""
    device: str
    shown_bytes: Callable[[int], bytes] = field(init=False)
    """What a token adds to a text: nothing, for special ones."""
    texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        """Derive what every request needs."""
        special = self.tokenizer.special_token_ids
        token_bytes = functools.cache(self.tokenizer.token_bytes)
        object.__setattr__(self, "texts", TokenTexts(token_bytes))
        object.__setattr__(
            self, "shown_bytes", lambda token: b"" if token in special else token_bytes(token)
        )


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
        prompts = asked.prompts
        token_ids = await self._encode(model, prompts)
        echoes = [self._echo(model, prompt) if asked.echo else "" for prompt in prompts]
        head = self._head("cmpl")
        choices = self._choices(model, asked, token_ids, head)
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
        token_ids = await self._encode_chat(model, asked)
        head = self._head("chatcmpl")
        choices = self._choices(model, asked, [token_ids], head)
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

    async def _encode(self, model: Model, prompts: tuple[Prompt, ...]) -> list[tuple[int, ...]]:
        def encode_all() -> list[tuple[int, ...]]:
            return [
                tuple(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        encoded = await self._unhurried(encode_all, size)
        for at, token_ids in enumerate(encoded):
            param = "prompt" if len(encoded) == 1 else f"prompt[{at}]"
            check_token_ids(token_ids, model.vocab_size, param)
            if not token_ids:
                raise InvalidRequest(
                    f"Invalid '{param}': it is empty; at least one token is needed.", param
                )
        return encoded

    async def _encode_chat(self, model: Model, asked: ChatRequest) -> tuple[int, ...]:
        options = asked.chat_template_kwargs or {}
        if taken := RESERVED_TEMPLATE_NAMES & options.keys():
            raise InvalidRequest(
                f"Invalid 'chat_template_kwargs': {', '.join(sorted(taken))} cannot be given "
                "here; they come from the request itself.",
                "chat_template_kwargs",
            )
        messages = asked.template_messages()

        def encode_chat() -> tuple[int, ...]:
            text = model.tokenizer.apply_chat_template(messages, **options)
            return tuple(model.tokenizer.encode(text, add_special_tokens=False))

        size = sum(len(message["content"] or "") for message in messages)
        token_ids = await self._unhurried(encode_chat, size)
        if not token_ids:
            raise InvalidRequest(
                "Invalid 'messages': the chat template makes no prompt of them.", "messages"
            )
        return token_ids

    async def _unhurried(self, work: Callable[[], _T], num_characters: int) -> _T:
        """Do long work on text beside the event loop, and short work at once."""
        if num_characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._worker.threads, work)

    def _echo(self, model: Model, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(model.shown_bytes, prompt)).decode(errors="replace")

    def _choices(
        self,
        model: Model,
        asked: CompletionRequest | ChatRequest,
        prompts: list[tuple[int, ...]],
        head: Head,
    ) -> list[Choice]:
        choices: list[Choice] = []
        arrival = time.time()
        for number, token_ids in enumerate(prompts):
            max_tokens = _max_tokens(asked, len(token_ids), model.max_context_tokens)
            sampling = sampling_params(asked, max_tokens, model.vocab_size)
            for _ in range(asked.num_choices):
                index = len(choices)
                choices.append(
                    Choice(
                        index=index,
                        prompt=number,
                        request=EngineRequest(
                            request_id=f"{head.id}-{index}",
                            prompt_token_ids=token_ids,
                            sampling=_with_seed_of_choice(sampling, index),
                            arrival_time=arrival,
                            cache_salt=asked.cache_salt or "",
                        ),
                        detokenizer=Detokenizer(
                            model.shown_bytes, asked.stop_strings, asked.min_tokens or 0
                        ),
                    )
                )
        return choices

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
            request.scope["path"], headers["x-request-id"], generation, started_at, worker
        )
        if asked.stream:
            return EventStream(generation, renderer, record, headers)
        return await _whole_answer(request, generation, renderer, record, headers)

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


@dataclass(frozen=True, slots=True)
class Record:
    """What the log says of a request; never its content."""

    path: str
    request_id: str
    generation: Generation
    started_at: float
    worker: Worker

    def write(self, outcome: str) -> None:
        """One line at the end of a request."""
        now = time.monotonic()
        self.worker.pace.request_ended(now)
        prompt_tokens, completion_tokens, cached_tokens = self.generation.num_tokens()
        logger.info(
            "Request",
            extra={
                "path": self.path,
                "request_id": self.request_id,
                "outcome": outcome,
                "prompt_tokens": prompt_tokens,
                "cached_tokens": cached_tokens,
                "completion_tokens": completion_tokens,
                "seconds": round(now - self.started_at, 4),
            },
        )


class EventStream(Response):
    """An answer that is sent as it grows."""

    def __init__(
        self,
        generation: Generation,
        renderer: ChatRenderer | CompletionRenderer,
        record: Record,
        headers: dict[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                # Proxies that gather an answer before they pass it on would defeat its purpose.
                "x-accel-buffering": "no",
                **headers,
            }
        )
        self._generation = generation
        self._renderer = renderer
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send events until the answer is complete or its client is gone."""
        outcome = "client gone"
        try:
            async with _watching(receive, self._generation):
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                outcome = await self._send_events(send)
        except ClientGone:
            pass
        finally:
            self._generation.close()
            self._record.write(outcome)

    async def _send_events(self, send: Send) -> str:
        generation, renderer = self._generation, self._renderer
        outcome = "complete"
        try:
            while not generation.is_finished:
                if events := renderer.events(await generation.next_pieces()):
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            end = renderer.usage_event(_usage(generation))
        except WorkerError as error:
            # The status is long sent: the stream itself has to tell.
            outcome = error.reason
            end = event(error_answer(error)[1])
        await send({"type": "http.response.body", "body": end + DONE, "more_body": False})
        return outcome


async def _whole_answer(
    request: Request,
    generation: Generation,
    renderer: ChatRenderer | CompletionRenderer,
    record: Record,
    headers: dict[str, str],
) -> Response:
    outcome = "client gone"
    wholes = {choice.index: Piece(choice.index) for choice in generation.choices}
    try:
        async with _watching(request.receive, generation):
            while not generation.is_finished:
                for piece in await generation.next_pieces():
                    wholes[piece.choice].extend(piece)
        outcome = "complete"
    except ClientGone:
        return await _nobody_there(request, ClientDisconnect())
    except WorkerError as error:
        outcome = error.reason
        raise
    finally:
        generation.close()
        record.write(outcome)
    return _json(renderer.whole(wholes.values(), _usage(generation)), 200, headers)


@asynccontextmanager
async def _watching(receive: Receive, generation: Generation) -> Any:
    """Close the generation's inbox when the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.inbox.close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: it is longer than `max_bytes`, or says that it will be.
        InvalidRequest: it does not come.
    """
    said = request.headers.get("content-length", "0")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if int(said) <= max_bytes:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > max_bytes:
                        break
    except TimeoutError:
        raise InvalidRequest(f"The body did not come within {BODY_SECONDS:.0f} s.") from None
    if int(said) > max_bytes or len(body) > max_bytes:
        raise BodyTooLarge(f"The body is larger than the {max_bytes} bytes that are accepted.")
    return bytes(body)


def _max_tokens(asked: CompletionRequest | ChatRequest, num_prompt_tokens: int, limit: int) -> int:
    """Most tokens to generate, within the context.

    Raises:
        RequestTooLarge: prompt and answer do not fit together.
    """
    room = limit - num_prompt_tokens
    wanted = asked.wanted_tokens
    if wanted is None:
        # At least one token: an answer without any would be none.
        wanted = max(1, room if asked.default_tokens is None else min(asked.default_tokens, room))
    if wanted > room:
        param = "prompt" if isinstance(asked, CompletionRequest) else "messages"
        raise RequestTooLarge(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the prompt, {wanted} "
            "in the completion). Shorten the prompt or lower 'max_tokens'.",
            param,
            "context_length_exceeded",
        )
    return wanted


def _with_seed_of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    if sampling.seed is None or index == 0:
        return sampling
    # Else all answers to a prompt would be the same.
    return replace(sampling, seed=(sampling.seed + index) % (1 << 63))


def _usage(generation: Generation) -> Usage:
    return usage(*generation.num_tokens())


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
