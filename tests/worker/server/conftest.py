"""A real server on the loopback whose engine follows a script instead of a model."""

import asyncio
import itertools
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deepseek_worker.admission import Limits
from deepseek_worker.api_process import Server, api_worker, uvicorn_config
from deepseek_worker.board import WARM, Board, create_board
from deepseek_worker.client import EngineClient
from deepseek_worker.config import EngineConfig, ServerConfig
from deepseek_worker.connections import ConnectionLimits
from deepseek_worker.driver import EngineThread
from deepseek_worker.errors import InvalidRequest, QueueFull, RequestTooLarge, TemplateError
from deepseek_worker.grammar import GrammarCompiler
from deepseek_worker.prompts import Model
from deepseek_worker.sequence import Output, Request, TokenLogprobs
from deepseek_worker.server import Worker
from deepseek_worker.stats import EngineStats
from deepseek_worker.switchboard import Switchboard

# For the programs of the local cluster, promtool among them.
sys.path[:0] = [str(Path(__file__).parents[3] / "tools"), str(Path(__file__).parent)]

END = 256
PAGE_TOKENS = 16
PATIENCE_SECONDS = 60
"""For whatever has to come: where many tests share two processors, a moment is long."""


class ByteTokenizer:
    """A token for each byte, and one that ends."""

    vocab_size = 257
    special_token_ids = frozenset({END})
    marker_token_ids = frozenset({END})
    eos_token_ids = frozenset({END})

    def __init__(self, chat_template: str = "") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == END else bytes([token_id])

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        roles = [message["role"] for message in messages]
        if any(a == b == "user" for a, b in itertools.pairwise(roles)):
            raise TemplateError("Conversation roles must alternate user/assistant")
        turns = "".join(f"<{turn['role']}>{turn['content']}\n" for turn in messages)
        if tools:
            turns = json.dumps(tools) + turns
        if not add_generation_prompt:
            return turns
        thought = "<think>\n" if "</think>" in self.chat_template else ""
        return turns + json.dumps(options, sort_keys=True) + "<assistant>" + thought


