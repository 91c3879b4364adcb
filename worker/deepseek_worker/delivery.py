"""How bodies come in and answers go out, and what happens when the client hangs up."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deepseek_worker.answers import ErrorBody, Usage, encode, error_answer, usage
from deepseek_worker.errors import BodyTooLarge, InvalidRequest, WorkerError
from deepseek_worker.generation import ClientGone, Generation, Piece
from deepseek_worker.pace import Pace

BODY_SECONDS = 60.0

logger = logging.getLogger(__name__)


class Renderer(Protocol):
    """Turns what an answer gains into what its client gets."""

    done: bytes
    """What ends a stream."""

    def events(self, pieces: Iterable[Piece]) -> bytes:
        """The events that bring `pieces`; none for what cannot be sent yet."""

    def usage_event(self, usage: Usage) -> bytes:
        """What follows the last piece, once all tokens are counted."""

    def error_event(self, body: ErrorBody) -> bytes:
        """What a stream says that cannot be completed."""

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> Any:
        """The answer in one body, from the whole of each choice."""


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


@dataclass(frozen=True, slots=True)
class Record:
    """What the log says of a request; never its content."""

    path: str
    request_id: str
    generation: Generation
    started_at: float
    """When the request came, by the monotonic clock."""
    pace: Pace

    def write(self, outcome: str) -> None:
        """One line at the end of a request."""
        now = time.monotonic()
        self.pace.request_ended(now)
        prompt_tokens, completion_tokens, cached_tokens, _ = self.generation.num_tokens()
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
        renderer: Renderer,
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
            end = renderer.error_event(error_answer(error)[1])
        await send({"type": "http.response.body", "body": end + renderer.done, "more_body": False})
        return outcome


async def whole_answer(
    request: Request,
    generation: Generation,
    renderer: Renderer,
    record: Record,
    headers: dict[str, str],
) -> Response:
    """An answer in one body, once it is complete.

    Raises:
        ClientDisconnect: nobody waits for it any more.
        WorkerError: it cannot be completed.
    """
    outcome = "client gone"
    wholes = {choice.index: Piece(choice.index) for choice in generation.choices}
    try:
        async with _watching(request.receive, generation):
            while not generation.is_finished:
                for piece in await generation.next_pieces():
                    wholes[piece.choice].extend(piece)
        outcome = "complete"
    except ClientGone:
        raise ClientDisconnect from None
    except WorkerError as error:
        outcome = error.reason
        raise
    finally:
        generation.close()
        record.write(outcome)
    body = encode(renderer.whole(wholes.values(), _usage(generation)))
    return Response(body, 200, headers, "application/json")


@asynccontextmanager
async def _watching(receive: Receive, generation: Generation) -> AsyncIterator[None]:
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


def _usage(generation: Generation) -> Usage:
    return usage(*generation.num_tokens())
