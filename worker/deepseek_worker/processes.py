"""The processes of one worker: how they are started, told to end, and what they say at their end.

`serve.py` starts them with everything they are to know as one argument, and holds one end of a
socket to each: the control. When it closes, the process ends; so nothing is left behind when the
one that started them is killed. What ends a process early goes back over the same socket.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from deepseek_worker.config import EngineConfig, Frozen, ServerConfig
from deepseek_worker.errors import WorkerError
from deepseek_worker.logs import configure
from deepseek_worker.progress import Failure

DRAIN = b"d"
"""Tells an API process to take nothing new, finish what it has, and end."""
ATTACH = b"a"
"""Comes to the engine's process together with the socket of an API process."""
FLUSH_SECONDS = 5
"""What is left of an answer after the engine is done with it has this long."""
STOP_SECONDS = 5.0
"""A process that was told to end has this long."""

logger = logging.getLogger(__name__)


class Launch(Frozen):
    """What a process is told at its start; descriptors are of files that it inherits."""

    engine: EngineConfig
    server: ServerConfig
    started_at: float
    """When the worker started, in Unix seconds."""
    control: int
    """Descriptor of the socket to the process that started this one."""
    link: int = -1
    """Descriptor of an API process' socket to the engine."""
    listener: int = -1
    """Descriptor of the socket on which clients arrive, the same in all API processes."""
    board: int = -1
    """Descriptor of the memory that all API processes share."""
    index: int = 0
    """Which of the API processes this is."""
    num_api_processes: int = 1


def process_main(run: Callable[[Launch, socket.socket], None]) -> NoReturn:
    """What a process does that `Child` started: run, leave its last words, end."""
    launch = Launch.model_validate_json(sys.argv[1])
    configure(launch.server.log_format)
    control = socket.socket(fileno=launch.control)
    code = 0
    try:
        run(launch, control)
    except Exception as error:
        failure = Failure.of(error)
        code = failure.exit_code
        if not isinstance(error, WorkerError):
            logger.exception("Unexpected error", extra={"reason": failure.reason})
        # Who started this one may have gone.
        with suppress(OSError):
            control.setblocking(True)
            control.sendall(msgspec.msgpack.encode(failure))
    logging.shutdown()
    # Not sys.exit: a thread that loads a model or waits for a GPU would keep the process.
    os._exit(code)


class Child:
    """A process of this worker."""

    def __init__(self, module: str, launch: Launch, descriptors: Sequence[int] = ()) -> None:
        """Start it.

        Args:
            module: What it runs; its `main` calls `process_main`.
            launch: What it is told; `control` is filled in here.
            descriptors: Files that it inherits.
        """
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        told = launch.model_copy(update={"control": theirs.fileno()})
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, told.model_dump_json()],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *descriptors),
                # Signals of a terminal go to the one process that knows how to end all.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def tell(self, word: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a word over its control; one that has ended does not hear it."""
        try:
            socket.send_fds(self.control, [word], descriptors)
        except OSError:
            logger.debug("Process %d has ended", self.pid)

    def end(self) -> None:
        """Close its control."""
        # Not `close`: it may still have something to say.
        try:
            self.control.shutdown(socket.SHUT_WR)
        except OSError:
            logger.debug("Process %d has ended", self.pid)

    def kill(self) -> None:
        """End it at once, if it runs."""
        self._process.kill()

    def reap(self) -> int:
        """Wait for its end, which has begun; returns its exit code, negative for a signal."""
        self.control.close()
        return self._process.wait()


def last_words(data: bytes) -> Failure | None:
    """What a process left on its control; None where it ended without a word."""
    return msgspec.msgpack.decode(data, type=Failure) if data else None


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    reason = ", which the kernel sends when memory is used up" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{reason}"
