"""The engine's thread: one door, outputs in order, and an end that everybody hears of."""

import threading
import time

import pytest

from deepseek_worker.driver import EngineThread
from deepseek_worker.errors import Draining, EngineFailed, ModelNotFound, RequestTooLarge
from deepseek_worker.sequence import Request, SamplingParams


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
        assert self.done.wait(20), "no last output came"
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
    thread.wait_until_loaded(20)
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
    thread.submit(request(max_tokens=200), inbox)

    thread.abort("a")

    assert inbox.wait().finish_reason == "abort"
    wait_for(lambda: thread.stats().held_pages == 0)
    thread.abort("a")
    thread.abort("unknown")


def test_an_id_is_free_again_after_its_last_output(thread):
    first = Inbox()
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
        gate.wait(20)
        return make_engine(tiny[0])

    thread = EngineThread(load)
    thread.start()
    wait_for(lambda: thread.progress().loading_progress == 0.25)

    assert thread.progress().phase == "loading"
    assert thread.stats() is None
    with pytest.raises(EngineFailed, match="still loading"):
        thread.submit(request(), Inbox())
    with pytest.raises(TimeoutError):
        thread.wait_until_loaded(0.01)
    gate.set()
    thread.wait_until_loaded(20)
    assert thread.progress().phase == "ready"
    thread.stop()


def test_a_model_that_cannot_be_loaded_is_reported_with_its_cause():
    def load(report):
        raise ModelNotFound("/models/none does not exist")

    thread = EngineThread(load)
    thread.start()

    with pytest.raises(EngineFailed, match="does not exist") as caught:
        thread.wait_until_loaded(20)
    assert isinstance(caught.value.__cause__, ModelNotFound)
    assert thread.progress().phase == "failed"
    assert isinstance(thread.progress().error, ModelNotFound)
    thread.stop()


def test_draining_finishes_what_runs_and_takes_nothing_new(thread):
    inbox = Inbox()
    thread.submit(request(max_tokens=60), inbox)

    assert thread.drain(20)

    assert inbox.wait().finish_reason == "length"
    assert thread.progress().phase == "draining"
    with pytest.raises(Draining):
        thread.submit(request(), Inbox())


def test_draining_aborts_what_takes_too_long(thread):
    inbox = Inbox()
    thread.submit(request(max_tokens=240), inbox)

    assert not thread.drain(0)

    assert inbox.wait().finish_reason == "abort"


def test_a_receiver_that_fails_leaves_the_others_alone(thread):
    def fail(output):
        raise RuntimeError("event loop is closed")

    inbox = Inbox()
    thread.submit(request("broken"), fail)
    thread.submit(request(), inbox)

    assert inbox.wait().finish_reason == "length"
    assert thread.drain(20)


def test_drained_means_delivered(thread):
    outputs = []
    for number in range(5):
        thread.submit(request(str(number)), outputs.append)

    assert thread.drain(20)

    assert sum(output.finish_reason == "length" for output in outputs) == 5


def test_an_error_in_the_engine_reaches_every_waiting_client(thread):
    engine = thread.wait_until_loaded()
    inbox = Inbox()
    engine.scheduler.schedule = lambda: 1 / 0

    thread.submit(request(), inbox)

    last = inbox.wait()
    assert last.finish_reason == "error"
    assert last.error_reason == "EngineFailed"
    assert thread.progress().phase == "failed"
    with pytest.raises(EngineFailed, match="division by zero"):
        thread.submit(request("b"), Inbox())


def test_idle_time_counts_as_progress_and_a_stuck_step_does_not(thread):
    engine = thread.wait_until_loaded()
    before = thread.progress().last_step_at
    wait_for(lambda: thread.progress().last_step_at > before)

    gate = threading.Event()
    step = type(engine).step
    inbox = Inbox()
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: (gate.wait(20), schedule())[1]
    thread.submit(request(), inbox)
    time.sleep(0.05)
    stuck = thread.progress().last_step_at
    time.sleep(0.3)

    assert thread.progress().last_step_at == stuck
    gate.set()
    assert inbox.wait().finish_reason == "length"
    assert step is type(engine).step


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
