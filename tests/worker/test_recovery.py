"""Splitting what cannot be computed at once, without a model."""

import pytest

from deepseek_worker.errors import DeviceFault
from deepseek_worker.recovery import Exhaustion, Failed, compute_what_fits
from deepseek_worker.runner import Computed
from deepseek_worker.sampler import Sampled
from deepseek_worker.scheduler import Scheduled
from deepseek_worker.sequence import Request, SamplingParams, Sequence


def entries(*lengths: int) -> list[Scheduled]:
    return [
        Scheduled(
            Sequence(Request(str(n), (1,) * length, SamplingParams()), n, 10**6, frozenset()),
            0,
            length,
        )
        for n, length in enumerate(lengths)
    ]


class Device:
    """Computes at most `capacity` tokens at once, and never the poisoned sequence."""

    def __init__(self, capacity: int = 10**9, poisoned: int | None = None) -> None:
        self.capacity = capacity
        self.poisoned = poisoned
        self.calls: list[int] = []
        self.exhaustions: list[int] = []

    def compute(self, batch):
        num_tokens = sum(entry.num_tokens for entry in batch)
        self.calls.append(num_tokens)
        if num_tokens > self.capacity:
            raise RuntimeError("CUDA error: out of memory")
        if any(entry.sequence.order == self.poisoned for entry in batch):
            raise ValueError("poisoned")
        return {entry: Computed(Sampled(7) if entry.is_sampled else None) for entry in batch}

    def run(self, batch, max_halvings=3):
        return compute_what_fits(batch, self.compute, self.exhaustions.append, max_halvings)


def failed(outcomes) -> list[int]:
    return [entry.sequence.order for entry, o in outcomes.items() if isinstance(o, Failed)]


def test_what_fits_is_computed_once():
    device = Device()

    outcomes = device.run(entries(1, 2, 3))

    assert device.calls == [6]
    assert len(outcomes) == 3
    assert failed(outcomes) == []


def test_nothing_to_compute_is_no_error():
    assert Device().run([]) == {}


def test_too_large_a_batch_is_computed_in_halves():
    device = Device(capacity=4)

    outcomes = device.run(entries(1, 1, 1, 1, 1, 1))

    assert device.calls == [6, 3, 3]
    assert device.exhaustions == [6]
    assert failed(outcomes) == []


@pytest.mark.parametrize("poisoned", range(9))
def test_only_the_poisoned_sequence_fails(poisoned):
    device = Device(poisoned=poisoned)

    outcomes = device.run(entries(*[1] * 9))

    assert failed(outcomes) == [poisoned]
    assert len(outcomes) == 9
    assert device.exhaustions == []


def test_a_chunk_too_large_alone_is_computed_in_parts_and_sampled_once():
    device = Device(capacity=30)

    (outcome,) = device.run(entries(100)).values()

    assert device.calls == [100, 50, 25, 25, 50, 25, 25]
    assert outcome.sampled == Sampled(7)


@pytest.mark.parametrize("max_halvings", [0, 1, 3, 10])
def test_a_chunk_is_halved_as_often_as_allowed(max_halvings):
    device = Device(capacity=0)

    (outcome,) = device.run(entries(1 << 20), max_halvings).values()

    assert outcome.reason == "OutOfMemory"
    assert len(device.calls) == 1 + max_halvings


@pytest.mark.parametrize(
    ("max_halvings", "calls"),
    [
        (0, [8, 1, 1, 1, 1, 1, 1, 1, 1]),
        (1, [8, 4, 1, 1, 1, 1, 4, 1, 1, 1, 1]),
        (2, [8, 4, 2, 2, 4, 2, 2]),
    ],
)
def test_a_batch_is_halved_as_often_as_allowed_and_then_tried_one_by_one(max_halvings, calls):
    device = Device(capacity=2)

    outcomes = device.run(entries(*[1] * 8), max_halvings)

    assert device.calls == calls
    assert failed(outcomes) == []


def test_when_nothing_fits_everything_fails_in_bounded_time():
    device = Device(capacity=0)

    outcomes = device.run(entries(*[64] * 64))

    assert failed(outcomes) == list(range(64))
    assert len(device.calls) < 64 * 6
    assert {outcome.reason for outcome in outcomes.values()} == {"OutOfMemory"}


def test_an_ordinary_error_is_named():
    (outcome,) = Device(poisoned=0).run(entries(1)).values()

    assert outcome == Failed("InternalError", "the forward pass failed: ValueError: poisoned")


def test_a_device_that_failed_is_no_matter_of_the_batch():
    def compute(batch):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    with pytest.raises(DeviceFault, match="ECC"):
        compute_what_fits(entries(1, 1), compute, print, 3)


class TestExhaustion:
    FITS, FAILS, BREAKS = None, Failed("OutOfMemory", "no"), Failed("InternalError", "no")

    @pytest.mark.parametrize(
        ("batches", "num_failures", "is_used_up"),
        [
            pytest.param([], 0, False, id="nothing happened"),
            pytest.param([[FAILS]] * 2, 2, False, id="two alone"),
            pytest.param([[FAILS]] * 3, 3, True, id="three alone in a row"),
            pytest.param([[FAILS, FAILS, FAILS]], 3, True, id="three of one batch"),
            pytest.param([[FAILS], [FAILS], [FITS], [FAILS]], 3, False, id="one fits in between"),
            pytest.param([[FAILS, FITS]] * 5, 5, False, id="always one that fits beside"),
            pytest.param([[FAILS]] * 3 + [[FITS]], 3, False, id="it fits again"),
            pytest.param([[BREAKS]] * 9, 0, False, id="other errors"),
            pytest.param([[FAILS]] * 3 + [[]], 3, True, id="a step without work"),
        ],
    )
    def test_it_is_used_up_when_nothing_fits_any_more(self, batches, num_failures, is_used_up):
        exhaustion = Exhaustion()

        for outcomes in batches:
            given = entries(*[1] * len(outcomes))
            exhaustion.note(dict(zip(given, outcomes, strict=True)))

        assert exhaustion.num_failures == num_failures
        assert exhaustion.is_used_up is is_used_up
