"""Outputs from the engine's thread to pieces of text, without HTTP."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from deepseek_worker.board import Board, create_board
from deepseek_worker.client import EngineClient
from deepseek_worker.detokenizer import Detokenizer
from deepseek_worker.errors import Draining, QueueFull, Unavailable, WorkerError
from deepseek_worker.generation import Choice, ClientGone, Generation, Piece
from deepseek_worker.metrics import Metrics
from deepseek_worker.sequence import Output, Request, SamplingParams


def choice(index: int = 0, stop: tuple[str, ...] = (), **sampling: Any) -> Choice:
    request = Request(f"r{index}", (120, 121), SamplingParams(**{"max_tokens": 4, **sampling}))
    detokenizer = Detokenizer(lambda token: bytes([token]), stop)
    return Choice(index=index, prompt=index, request=request, detokenizer=detokenizer)


async def collect(generation: Generation) -> dict[int, Piece]:
    whole: dict[int, Piece] = {}
    while not generation.is_finished:
        for piece in await generation.next_pieces():
            if piece.choice in whole:
                whole[piece.choice].extend(piece)
            else:
                whole[piece.choice] = piece
    return whole


@pytest.fixture
def generate(scripted: Any) -> Callable[..., Any]:
    """Start the choices on a scripted engine, and do something with them."""

    def run(engine: Any, *choices: Choice, then: Callable[[Generation], Any]) -> Any:
        telephone = scripted.Telephone(engine)

        async def talk() -> Any:
            board = Board(create_board(1), 1)
            client = EngineClient(board, time.time())
            await client.connect(telephone.line())
            await client.wait_until_loaded()
            generation = Generation(client, Metrics(client, board), list(choices), 0.0)
            try:
                generation.start()
                return await then(generation)
            finally:
                generation.close()
                await client.drain(60)
                assert board.num_unfinished == 0
                client.close()

        try:
            return asyncio.run(talk())
        finally:
            telephone.close()
            assert not engine.has_work()
            assert not telephone.driver._callbacks

    return run


def test_answers_grow_side_by_side(scripted: Any, generate: Any) -> None:
    engine = scripted.Engine()
    engine.reply = lambda request: b"abcd" if request.request_id == "r0" else b"xy"

    whole = generate(engine, choice(0), choice(1), then=collect)

    assert {index: (piece.text, piece.finish_reason) for index, piece in whole.items()} == {
        0: ("abcd", "length"),
        1: ("xy", "stop"),
    }


def test_tokens_are_counted_by_prompt_and_answer(scripted: Any, generate: Any) -> None:
    async def then(generation: Generation) -> tuple[int, ...]:
        await collect(generation)
        return generation.num_tokens()

    twice = choice(1)
    twice.prompt = 0

    assert generate(scripted.Engine(), choice(0), twice, choice(2), then=then) == (4, 12, 0, 0)


def test_a_stop_string_ends_the_engine_s_work_too(scripted: Any, generate: Any) -> None:
    engine = scripted.Engine()
    engine.step_seconds = 0.2

    whole = generate(engine, choice(stop=("bc",), max_tokens=200), then=collect)

    assert (whole[0].text, whole[0].finish_reason) == ("a", "stop")
    assert engine.stats().num_generated_tokens < 20


def test_a_reader_whose_client_is_gone_is_sent_away(scripted: Any, generate: Any) -> None:
    engine = scripted.Engine()
    engine.gate.clear()

    async def then(generation: Generation) -> None:
        asyncio.get_running_loop().call_later(0.01, generation.inbox.close)
        try:
            await collect(generation)
        finally:
            engine.gate.set()

    with pytest.raises(ClientGone):
        generate(engine, choice(), then=then)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("OutOfMemory", Unavailable), ("EngineFailed", Unavailable), ("NonFiniteLogits", WorkerError)],
)
def test_an_answer_that_fails_ends_all_of_its_request(
    scripted: Any, generate: Any, reason: str, expected: type[WorkerError]
) -> None:
    engine = scripted.Engine()
    engine.fault = lambda request: (
        Output(request.request_id, finish_reason="error", error="no", error_reason=reason)
        if request.request_id == "r1"
        else None
    )

    with pytest.raises(WorkerError, match=reason) as failure:
        generate(engine, choice(0), choice(1), then=collect)

    assert type(failure.value) is expected


def test_an_answer_that_a_shutdown_ends_says_so(scripted: Any, generate: Any) -> None:
    engine = scripted.Engine()
    engine.fault = lambda request: Output(request.request_id, finish_reason="abort")

    with pytest.raises(Draining, match="ask again"):
        generate(engine, choice(), then=collect)


def test_what_cannot_be_started_whole_is_not_started(scripted: Any, generate: Any) -> None:
    engine = scripted.Engine()
    engine.max_unfinished = 1
    engine.max_running = 0

    with pytest.raises(QueueFull):
        generate(engine, choice(0), choice(1), then=collect)


def test_the_end_token_is_counted_and_not_shown(scripted: Any) -> None:
    output = Output("r0", (97, scripted.END), "stop", stop_token_id=scripted.END)
    answer = choice()

    piece = answer.accept(output)

    assert (piece.text, piece.finish_reason, answer.num_tokens) == ("a", "stop", 2)
