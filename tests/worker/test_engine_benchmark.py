"""The GPU benchmark: scaled bars, arrivals on a scripted engine, curves."""

import argparse
from collections import deque

import pytest

from deepseek_worker.sequence import Output

BENCHMARK = "engine_gpu"


@pytest.fixture
def ceilings(bench):
    return bench.Ceilings(4200.0, 4500.0, 780.0, 1300.0, 759.0, 55.0, 55.0)


def test_bars_that_arithmetic_limits_scale_with_the_measured_rate(bench, ceilings):
    by_name = {workload.name: workload for workload in bench.WORKLOADS}
    plain, scaled = by_name["1 request, 16 in, 256 out, greedy"], by_name["prefill, 8 x 4096"]

    assert bench._throughput_row(plain, "bf16", [259.0, 261.0, 262.0], ceilings)["bar"] == 260
    row = bench._throughput_row(scaled, "bf16", [47000.0], ceilings)
    assert row["bar"] == pytest.approx(46000 * 1.1)
    assert bench.is_missed(row)
    assert bench._throughput_row(plain, "int8", [1.0], ceilings)["bar"] is None


class ScriptedEngine:
    """One token a step for the oldest request."""

    def __init__(self):
        self.queue = deque()

    def add(self, request):
        self.queue.append([request, request.sampling.max_tokens])

    def has_work(self):
        return bool(self.queue)

    def spare_seconds(self):
        return 0.0

    def step(self):
        request, left = self.queue[0]
        self.queue[0][1] = left - 1
        if left == 1:
            self.queue.popleft()
        return [Output(request.request_id, (5,), "length" if left == 1 else None)]


@pytest.fixture
def scripted(bench, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "synchronize", lambda: None)
    subject = bench.Bench.__new__(bench.Bench)
    subject.engine = ScriptedEngine()
    subject._num_requests = 0
    subject._draw = bench.random.Random(0)
    return subject


def test_latency_counts_from_the_scheduled_arrival(scripted):
    requests = scripted.requests([(4, 3), (4, 2)], 0.6)

    answers = scripted.arrive(requests, [0.0, 0.02])

    assert [len(answer.times) for answer in answers] == [3, 2]
    assert answers[1].times[0] >= 0.02
    assert 0 <= answers[1].first_token_ms < 1000
    assert len(answers[0].gaps_ms) == 2


def test_tokens_that_do_not_come_are_an_error(scripted):
    requests = scripted.requests([(4, 3)], 0.6)
    scripted.engine.step = lambda: scripted.engine.queue.clear() or []

    with pytest.raises(RuntimeError, match="0 tokens came instead of 3"):
        scripted.seconds(requests)


def options_of(tmp_path, **changes):
    defaults = {
        "poisson": "r1-distill-qwen-1.5b:bf16", "http": False, "running": 8,
        "given_rates": None, "seeds": [0, 1], "seconds": 20.0, "clients": 2, "api_processes": None,
        "output": tmp_path / "engine.json",
    }  # fmt: skip
    return argparse.Namespace(**(defaults | changes))


def test_the_curve_stops_where_the_limit_is_passed(
    bench, scripted, ceilings, tmp_path, monkeypatch
):
    served = []

    def arrive(requests, arrivals):
        """The higher the rate, the later the first token; few at the end of a run are latest."""
        rate = len(arrivals) / 20
        served.append(rate)
        late = 2.0 if rate > 950 else 1.0
        return [
            bench.Answer(at, [at + rate * (late if at > 19.85 else 1.0) / 12_000, at + 1.0])
            for at in arrivals
        ]

    monkeypatch.setattr(bench, "Bench", lambda *_, **__: scripted)
    monkeypatch.setattr(scripted, "arrive", arrive)
    monkeypatch.setattr(scripted, "requests", lambda lengths, _: lengths)
    scripted.close = lambda: None

    (row,) = bench.poisson(
        ceilings, options_of(tmp_path, given_rates=[500.0, 900.0, 1000.0, 1200.0])
    )

    assert row["value"] == 900
    assert row["bar"] == 1000
    assert [point["rate"] for point in row["curve"]] == [500, 900, 1000]
    assert row["curve"][1]["first_p99_ms"] == pytest.approx(75, rel=0.05)
    # Of a whole run it is 83 ms.
    assert row["curve"][2]["first_p99_ms"] > 160
    assert len(served) == 1 + 2 * 3


def test_through_http_each_case_has_a_row_with_its_curve_and_a_line_of_the_plot(
    bench, ceilings, tmp_path, monkeypatch
):
    from curves import Point
    from rows import write

    asked = []

    def curve(shape, flags, options):
        asked.append((shape.name, flags, options.rates))
        points = [Point(rate, rate / 20, rate / 10, 1.0, 16 * rate) for rate in (500, 900, 1200)]
        return points, {"deepseek_worker.api_process": 0.5}

    monkeypatch.setattr(bench, "curve", curve)
    cases = "r1-distill-qwen-1.5b:bf16,r1-distill-qwen-7b:fp8"
    options = options_of(tmp_path, poisson=cases, http=True, api_processes=3)

    first, second = bench.poisson(ceilings, options)
    write(options.output, [first], "x", "a card", {})
    write(options.output, [second], "y", "a card", {})
    bench.draw(options.output)

    assert (first["value"], first["bar"], second["bar"]) == (900, 800, None)
    assert [point["first_p99_ms"] for point in first["curve"]] == [50, 90, 120]
    assert first["note"].endswith("processor ms a request: api_process 0.50")
    assert asked[0][2] != asked[1][2]
    assert asked[1][0] == "r1-distill-qwen-7b"
    assert {"--weights=fp8", "--api-processes=3"} <= set(asked[1][1])
    plot = (tmp_path / "engine-poisson-http.svg").read_text()
    assert plot.count("<polyline") == 2
    assert "r1-distill-qwen-7b, fp8</text>" in plot
    assert not (tmp_path / "engine-poisson.svg").exists()
