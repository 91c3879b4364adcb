"""The life of `deepseek-worker serve`: open the port, start the processes, watch, drain, end.

This process computes nothing and imports no torch. One child owns the engine and the device, one
or more own HTTP and text. It connects each of those with the engine, puts another in the place of
one that died, and ends them all together.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from deepseek_worker.board import Board, create_board
from deepseek_worker.config import EngineConfig, ServerConfig, served_name
from deepseek_worker.errors import InvalidFlags, ProcessEnded
from deepseek_worker.processes import (
    ATTACH,
    DRAIN,
    FLUSH_SECONDS,
    STOP_SECONDS,
    Child,
    Launch,
    how_it_ended,
    last_words,
)
from deepseek_worker.processors import default_api_processes, usable_cpus
from deepseek_worker.progress import Failure
from deepseek_worker.secret_files import SecretFile

ENGINE, API = "deepseek_worker.engine_process", "deepseek_worker.api_process"
# How long API processes say why they do not answer any more, once the engine has gone.
FAREWELL_SECONDS = 1.0
# More would be put in the place of those that ended only to end too.
MAX_RESTARTS, RESTART_SECONDS = 5, 60.0

logger = logging.getLogger(__name__)


async def serve(engine_config: EngineConfig, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT has drained the worker.

    Raises:
        InvalidFlags: the port or a token file cannot be used, or an adapter has the model's name.
        ProcessEnded: the model cannot be served, or the engine's process has ended.
    """
    for path, flag in (
        (config.state_token_file, "--state-token-file"),
        (config.api_key_file, "--api-key-file"),
    ):
        if path is not None:
            SecretFile(path, flag)
    _check_names(engine_config, config)
    supervisor = Supervisor(engine_config, config, _listen(config))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, supervisor, stopping, number)
    await supervisor.run(stopping)


def _check_names(engine_config: EngineConfig, config: ServerConfig) -> None:
    taken = (served_name(engine_config, config), config.model_id)
    for adapter in engine_config.lora:
        if adapter.name in taken:
            raise InvalidFlags(
                f"--lora {adapter.name}={adapter.path} has a name of the model itself; give the"
                " adapter another one"
            )


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise InvalidFlags(
            f"cannot listen on --host {config.host} --port {config.port}: {error.strerror}"
        ) from error
    return listener


def _stop(supervisor: "Supervisor", stopping: asyncio.Event, number: int) -> None:
    if stopping.is_set():
        logger.warning("Told to stop twice; ending at once")
        supervisor.kill()
        os._exit(128 + number)
    stopping.set()


