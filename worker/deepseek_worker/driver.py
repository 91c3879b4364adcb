"""The one thread that owns the engine, and the only door to it.

`submit` and `abort` may be called from any thread; this one steps the engine as long as there is
work, and hands every `Output` to the callback given with its request. Callbacks run on the
engine's thread: they must only pass the output on. After the last one of a step `on_step` is
called, so that what belongs together can go together.
"""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from deepseek_worker.engine import Engine
from deepseek_worker.errors import DeviceFault, EngineFailed
from deepseek_worker.memory.faults import is_device_fault
from deepseek_worker.progress import Failure, Phase, Progress
from deepseek_worker.sequence import Output, Request
from deepseek_worker.stats import EngineStats

logger = logging.getLogger(__name__)

OnOutput = Callable[[Output], None]
LoadEngine = Callable[[Callable[[float], None]], Engine]


def _nothing() -> None:
    """Whoever takes outputs one by one need not know where a step ends."""


class EngineThread:
    """Runs `load` and then the engine's steps in one thread of its own."""

    def __init__(self, load: LoadEngine, on_step: Callable[[], None] = _nothing) -> None:
        self._load = load
        self._on_step = on_step
        self._wake = threading.Condition()
        self._inbox: deque[Request | str] = deque()
        self._callbacks: dict[str, OnOutput] = {}
        self._engine: Engine | None = None
        self._stats: EngineStats | None = None
        self._phase: Phase = "loading"
        self._loading_progress = 0.0
        self._error: BaseException | None = None
        self._stopping = False
        self._started_at = time.time()
        self._last_step_at = self._started_at
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin loading; `progress()` tells how far it is."""
        self._thread.start()

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """Queue a request; `on_output` is called from the engine's thread until it is finished.

        Raises:
            RequestError: the request can never be served.
            QueueFull: too many requests wait.
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
        failure = None if self._error is None else Failure.of(self._error)
        return Progress(
            self._phase, self._loading_progress, self._started_at, self._last_step_at, failure
        )

    @property
    def error(self) -> BaseException | None:
        """What ended the thread."""
        return self._error

    def stats(self) -> EngineStats | None:
        """The engine's counters after its last step; None until it is loaded."""
        return self._stats

    def stop(self) -> None:
        """Abort everything and end the thread."""
        with self._wake:
            self._inbox.extend(self._callbacks)
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _refuse_unless_ready(self) -> None:
        if self._phase == "failed":
            raise EngineFailed(f"the engine ended with an error: {self._error}")
        if self._phase == "loading":
            raise EngineFailed("the model is still loading; try again when /health/ready is 200")

    def _run(self) -> None:
        try:
            engine = self._load(self._report_loading)
            # What a start leaves lives on: the collector need not look at it between steps.
            gc.collect()
            gc.freeze()
            with self._wake:
                self._engine = engine
                self._stats = engine.stats()
                self._last_step_at = time.time()
                self._phase = "ready"
            while self._take_inbox(engine):
                outputs = engine.step()
                self._stats = engine.stats()
                self._last_step_at = time.time()
                self._deliver(outputs)
        except BaseException as error:
            # A panic in a library's Rust is no `Exception`.
            self._fail(error)

    def _report_loading(self, fraction: float) -> None:
        self._loading_progress = fraction

    def _take_inbox(self, engine: Engine) -> bool:
        """Wait for work and hand it to the engine; False when the thread shall end."""
        with self._wake:
            while not (self._inbox or self._stopping or engine.has_work()):
                self._last_step_at = time.time()
                self._wake.wait(timeout=1.0)
            # Whoever arrives while the device is busy is still in the next step.
            deadline = time.monotonic() + engine.spare_seconds()
            while (left := deadline - time.monotonic()) > 0 and not self._stopping:
                self._wake.wait(left)
            items = list(self._inbox)
            self._inbox.clear()
            stopping = self._stopping
        aborted: list[Output] = []
        for item in items:
            if isinstance(item, Request):
                engine.add(item)
            else:
                aborted += engine.abort(item)
        self._stats = engine.stats()
        self._deliver(aborted)
        return not stopping or engine.has_work()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            on_output = self._callbacks[output.request_id]
            if output.finish_reason is not None:
                del self._callbacks[output.request_id]
            _pass_on(on_output, output)
        if outputs:
            self._on_step()

    def _fail(self, error: BaseException) -> None:
        if is_device_fault(error):
            # By its name the operator knows that a restart on this device does not help.
            error = DeviceFault(f"the device failed: {error}")
        with self._wake:
            self._error = error
            self._phase = "failed"
            callbacks = dict(self._callbacks)
            self._callbacks.clear()
            self._inbox.clear()
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
        self._on_step()


def _pass_on(on_output: OnOutput, output: Output) -> None:
    """A receiver that fails is no reason for others to end."""
    try:
        on_output(output)
    except Exception:
        logger.exception("The receiver of request %s failed", output.request_id)
