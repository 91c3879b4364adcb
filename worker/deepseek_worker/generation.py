"""The answers to one HTTP request while they grow.

`Courier` carries outputs from the engine's thread to the event loop; `Generation` turns them
into pieces of text, ends an answer at its stop string, and lets go of everything when its client
is gone or anything fails.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from deepseek_worker.answers import LogprobEntry
from deepseek_worker.detokenizer import Detokenizer
from deepseek_worker.driver import EngineThread
from deepseek_worker.errors import Draining, Unavailable, WorkerError
from deepseek_worker.metrics import Metrics
from deepseek_worker.sequence import Output, Request


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Inbox:
    """Outputs for one reader on the event loop."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._is_closed = False
        self._arrival = asyncio.Event()

    def put(self, output: Output) -> None:
        """Add an output."""
        self._outputs.append(output)
        self._arrival.set()

    def close(self) -> None:
        """Send the reader away: its client is gone."""
        self._is_closed = True
        self._arrival.set()

    async def take(self) -> list[Output]:
        """All outputs since the last time, at least one.

        Raises:
            ClientGone: the inbox has been closed.
        """
        await self._arrival.wait()
        if self._is_closed:
            raise ClientGone
        self._arrival.clear()
        outputs, self._outputs = self._outputs, []
        return outputs


class Courier:
    """From the engine's thread to the event loop: one wake-up for all outputs of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._bag: deque[tuple[Inbox, Output]] = deque()
        self._is_called = False

    def post(self, inbox: Inbox, output: Output) -> None:
        """Called on the engine's thread."""
        self._bag.append((inbox, output))
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # First, so that an output which comes meanwhile calls again rather than being left.
        self._is_called = False
        while self._bag:
            inbox, output = self._bag.popleft()
            inbox.put(output)


@dataclass(slots=True)
class Piece:
    """What one answer gained."""

    choice: int
    text: str = ""
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    """None until the answer's last piece."""

    def extend(self, later: "Piece") -> None:
        """Add what came after this piece."""
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason


@dataclass(slots=True)
class Choice:
    """One answer to one prompt, and the engine's request behind it."""

    index: int
    prompt: int
    """Which of the HTTP request's prompts it answers."""
    request: Request
    detokenizer: Detokenizer
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_finished: bool = False
    last_token_at: float | None = None

    def accept(self, output: Output) -> Piece:
        """Read the engine's next output."""
        piece = Piece(self.index)
        self.num_tokens += len(output.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            prompt = self.request.prompt_token_ids
            piece.logprobs.extend(zip(prompt, output.prompt_logprobs, strict=True))
        shown = output.token_ids
        if output.stop_token_id is not None:
            # The token that ended the answer is counted, and is no part of it.
            shown = shown[:-1]
        if output.logprobs:
            piece.logprobs.extend(zip(shown, output.logprobs, strict=False))
        piece.text = self.detokenizer.push(shown)
        if output.finish_reason is not None:
            piece.text += self.detokenizer.finish()
            piece.finish_reason = output.finish_reason
        if self.detokenizer.is_stopped:
            piece.finish_reason = "stop"
        self.is_finished = piece.finish_reason is not None
        return piece


class Generation:
    """All answers of one HTTP request."""

    def __init__(
        self,
        engine: EngineThread,
        courier: Courier,
        metrics: Metrics,
        choices: list[Choice],
        started_at: float,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            engine: Computes the answers.
            courier: Brings them.
            metrics: Told of every first, next and last token.
            choices: The answers to compute.
            started_at: When the request came, by the monotonic clock.
        """
        self.choices = choices
        self._engine = engine
        self._courier = courier
        self._metrics = metrics
        self._started_at = started_at
        self._by_id = {choice.request.request_id: choice for choice in choices}
        self._begun: list[Choice] = []
        self.inbox = Inbox()

    def start(self) -> None:
        """Hand every choice to the engine, or none.

        Raises:
            RequestError: one of them can never be served.
            Unavailable: not now.
        """
        try:
            for choice in self.choices:
                self._engine.submit(choice.request, partial(self._courier.post, self.inbox))
                self._begun.append(choice)
        except BaseException:
            self.close()
            raise

    @property
    def is_finished(self) -> bool:
        """Whether every answer is complete."""
        return all(choice.is_finished for choice in self.choices)

    async def next_pieces(self) -> list[Piece]:
        """What has come since the last time, at most one piece for each answer.

        Raises:
            ClientGone: nobody waits any more.
            WorkerError: an answer cannot be completed.
        """
        pieces: dict[int, Piece] = {}
        outputs = await self.inbox.take()
        now = time.monotonic()
        for output in outputs:
            choice = self._by_id[output.request_id]
            if choice.is_finished:
                continue
            self._observe(choice, len(output.token_ids), now)
            self._raise_if_failed(output)
            piece = choice.accept(output)
            if choice.is_finished:
                self._end(choice, output, piece.finish_reason or "stop", now)
            if earlier := pieces.get(choice.index):
                earlier.extend(piece)
            else:
                pieces[choice.index] = piece
        return list(pieces.values())

    def close(self) -> None:
        """Let go of what is not finished; its pages are free before the engine's next step."""
        for choice in self._begun:
            if not choice.is_finished:
                choice.is_finished = True
                self._engine.abort(choice.request.request_id)
                self._metrics.request_ended("abort", time.monotonic() - self._started_at)
        self._begun.clear()

    def num_tokens(self) -> tuple[int, int, int]:
        """Prompt, generated and cached tokens; a prompt with several answers counts once."""
        firsts = {choice.prompt: choice for choice in reversed(self.choices)}.values()
        return (
            sum(len(choice.request.prompt_token_ids) for choice in firsts),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.num_cached_tokens for choice in firsts),
        )

    def _observe(self, choice: Choice, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        if choice.last_token_at is None:
            self._metrics.first_token(now - self._started_at)
        else:
            self._metrics.next_tokens((now - choice.last_token_at) / num_tokens, num_tokens)
        choice.last_token_at = now

    def _end(self, choice: Choice, output: Output, finish_reason: str, now: float) -> None:
        if output.finish_reason is None:
            # The stop string is the server's business: the engine would go on.
            self._engine.abort(choice.request.request_id)
        self._metrics.request_ended(finish_reason, now - self._started_at)

    def _raise_if_failed(self, output: Output) -> None:
        if output.finish_reason not in ("error", "abort"):
            return
        choice = self._by_id[output.request_id]
        choice.is_finished = True
        self._metrics.request_ended(output.finish_reason, time.monotonic() - self._started_at)
        if output.finish_reason == "abort":
            raise Draining("This worker shut down before the answer was complete; ask again.")
        message = f"{output.error or 'The engine failed.'} ({output.error_reason})"
        if output.error_reason in ("OutOfMemory", "EngineFailed"):
            raise Unavailable(message)
        raise WorkerError(message)