class Restarts:
    """Whether ended processes are still worth replacing. Pure: time is an argument."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_RESTARTS)

    def is_allowed(self, now: float) -> bool:
        """Whether to replace one now, by the monotonic clock; counts it if so."""
        if len(self._times) == MAX_RESTARTS and now - self._times[0] < RESTART_SECONDS:
            return False
        self._times.append(now)
        return True


@dataclass(frozen=True, slots=True)
class _Running:
    child: Child
    ended: "asyncio.Task[tuple[int, Failure | None]]"
    """Its exit code and last words."""


class Supervisor:
    """The processes of one worker."""

    def __init__(
        self, engine_config: EngineConfig, config: ServerConfig, listener: socket.socket
    ) -> None:
        self._config = config
        self._listener = listener
        num_apis = config.api_processes or default_api_processes(usable_cpus())
        self._board_fd = create_board(num_apis)
        self._board = Board(self._board_fd, num_apis)
        self._launch = Launch(
            engine=engine_config,
            server=config,
            started_at=time.time(),
            control=-1,
            board=self._board_fd,
            listener=listener.fileno(),
            num_api_processes=num_apis,
        )
        self._engine: _Running | None = None
        self._apis: list[_Running] = []
        self._restarts = Restarts()

    async def run(self, stopping: asyncio.Event) -> None:
        """Start all processes, keep them until told to stop, and end them.

        Raises:
            ProcessEnded: one ended without which the worker cannot go on.
        """
        try:
            self._engine = _started(Child(ENGINE, self._launch))
            self._apis = [
                self._api(self._engine, index) for index in range(self._launch.num_api_processes)
            ]
            await self._watch(self._engine, stopping)
            await self._drain()
        finally:
            await self._end()

    def kill(self) -> None:
        """End all processes at once."""
        for running in self._all():
            running.child.kill()

    def _all(self) -> list[_Running]:
        return [*self._apis, *([self._engine] if self._engine else [])]

    def _api(self, engine: _Running, index: int) -> _Running:
        """Start an API process and connect it with the engine's."""
        ours, engines = socket.socketpair()
        with ours, engines:
            told = self._launch.model_copy(update={"index": index, "link": ours.fileno()})
            descriptors = (ours.fileno(), self._board_fd, self._listener.fileno())
            child = Child(API, told, descriptors)
            engine.child.tell(ATTACH, [engines.fileno()])
        return _started(child)

    async def _watch(self, engine: _Running, stopping: asyncio.Event) -> None:
        stop = asyncio.create_task(stopping.wait())
        try:
            while not stop.done():
                tasks = {stop, *(running.ended for running in self._all())}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if engine.ended.done():
                    await self._lose_engine(*engine.ended.result())
                for index, api in enumerate(self._apis):
                    if api.ended.done():
                        self._replace(engine, index, *api.ended.result())
        finally:
            stop.cancel()

    async def _lose_engine(self, code: int, words: Failure | None) -> None:
        if words is not None:
            raise ProcessEnded(words.message, words.reason, words.exit_code)
        message = f"the engine's process {how_it_ended(code)}"
        logger.error("%s; ending", message)
        await asyncio.sleep(FAREWELL_SECONDS)
        raise ProcessEnded(message)

    def _replace(self, engine: _Running, index: int, code: int, words: Failure | None) -> None:
        if words is not None and not self._board.is_warm:
            raise ProcessEnded(words.message, words.reason, words.exit_code)
        message = f"an API process {how_it_ended(code)}{f': {words.message}' if words else ''}"
        if not self._restarts.is_allowed(time.monotonic()):
            raise ProcessEnded(f"{message}, after {MAX_RESTARTS} others within a minute")
        logger.error("%s; starting another", message, extra={"api_process": index})
        self._board.forget_requests(index)
        self._apis[index] = self._api(engine, index)

    async def _drain(self) -> None:
        seconds = self._config.drain_seconds
        logger.info("Draining", extra={"seconds": seconds})
        for api in self._apis:
            api.child.tell(DRAIN)
        await _ended(self._apis, seconds + FLUSH_SECONDS + STOP_SECONDS)

    async def _end(self) -> None:
        """API processes first: what they still have to say may need the engine."""
        for group in (self._apis, self._all()):
            for running in group:
                running.child.end()
            await _ended(group, FLUSH_SECONDS + STOP_SECONDS)
        self._listener.close()
        os.close(self._board_fd)


def _started(child: Child) -> _Running:
    return _Running(child, asyncio.create_task(_end_of(child)))


async def _end_of(child: Child) -> tuple[int, Failure | None]:
    """Wait for a process to end: then its control closes."""
    loop, data = asyncio.get_running_loop(), b""
    with suppress(ConnectionError):
        while piece := await loop.sock_recv(child.control, 4096):
            data += piece
    return await asyncio.to_thread(child.reap), last_words(data)


async def _ended(group: Iterable[_Running], seconds: float) -> None:
    """Wait for processes that were told to end; kill those that do not."""
    tasks = [running.ended for running in group]
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=seconds)
    for running in group:
        if running.ended in late:
            logger.warning("A process does not end; killing it", extra={"pid": running.child.pid})
            running.child.kill()
    if late:
        await asyncio.wait(late)