class ScriptedEngine:
    """Emits given tokens, one a step for each running request, within a pool of pages."""

    device = "cpu"
    vocab_size = 257

    def __init__(self) -> None:
        self.max_context_tokens = 256
        self.max_running = 8
        self.max_unfinished = 400
        self.pool_pages = 64
        self.reply: Callable[[Request], Iterable[int]] = lambda _: b"abcdefgh" * 1000
        self.fault: Callable[[Request], Output | None] = lambda _: None
        self.gate = threading.Event()
        self.gate.set()
        self.step_seconds = 0.0
        self.seen: list[Request] = []
        self._waiting: list[Request] = []
        self._running: dict[str, tuple[Request, Iterator[int], list[int]]] = {}
        self._steps = self._prompt_tokens = self._tokens = 0

    @property
    def limits(self) -> Limits:
        queued = self.max_unfinished - self.max_running
        return Limits(self.max_context_tokens, self.max_running, 256, queued)

    def validate(self, request: Request, num_unfinished: int = 0) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty")
        if self._pages(request) > self.pool_pages:
            raise RequestTooLarge(f"the pool has {self.pool_pages} pages")
        if num_unfinished >= self.max_unfinished:
            raise QueueFull(f"{num_unfinished} requests wait already; try again later")

    def add(self, request: Request) -> None:
        self.seen.append(request)
        self._waiting.append(request)

    def abort(self, request_id: str) -> list[Output]:
        known = request_id in self._running or any(
            request.request_id == request_id for request in self._waiting
        )
        self._running.pop(request_id, None)
        self._waiting = [request for request in self._waiting if request.request_id != request_id]
        return [Output(request_id, finish_reason="abort")] if known else []

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def spare_seconds(self) -> float:
        return 0.0

    def step(self) -> list[Output]:
        time.sleep(self.step_seconds)
        assert self.gate.wait(PATIENCE_SECONDS)
        while (
            self._waiting
            and len(self._running) < self.max_running
            and self._pages(self._waiting[0]) <= self._num_free()
        ):
            request = self._waiting.pop(0)
            self._prompt_tokens += len(request.prompt_token_ids)
            self._running[request.request_id] = (request, iter(self.reply(request)), [])
        self._steps += 1
        return [self._advance(*entry) for entry in list(self._running.values())]

    def stats(self) -> EngineStats:
        free = self._num_free()
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            pool_pages=self.pool_pages,
            free_pages=free,
            cached_pages=0,
            held_pages=self.pool_pages - free,
            waiting_pages=sum(map(self._pages, self._waiting)),
            page_tokens=PAGE_TOKENS,
            predicted_bytes={"weights": 100, "kv_cache": 640},
            measured_bytes={"weights": 110, "kv_cache": 640},
            page_bytes=10,
            limit_bytes=1000,
            num_steps=self._steps,
            num_preemptions=0,
            num_out_of_memory_retries=0,
            num_out_of_memory_failures=0,
            is_exhausted=False,
            num_non_finite_logits=0,
            num_prompt_tokens=self._prompt_tokens,
            num_generated_tokens=self._tokens,
            num_cached_tokens=0,
        )

    def _advance(self, request: Request, script: Iterator[int], past: list[int]) -> Output:
        if past and (failed := self.fault(request)):
            del self._running[request.request_id]
            return failed
        sampling = request.sampling
        prompt_logprobs = None
        if not past and sampling.prompt_logprobs is not None:
            prompt = request.prompt_token_ids
            known = [_logprobs(token, sampling.prompt_logprobs) for token in prompt[1:]]
            prompt_logprobs = (None, *known)
        if sampling.max_tokens == 0:
            del self._running[request.request_id]
            return Output(
                request.request_id, finish_reason="length", prompt_logprobs=prompt_logprobs
            )
        token = next(script, END)
        guide = request.guide
        bits = guide.allowed_tokens() if guide else None
        if bits is not None and not bits[token // 8] >> token % 8 & 1:
            # As a model does: something else that is allowed, of which the script cannot know.
            token = next(t for t in range(self.vocab_size) if bits[t // 8] >> t % 8 & 1)
        past.append(token)
        self._tokens += 1
        finish_reason = None
        if guide:
            guide.advance(token)
        if token == END or (guide and guide.is_finished):
            finish_reason = "stop"
        elif len(past) == sampling.max_tokens:
            finish_reason = "length"
        if finish_reason:
            del self._running[request.request_id]
        wanted = sampling.logprobs
        return Output(
            request.request_id,
            (token,),
            finish_reason=finish_reason,
            stop_token_id=END if token == END else None,
            logprobs=() if wanted is None else (_logprobs(token, wanted),),
            prompt_logprobs=prompt_logprobs,
        )

    def _pages(self, request: Request) -> int:
        tokens = len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
        return math.ceil(tokens / PAGE_TOKENS)

    def _num_free(self) -> int:
        held = sum(self._pages(request) for request, _, _ in self._running.values())
        return self.pool_pages - held


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    top = tuple(((token + i) % 256, -float(i) - 0.5) for i in range(num_top))
    return TokenLogprobs(token, -0.5, 1, top)


class Telephone:
    """An engine with its thread and its switchboard, in threads of this process."""

    def __init__(self, engine: Any, tokenizer: Any = None, *, loads: bool = True) -> None:
        self.control, theirs = socket.socketpair()
        self._may_load = threading.Event()
        if loads:
            self._may_load.set()

        def load(report: Callable[[float], None]) -> tuple[Any, GrammarCompiler | None]:
            self._may_load.wait()
            return engine, GrammarCompiler(tokenizer, engine.vocab_size) if tokenizer else None

        self.switchboard = Switchboard(load, theirs)
        self.driver = self.switchboard.engine
        self._thread = threading.Thread(target=self.switchboard.run, daemon=True)
        self._thread.start()

    def line(self) -> socket.socket:
        """Connect one more API process."""
        ours, engines = socket.socketpair()
        with engines:
            socket.send_fds(self.control, [b"a"], [engines.fileno()])
        return ours

    def close(self) -> None:
        self._may_load.set()
        self.control.close()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self.driver.stop()


class Running:
    """A server and its engine, in threads of this process."""

    def __init__(self, engine: ScriptedEngine, **options: Any) -> None:
        self.engine = engine
        self.config = ServerConfig(
            **{"served_model_name": "tiny", "model_id": "tiny-v1", "port": 0, **options}
        )
        self.telephone: Telephone
        self.worker: Worker
        self.limits = ConnectionLimits(
            self.config.connection_max_requests, self.config.connection_max_seconds
        )
        self.port = 0
        self.client = httpx.Client(verify=False, timeout=PATIENCE_SECONDS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(self.url + path, content=content, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + path, **options)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "hello", **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **body})

    @staticmethod
    def events(response: httpx.Response) -> list[dict[str, Any]]:
        """The chunks of a stream, which has to end as promised."""
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @staticmethod
    def text_of(chunks: list[dict[str, Any]], choice: int = 0) -> str:
        """The text that chunks bring for one choice."""
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice]
        return "".join(part.get("text", part.get("delta", {}).get("content", "")) for part in parts)

    @staticmethod
    def error_of(response: httpx.Response) -> dict[str, Any]:
        """The error of a refusal, which has to have the API's form."""
        error: dict[str, Any] = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def send(self, connection: socket.socket, path: str, body: Any) -> None:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)

    @property
    def driver(self) -> EngineThread:
        return self.telephone.driver

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition(" ")[0] == name or line.startswith(name + "{")
        )

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: not (self._holds() or self.driver._callbacks))

    def _holds(self) -> bool:
        stats = self.stats()
        return bool(stats.num_running or stats.num_waiting or stats.held_pages)


