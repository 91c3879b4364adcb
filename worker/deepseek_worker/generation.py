"""The answers to one HTTP request while they grow.

`Generation` turns the engine's outputs into pieces of text, ends an answer at its stop string, and
lets go of everything when its client is gone or anything fails.
"""

import asyncio
import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from deepseek_worker.answers import LogprobEntry
from deepseek_worker.client import EngineClient
from deepseek_worker.detokenizer import Detokenizer
from deepseek_worker.errors import (
    Draining,
    InvalidRequest,
    QueueFull,
    RequestTooLarge,
    Unavailable,
    WorkerError,
)
from deepseek_worker.markers import MarkerSearch
from deepseek_worker.metrics import Metrics
from deepseek_worker.parsing import AnswerParser, CallPart, Parts
from deepseek_worker.sequence import Output, Request, TokenLogprobs


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


@dataclass(slots=True)
class Piece:
    """What one answer gained."""

    choice: int
    text: str = ""
    """The content, without thought and calls where an answer is read for them."""
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    """None until the answer's last piece."""
    thought: str = ""
    calls: list[CallPart] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Comes once, when there are any."""

    def extend(self, later: "Piece") -> None:
        """Add what came after this piece."""
        parts = Parts(self.thought, self.text, self.calls)
        parts.extend(Parts(later.thought, later.text, later.calls))
        self.thought, self.text, self.calls = parts.thought, parts.content, parts.calls
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason


@dataclass(slots=True)
class Choice:
    """One answer to one prompt, and the engine's request behind it."""

    index: int
    prompt: int
    """Which of the HTTP request's prompts it answers."""
    request: Request
    detokenizer: Detokenizer
    parser: AnswerParser | None = None
    """Takes the text apart; None leaves it as it is."""
    thought_end: MarkerSearch | None = None
    """Looks for the end of the thought, in which the answer begins; None if it does not."""
    num_echoed_logprobs: int | None = None
    """Alternatives beside each token of the prompt, if the answer repeats it with logprobs."""
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_thought_tokens: int = 0
    is_finished: bool = False
    last_token_at: float | None = None

    def accept(self, output: Output) -> Piece:
        """Read the engine's next output."""
        piece = Piece(self.index)
        self.num_tokens += len(output.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            self._read_prompt_logprobs(piece, output.prompt_logprobs)
        shown = output.token_ids
        if output.stop_token_id is not None:
            # The token that ended the answer is counted, and is no part of it.
            shown = shown[:-1]
        if output.logprobs:
            piece.logprobs.extend(zip(shown, output.logprobs, strict=False))
        self._count_thought(shown)
        text = self.detokenizer.push(shown)
        if output.finish_reason is not None:
            text += self.detokenizer.finish()
            piece.finish_reason = output.finish_reason
        if self.detokenizer.is_stopped:
            piece.finish_reason = "stop"
        self._read(piece, text)
        self.is_finished = piece.finish_reason is not None
        return piece

    def _read(self, piece: Piece, text: str) -> None:
        """Take the text apart into the piece."""
        if self.parser is None:
            piece.text = text
            return
        parts = self.parser.push(text)
        if piece.finish_reason is not None:
            parts.extend(self.parser.finish())
        piece.thought, piece.text, piece.calls = parts.thought, parts.content, parts.calls
        if self.parser.is_complete:
            piece.finish_reason = "stop"
        if self.parser.num_calls and piece.finish_reason == "stop":
            piece.finish_reason = "tool_calls"

    def _count_thought(self, token_ids: tuple[int, ...]) -> None:
        if self.thought_end is None:
            return
        for token_id in token_ids:
            if not self.thought_end.is_done:
                self.num_thought_tokens += 1
                self.thought_end.push(self.detokenizer.token_bytes(token_id))

    def _read_prompt_logprobs(
        self, piece: Piece, entries: tuple[TokenLogprobs | None, ...]
    ) -> None:
        if self.request.sampling.prompt_logprobs is not None:
            piece.prompt_logprobs = entries
        if (num_top := self.num_echoed_logprobs) is not None:
            prompt = self.request.prompt_token_ids
            cut = (None if e is None else replace(e, top=e.top[:num_top]) for e in entries)
            piece.logprobs.extend(zip(prompt, cut, strict=True))


class Generation:
    """All answers of one HTTP request."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        choices: list[Choice],
        started_at: float,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            engine: Computes the answers.
            metrics: Told of every first, next and last token.
            choices: The answers to compute.
            started_at: When the request came, by the monotonic clock.
        """
        self.choices = choices
        self._engine = engine
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
                self._engine.submit(choice.request, self.inbox.put)
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

    def num_tokens(self) -> tuple[int, int, int, int]:
        """Prompt, generated, cached and thought tokens; a prompt with several answers counts once.

        Thought tokens are among the generated ones, cached tokens among the prompt's.
        """
        firsts = {choice.prompt: choice for choice in reversed(self.choices)}.values()
        return (
            sum(len(choice.request.prompt_token_ids) for choice in firsts),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.num_cached_tokens for choice in firsts),
            sum(choice.num_thought_tokens for choice in self.choices),
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
            # The engine knows no stop strings and calls: it would go on.
            self._engine.abort(choice.request.request_id)
        ended_by = "stop" if finish_reason == "tool_calls" else finish_reason
        self._metrics.request_ended(ended_by, now - self._started_at)

    def _raise_if_failed(self, output: Output) -> None:
        if output.finish_reason not in ("error", "abort"):
            return
        choice = self._by_id[output.request_id]
        choice.is_finished = True
        self._metrics.request_ended(output.finish_reason, time.monotonic() - self._started_at)
        if output.finish_reason == "abort":
            raise Draining("This worker shut down before the answer was complete; ask again.")
        refusals = {kind.reason: kind for kind in (QueueFull, RequestTooLarge)}
        if (refusal := refusals.get(output.error_reason or "")) is not None:
            raise refusal(output.error or refusal.reason)
        message = f"{output.error or 'The engine failed.'} ({output.error_reason})"
        if output.error_reason in ("OutOfMemory", "EngineFailed"):
            raise Unavailable(message)
        if output.error_reason == "GuideFailed":
            raise InvalidRequest(f"The structure of the answer cannot be kept: {output.error}.")
        raise WorkerError(message)
