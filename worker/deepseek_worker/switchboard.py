"""The engine's process as API processes see it: a socket for each, and the thread that serves them.

This thread reads requests, hands grammars to threads that compile them, and says how the engine
is doing, also within a step. Outputs are gathered on the engine's thread while a step is delivered
and go to each process in one message, sent from that thread without waiting: what a socket does
not take at once is left to this one.
"""

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from deepseek_worker.driver import EngineThread
from deepseek_worker.engine import Engine
from deepseek_worker.errors import EngineFailed, InvalidRequest, WorkerError
from deepseek_worker.grammar import GrammarCompiler
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
    read_to_engine,
)
from deepseek_worker.sequence import Guide, Output, Structure

HEARTBEAT_SECONDS = 1.0
LOADING_HEARTBEAT_SECONDS = 0.1
RECEIVE_BYTES = 1 << 18
# An API process that leaves so much unread is stuck.
MAX_UNREAD_BYTES = 64 << 20
GRAMMAR_THREADS = 2

Loaded = tuple[Engine, GrammarCompiler | None]
Load = Callable[[Callable[[float], None]], Loaded]
logger = logging.getLogger(__name__)


class Switchboard:
    """Connects API processes with the engine's thread."""

    def __init__(self, load: Load, control: socket.socket) -> None:
        """Prepare; nothing runs before `run`.

        Args:
            load: Makes the engine and what follows grammars for it; called on its thread.
            control: Brings the sockets of API processes, and the end when it closes.
        """
        self.engine = EngineThread(partial(self._load, load), self._send_outputs)
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._peers: list[_Peer] = []
        self._touched: list[_Peer] = []
        self._facts: Facts | None = None
        self._grammars: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(GRAMMAR_THREADS, "grammar")
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_ending = False
        self._has_told_failure = False

    def run(self) -> None:
        """Load and serve until the control socket closes.

        Raises:
            WorkerError: the engine could not be loaded.
        """
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ, self._read_control)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._wake_up)
        self.engine.start()
        beat_at = 0.0
        try:
            while not self._is_ending:
                for key, mask in self._selector.select(max(0.0, beat_at - time.monotonic())):
                    key.data(mask)
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._beat()
        finally:
            for peer in list(self._peers):
                self._hang_up(peer)
            self._selector.close()

    def stop(self) -> None:
        """Have `run` return; may be called from any thread."""
        self._is_ending = True
        self._wake()

    def _load(self, load: Load, report: Callable[[float], None]) -> Engine:
        engine, self._grammars = load(report)
        has_grammars = self._grammars is not None
        self._facts = Facts(engine.device, engine.vocab_size, engine.limits, has_grammars)
        return engine

    def _beat(self) -> float:
        """Tell everybody how the engine is doing; returns the seconds until the next time."""
        status = self._status(None)
        for peer in self._peers:
            peer.send(status)
        if status.progress.phase == "loading":
            return LOADING_HEARTBEAT_SECONDS
        if status.progress.phase == "failed":
            self._tell_of_failure()
        return HEARTBEAT_SECONDS

    def _tell_of_failure(self) -> None:
        """End with what ended the load; of an engine that served, only log it, once."""
        error = self.engine.error
        if self._facts is None:
            raise error or EngineFailed("the model could not be loaded")
        if not self._has_told_failure:
            self._has_told_failure = True
            logger.error("The engine ended with an error", exc_info=error)

    def _status(self, number: int | None) -> Status:
        progress = self.engine.progress()
        facts = None if progress.phase == "loading" else self._facts
        return Status(number, progress, self.engine.stats(), facts)

    def _read_control(self, _: int) -> None:
        data, sockets, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            self._is_ending = True
        for number in sockets:
            link = socket.socket(fileno=number)
            link.setblocking(False)
            peer = _Peer(link, self._wake)
            self._peers.append(peer)
            self._selector.register(link, selectors.EVENT_READ, partial(self._attend, peer))
            peer.send(self._status(None))

    def _attend(self, peer: "_Peer", mask: int) -> None:
        if peer.is_closed:
            return
        if mask & selectors.EVENT_WRITE and peer.send_rest():
            self._selector.modify(
                peer.link, selectors.EVENT_READ, self._selector.get_key(peer.link).data
            )
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = peer.link.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(peer)
            return
        for body in peer.frames.feed(data):
            self._handle(peer, read_to_engine(body))

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_writer, b"\0")

    def _wake_up(self, _: int) -> None:
        """Watch for the moment at which sockets that were full take more."""
        os.read(self._wake_reader, 4096)
        for peer in list(self._peers):
            if peer.num_unread_bytes > MAX_UNREAD_BYTES:
                logger.error("An API process reads nothing any more; dropping its requests")
                self._hang_up(peer)
            elif peer.num_unread_bytes:
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(peer.link, both, self._selector.get_key(peer.link).data)

    def _hang_up(self, peer: "_Peer") -> None:
        """An API process has gone: nobody waits for its requests any more."""
        self._selector.unregister(peer.link)
        self._peers.remove(peer)
        peer.close()
        with peer.entrance:
            peer.compiling.clear()
            for request_id in list(peer.requests):
                self.engine.abort(request_id)

    def _handle(self, peer: "_Peer", message: ToEngine) -> None:
        match message:
            case Submit(structure=None):
                self._submit(peer, message)
            case Submit():
                peer.compiling.add(message.request_id)
                self._threads.submit(self._submit_structured, peer, message)
            case Abort(request_id=request_id):
                with peer.entrance:
                    peer.compiling.discard(request_id)
                    self.engine.abort(request_id)
            case Compile():
                self._threads.submit(self._compile, peer, message)
            case Ask(number=number):
                peer.send(self._status(number))

    def _submit(self, peer: "_Peer", message: Submit, guide: Guide | None = None) -> None:
        request_id = message.request_id
        request = replace(message.request(), guide=guide)
        # First, because the last output takes it away again.
        peer.requests.add(request_id)
        try:
            self.engine.submit(request, partial(self._gather, peer))
        except WorkerError as error:
            peer.requests.discard(request_id)
            peer.refuse(request_id, error)

    def _submit_structured(self, peer: "_Peer", message: Submit) -> None:
        """On a thread for grammars: mostly the grammar is still known."""
        assert message.structure is not None  # noqa: S101 - else there is nothing to compile
        try:
            guide = self._guide(message.structure)
        # A panic of the library is no Exception.
        except BaseException as error:
            with peer.entrance:
                peer.compiling.discard(message.request_id)
            # Without a last output the request would count as unfinished for ever.
            peer.refuse(message.request_id, _failure(error))
            return
        with peer.entrance:
            if message.request_id in peer.compiling:
                peer.compiling.discard(message.request_id)
                self._submit(peer, message, guide)
            else:
                peer.send(Step([Output(message.request_id, finish_reason="abort")]))

    def _guide(self, structure: Structure) -> Guide:
        if self._grammars is None:
            raise EngineFailed("there are no grammars for this tokenizer")
        return self._grammars.compile(structure)()

    def _compile(self, peer: "_Peer", message: Compile) -> None:
        """On a thread for grammars."""
        error = None
        try:
            if self._grammars is not None:
                self._grammars.compile(message.structure)
        except InvalidRequest as invalid:
            error = str(invalid)
        except BaseException as stumbled:
            param = message.structure.param
            error = f"Invalid '{param}': no grammar can be made of it: {_failure(stumbled)}."
        peer.send(Compiled(message.number, error))

    def _gather(self, peer: "_Peer", output: Output) -> None:
        """On the engine's thread: keep an output until all of the step are there."""
        if not peer.outputs:
            self._touched.append(peer)
        peer.outputs.append(output)
        if output.finish_reason is not None:
            peer.requests.discard(output.request_id)

    def _send_outputs(self) -> None:
        """On the engine's thread, after each step."""
        for peer in self._touched:
            peer.send(Step(peer.outputs))
            peer.outputs = []
        self._touched.clear()


