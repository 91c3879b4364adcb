"""The engine as an API process sees it: a socket to the process that owns it.

Everything runs on the event loop. Requests are checked here, before anything is sent, by the rules
that the engine's process holds too; how many are unfinished in the whole worker is on the board.
All outputs of a step come in one message and wake the loop once.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from socket import socket
from typing import cast

from deepseek_worker.admission import check_request
from deepseek_worker.board import UNFINISHED, Board
from deepseek_worker.errors import Draining, EngineFailed, InvalidRequest
from deepseek_worker.messages import (
    Abort,
    Ask,
    Compile,
    Compiled,
    Facts,
    Frames,
    FromEngine,
    Status,
    Step,
    Submit,
    ToEngine,
    frame,
    read_from_engine,
)
from deepseek_worker.progress import Failure, Progress
from deepseek_worker.sequence import Output, Request, Structure
from deepseek_worker.stats import EngineStats

# The engine's process answers between two steps and within one. Probes wait a second.
STATUS_SECONDS = 0.5
GRAMMAR_SECONDS = 20.0

OnOutput = Callable[[Output], None]
logger = logging.getLogger(__name__)


class EngineClient(asyncio.Protocol):
    """Hands requests to the engine's process, and its outputs to whoever asked."""

    def __init__(self, board: Board, started_at: float) -> None:
        """Nothing is known before `connect`.

        Args:
            board: Where this process counts its unfinished requests.
            started_at: When the worker started, in Unix seconds.
        """
        self._board = board
        self._progress = Progress("loading", 0.0, started_at, started_at)
        self._stats: EngineStats | None = None
        self._callbacks: dict[str, OnOutput] = {}
        self._questions: dict[int, asyncio.Future[Status | Compiled]] = {}
        self._numbers = itertools.count()
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._is_draining = False
        self._is_heard = False
        self._loaded = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.facts: Facts | None = None
        """None until the engine is loaded."""
        self.lost = asyncio.Event()
        """Set when the engine's process has gone."""

    async def connect(self, link: socket) -> None:
        """Talk over this socket, and no other, from now on."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=link)

    def close(self) -> None:
        """Hang up; the engine's process drops what is unfinished."""
        if self._transport is not None:
            self._transport.close()

    async def wait_until_loaded(self) -> Facts:
        """What is known of the engine, once it is loaded."""
        await self._loaded.wait()
        assert self.facts is not None  # noqa: S101 - set with the event
        return self.facts

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """Hand over a request; `on_output` is called on the event loop until it is finished.

        Where many processes submit at the same moment the engine's may still refuse: the only
        output then has the reason `QueueFull`.

        Raises:
            RequestError: the request can never be served.
            QueueFull: too many requests wait.
            Draining: the worker is about to end.
            EngineFailed: the engine is not loaded, or has ended.
        """
        facts = self._ready_facts()
        check_request(request, facts.limits, facts.vocab_size, self._board.num_unfinished)
        if request.request_id in self._callbacks:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._callbacks[request.request_id] = on_output
        self._count_unfinished()
        self._send(Submit.of(request))

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown and finished ones are ignored.

        Its pages are free before the engine's next step, and its last output says `abort`.
        """
        if request_id in self._callbacks:
            self._send(Abort(request_id))

    async def compile(self, structure: Structure) -> None:
        """Have the engine's process read a grammar, which it keeps for the requests that follow.

        Raises:
            InvalidRequest: it cannot be followed, or takes too long to compile.
            EngineFailed: the engine is not loaded, or has ended.
        """
        param = structure.param
        if not self._ready_facts().has_grammars:
            raise InvalidRequest(
                f"'{param}' needs a tokenizer of bytes, which this model has not; leave it out.",
                param,
                "unsupported_parameter",
            )
        try:
            compiled = await self._ask(partial(Compile, structure=structure), GRAMMAR_SECONDS)
        except TimeoutError:
            raise InvalidRequest(
                f"Invalid '{param}': no grammar could be made of it within "
                f"{GRAMMAR_SECONDS:.0f} s; simplify it.",
                param,
                "invalid_value",
            ) from None
        if isinstance(compiled, Compiled) and compiled.error is not None:
            raise InvalidRequest(compiled.error, param, "invalid_value")

    async def refresh(self) -> None:
        """Ask how the engine is doing; one that does not say is as it was a second ago."""
        if not self._is_heard or self.lost.is_set():
            # Before its first word it still starts Python.
            return
        try:
            await self._ask(Ask, STATUS_SECONDS)
        except TimeoutError:
            logger.warning("The engine's process does not say how it is doing")
        except EngineFailed:
            return

    def progress(self) -> Progress:
        """Where the engine stands, as far as this process knows."""
        if self._is_draining and self._progress.phase == "ready":
            return replace(self._progress, phase="draining")
        return self._progress

    def stats(self) -> EngineStats | None:
        """The engine's counters, as far as this process knows; None until it is loaded."""
        return self._stats

    async def drain(self, timeout_seconds: float) -> bool:
        """Take nothing new and wait for what runs; False when some had to be aborted."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            for request_id in list(self._callbacks):
                self.abort(request_id)
            return False
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        # Of a stream socket; uvloop's is no subclass.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        for body in self._frames.feed(data):
            self._handle(read_from_engine(body))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Called by the event loop: what is unfinished can only fail now."""
        if self._progress.phase != "failed":
            failure = Failure(EngineFailed.reason, "the engine's process has ended")
            self._progress = replace(self._progress, phase="failed", failure=failure)
        for request_id in list(self._callbacks):
            self._deliver(
                Output(
                    request_id,
                    finish_reason="error",
                    error="the engine's process has ended",
                    error_reason=EngineFailed.reason,
                )
            )
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineFailed("the engine's process has ended"))
        self.lost.set()

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Step(outputs=outputs):
                for output in outputs:
                    self._deliver(output)
            case Status():
                self._progress, self._stats, self._is_heard = message.progress, message.stats, True
                if message.facts is not None:
                    self.facts = message.facts
                    self._loaded.set()
                self._answer(message)
            case Compiled():
                self._answer(message)

    def _deliver(self, output: Output) -> None:
        on_output = self._callbacks.get(output.request_id)
        if on_output is None:
            return
        if output.finish_reason is not None:
            del self._callbacks[output.request_id]
            self._count_unfinished()
        on_output(output)

    def _answer(self, message: Status | Compiled) -> None:
        question = self._questions.get(-1 if message.number is None else message.number)
        if question is not None and not question.done():
            question.set_result(message)

    async def _ask(
        self, question: Callable[[int], ToEngine], timeout_seconds: float
    ) -> Status | Compiled:
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(number))
            return await asyncio.wait_for(answer, timeout_seconds)
        finally:
            del self._questions[number]

    def _ready_facts(self) -> Facts:
        """What is known of an engine that takes requests.

        Raises:
            Draining: the worker is about to end.
            EngineFailed: the engine is not loaded, or has ended.
        """
        if self._progress.phase == "failed":
            words = self._progress.failure.message if self._progress.failure else ""
            raise EngineFailed(f"the engine ended with an error: {words}")
        if self._is_draining:
            raise Draining("this worker is shutting down; send the request to another one")
        if self.facts is None:
            raise EngineFailed("the model is still loading; try again when /health/ready is 200")
        return self.facts

    def _count_unfinished(self) -> None:
        self._board.set(UNFINISHED, len(self._callbacks))
        if self._callbacks:
            self._idle.clear()
        else:
            self._idle.set()

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self.lost.is_set():
            self._transport.write(frame(message))
