"""The one thread that owns the engine, and the only door to it.

The server calls `submit` and `abort` from its event loop; the thread steps the engine as long
as there is work and hands every `Output` to the callback given with the request. Callbacks run
on the engine's thread: they must only pass the output on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deepseek_worker.engine import Engine
from deepseek_worker.errors import Draining, EngineFailed, WorkerError
from deepseek_worker.sequence import Output, Request
from deepseek_worker.stats import EngineStats

logger = logging.getLogger(__name__)

Phase = Literal["loading", "ready", "draining", "failed"]
OnOutput = Callable[[Output], None]
LoadEngine = Callable[[Callable[[float], None]], Engine]


@dataclass(frozen=True, slots=True)
class Progress:
    """How the thread is doing; readable at any time without waiting for a step."""

    phase: Phase
    loading_progress: float
    """0 to 1."""
    started_at: float
    """Unix seconds."""
    last_step_at: float
    """Unix seconds of the last finished step, or of the last moment without work."""
    error: WorkerError | Exception | None
    """What ended the thread, in phase `failed`."""


class EngineThread:
    """Runs `load` and then the engine's steps in one thread of its own."""

    def __init__(self, load: LoadEngine) -> None:
        self._load = load
        self._wake = threading.Condition()
        self._inbox: deque[Request | str] = deque()
        self._callbacks: dict[str, OnOutput] = {}
        self._engine: Engine | None = None
        self._stats: EngineStats | None = None
        self._phase: Phase = "loading"
        self._loading_progress = 0.0
        self._error: Exception | None = None
        self._stopping = False
        self._started_at = time.time()
        self._last_step_at = self._started_at
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin loading; `progress()` tells how far it is."""
        self._thread.start()

    def wait_until_loaded(self, timeout_seconds: float | None = None) -> Engine:
        """The engine, once it is loaded.

        Raises:
            EngineFailed: loading ended with an error, which is the cause.
            TimeoutError: it is still loading.
        """
        if not self._loaded.wait(timeout_seconds):
            raise TimeoutError(f"the model was not loaded within {timeout_seconds} s")
        if self._engine is None:
            raise EngineFailed(f"the model could not be loaded: {self._error}") from self._error
        return self._engine

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """Queue a request; `on_output` is called from the engine's thread until it is finished.

        Raises:
            RequestError: the request can never be served.
            QueueFull: too many requests wait.
            Draining: the worker is about to end.
            EngineFailed: the engine is not loaded, or its thread has ended.
        """
        with self._wake:
            self._refuse_unless_ready()
            assert self._engine is not None  # noqa: S101 - set before the phase is ready
            self._engine.validate(request, num_unfinished=len(self._callbacks))
            if request.request_id in self._callbacks:
                raise ValueError(f"request id {request.request_id!r} is in use")
            self._callbacks[request.request_id] = on_output
            self._inbox.append(request)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown and finished ones are ignored.

        Its pages are free before the next step, and its last output says `abort`.
        """
        with self._wake:
            if request_id in self._callbacks:
                self._inbox.append(request_id)
                self._wake.notify()

    def progress(self) -> Progress:
        """Where the thread stands."""
        return Progress(
            self._phase, self._loading_progress, self._started_at, self._last_step_at, self._error
        )

    def stats(self) -> EngineStats | None:
        """The engine's counters after its last step; None until it is loaded."""
        return self._stats

    def drain(self, timeout_seconds: float) -> bool:
        """Take nothing new and wait for what runs; False when some had to be aborted."""
        deadline = time.monotonic() + timeout_seconds
        with self._wake:
            if self._phase in ("ready", "loading"):
                self._phase = "draining"
            finished = self._wake.wait_for(
                lambda: not self._callbacks or self._phase == "failed",
                max(0.0, deadline - time.monotonic()),
            )
            self._inbox.extend(self._callbacks)
            self._wake.notify_all()
        return finished

    def stop(self) -> None:
        """Abort everything and end the thread."""
        with self._wake:
            self._inbox.extend(self._callbacks)
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _refuse_unless_ready(self) -> None:
        if self._phase == "draining":
            raise Draining("this worker is shutting down; send the request to another one")
        if self._phase == "failed":
            raise EngineFailed(f"the engine ended with an error: {self._error}")
        if self._phase == "loading":
            raise EngineFailed("the model is still loading; try again when /health/ready is 200")

    def _run(self) -> None:
        try:
            engine = self._load(self._report_loading)
            with self._wake:
                self._engine = engine
                self._stats = engine.stats()
                self._last_step_at = time.time()
                if self._phase == "loading":
                    self._phase = "ready"
            self._loaded.set()
            while self._take_inbox(engine):
                self._deliver(engine.step())
                self._stats = engine.stats()
                self._last_step_at = time.time()
        except Exception as error:
            self._fail(error)

    def _report_loading(self, fraction: float) -> None:
        self._loading_progress = fraction

    def _take_inbox(self, engine: Engine) -> bool:
        """Wait for work and hand it to the engine; False when the thread shall end."""
        with self._wake:
            while not (self._inbox or self._stopping or engine.has_work()):
                self._last_step_at = time.time()
                self._wake.wait(timeout=1.0)
            items = list(self._inbox)
            self._inbox.clear()
            stopping = self._stopping
        for item in items:
            if isinstance(item, Request):
                engine.add(item)
            else:
                self._deliver(engine.abort(item))
        self._stats = engine.stats()
        return not stopping or engine.has_work()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            on_output = self._callbacks[output.request_id]
            if output.finish_reason is None:
                _pass_on(on_output, output)
                continue
            with self._wake:
                # Before anybody who drains wakes up: what he sees as finished is delivered.
                del self._callbacks[output.request_id]
                _pass_on(on_output, output)
                self._wake.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._error = error
            self._phase = "failed"
            callbacks = dict(self._callbacks)
            self._callbacks.clear()
            self._inbox.clear()
            self._loaded.set()
            self._wake.notify_all()
        for request_id, on_output in callbacks.items():
            _pass_on(
                on_output,
                Output(
                    request_id,
                    finish_reason="error",
                    error=f"the engine ended with an error: {error}",
                    error_reason="EngineFailed",
                ),
            )


def _pass_on(on_output: OnOutput, output: Output) -> None:
    """A receiver that fails, such as a closed event loop, is no reason for others to end."""
    try:
        on_output(output)
    except Exception:
        logger.exception("The receiver of request %s failed", output.request_id)
