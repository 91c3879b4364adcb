"""API processes and the engine's process, each in threads of this one, over real sockets."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from deepseek_worker import switchboard
from deepseek_worker.admission import Limits
from deepseek_worker.board import Board, create_board
from deepseek_worker.client import EngineClient
from deepseek_worker.errors import (
    Draining,
    EngineFailed,
    InvalidRequest,
    QueueFull,
    RequestTooLarge,
)
from deepseek_worker.messages import Step, Submit, frame
from deepseek_worker.sequence import Output, Request, SamplingParams, Structure

PATIENCE_SECONDS = 60


class Outputs:
    """Collects the outputs of one request."""

    def __init__(self) -> None:
        self.all: list[Output] = []
        self.done = asyncio.Event()

    def __call__(self, output: Output) -> None:
        assert not self.done.is_set(), "something came after the last output"
        self.all.append(output)
        if output.finish_reason is not None:
            self.done.set()

    @property
    def tokens(self) -> bytes:
        return bytes(token for output in self.all for token in output.token_ids)

    async def last(self) -> Output:
        await asyncio.wait_for(self.done.wait(), PATIENCE_SECONDS)
        return self.all[-1]


class Lines:
    """One engine and as many API processes as are asked for."""

    def __init__(self, telephone: Any, num: int) -> None:
        self.telephone = telephone
        self.fd = create_board(num)
        self.boards = [Board(self.fd, num, row) for row in range(num)]
        self.clients = [EngineClient(board, time.time()) for board in self.boards]
        self.num_steps = [0] * num

    def submit(self, client: int, name: str, length: int = 5, **sampling: Any) -> Outputs:
        outputs = Outputs()
        params = SamplingParams(**{"max_tokens": 8, **sampling})
        self.clients[client].submit(Request(name, (97,) * length, params), outputs)
        return outputs

    def count_steps(self, index: int) -> None:
        client = self.clients[index]
        handle = client._handle

        def counted(message: Any) -> None:
            self.num_steps[index] += isinstance(message, Step)
            handle(message)

        client._handle = counted


@pytest.fixture
def talk(scripted: Any) -> Callable[..., Any]:
    """Run a conversation of some clients with a scripted engine; at its end nothing is left."""

    def run(engine: Any, then: Callable[[Lines], Any], num: int = 1) -> Any:
        telephone = scripted.Telephone(engine)
        lines = Lines(telephone, num)

        @asynccontextmanager
        async def connected() -> Any:
            for index, client in enumerate(lines.clients):
                await client.connect(telephone.line())
                await client.wait_until_loaded()
                lines.count_steps(index)
            try:
                yield
            finally:
                engine.gate.set()
                for client in lines.clients:
                    client.close()

        async def conversation() -> Any:
            async with connected():
                return await asyncio.wait_for(then(lines), PATIENCE_SECONDS)

        try:
            return asyncio.run(conversation())
        finally:
            wait_for(lambda: not telephone.driver._callbacks)
            wait_for(lambda: not engine.has_work())
            telephone.close()
            os.close(lines.fd)

    return run


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_for, condition)


def test_tokens_come_in_order_and_once(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.max_running = 64
    engine.pool_pages = 1000
    engine.reply = lambda request: request.request_id.encode() + b"0123456789" * 4

    async def then(lines: Lines) -> list[tuple[str, bytes]]:
        asked = [(f"{n:02}", lines.submit(n % 2, f"{n:02}", max_tokens=30)) for n in range(40)]
        for _, outputs in asked:
            await outputs.last()
        return [(name, outputs.tokens) for name, outputs in asked]

    for name, tokens in talk(engine, then, num=2):
        assert tokens == (name.encode() + b"0123456789" * 4)[:30]


def test_a_step_is_one_message_to_each_process_that_it_concerns(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.max_running = 30
    engine.gate.clear()

    async def then(lines: Lines) -> tuple[list[int], int]:
        first = [lines.submit(0, f"a{n}", max_tokens=12) for n in range(10)]
        wait_for(engine.has_work)
        second = [lines.submit(1, f"b{n}", max_tokens=5) for n in range(10)]
        # All are with the engine before its first step ends.
        wait_for(lambda: len(lines.telephone.driver._callbacks) == 20)
        engine.gate.set()
        for outputs in first + second:
            await outputs.last()
        return lines.num_steps, engine.stats().num_steps

    (first, second), num_steps = talk(engine, then, num=2)

    # The first request may begin a step before the others; each step is one message or none.
    assert num_steps in (12, 13, 14)
    assert first == num_steps
    assert second in (5, 6)


def test_the_queue_is_that_of_all_processes(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.max_running, engine.max_unfinished = 2, 4
    engine.gate.clear()

    async def then(lines: Lines) -> None:
        taken = [lines.submit(n % 2, str(n)) for n in range(4)]
        for client in (0, 1):
            with pytest.raises(QueueFull, match="4 requests"):
                lines.submit(client, "more")
        engine.gate.set()
        for outputs in taken:
            await outputs.last()
        assert (await lines.submit(1, "later").last()).finish_reason == "length"

    talk(engine, then, num=2)


def test_what_the_engine_s_process_refuses_is_an_output(scripted: Any, talk: Any) -> None:
    # As where two processes fill the last place at the same moment.
    class Full(scripted.Engine):
        limits = Limits(256, 8, 256, 1000)

    engine = Full()
    engine.max_unfinished = 0

    async def then(lines: Lines) -> Output:
        return await lines.submit(0, "a").last()

    refused = talk(engine, then)

    assert (refused.finish_reason, refused.error_reason) == ("error", "QueueFull")


def test_what_can_never_fit_is_refused_before_it_is_sent(scripted: Any, talk: Any) -> None:
    async def then(lines: Lines) -> None:
        with pytest.raises(RequestTooLarge):
            lines.submit(0, "a", length=300)
        assert lines.boards[0].num_unfinished == 0

    talk(scripted.Engine(), then)


def test_a_long_prompt_arrives_whole_beside_others(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.max_context_tokens = 1_000_000
    engine.pool_pages = 100_000

    async def then(lines: Lines) -> None:
        long = lines.submit(0, "long", length=500_000)
        short = [lines.submit(n % 2, f"s{n}") for n in range(10)]
        for outputs in (long, *short):
            assert (await outputs.last()).finish_reason == "length"

    talk(engine, then, num=2)

    lengths = {request.request_id: len(request.prompt_token_ids) for request in engine.seen}
    assert lengths["long"] == 500_000


def test_an_abort_ends_one_request_and_counts_until_it_has(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.step_seconds = 0.01

    async def then(lines: Lines) -> None:
        gone, kept = lines.submit(0, "gone", max_tokens=200), lines.submit(0, "kept")
        lines.clients[0].abort("gone")
        assert lines.boards[0].num_unfinished == 2
        assert (await gone.last()).finish_reason == "abort"
        assert (await kept.last()).finish_reason == "length"
        assert lines.boards[0].num_unfinished == 0
        lines.clients[0].abort("gone")
        lines.clients[0].abort("unknown")

    talk(engine, then)


def test_a_process_that_dies_takes_its_own_requests_along(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.step_seconds = 0.05

    async def then(lines: Lines) -> None:
        lost = [lines.submit(0, f"lost{n}", max_tokens=200) for n in range(3)]
        kept = lines.submit(1, "kept", max_tokens=200)
        wait_for(lambda: engine.stats().num_running == 4)
        lines.clients[0]._transport.abort()
        await until(lambda: engine.stats().num_running == 1)
        engine.step_seconds = 0
        assert (await kept.last()).finish_reason == "length"
        assert len(kept.tokens) == 200
        assert all(len(outputs.all) < 200 for outputs in lost)

    talk(engine, then, num=2)


def test_an_engine_that_goes_fails_what_runs_and_what_comes(scripted: Any) -> None:
    engine = scripted.Engine()
    engine.gate.clear()
    telephone = scripted.Telephone(engine)
    lines = Lines(telephone, 1)

    async def run() -> None:
        (client,) = lines.clients
        await client.connect(telephone.line())
        await client.wait_until_loaded()
        running = lines.submit(0, "a")
        telephone.switchboard.stop()
        last = await running.last()
        assert (last.finish_reason, last.error_reason) == ("error", "EngineFailed")
        assert client.lost.is_set() or await asyncio.wait_for(client.lost.wait(), PATIENCE_SECONDS)
        assert client.progress().phase == "failed"
        assert lines.boards[0].num_unfinished == 0
        with pytest.raises(EngineFailed, match="has ended"):
            lines.submit(0, "b")
        await client.refresh()

    try:
        asyncio.run(run())
    finally:
        engine.gate.set()
        telephone.close()
        os.close(lines.fd)


def test_draining_finishes_what_runs_and_takes_nothing_new(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.step_seconds = 0.005

    async def then(lines: Lines) -> None:
        (client,) = lines.clients
        running = lines.submit(0, "a", max_tokens=40)
        draining = asyncio.create_task(client.drain(PATIENCE_SECONDS))
        await asyncio.sleep(0)
        assert client.progress().phase == "draining"
        with pytest.raises(Draining):
            lines.submit(0, "b")
        assert await draining
        assert running.all[-1].finish_reason == "length"

    talk(engine, then)


def test_draining_aborts_what_takes_too_long(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.step_seconds = 0.05

    async def then(lines: Lines) -> Output:
        running = lines.submit(0, "a", max_tokens=200)
        assert not await lines.clients[0].drain(0.02)
        return await running.last()

    assert talk(engine, then).finish_reason == "abort"


def test_how_the_engine_does_is_told_within_a_step_too(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.gate.clear()

    async def then(lines: Lines) -> None:
        (client,) = lines.clients
        outputs = lines.submit(0, "a")
        wait_for(lambda: len(engine.seen) == 1)
        await client.refresh()
        stuck = client.progress().last_step_at
        await asyncio.sleep(0.2)
        await client.refresh()
        assert client.progress().last_step_at == stuck
        engine.gate.set()
        await outputs.last()
        await client.refresh()
        assert client.progress().last_step_at > stuck
        assert client.stats().num_generated_tokens == 8

    talk(engine, then)


def test_a_storm_of_aborts_leaves_nothing(scripted: Any, talk: Any) -> None:
    engine = scripted.Engine()
    engine.max_unfinished = 10_000
    engine.step_seconds = 0.001

    async def then(lines: Lines) -> list[str]:
        asked = []
        for n in range(600):
            outputs = lines.submit(n % 2, str(n), max_tokens=20)
            asked.append(outputs)
            if n % 3:
                lines.clients[n % 2].abort(str(n))
            if n % 50 == 0:
                await asyncio.sleep(0.002)
        reasons = [(await outputs.last()).finish_reason for outputs in asked]
        assert lines.boards[0].num_unfinished == 0
        return reasons

    reasons = talk(engine, then, num=2)

    assert reasons.count("length") >= 200
    assert set(reasons) == {"length", "abort"}


def test_a_process_that_reads_nothing_is_dropped_and_others_go_on(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(switchboard, "MAX_UNREAD_BYTES", 1 << 20)
    engine = scripted.Engine()
    engine.max_context_tokens = engine.pool_pages = 100_000
    telephone = scripted.Telephone(engine)
    deaf, lines = telephone.line(), Lines(telephone, 1)

    async def run() -> None:
        (client,) = lines.clients
        await client.connect(telephone.line())
        await client.wait_until_loaded()
        sampling = SamplingParams(max_tokens=50_000, logprobs=20)
        request = Request("deaf", (97,), sampling)
        deaf.sendall(frame(Submit.of(request)))
        await until(lambda: engine.stats().num_generated_tokens > 0)
        await until(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_generated_tokens < 50_000
        assert (await lines.submit(0, "other").last()).finish_reason == "length"
        client.close()

    try:
        asyncio.run(asyncio.wait_for(run(), PATIENCE_SECONDS))
    finally:
        deaf.close()
        telephone.close()
        os.close(lines.fd)
    assert "reads nothing any more" in caplog.text


def test_an_abort_while_a_grammar_is_compiled_ends_the_request(scripted: Any, talk: Any) -> None:
    class Slow:
        """Compiles when told to."""

        def __init__(self) -> None:
            self.gate = threading.Event()

        def compile(self, structure: Structure) -> Callable[[], Any]:
            assert self.gate.wait(PATIENCE_SECONDS)
            return lambda: None

    engine, slow = scripted.Engine(), Slow()

    async def then(lines: Lines) -> Output:
        lines.telephone.switchboard._grammars = slow
        outputs = Outputs()
        request = Request("a", (97,), SamplingParams(), structure=Structure("start: /a/", "x"))
        lines.clients[0].submit(request, outputs)
        lines.clients[0].abort("a")
        await lines.clients[0].refresh()
        slow.gate.set()
        return await outputs.last()

    assert talk(engine, then).finish_reason == "abort"
    assert engine.seen == []


class Stumbling:
    """Fails as the library does where it has a bug of its own: by what is no `Exception`."""

    class Panic(BaseException):
        pass

    def compile(self, structure: Structure) -> Callable[[], Any]:
        raise self.Panic(structure.lark)


def test_a_grammar_that_its_compiler_stumbles_over_ends_one_request(
    scripted: Any, talk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def then(lines: Lines) -> tuple[Output, set[str]]:
        lines.telephone.switchboard._grammars = Stumbling()
        outputs = Outputs()
        request = Request("a", (97,), SamplingParams(), structure=Structure("start: /a/", "x"))
        lines.clients[0].submit(request, outputs)
        last = await outputs.last()
        assert lines.boards[0].num_unfinished == 0
        assert (await lines.submit(0, "other").last()).finish_reason == "length"
        (peer,) = lines.telephone.switchboard._peers
        return last, peer.compiling

    last, compiling = talk(scripted.Engine(), then)

    assert (last.finish_reason, last.error_reason) == ("error", "InternalError")
    assert last.error == "the compiler failed (Panic)"
    assert compiling == set()
    assert "A grammar could not be compiled" in caplog.text


def test_whoever_asks_for_such_a_grammar_is_told_at_once(scripted: Any, talk: Any) -> None:
    async def then(lines: Lines) -> None:
        lines.telephone.switchboard._grammars = Stumbling()
        (client,) = lines.clients
        client.facts = replace(client.facts, has_grammars=True)
        with pytest.raises(InvalidRequest, match=r"Invalid 'x': .* the compiler failed \(Panic\)"):
            await client.compile(Structure("start: /a/", "x"))

    talk(scripted.Engine(), then)
