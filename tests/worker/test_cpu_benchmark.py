"""The rows of the CPU benchmark: medians of paired rounds, and what disturbed them."""

import pytest

BENCHMARK = "engine_cpu"


def test_the_ratio_is_the_median_of_each_rounds_own(bench):
    # The machine was slow for both in the second round.
    rounds = [bench.Round(30.0, 20.0, 0.0), bench.Round(12.0, 10.0, 2.0), bench.Round(40, 20, 1.0)]

    speed, ratio = bench.rows("r", rounds, bar=1.0)

    assert (speed["value"], speed["min"], speed["max"]) == (30.0, 12.0, 40.0)
    assert (speed["baseline"], speed["baseline_min"], speed["baseline_max"]) == (20, 10, 20)
    assert (ratio["value"], ratio["min"], ratio["max"]) == (1.5, 1.2, 2.0)
    assert (speed["bar"], ratio["bar"]) == (None, 1.0)
    assert not bench.is_missed(ratio)
    assert "note" not in ratio


def test_disturbed_rounds_count_and_are_told(bench):
    rounds = [bench.Round(9.0, 10.0, 40.0), bench.Round(9.0, 10.0, 3.0)]

    speed, ratio = bench.rows("r", rounds, bar=1.0)

    assert bench.is_missed(ratio)
    assert ratio["note"] == "others took processors in 1 of 2 rounds"
    assert speed["others_percent"] == [40, 3]


def test_others_take_what_is_neither_idle_nor_waiting(bench):
    stat = (
        "cpu  1 20 300 4000 50000 600000 7000000 80000000 900000000 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"
    )

    assert bench.busy_ticks(stat) == 87600321


class Side:
    """Answers at once, always the same."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def generate(self, prompts, num_new):
        self.log.append(self.name)
        return [[7] * num_new for _ in prompts]


def test_both_warm_up_and_then_take_turns_at_being_first(bench):
    log = []

    rounds = bench.compare(Side(log, "ours"), Side(log, "theirs"), [[1, 2]], 4, 2)

    assert log == ["ours", "theirs", "ours", "theirs", "theirs", "ours"]
    assert len(rounds) == 2


def test_different_answers_are_not_measured(bench):
    with pytest.raises(RuntimeError, match="not measured"):
        bench.check_equal([[1]], [[2]])
