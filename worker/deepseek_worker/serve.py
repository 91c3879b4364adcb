"""The life of `deepseek-worker serve`: open the port, load, answer once, serve, drain, end."""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import uvicorn

from deepseek_worker.config import EngineConfig, ServerConfig
from deepseek_worker.connections import ConnectionLimits, protocol
from deepseek_worker.driver import EngineThread
from deepseek_worker.engine import Engine
from deepseek_worker.errors import InvalidFlags, WorkerError
from deepseek_worker.generation import Courier, Inbox
from deepseek_worker.metrics import Metrics
from deepseek_worker.prompts import Model
from deepseek_worker.secret_files import SecretFile
from deepseek_worker.sequence import Request, SamplingParams
from deepseek_worker.server import Api, Worker
from deepseek_worker.startup import load_engine
from deepseek_worker.tokenizer import load_tokenizer
from deepseek_worker.weights.loading import ReportProgress

# An idle connection outlives the pools of the usual clients, so that they, who know whether they
# are about to send, close it.
KEEP_ALIVE_SECONDS = 75
# What is left of an answer after the engine is done with it.
FLUSH_SECONDS = 5
STOP_SECONDS = 5.0
POLL_SECONDS = 0.05

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn, which leaves the signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: SIGTERM drains before it ends."""
        yield


async def serve(engine_config: EngineConfig, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT has drained the worker.

    Raises:
        InvalidFlags: the port or a token file cannot be used.
        ModelError: the model cannot be served.
        WorkerError: its first answer failed.
    """
    loop, loaded = asyncio.get_running_loop(), asyncio.Event()

    def load(report: ReportProgress) -> Engine:
        try:
            return load_engine(engine_config, report)
        finally:
            loop.call_soon_threadsafe(loaded.set)

    engine = EngineThread(load)
    worker = _worker(engine, engine_config, config)
    # Before the model is loaded: probes are to hear of the progress.
    listener = _listen(config)
    limits = ConnectionLimits(config.connection_max_requests, config.connection_max_seconds)
    server = Server(_uvicorn_config(worker, limits))
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stopping, number)

    engine.start()
    tasks: dict[str, asyncio.Task[Any]] = {
        "serving": asyncio.create_task(server.serve(sockets=[listener])),
        "starting": asyncio.create_task(_bring_up(worker, engine_config, loaded)),
        "stopping": asyncio.create_task(stopping.wait()),
        "watching": asyncio.create_task(_tell_of_failure(engine)),
    }
    try:
        # Ends well only with the worker: serving and starting return early by raising.
        await _first_failure_or(tasks)
        tasks["starting"].cancel()
        await _drain(engine, limits, config.drain_seconds)
    finally:
        for name in ("starting", "stopping", "watching"):
            tasks[name].cancel()
        server.should_exit = True
        await tasks["serving"]
        await _end(engine)


async def _first_failure_or(tasks: dict[str, "asyncio.Task[Any]"]) -> None:
    """Wait for the signal to stop; raise what ends the start-up before it."""
    waiting = set(tasks.values())
    while tasks["stopping"] in waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


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


def _worker(engine: EngineThread, engine_config: EngineConfig, config: ServerConfig) -> Worker:
    served_name = config.served_model_name or engine_config.model.resolve().stem
    return Worker(
        config=config,
        engine=engine,
        courier=Courier(asyncio.get_running_loop()),
        metrics=Metrics(engine),
        served_name=served_name,
        model_id=config.model_id or served_name,
        version=_version(),
        state_token=_secret(config.state_token_file, "--state-token-file"),
        api_keys=_secret(config.api_key_file, "--api-key-file"),
    )


def _secret(path: Path | None, flag: str) -> SecretFile | None:
    return None if path is None else SecretFile(path, flag)


def _version() -> str:
    try:
        return version("deepseek-worker")
    except PackageNotFoundError:
        return "source"


def _uvicorn_config(worker: Worker, limits: ConnectionLimits) -> uvicorn.Config:
    return uvicorn.Config(
        Api(worker).application(),
        http=protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


async def _bring_up(worker: Worker, engine_config: EngineConfig, loaded: asyncio.Event) -> None:
    logger.info("Loading", extra={"model": str(engine_config.model)})
    tokenizer = await asyncio.to_thread(load_tokenizer, engine_config.model)
    await loaded.wait()
    try:
        engine = worker.engine.wait_until_loaded(STOP_SECONDS)
    except WorkerError as error:
        # What ended the load says more than that it ended.
        raise error.__cause__ or error from None
    worker.model = Model(tokenizer, engine.max_context_tokens, engine.vocab_size, engine.device)
    await _answer_once(worker, worker.model)
    worker.is_warm = True
    logger.info(
        "Ready",
        extra={
            "served_name": worker.served_name,
            "model_id": worker.model_id,
            "device": engine.device,
            "max_context_tokens": engine.max_context_tokens,
        },
    )


async def _answer_once(worker: Worker, model: Model) -> None:
    """A real request, through everything that clients' requests go through on their way."""
    prompt = tuple(model.tokenizer.encode("Hello"))[: model.max_context_tokens - 1]
    inbox = Inbox()
    worker.engine.submit(
        Request("warm-up", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)),
        partial(worker.courier.post, inbox),
    )
    while True:
        for output in await inbox.take():
            if output.finish_reason == "error":
                raise WorkerError(f"the model's first answer failed: {output.error}")
            if output.finish_reason is not None:
                return


async def _tell_of_failure(engine: EngineThread) -> None:
    """Log once that a loaded engine has failed; probes and /state say so from then on."""
    while True:
        await asyncio.sleep(1.0)
        progress = engine.progress()
        if progress.phase == "failed" and engine.stats() is not None:
            logger.error("The engine ended with an error", exc_info=progress.error)
            return


async def _drain(engine: EngineThread, limits: ConnectionLimits, seconds: float) -> None:
    limits.is_draining = True
    logger.info("Draining", extra={"seconds": seconds})
    finished = await asyncio.to_thread(engine.drain, seconds)
    if not finished:
        logger.warning("Requests were aborted, because they took longer than --drain-seconds")


async def _end(engine: EngineThread) -> None:
    """End the engine's thread; one that does not end, in a load or on a dead GPU, is left."""
    if engine.stats() is None or engine.progress().phase == "failed":
        return
    # Not in a thread of the event loop's, for which its end would wait.
    stopper = threading.Thread(target=engine.stop, daemon=True)
    stopper.start()
    deadline = time.monotonic() + STOP_SECONDS
    while stopper.is_alive():
        if time.monotonic() > deadline:
            logger.warning("The engine does not end; leaving it")
            return
        await asyncio.sleep(POLL_SECONDS)


def _stop(stopping: asyncio.Event, number: int) -> None:
    if stopping.is_set():
        logger.warning("Told to stop twice; ending at once")
        os._exit(128 + number)
    stopping.set()
