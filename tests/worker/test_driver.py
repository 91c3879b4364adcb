"""The engine's thread: one door, outputs in order, and an end that everybody hears of."""

import threading
import time

import pytest

from deepseek_worker.driver import EngineThread
from deepseek_worker.errors import EngineFailed, ModelNotFound, RequestTooLarge
from deepseek_worker.progress import Failure
from deepseek_worker.sequence import Request, SamplingParams

PATIENCE_SECONDS = 60


class Inbox:
    """Collects one request's outputs and waits for the last."""

    def __init__(self) -> None:
        self.outputs = []
        self.done = threading.Event()

    def __call__(self, output) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.done.set()

    def wait(self):
        assert self.done.wait(PATIENCE_SECONDS), "no last output came"
        return self.outputs[-1]


def request(name="a", length=5, max_tokens=8):
    return Request(name, (3,) * length, SamplingParams(0, max_tokens=max_tokens))


@pytest.fixture
def thread(tiny, make_engine):
    def load(report):
        report(0.5)
        return make_engine(tiny[0])

    thread = EngineThread(load)
    thread.start()
    wait_for(lambda: thread.progress().phase == "ready")
    yield thread
    thread.stop()


def test_a_request_is_answered_in_order(thread):
    inbox = Inbox()

    thread.submit(request(), inbox)
    last = inbox.wait()

    assert last.finish_reason == "length"
    assert sum(len(output.token_ids) for output in inbox.outputs) == 8
    assert [o.finish_reason for o in inbox.outputs[:-1]] == [None] * (len(inbox.outputs) - 1)


def test_many_threads_submit_at_once(thread):
    inboxes = [Inbox() for _ in range(40)]

    def submit(first):
        for number in range(first, 40, 4):
            thread.submit(request(str(number)), inboxes[number])

    submitters = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
    for submitter in submitters:
        submitter.start()
    for submitter in submitters:
        submitter.join()

    assert {inbox.wait().finish_reason for inbox in inboxes} == {"length"}
    assert thread.stats().num_running == 0


def test_an_abort_ends_the_request_and_frees_its_pages(thread):
    inbox = Inbox()

    def abort_at_once(output):
        inbox(output)
        thread.abort("a")

    thread.submit(request(max_tokens=200), abort_at_once)

    assert inbox.wait().finish_reason == "abort"
    assert inbox.outputs[0].token_ids
    wait_for(lambda: thread.stats().held_pages == 0)
    thread.abort("a")
    thread.abort("unknown")


def test_an_id_is_free_again_after_its_last_output(thread):
    first = Inbox()
    with thread._wake:
        # So that it does not end meanwhile.
        thread.submit(request(max_tokens=200), first)
        with pytest.raises(ValueError, match="in use"):
            thread.submit(request(), Inbox())
        thread.abort("a")
    first.wait()

    second = Inbox()
    thread.submit(request(), second)

    assert second.wait().finish_reason == "length"


def test_what_can_never_fit_is_refused_at_the_door(thread):
    with pytest.raises(RequestTooLarge):
        thread.submit(request(length=300), Inbox())


def test_before_loading_ends_nothing_is_taken(tiny, make_engine):
    gate = threading.Event()

    def load(report):
        report(0.25)
        gate.wait(PATIENCE_SECONDS)
        return make_engine(tiny[0])

    thread = EngineThread(load)
    thread.start()
    wait_for(lambda: thread.progress().loading_progress == 0.25)

    assert thread.progress().phase == "loading"
    assert thread.stats() is None
    with pytest.raises(EngineFailed, match="still loading"):
        thread.submit(request(), Inbox())
    gate.set()
    wait_for(lambda: thread.progress().phase == "ready")
    thread.stop()


def test_a_model_that_cannot_be_loaded_is_reported_with_its_cause():
    def load(report):
        raise ModelNotFound("/models/none does not exist")

    thread = EngineThread(load)
    thread.start()

    wait_for(lambda: thread.progress().phase == "failed")
    assert isinstance(thread.error, ModelNotFound)
    assert thread.progress().failure == Failure("ModelNotFound", "/models/none does not exist", 3)
    with pytest.raises(EngineFailed, match="does not exist"):
        thread.submit(request(), Inbox())
    thread.stop()


def test_a_receiver_that_fails_leaves_the_others_alone(thread):
    def fail(output):
        raise RuntimeError("event loop is closed")

    inbox = Inbox()
    thread.submit(request("broken"), fail)
    thread.submit(request(), inbox)

    assert inbox.wait().finish_reason == "length"


def test_the_end_of_each_step_is_told_once_all_its_outputs_are_out(tiny, make_engine):
    told, steps = [], []

    def end_step():
        steps.append(list(told))
        told.clear()

    engine = make_engine(tiny[0])
    thread = EngineThread(lambda _: engine, end_step)
    thread.start()
    wait_for(lambda: thread.progress().phase == "ready")
    with thread._wake:
        # All at once, so that they are in the same steps.
        for number in range(3):
            thread.submit(request(str(number), max_tokens=4), told.append)
    wait_for(lambda: not thread._callbacks)
    thread.stop()

    assert [len(outputs) for outputs in steps] == [3, 3, 3, 3]
    assert engine.counters.steps == 4
    assert told == []


def test_an_error_in_the_engine_reaches_every_waiting_client(thread):
    engine = thread._engine
    inbox = Inbox()
    engine.scheduler.schedule = lambda: 1 / 0

    thread.submit(request(), inbox)

    last = inbox.wait()
    assert last.finish_reason == "error"
    assert last.error_reason == "EngineFailed"
    assert thread.progress().phase == "failed"
    with pytest.raises(EngineFailed, match="division by zero"):
        thread.submit(request("b"), Inbox())


def test_a_device_that_failed_is_told_by_its_name(thread):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    thread._engine.scheduler.schedule = fail
    inbox = Inbox()

    thread.submit(request(), inbox)

    assert inbox.wait().error_reason == "EngineFailed"
    assert thread.progress().failure.reason == "DeviceFault"


def test_a_panic_of_a_library_ends_the_engine_with_its_name(thread):
    class PanicException(BaseException):
        pass

    def panic():
        raise PanicException("index out of bounds")

    thread._engine.scheduler.schedule = panic
    inbox = Inbox()

    thread.submit(request(), inbox)

    assert inbox.wait().error_reason == "EngineFailed"
    assert thread.progress().failure.message == "PanicException: index out of bounds"


def test_idle_time_counts_as_progress_and_a_stuck_step_does_not(thread):
    engine = thread._engine
    before = thread.progress().last_step_at
    wait_for(lambda: thread.progress().last_step_at > before)

    stepping, gate = threading.Event(), threading.Event()
    inbox = Inbox()
    schedule = engine.scheduler.schedule

    def schedule_when_told():
        stepping.set()
        assert gate.wait(PATIENCE_SECONDS)
        return schedule()

    engine.scheduler.schedule = schedule_when_told
    thread.submit(request(), inbox)
    assert stepping.wait(PATIENCE_SECONDS)
    stuck = thread.progress().last_step_at
    time.sleep(1.2)  # longer than between two signs of an idle engine

    assert thread.progress().last_step_at == stuck
    gate.set()
    assert inbox.wait().finish_reason == "length"


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
