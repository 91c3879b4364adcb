"""The benchmark of workers that share a card: its figures, its rows, and what the driver says."""

import pytest

MIB = 2**20
BENCHMARK = "sharing"


def answer(arrival, first, last, status=200):
    times = [arrival + first, arrival + last] if status == 200 else []
    return {"arrival": arrival, "times": times, "ok": status == 200, "status": status}


def test_figures_are_of_all_tenants_and_of_each(bench):
    quick = [answer(0.0, 0.1, 1.0), answer(0.0, 0.2, 2.0)]
    slow = [answer(0.0, 0.4, 4.0), answer(1.0, 0.3, 1.2)]

    found = bench.figures([quick, slow], num_out=10)

    assert found.tokens_per_s == 40 / 4
    assert found.each == (20 / 2, 20 / 4)
    assert found.fairness == 0.5
    assert found.first_p99_ms == pytest.approx(400)
    assert found.gap_mean_ms == pytest.approx(1e3 * (0.9 + 1.8 + 3.6 + 0.9) / 4 / 9)


def test_an_answer_that_is_missing_gives_no_figures(bench):
    with pytest.raises(RuntimeError, match="1 requests have no complete answer"):
        bench.figures([[answer(0, 1, 2), answer(0, 1, 2, status=429)]], num_out=2)


def test_what_is_refused_is_told_apart_from_what_breaks(bench):
    answers = [answer(0, 1, 2, status) for status in (200, 429, 503, 0, 500)]

    assert bench.outcomes(answers) == {"answered": 1, "refused": 2, "broken": 2}


def figures(bench, tokens_per_s, each=(1.0, 1.0)):
    return bench.Figures(tokens_per_s, each, first_p99_ms=50.0, gap_mean_ms=5.0)


def test_sharing_costs_a_part_of_whole_cards(bench):
    whole = bench.whole_rows(
        "shape", 2, figures(bench, 1000.0), figures(bench, 4000.0), figures(bench, 100.0)
    )
    known = {row["name"]: row["value"] for row in whole}

    shared = bench.shared_rows("shape", 2, figures(bench, 2000.0), figures(bench, 200.0), known)

    found = {row["name"].removeprefix("shape: "): row for row in [*whole, *shared]}
    assert found["a whole card for each tenant, cost"]["value"] == 1000
    assert found["2 workers on one card, cost"]["value"] == 500
    assert found["2 workers on one card, cost over that of 2 whole cards"]["value"] == 0.5
    steady = found["2 workers on one card, steady: cost over that of 2 whole cards"]
    assert (steady["value"], steady["bar"], steady["better"]) == (0.5, 0.55, "lower")
    assert found["2 workers on one card, all at once, over one worker for all"]["value"] == 0.5


def test_without_figures_of_whole_cards_nothing_is_compared(bench):
    rows = bench.shared_rows("shape", 2, figures(bench, 2000.0), figures(bench, 200.0), {})

    assert not any("over that of" in row["name"] or "over one" in row["name"] for row in rows)


def test_a_greedy_tenant_that_takes_what_is_not_its_own_misses_a_bar(bench):
    burst = figures(bench, 100.0, (10.0, 40.0, 50.0))
    others = figures(bench, 60.0, (30.0, 30.0))
    greedy = [answer(0, 1, 2), answer(0, 1, 2, status=429)]

    def rows(during, broken=()):
        held = bench.Held(100 * MIB, (90 * MIB, 80 * MIB, 70 * MIB), during, "somebody")
        return bench.isolation_rows("shape", 3, held, [*greedy, *broken], burst, others)

    kept = rows((95 * MIB, 80 * MIB, 71 * MIB))
    taken = rows((120 * MIB, 80 * MIB, 71 * MIB), [answer(0, 1, 2, status=0)])

    assert [row["name"] for row in kept if bench.is_missed(row)] == []
    assert [row["value"] for row in kept] == [0.9, 0.95, 1.0, 0.0, 0.75]
    assert [row["name"].split(": ")[-1] for row in taken if bench.is_missed(row)] == [
        "its bytes over its limit",
        "its requests neither answered nor refused",
    ]


def test_processes_of_which_the_driver_tells_nothing_are_left_out(bench):
    told = ["11, 500", "12, [N/A]", "13, 17"]

    assert bench.read_processes(told) == {11: 500 * MIB, 13: 17 * MIB}
    assert bench.read_processes([]) == {}


def test_figures_of_a_cpu_do_not_get_among_those_of_a_gpu(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu"])

    assert "name another file" in capsys.readouterr().err
