"""The engine's process on its own: a start that fails, an end, answers at any time."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepseek_worker.errors import ModelNotFound
from deepseek_worker.messages import Ask, Frames, Status, frame, read_from_engine
from deepseek_worker.switchboard import Switchboard

PATIENCE_SECONDS = 60


def messages(line: socket.socket) -> Iterator[Any]:
    """What comes over a line."""
    line.settimeout(PATIENCE_SECONDS)
    frames = Frames()
    while data := line.recv(65536):
        yield from map(read_from_engine, frames.feed(data))
    raise AssertionError("the line was closed")


def read(line: socket.socket, wanted: Callable[[Any], bool]) -> Any:
    """The first message of a kind."""
    return next(message for message in messages(line) if wanted(message))


def test_a_load_that_fails_ends_it_with_what_ended_the_load() -> None:
    def load(report: Callable[[float], None]) -> Any:
        raise ModelNotFound("there is nothing")

    ours, theirs = socket.socketpair()

    with ours, theirs, pytest.raises(ModelNotFound, match="there is nothing"):
        Switchboard(load, theirs).run()


def test_it_ends_with_its_control(scripted: Any) -> None:
    telephone = scripted.Telephone(scripted.Engine())
    line = telephone.line()
    read(line, lambda message: message.facts is not None)

    telephone.control.shutdown(socket.SHUT_RDWR)
    telephone._thread.join(PATIENCE_SECONDS)

    assert not telephone._thread.is_alive()
    line.settimeout(PATIENCE_SECONDS)
    while line.recv(65536):
        pass
    line.close()
    telephone.close()


def test_the_share_that_is_loaded_is_told_without_being_asked() -> None:
    gate = threading.Event()

    def load(report: Callable[[float], None]) -> Any:
        report(0.25)
        gate.wait(PATIENCE_SECONDS)
        raise ModelNotFound("enough")

    control, theirs = socket.socketpair()
    switchboard = Switchboard(load, theirs)

    def run() -> None:
        with pytest.raises(ModelNotFound):
            switchboard.run()

    thread = threading.Thread(target=run)
    thread.start()
    line, engines = socket.socketpair()
    with control, line, engines, theirs:
        socket.send_fds(control, [b"a"], [engines.fileno()])
        told = read(line, lambda message: message.progress.loading_progress == 0.25)
        gate.set()
        thread.join(PATIENCE_SECONDS)

    assert (told.progress.phase, told.facts, told.stats) == ("loading", None, None)


def test_questions_are_answered_under_their_numbers(scripted: Any) -> None:
    telephone = scripted.Telephone(scripted.Engine())
    line = telephone.line()

    line.sendall(frame(Ask(7)) + frame(Ask(8)))

    answers = (message for message in messages(line) if message.number is not None)
    for number in (7, 8):
        answer = next(answers)
        assert isinstance(answer, Status)
        assert answer.number == number
        assert abs(answer.progress.last_step_at - time.time()) < 60
    line.close()
    telephone.close()