@contextmanager
def running(
    engine: ScriptedEngine | None = None,
    *,
    loaded: bool = True,
    chat_template: str = "",
    tokenizer: Any = None,
    follows_grammars: bool = True,
    lora: tuple[str, ...] = (),
    **options: Any,
) -> Iterator[Running]:
    tokenizer = tokenizer or ByteTokenizer(chat_template)
    here = Running(engine or ScriptedEngine(), **options)
    listener = socket.create_server(("127.0.0.1", 0))
    here.port = listener.getsockname()[1]
    up = threading.Event()
    here_server: list[Server] = []

    board = Board(create_board(1), 1)
    here.telephone = Telephone(here.engine, tokenizer if follows_grammars else None, loads=loaded)

    async def serve() -> None:
        client = EngineClient(board, time.time())
        await client.connect(here.telephone.line())
        here.worker = api_worker(
            client, board, EngineConfig(model=Path("tiny"), lora=lora), here.config, time.time()
        )
        if loaded:
            facts = await client.wait_until_loaded()
            limit = facts.limits.max_context_tokens
            here.worker.model = Model(tokenizer, limit, facts.vocab_size, facts.device)
            board.set(WARM, 1)
        server = Server(uvicorn_config(here.worker, here.limits))
        here_server.append(server)
        up.set()
        try:
            await server.serve(sockets=[listener])
        finally:
            client.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert up.wait(PATIENCE_SECONDS)
    try:
        yield here
    finally:
        here.client.close()
        here.engine.gate.set()
        here_server[0].should_exit = True
        thread.join(PATIENCE_SECONDS)
        here.telephone.close()


@pytest.fixture(scope="session")
def worker(trained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from worker_process import Process

    process = Process(
        trained_model,
        tmp_path_factory.mktemp("worker"),
        "--max-context-tokens=512",
        # Room for about four requests of the longest kind: clients have to wait for pages.
        "--kv-cache-bytes=100000000",
        "--max-batch-tokens=256",
    )
    process.wait_until_ready()
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="session")
def quick_model(make_checkpoint: Any) -> Path:
    """A tiny random model with a token for each byte: loaded at once, and it never ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder, _ = make_checkpoint(vocab_size=256, max_position_embeddings=100_000)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def scripted() -> SimpleNamespace:
    """For tests that need an engine or a server of their own."""
    return SimpleNamespace(Engine=ScriptedEngine, Telephone=Telephone, running=running, END=END)


@pytest.fixture(scope="module")
def scripted_module() -> SimpleNamespace:
    """The same for servers that many tests share."""
    return SimpleNamespace(Engine=ScriptedEngine, Telephone=Telephone, running=running, END=END)


@pytest.fixture(scope="module")
def _shared() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def api(_shared: Running) -> Running:
    """One server for many tests, its engine as at the start."""
    _shared.engine.gate.set()
    _shared.wait_until_idle()
    for name, value in vars(ScriptedEngine()).items():
        if name in (
            "max_running",
            "max_unfinished",
            "pool_pages",
            "reply",
            "fault",
            "step_seconds",
        ):
            setattr(_shared.engine, name, value)
    _shared.engine.seen.clear()
    return _shared