def _failure(error: BaseException) -> WorkerError:
    """What to say of it; the log has the rest of what nobody expected."""
    if isinstance(error, WorkerError):
        return error
    logger.error("A grammar could not be compiled", exc_info=error)
    return WorkerError(f"the compiler failed ({type(error).__name__})")


class _Peer:
    """One API process."""

    def __init__(self, link: socket.socket, wake: Callable[[], None]) -> None:
        self.link = link
        self.frames = Frames()
        self.requests: set[str] = set()
        """What the engine has of it."""
        self.compiling: set[str] = set()
        """What waits for its grammar."""
        self.entrance = threading.Lock()
        """Held while a request passes from `compiling` to `requests`, or is aborted."""
        self.outputs: list[Output] = []
        self._wake = wake
        self._lock = threading.Lock()
        self._rest = bytearray()
        self.is_closed = False

    @property
    def num_unread_bytes(self) -> int:
        """What its socket did not take yet."""
        return len(self._rest)

    def send(self, message: FromEngine) -> None:
        """Send without waiting; may be called from any thread."""
        data = frame(message)
        with self._lock:
            if self.is_closed:
                return
            if not self._rest:
                data = data[self._try(data) :]
            self._rest += data
            is_left = bool(data)
        if is_left:
            self._wake()

    def send_rest(self) -> bool:
        """Send what was left; returns whether nothing is left any more."""
        with self._lock:
            if not self.is_closed:
                del self._rest[: self._try(self._rest)]
            return not self._rest

    def refuse(self, request_id: str, error: WorkerError) -> None:
        """Say that a request was not taken."""
        output = Output(
            request_id, finish_reason="error", error=str(error), error_reason=error.reason
        )
        self.send(Step([output]))

    def close(self) -> None:
        """Let go of the socket; what is sent later goes nowhere."""
        with self._lock:
            self.is_closed = True
            self.link.close()

    def _try(self, data: bytes | bytearray) -> int:
        try:
            return self.link.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            # It has gone, which reading from it will tell.
            return len(data)
