"""The benchmark through HTTP: prompts of known length, clients in processes, and its figures."""

import asyncio
import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

BENCHMARK = "engine_http"


def test_every_arrival_is_sent_and_measured_by_processes_of_their_own(
    bench: Any, scripted: Any
) -> None:
    times = [0.01 * number for number in range(40)]
    with scripted.running(served_model_name="bench") as server:
        answers = bench.send(server.port, times, [f"prompt {n}" for n in range(40)], 2)
        server.wait_until_idle()

    assert sorted(answer["arrival"] for answer in answers) == times
    assert all(answer["ok"] for answer in answers)
    assert all(answer["times"][0] >= answer["arrival"] for answer in answers)
    prompts = {bytes(request.prompt_token_ids).decode() for request in server.engine.seen}
    assert prompts == {f"prompt {n}" for n in range(40)}


def test_nothing_is_sent_early_by_a_timer_that_ends_early(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = importlib.import_module("http_client")
    waits: list[float] = []
    now = 10.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += max(0.9 * seconds, 0.002)

    sent: list[float] = []
    pool = client.Pool(0, 10.0, 1, b"")
    pool._free.append(SimpleNamespace(send=lambda exchange: sent.append(now - exchange.arrival)))
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(client, "asyncio", SimpleNamespace(sleep=sleep))

    asyncio.run(pool.ask(client.Exchange(1.0, b"")))

    assert len(waits) > 1
    assert sent[0] >= 10.0


def test_an_answer_that_is_refused_or_short_is_not_complete(bench: Any, scripted: Any) -> None:
    engine = scripted.Engine()
    engine.reply = lambda request: b"abc"
    with scripted.running(engine, served_model_name="bench") as server:
        short = bench.send(server.port, [0.0], ["x"], 1)
        engine.max_unfinished = 0
        refused = bench.send(server.port, [0.0], ["x"], 1)

    assert (short[0]["ok"], short[0]["status"]) == (False, 200)
    assert not refused[0]["ok"]
    with pytest.raises(RuntimeError, match="1 requests have no complete answer"):
        bench.point(1.0, 1.0, [short])


def test_a_workers_processes_are_it_and_its_children(bench: Any) -> None:
    code = "import subprocess, sys; print(0, flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()

        found = bench.Served(process, 0, None)._processes()

        assert sorted(kind for _, kind in found) == sorted([child, code])
        assert process.pid in dict(found)
        process.communicate(b"\n")


def answer(arrival: float, first: float) -> dict[str, Any]:
    return {"arrival": arrival, "times": [arrival + first, arrival + first + 0.15], "ok": True}


def test_a_point_is_the_worst_of_its_seeds_and_looks_at_the_end_on_its_own(bench: Any) -> None:
    even = [answer(0.1 * n, 0.01) for n in range(200)]
    # A queue that only begins to grow shows in the last seconds.
    growing = [answer(0.1 * n, 0.01 if n < 199 else 0.2) for n in range(200)]

    calm, worse = bench.point(10, 20, [even]), bench.point(10, 20, [even, growing])

    assert (calm.first_p50_ms, calm.first_p99_ms) == (pytest.approx(10), pytest.approx(10))
    assert calm.gap_mean_ms == pytest.approx(10)
    assert worse.first_p99_ms > 100


def test_the_highest_rate_is_before_the_first_that_is_too_slow(bench: Any) -> None:
    from curves import Point

    points = [Point(rate, 1, ms, 1, 1) for rate, ms in ((1, 50), (2, 99), (3, 101), (4, 90))]

    assert bench.highest_rate(points) == 2
    assert bench.highest_rate([]) == 0


def test_a_curve_is_a_table_and_a_plot(bench: Any) -> None:
    from curves import Point, svg, table

    points = [Point(300, 20.25, 40.5, 2.5, 4800), Point(600, 30, 950, 3, 9600)]

    lines = table(points).splitlines()
    drawn = ET.fromstring(svg({"a <b>": points}, 100.0))

    assert lines[1].split() == ["300", "20.2", "40.5", "2.50", "4800"]
    (line,) = drawn.findall("{*}polyline")
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert places[0][0] < places[1][0]
    assert places[0][1] > places[1][1]
    assert len(drawn.findall("{*}circle")) == 2


@pytest.mark.model
def test_prompts_have_as_many_tokens_as_they_should(
    bench: Any, trained_model: Path, tmp_path: Path
) -> None:
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps({"vocab_size": 60_000}))

    bench.make_model(shape, tmp_path, trained_model)
    prompts = bench.make_prompts(tmp_path, 5, 128, seed=3)

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [len(tokenizer.encode(prompt).ids) for prompt in prompts] == [128] * 5
    assert len(set(prompts)) == 5
    assert all(tokenizer.id_to_token(number) for number in range(60_000))
