from typing import Any

import pytest

from deepseek_worker.health import liveness, readiness, worker_state
from deepseek_worker.progress import Failure, Progress

NOW = 1000.0


def progress(phase: Any = "ready", **values: Any) -> Progress:
    return Progress(
        **{
            "phase": phase,
            "loading_progress": 1.0,
            "started_at": 0.0,
            "last_step_at": NOW - 1,
            "failure": None,
            **values,
        }
    )


@pytest.mark.parametrize(
    ("now", "given", "ok", "says"),
    [
        pytest.param(NOW, progress(), True, "OK", id="stepping"),
        pytest.param(NOW + 9, progress(), True, "OK", id="a long step is no stall"),
        pytest.param(NOW + 10, progress(), False, "no step for 11 s; 10 s are", id="stalled"),
        pytest.param(NOW - 99, progress(), True, "OK", id="the clock was set back"),
        pytest.param(NOW + 999, progress("loading"), True, "OK", id="loading takes its time"),
        pytest.param(NOW, progress("draining"), True, "OK", id="draining lives"),
        pytest.param(NOW + 10, progress("draining"), False, "no step", id="draining, stalled"),
        pytest.param(
            NOW,
            progress("failed", failure=Failure("InternalError", "no GPU")),
            False,
            "error: no GPU",
            id="failed",
        ),
    ],
)
def test_only_what_a_restart_could_help_is_not_alive(
    now: float, given: Progress, ok: bool, says: str
) -> None:
    verdict = liveness(given, now, stall_seconds=10)

    assert (verdict.ok, verdict.phase) == (ok, given.phase)
    assert says in verdict.message


@pytest.mark.parametrize(
    ("given", "is_warm", "ok", "says"),
    [
        pytest.param(progress(), True, True, "OK", id="ready"),
        pytest.param(progress(), False, False, "first request", id="cold"),
        pytest.param(
            progress("loading", loading_progress=0.42), False, False, "loading: 42 %", id="loading"
        ),
        pytest.param(progress("draining"), True, False, "shutting down", id="draining"),
        pytest.param(progress("failed"), True, False, "ended with an error", id="failed"),
        pytest.param(progress(last_step_at=0.0), True, False, "no step", id="stalled"),
    ],
)
def test_ready_is_what_has_answered_and_takes_more(
    given: Progress, is_warm: bool, ok: bool, says: str
) -> None:
    verdict = readiness(given, NOW, stall_seconds=10, is_warm=is_warm)

    assert verdict.ok is ok
    assert says in verdict.message


def state(given: Progress, *, is_warm: bool = True, now: float = NOW) -> Any:
    return worker_state(
        served_name="name",
        model_id="id",
        device="cpu",
        progress=given,
        stats=None,
        is_warm=is_warm,
        now=now,
        stall_seconds=10,
    )


@pytest.mark.parametrize(
    ("given", "is_warm", "seconds", "is_stalled"),
    [
        pytest.param(progress(), True, 10, False, id="within what a step may take"),
        pytest.param(progress(last_step_at=NOW - 12), True, 12, True, id="stalled"),
        pytest.param(progress("draining", last_step_at=NOW - 12), True, 12, True, id="draining"),
        pytest.param(progress(last_step_at=NOW - 12), False, 0, False, id="the first steps"),
        pytest.param(progress("failed", last_step_at=0.0), True, NOW, False, id="failed"),
        pytest.param(progress(last_step_at=NOW + 9), True, 0, False, id="a clock set back"),
    ],
)
def test_a_stall_is_told_by_the_workers_own_clock(
    given: Progress, is_warm: bool, seconds: float, is_stalled: bool
) -> None:
    at = NOW + 9 if given.last_step_at == NOW - 1 else NOW

    told = state(given, is_warm=is_warm, now=at)

    assert (told.seconds_since_step, told.is_stalled) == (seconds, is_stalled)


def test_a_worker_that_is_not_warm_is_loading_to_the_operator() -> None:
    assert state(progress(), is_warm=False).phase == "loading"
    assert state(progress(), is_warm=True).phase == "ready"
    assert state(progress("draining"), is_warm=False).phase == "draining"


def test_the_state_of_a_failed_worker_says_why() -> None:
    known = state(progress("failed", failure=Failure("ModelUnusable", "cut short")), is_warm=True)
    failure = Failure.of(ValueError("?"))
    unknown = state(progress("failed", failure=failure), is_warm=True)

    assert (known.reason, known.message) == ("ModelUnusable", "cut short")
    assert (unknown.reason, unknown.message) == ("InternalError", "ValueError: ?")


def test_before_the_model_is_loaded_nothing_is_claimed() -> None:
    loading = state(progress("loading", loading_progress=0.5), is_warm=False)

    assert (loading.pool_pages, loading.memory.measured_bytes) == (0, {})
    assert loading.loading_progress == 0.5
