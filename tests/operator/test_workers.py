"""What the workers say of themselves: folding samples, and what they mean."""

from typing import Any

import pytest
from scenes import pod_of

from deepseek_contract.state import MemoryState, WorkerState
from deepseek_operator.workers import (
    MISSES,
    Reading,
    Readings,
    Sample,
    fault,
    following,
    is_deaf,
    memory_status,
)

SILENCE = Sample("silent", "no answer in time")


def state_of(**values: Any) -> WorkerState:
    memory = MemoryState(
        predicted_bytes={"weights": 100}, measured_bytes={"weights": 110}, limit_bytes=1000
    )
    given = {
        "phase": "ready", "served_name": "chat", "model_id": "m", "device": "cpu",
        "started_at": 1.0, "memory": memory, "used_percent": 40.0, **values,
    }  # fmt: skip
    return WorkerState(**given)


def answer(**values: Any) -> Sample:
    return Sample("answered", state=state_of(**values))


def after(*samples: Sample, start: float = 100.0) -> Reading:
    reading = None
    for number, sample in enumerate(samples):
        reading = following(reading, sample, start + 2 * number)
    assert reading is not None
    return reading


def test_three_silences_in_a_row_are_a_loss() -> None:
    reading = after(answer(), *[SILENCE] * MISSES)

    assert reading.is_lost
    assert reading.silent_since == 102.0
    assert reading.has_answered


def test_an_answer_in_between_starts_the_count_anew() -> None:
    reading = after(SILENCE, SILENCE, answer(), SILENCE, SILENCE)

    assert not reading.is_lost
    assert reading.silent_since == 106.0


@pytest.mark.parametrize("outcome", ["refused", "forbidden", "unreadable"])
def test_somebody_who_answers_nonsense_is_not_silent(outcome: Any) -> None:
    reading = after(*[Sample(outcome, "?")] * 9)

    assert not reading.is_lost
    assert not reading.has_answered


def test_a_worker_that_was_never_heard_can_be_silent_without_meaning_anything() -> None:
    assert not after(*[SILENCE] * 9).has_answered


class TestNews:
    def news(self, *samples: Sample) -> list[bool]:
        readings = Readings()
        return [
            readings.take("uid", sample, 100.0 + number) for number, sample in enumerate(samples)
        ]

    def test_the_first_reading_is_news_and_the_same_again_is_not(self) -> None:
        assert self.news(answer(), answer(), answer()) == [True, False, False]

    def test_only_the_third_silence_is_news(self) -> None:
        assert self.news(answer(), *[SILENCE] * 4) == [True, False, False, True, False]

    def test_used_memory_is_news_by_five_points_since_it_was_last_told(self) -> None:
        percents = (40.0, 43.0, 44.9, 45.0, 48.0, 40.0)

        told = self.news(*(answer(used_percent=percent) for percent in percents))

        assert told == [True, False, False, True, False, True]

    @pytest.mark.parametrize(
        "change",
        [
            {"phase": "draining"},
            {"phase": "failed", "reason": "DeviceFault"},
            {"is_stalled": True},
            {"is_exhausted": True},
            {"out_of_memory_retries": 1},
        ],
    )
    def test_trouble_is_news(self, change: dict[str, Any]) -> None:
        assert self.news(answer(), answer(**change)) == [True, True]

    def test_workers_that_are_gone_are_forgotten(self) -> None:
        readings = Readings()
        readings.take("stays", answer(), 1.0)
        readings.take("goes", answer(), 1.0)

        readings.keep_only({"stays"})

        assert readings.get("goes") is None
        assert readings.get("stays") is not None


class TestRetries:
    def test_those_before_the_first_answer_were_counted_before(self) -> None:
        assert after(answer(out_of_memory_retries=7)).uncounted_retries == 0

    def test_growth_is_counted_over_a_restart_of_the_worker(self) -> None:
        reading = after(
            answer(out_of_memory_retries=7),
            answer(out_of_memory_retries=9),
            answer(out_of_memory_retries=3, started_at=50.0),
        )

        assert reading.uncounted_retries == 5
        assert reading.retried_at == 104.0

    def test_what_a_status_has_counted_is_not_counted_again(self) -> None:
        readings = Readings()
        pod = pod_of()
        uid = pod["metadata"]["uid"]
        for retries in (0, 4):
            readings.take(uid, answer(out_of_memory_retries=retries), 1.0)

        readings.counted([pod])
        readings.take(uid, answer(out_of_memory_retries=5), 2.0)

        assert readings.of([pod])[uid].uncounted_retries == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, None),
        ({"phase": "loading"}, None),
        ({"phase": "failed", "reason": "ModelUnusable"}, None),
        ({"phase": "failed", "reason": "DeviceFault", "message": "ECC"}, "DeviceFault): ECC"),
        ({"phase": "failed", "reason": "MemoryHeld"}, "MemoryHeld"),
        ({"is_stalled": True, "seconds_since_step": 12.3}, "no step for 12 s"),
        ({"is_exhausted": True, "out_of_memory_failures": 3}, "3 failed alone"),
    ],
)
def test_a_fault_is_what_another_device_may_not_have(
    given: dict[str, Any], words: str | None
) -> None:
    found = fault(state_of(**given))

    assert found == words if words is None else words in (found or "")


class TestMemoryStatus:
    def status(self, previous: Any = None, **percents: float) -> Any:
        pods = [pod_of(name, ready=True) for name in percents]
        readings = {
            pod["metadata"]["uid"]: after(answer(used_percent=percent))
            for pod, percent in zip(pods, percents.values(), strict=True)
        }
        return memory_status(pods, readings, previous)

    def test_it_is_of_the_worker_that_uses_most(self) -> None:
        assert self.status(a=40.4, b=70.6) == {
            "predictedBytes": {"weights": 100},
            "measuredBytes": {"weights": 110},
            "limitBytes": 1000,
            "usedPercent": 71,
        }

    def test_small_changes_are_not_told(self) -> None:
        told = self.status(a=40)

        assert self.status(told, a=44) == told
        assert self.status(told, a=45)["usedPercent"] == 45

    def test_nobody_ready_leaves_the_last_value(self) -> None:
        told = self.status(a=40)

        assert memory_status([pod_of()], {}, told) == told
        assert memory_status([], {}, None) is None

    def test_a_worker_without_measures_has_none(self) -> None:
        pod = pod_of(ready=True)
        empty = MemoryState(predicted_bytes={}, measured_bytes={}, limit_bytes=0)
        readings = {pod["metadata"]["uid"]: after(answer(memory=empty))}

        assert memory_status([pod], readings, None) is None

    def test_a_broken_counter_does_not_break_the_status(self) -> None:
        assert self.status(a=1e300)["usedPercent"] == 100_000


class TestDeafness:
    LOST = after(answer(), *[SILENCE] * MISSES)
    HEARD = after(answer())

    def deaf(self, silent: int, heard: int) -> bool:
        nodes = {f"s{n}": [self.LOST] for n in range(silent)}
        return is_deaf(nodes | {f"h{n}": [self.LOST, self.HEARD] for n in range(heard)})

    def test_a_third_of_the_nodes_can_be_gone(self) -> None:
        assert not self.deaf(333, 667)

    def test_most_nodes_cannot(self) -> None:
        assert self.deaf(6, 5)
        assert self.deaf(3, 0)

    def test_few_nodes_say_nothing_about_us(self) -> None:
        assert not self.deaf(2, 0)
        assert not self.deaf(1, 1)
