"""The life of an API process: HTTP, text and tokens for one engine in another process.

It may not import torch. Several share one listening socket; all give the same answers.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from deepseek_worker.board import WARM, Board
from deepseek_worker.client import EngineClient
from deepseek_worker.config import EngineConfig, ServerConfig, served_name
from deepseek_worker.connections import ConnectionLimits, protocol
from deepseek_worker.errors import EngineFailed, WorkerError
from deepseek_worker.generation import Inbox
from deepseek_worker.metrics import Metrics
from deepseek_worker.processes import DRAIN, FLUSH_SECONDS, Launch, process_main
from deepseek_worker.prompts import Model
from deepseek_worker.secret_files import SecretFile
from deepseek_worker.sequence import Request, SamplingParams
from deepseek_worker.server import Api, Worker
from deepseek_worker.tokenizer import load_tokenizer

# An idle connection outlives the pools of the usual clients, so that they, who know whether they
# are about to send, close it.
KEEP_ALIVE_SECONDS = 75
# How long a connection that was open at SIGTERM may still ask, at most half of --drain-seconds. A
# client that keeps it does not know yet; the next answer tells it to connect elsewhere.
GOODBYE_SECONDS = 5.0
POLL_SECONDS = 0.05
# An engine that ended is noticed by the process that started all; if it says nothing, the engine
# lives and has hung up on this process alone.
LOST_SECONDS = 5.0

# By its name: the module runs as `__main__`.
logger = logging.getLogger("deepseek_worker.api_process")


class Server(uvicorn.Server):
    """uvicorn, which leaves the signals to the process that started this one."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: a control tells when to drain and when to end."""
        yield


def main() -> None:
    """What `serve.py` starts."""
    process_main(run)


def run(launch: Launch, control: socket.socket) -> None:
    """Serve until the control says to end.

    Raises:
        WorkerError: the tokenizer cannot be used, or the first answer failed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(launch, control))


async def serve(launch: Launch, control: socket.socket) -> None:
    """Serve until the control says to end; see `run`."""
    board = Board(launch.board, launch.num_api_processes, launch.index)
    client = EngineClient(board, launch.started_at)
    worker = api_worker(client, board, launch.engine, launch.server, launch.started_at)
    limits = ConnectionLimits(
        launch.server.connection_max_requests, launch.server.connection_max_seconds
    )
    server = Server(uvicorn_config(worker, limits))
    control.setblocking(False)
    await client.connect(socket.socket(fileno=launch.link))

    tasks: dict[str, asyncio.Task[Any]] = {
        "starting": asyncio.create_task(_bring_up(worker, launch.engine, launch.index)),
        "told": asyncio.create_task(_told(control)),
        "lost": asyncio.create_task(_lost(client)),
    }
    # The first ones listen before the model is loaded: probes are to hear of the progress. One
    # that takes another's place listens when it can answer.
    if not board.is_warm or await _first_of(tasks, "starting"):
        listener = socket.socket(fileno=launch.listener)
        tasks["serving"] = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _first_of(tasks, "told")
        if tasks["told"].result() == DRAIN:
            tasks["starting"].cancel()
            worker.is_ending = True
            await _drain(client, limits, launch.server.drain_seconds)
    finally:
        for name in ("starting", "told", "lost"):
            tasks[name].cancel()
        if "serving" in tasks:
            server.should_exit = True
            await tasks["serving"]
        client.close()


async def _first_of(tasks: dict[str, "asyncio.Task[Any]"], name: str) -> bool:
    """Wait for this task, or for the word to end; raise what ends any other before.

    Returns whether it was this task.
    """
    waiting = set(tasks.values())
    while not (tasks[name].done() or tasks["told"].done()):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    return not tasks["told"].done() or name == "told"


async def _told(control: socket.socket) -> bytes:
    """The word to drain; nothing when this process is to end at once."""
    try:
        return await asyncio.get_running_loop().sock_recv(control, 1)
    except ConnectionError:
        return b""


async def _lost(client: EngineClient) -> None:
    await client.lost.wait()
    await asyncio.sleep(LOST_SECONDS)
    raise EngineFailed("the engine's process has hung up on this one")


def api_worker(
    client: EngineClient,
    board: Board,
    engine_config: EngineConfig,
    config: ServerConfig,
    started_at: float,
) -> Worker:
    """What the routes share, before the model is known."""
    name = served_name(engine_config, config)
    return Worker(
        config=config,
        engine=client,
        board=board,
        metrics=Metrics(client, board, name if config.metrics_aliases == "vllm" else None),
        served_name=name,
        model_id=config.model_id or name,
        adapters=tuple(adapter.name for adapter in engine_config.lora),
        version=_version(),
        created=int(started_at),
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


def uvicorn_config(worker: Worker, limits: ConnectionLimits) -> uvicorn.Config:
    """How uvicorn serves the routes."""
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


async def _bring_up(worker: Worker, engine_config: EngineConfig, index: int) -> None:
    tokenizer = await asyncio.to_thread(load_tokenizer, engine_config.model)
    facts = await worker.engine.wait_until_loaded()
    worker.model = Model(tokenizer, facts.limits.max_context_tokens, facts.vocab_size, facts.device)
    await _answer_once(worker, worker.model, f"warm-up-{index}-{os.getpid()}")
    # What a start leaves lives on: the collector need not look at it between requests.
    gc.collect()
    gc.freeze()
    worker.board.set(WARM, 1)
    logger.info(
        "Ready",
        extra={
            "api_process": index,
            "served_name": worker.served_name,
            "model_id": worker.model_id,
            "device": facts.device,
            "max_context_tokens": facts.limits.max_context_tokens,
        },
    )


async def _answer_once(worker: Worker, model: Model, request_id: str) -> None:
    """A real request, through everything that clients' requests go through on their way."""
    prompt = tuple(model.tokenizer.encode("Hello"))[: model.max_context_tokens - 1]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    inbox = Inbox()
    worker.engine.submit(Request(request_id, prompt, sampling), inbox.put)
    while True:
        for output in await inbox.take():
            if output.finish_reason == "error":
                raise WorkerError(f"the model's first answer failed: {output.error}")
            if output.finish_reason is not None:
                return


async def _drain(client: EngineClient, limits: ConnectionLimits, seconds: float) -> None:
    limits.is_draining = True
    now = time.monotonic()
    refusing_at, ended_at = now + min(GOODBYE_SECONDS, seconds / 2), now + seconds
    while limits.num_open > 0:
        if time.monotonic() >= refusing_at:
            break
        await asyncio.sleep(POLL_SECONDS)
    if not await client.drain(max(0.0, ended_at - time.monotonic())):
        logger.warning("Requests were aborted, because they took longer than --drain-seconds")


if __name__ == "__main__":
    main()
