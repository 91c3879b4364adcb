"""Predicting when a step ends, with made-up times."""

import pytest

from deepseek_worker.step_clock import CAUTION, StepClock


def experienced() -> StepClock:
    """One that has seen shape `a` take 4 ms."""
    clock = StepClock()
    first = clock.launched("a", 1.0)
    clock.launched("a", 1.001)
    clock.ended(first, 1.004, is_exact=True)
    return clock


def test_a_step_starts_when_the_one_before_ends():
    clock = experienced()

    assert clock.seconds_left(1.004) == pytest.approx(CAUTION * 0.004)
    assert clock.seconds_left(1.006) == pytest.approx(CAUTION * 0.004 - 0.002)
    assert clock.seconds_left(1.1) == 0


def test_an_unknown_shape_is_not_waited_for():
    clock = experienced()
    clock.launched("b", 1.005)
    clock.ended(2, 1.008, is_exact=True)

    assert clock.seconds_left(1.008) == 0


def test_with_a_step_in_reserve_there_is_no_time_to_lose_or_none_known():
    clock = experienced()
    clock.launched("a", 1.005)

    assert clock.seconds_left(1.005) == 0


def test_a_step_that_ended_unseen_teaches_nothing():
    clock = experienced()
    clock.launched("a", 1.02)
    clock.ended(2, 1.02, is_exact=False)

    assert clock.seconds_left(1.02) == 0
    clock.launched("a", 1.021)
    clock.ended(3, 1.024, is_exact=True)
    assert clock.seconds_left(1.024) == pytest.approx(CAUTION * 0.004)


def test_an_idle_device_starts_at_once():
    clock = experienced()
    clock.ended(2, 1.008, is_exact=True)

    assert clock.seconds_left(2.0) == 0
    clock.launched("a", 2.0)
    assert clock.seconds_left(2.001) == pytest.approx(CAUTION * 0.004 - 0.001)


def test_a_step_that_nobody_waited_for_is_forgotten():
    clock = experienced()
    clock.launched("b", 1.005)
    clock.launched("a", 1.006)
    clock.ended(3, 1.010, is_exact=True)

    assert clock.seconds_left(1.010) == pytest.approx(CAUTION * 0.004)
    clock.ended(3, 1.011, is_exact=True)
    clock.ended(4, 1.014, is_exact=True)
    clock.ended(4, 1.014, is_exact=True)
    assert clock.seconds_left(1.014) == 0
