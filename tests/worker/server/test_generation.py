"""Outputs from the engine's thread to pieces of text, without HTTP."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deepseek_worker.detokenizer import Detokenizer
from deepseek_worker.driver import EngineThread
from deepseek_worker.errors import Draining, QueueFull, Unavailable, WorkerError
from deepseek_worker.generation import Choice, ClientGone, Courier, Generation, Inbox, Piece
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


def generate(engine: Any, *choices: Choice, then: Callable[[Generation], Any]) -> Any:
    """Start the choices on a scripted engine, and do something with them."""

    async def run() -> Any:
        driver = EngineThread(lambda _: engine)
        driver.start()
        driver.wait_until_loaded(5)
        courier = Courier(asyncio.get_running_loop())
        generation = Generation(driver, courier, Metrics(driver), list(choices), 0.0)
        try:
            generation.start()
            return await then(generation)
        finally:
            generation.close()
            await asyncio.to_thread(driver.stop)
            assert not engine.has_work()
            assert not driver._callbacks

    return asyncio.run(run())


def test_answers_grow_side_by_side(scripted: Any) -> None:
    engine = scripted.Engine()
    engine.reply = lambda request: b"abcd" if request.request_id == "r0" else b"xy"

    whole = generate(engine, choice(0), choice(1), then=collect)

    assert {index: (piece.text, piece.finish_reason) for index, piece in whole.items()} == {
        0: ("abcd", "length"),
        1: ("xy", "stop"),
    }


def test_tokens_are_counted_by_prompt_and_answer(scripted: Any) -> None:
    async def then(generation: Generation) -> tuple[int, int, int]:
        await collect(generation)
        return generation.num_tokens()

    twice = choice(1)
    twice.prompt = 0

    assert generate(scripted.Engine(), choice(0), twice, choice(2), then=then) == (4, 12, 0)


def test_a_stop_string_ends_the_engine_s_work_too(scripted: Any) -> None:
    engine = scripted.Engine()
    engine.step_seconds = 0.01

    whole = generate(engine, choice(stop=("bc",), max_tokens=200), then=collect)

    assert (whole[0].text, whole[0].finish_reason) == ("a", "stop")
    assert engine.stats().num_generated_tokens < 20


def test_a_reader_whose_client_is_gone_is_sent_away(scripted: Any) -> None:
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
    scripted: Any, reason: str, expected: type[WorkerError]
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


def test_an_answer_that_a_shutdown_ends_says_so(scripted: Any) -> None:
    engine = scripted.Engine()
    engine.fault = lambda request: Output(request.request_id, finish_reason="abort")

    with pytest.raises(Draining, match="ask again"):
        generate(engine, choice(), then=collect)


def test_what_cannot_be_started_whole_is_not_started(scripted: Any) -> None:
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


def test_many_outputs_wake_the_loop_once() -> None:
    async def run() -> tuple[int, list[str]]:
        loop = asyncio.get_running_loop()
        wakes = 0
        original = loop.call_soon_threadsafe

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return original(*arguments, **options)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        courier, inbox = Courier(loop), Inbox()

        def step() -> None:
            for number in range(100):
                courier.post(inbox, Output(str(number)))

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        return wakes, [output.request_id for output in await inbox.take()]

    wakes, seen = asyncio.run(run())

    assert wakes == 1
    assert seen == [str(number) for number in range(100)]
