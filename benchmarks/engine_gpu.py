"""The whole engine on one GPU: random weights of published shapes, requests with random tokens.

Parts, each of which may be measured alone (`--only`) and replaces its rows in the file:

- `throughput`: output tokens per second of requests submitted at once, in each `--formats`, the
  median of `--rounds` runs after a warm-up; the last row of a format counts prompt tokens.
- `arrivals`: latencies of 60 requests that arrive at random, with short prompts only and with
  every tenth of 8,192 tokens.
- `poisson`: the highest rate of arrivals at which the 99th percentile of the time to the first
  token, from the scheduled arrival, stays under 100 ms, over the whole run and over its last 5 s.
  With `--http` through the whole worker, whose clients are processes of their own
  (`engine_http.py`). The curves are printed as tables, kept in the file and drawn beside it.
- `penalties`: what they cost the requests that have them, and those beside one that has.
- `loading`: a checkpoint in the page cache read into each format (`engine_loading.py`).
- `llama`: 2,048 requests at once on the Llama-3.1-8B shape, FP8 with FP8 pages.

The end of a sequence is ignored and there is no prefix cache. Bars that depend on arithmetic scale
with the measured rate of a bf16 matrix product over 690 TFLOP/s: the rate that the card sustains,
since these rows keep it busy for seconds. Ten products alone run a sixth faster.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curves import Point, stored, svg, table
from engine_http import (
    MAX_MILLISECONDS,
    NUM_IN,
    NUM_OUT,
    SHAPES,
    add_options,
    arrivals,
    curve,
    highest_rate,
    point,
)
from engine_loading import measure, measure_calibrated
from kernel_bench import Ceilings, measure_ceilings
from rows import ROOT, Row, commit, is_missed, line, make_row, write

from deepseek_worker.config import EngineConfig
from deepseek_worker.engine import Engine
from deepseek_worker.sequence import Request, SamplingParams
from deepseek_worker.startup import load_engine

OUTPUT = ROOT / "benchmarks" / "results" / "h200" / "engine.json"
BASE_TFLOP_PER_S = 690.0
POISSON_SECONDS = 20.0
RATES = {
    "r1-distill-qwen-1.5b": [300.0, 600.0, 800.0, 1000.0, 1200.0],
    "r1-distill-qwen-7b": [50.0, 100.0, 150.0, 200.0, 250.0],
    "llama-3.1-8b": [50.0, 100.0, 150.0, 200.0, 250.0],
}
"""Arrivals a second; some of a 7B's take what reading prompts alone allows."""
IN_THE_ENGINE, THROUGH_HTTP = "Poisson arrivals", "Poisson arrivals through HTTP"
GIB = 2**30


@dataclass(frozen=True)
class Workload:
    """Requests that are submitted at once, and what is to be reached."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    """Tokens in and out of each request."""
    temperature: float
    figures: dict[str, tuple[float, float, float]]
    """By format: vLLM 0.22.1 on the same card, bar, aim."""
    is_scaled: bool = False
    counts_prompts: bool = False


def _drawn() -> tuple[tuple[int, int], ...]:
    draw = random.Random(1)
    return tuple((draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256))


WORKLOADS = (
    Workload(
        "1 request, 16 in, 256 out, greedy",
        ((16, 256),),
        0.0,
        {"bf16": (208, 260, 280), "fp8": (292, 405, 450), "int4": (323, 480, 560)},
    ),
    Workload(
        "32 requests, 1024 in, 256 out",
        ((1024, 256),) * 32,
        0.6,
        {"bf16": (3836, 4100, 4250), "fp8": (4843, 5700, 6000), "int4": (4207, 5000, 5300)},
    ),
    Workload(
        "256 requests, 1024 in, 256 out",
        ((1024, 256),) * 256,
        0.6,
        {"bf16": (7272, 7700, 8000), "fp8": (9977, 10500, 11000), "int4": (6970, 7100, 7700)},
        is_scaled=True,
    ),
    Workload(
        "256 requests, 100 to 1024 in and out",
        _drawn(),
        0.6,
        {
            "bf16": (12591, 13600, 14300),
            "fp8": (15180, 17000, 18300),
            "int4": (12010, 12500, 13500),
        },
        is_scaled=True,
    ),
    Workload(
        "prefill, 8 x 4096",
        ((4096, 1),) * 8,
        0.6,
        {
            "bf16": (45900, 46000, 47500),
            "fp8": (68100, 70000, 73000),
            "int4": (44100, 45000, 46500),
        },
        is_scaled=True,
        counts_prompts=True,
    ),
)
FP8_PAGES = {
    "1 request, 16 in, 256 out, greedy": 204,
    "32 requests, 1024 in, 256 out": 3859,
    "256 requests, 1024 in, 256 out": 7555,
    "256 requests, 100 to 1024 in and out": 12951,
    "prefill, 8 x 4096": 46200,
}
"""vLLM with bf16 weights and FP8 pages, to be ahead of."""


@dataclass
class Answer:
    """When the tokens of one request came."""

    arrival: float
    times: list[float] = field(default_factory=list)

    @property
    def first_token_ms(self) -> float:
        """From the scheduled arrival."""
        return (self.times[0] - self.arrival) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Between tokens."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [(later - earlier) * 1e3 for earlier, later in pairs]


class Bench:
    """One engine and the requests that it is given."""

    def __init__(self, shape: str, **options: Any) -> None:
        defaults = {
            "model": SHAPES / shape,
            "load_format": "dummy",
            "device": "cuda",
            "prefix_cache": False,
            "max_queued_requests": 10**6,
        }
        started = time.perf_counter()
        self.engine: Engine = load_engine(EngineConfig(**(defaults | options)), lambda _: None)
        self.load_seconds = time.perf_counter() - started
        self._num_requests = 0
        self._draw = random.Random(5)
        gc.collect()
        gc.freeze()
        memory = {kind: size >> 20 for kind, size in self.engine.stats().measured_bytes.items()}
        show(f"{shape} {options}: started in {self.load_seconds:.1f} s, MiB {memory}")

    def requests(
        self, lengths: Sequence[tuple[int, int]], temperature: float, **more: Any
    ) -> list[Request]:
        """Random prompts of these lengths, and more of how tokens are chosen."""
        requests = []
        for num_in, num_out in lengths:
            self._num_requests += 1
            prompt = tuple(self._draw.randrange(100, 100_000) for _ in range(num_in))
            sampling = SamplingParams(
                temperature=temperature, max_tokens=num_out, ignore_eos=True, **more
            )
            requests.append(Request(str(self._num_requests), prompt, sampling))
        return requests

    def seconds(self, requests: list[Request]) -> float:
        """Submit all at once and wait for the last token."""
        torch.cuda.synchronize()
        num_tokens = 0
        started = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                num_tokens += len(output.token_ids)
        elapsed = time.perf_counter() - started
        expected = sum(request.sampling.max_tokens or 0 for request in requests)
        if num_tokens != expected:
            raise RuntimeError(f"{num_tokens} tokens came instead of {expected}")
        return elapsed

    def arrive(self, requests: list[Request], arrivals: list[float]) -> list[Answer]:
        """Submit each at its time, and note when its tokens came."""
        engine = self.engine
        answers = {r.request_id: Answer(t) for r, t in zip(requests, arrivals, strict=True)}
        waiting = list(zip(arrivals, requests, strict=True))[::-1]
        torch.cuda.synchronize()
        started = time.perf_counter()
        while waiting or engine.has_work():
            # As the server's thread does: who arrives while the device is busy joins the next step.
            deadline = time.perf_counter() + engine.spare_seconds()
            while True:
                now = time.perf_counter()
                while waiting and waiting[-1][0] <= now - started:
                    engine.add(waiting.pop()[1])
                if now >= deadline and engine.has_work():
                    break
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                answers[output.request_id].times += [now] * len(output.token_ids)
        return list(answers.values())

    def close(self) -> None:
        """Give the memory back."""
        del self.engine
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def throughput(ceilings: Ceilings, options: argparse.Namespace) -> list[Row]:
    """Requests submitted at once, in each format."""
    rows = []
    for name in options.formats.split(","):
        weights, _, pages = name.partition("+")
        bench = Bench(
            "r1-distill-qwen-7b",
            weights=weights,
            kv_cache=pages or "bf16",
            max_context_tokens=4352,
            kv_cache_bytes=40 * GIB,
        )
        for workload in WORKLOADS:
            if options.workloads and not any(w in workload.name for w in options.workloads):
                continue
            tokens = sum(
                num_in if workload.counts_prompts else out for num_in, out in workload.lengths
            )
            rounds = options.rounds
            if tokens > 10_000 and not workload.counts_prompts:
                rounds = options.long_rounds
            else:
                bench.seconds(bench.requests(workload.lengths, workload.temperature))
            rates = [
                tokens / bench.seconds(bench.requests(workload.lengths, workload.temperature))
                for _ in range(rounds)
            ]
            rows.append(_throughput_row(workload, name, rates, ceilings))
            show(line(rows[-1]))
        bench.close()
    return rows


def _throughput_row(workload: Workload, name: str, rates: list[float], ceilings: Ceilings) -> Row:
    scale = ceilings.sustained_bf16_tflop_per_s / BASE_TFLOP_PER_S if workload.is_scaled else 1.0
    if name == "bf16+fp8":
        vllm = bar = aim = float(FP8_PAGES[workload.name])
    elif name in workload.figures:
        vllm, bar, aim = workload.figures[name]
    else:
        return make_row(f"{workload.name}, {name}", rates, "tokens/s")
    return make_row(
        f"{workload.name}, {name}",
        rates,
        "tokens/s",
        bar=bar * scale,
        stretch=aim * scale,
        baseline=vllm,
        note=f"bar {bar:g} at 690 TFLOP/s; {ceilings.sustained_bf16_tflop_per_s:.0f} sustained in "
        f"its run, {ceilings.bf16_tflop_per_s:.0f} in ten products"
        if workload.is_scaled
        else None,
    )


def latencies(_: Ceilings, _options: argparse.Namespace) -> list[Row]:
    """Latencies of 60 requests that arrive at random."""
    bench = Bench(
        "r1-distill-qwen-7b",
        weights="bf16",
        max_context_tokens=8448,
        kv_cache_bytes=20 * GIB,
        max_running_requests=64,
    )
    draw = random.Random(7)
    times, now = [], 0.0
    for _ in range(60):
        now += draw.expovariate(8.0)
        times.append(now)
    short = [(1024, 128)] * 60
    long = [(8192, 128) if index % 10 == 9 else (1024, 128) for index in range(60)]
    bench.arrive(bench.requests(short[:8], 0.6), [0.0] * 8)
    answers = bench.arrive(bench.requests(short, 0.6), times)
    first = [answer.first_token_ms for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps_ms]
    name = "60 arrivals, 8 a second, 1024 in, 128 out, bf16"
    rows = [
        make_row(f"{name}: time to first token, mean", [statistics.mean(first)], "ms", bar=33.6),
        make_row(f"{name}: time to first token, p99", [_p99(first)], "ms", bar=56),
        make_row(f"{name}: between tokens, mean", [statistics.mean(gaps)], "ms", bar=6.04),
        make_row(f"{name}: between tokens, p99", [_p99(gaps)], "ms", bar=18),
    ]
    answers = bench.arrive(bench.requests(long, 0.6), times)
    gaps = [gap for answer in answers for gap in answer.gaps_ms]
    rows.append(
        make_row(
            f"{name}, every tenth prompt 8192: between tokens, p99",
            [_p99(gaps)],
            "ms",
            bar=2 * rows[-1]["value"],
            note="bar: twice that without them",
        )
    )
    bench.close()
    return rows


def poisson(_: Ceilings, options: argparse.Namespace) -> list[Row]:
    """The highest rate of arrivals with a short time to the first token."""
    measure = _through_http if options.http else _in_the_engine
    rows = []
    for case in options.poisson.split(","):
        shape, weights = case.split(":")
        options.rates = options.given_rates or RATES[shape]
        points, note = measure(shape, weights, options)
        show(f"{case}\n{table(points)}")
        bar = None
        if case == "r1-distill-qwen-1.5b:bf16":
            bar = 800.0 if options.http else 1000.0
        row = make_row(
            f"{THROUGH_HTTP if options.http else IN_THE_ENGINE}, {shape}, {weights}, 128 in, "
            "16 out: highest rate with p99 of the time to first token under 100 ms",
            [highest_rate(points)],
            "requests/s",
            bar=bar,
            note=f"seeds {options.seeds}, {options.seconds:g} s each{note}",
        )
        rows.append(row | {"curve": [asdict(point) for point in points]})
    return rows


def _in_the_engine(
    shape: str, weights: str, options: argparse.Namespace
) -> tuple[list[Point], str]:
    bench = Bench(
        shape,
        weights=weights,
        max_context_tokens=512,
        kv_cache_bytes=30 * GIB,
        max_running_requests=options.running,
    )
    bench.arrive(bench.requests([(NUM_IN, NUM_OUT)] * 512, 0.6), [i / 500 for i in range(512)])
    points: list[Point] = []
    for rate in options.rates:
        runs = []
        for seed in options.seeds:
            times = arrivals(rate, options.seconds, seed)
            answers = bench.arrive(bench.requests([(NUM_IN, NUM_OUT)] * len(times), 0.6), times)
            runs.append([{"arrival": a.arrival, "times": a.times, "ok": True} for a in answers])
        points.append(point(rate, options.seconds, runs))
        show(table(points[-1:]).splitlines()[-1])
        if points[-1].first_p99_ms >= MAX_MILLISECONDS:
            break
    bench.close()
    return points, ""


def _through_http(shape: str, weights: str, options: argparse.Namespace) -> tuple[list[Point], str]:
    """The same, through the whole worker."""
    flags = [
        "--device=cuda", f"--weights={weights}", f"--kv-cache-bytes={30 * GIB}",
        f"--max-running-requests={options.running}",
    ]  # fmt: skip
    if options.api_processes:
        flags.append(f"--api-processes={options.api_processes}")
    points, costs = curve(SHAPES / shape, flags, options)
    spent = ", ".join(f"{kind.rpartition('.')[2]} {ms:.2f}" for kind, ms in costs.items())
    return points, f", {options.clients} client processes; processor ms a request: {spent}"


def draw(path: Path) -> None:
    """Draw all curves of the file beside it."""
    rows = json.loads(path.read_text())["rows"]
    for start, name in ((IN_THE_ENGINE, "poisson"), (THROUGH_HTTP, "poisson-http")):
        if curves := stored(rows, f"{start}, "):
            plot = path.with_name(f"{path.stem}-{name}.svg")
            plot.write_text(svg(curves, MAX_MILLISECONDS))
            show(f"curves drawn in {plot}")


def llama(_: Ceilings, options: argparse.Namespace) -> list[Row]:
    """2,048 requests at once on the Llama-3.1-8B shape."""
    bench = Bench(
        "llama-3.1-8b",
        weights="fp8",
        kv_cache="fp8",
        max_context_tokens=2048,
        max_running_requests=options.running,
    )
    lengths = [(1000, 1000)] * options.llama_requests
    rate = sum(out for _, out in lengths) / bench.seconds(bench.requests(lengths, 0.6))
    bench.close()
    name = f"Llama-3.1-8B, FP8, FP8 pages, {options.llama_requests} requests, 1000 in, 1000 out"
    return [make_row(name, [rate], "tokens/s", bar=14300, stretch=17744, baseline=13590)]


def penalties(_: Ceilings, options: argparse.Namespace) -> list[Row]:
    """What penalties cost the requests that have them, and those beside one that has."""
    bench = Bench(
        "r1-distill-qwen-7b", weights="bf16", max_context_tokens=512, kv_cache_bytes=10 * GIB
    )
    lengths = [(64, 256)] * 64
    given = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}

    def rate(num_penalized: int) -> float:
        requests = bench.requests(lengths[num_penalized:], 0.6)
        requests += bench.requests(lengths[:num_penalized], 0.6, **given)
        return sum(out for _, out in lengths) / bench.seconds(requests)

    rate(32)
    rates = [[rate(number) for number in (0, 1, 64)] for _ in range(options.rounds)]
    bench.close()
    name = "64 requests, 64 in, 256 out, bf16"
    return [
        make_row(f"{name}", [plain for plain, _, _ in rates], "tokens/s"),
        make_row(
            f"{name}: one with penalties, over none with",
            [one / plain for plain, one, _ in rates],
            "times",
            bar=0.95,
        ),
        make_row(
            f"{name}: all with penalties, over none with",
            [every / plain for plain, _, every in rates],
            "times",
            bar=0.9,
        ),
    ]


def loading(ceilings: Ceilings, options: argparse.Namespace) -> list[Row]:
    """How fast weights are read, and what rounding them for a text takes."""
    device = torch.device("cuda")
    shape, link = SHAPES / "r1-distill-qwen-7b", ceilings.host_to_device_gb_per_s
    rows = measure(shape, device, options.long_rounds, link)
    return [*rows, measure_calibrated(SHAPES / "r1-distill-qwen-1.5b", "fp8", device)]


PARTS: dict[str, Callable[[Ceilings, argparse.Namespace], list[Row]]] = {
    "throughput": throughput,
    "arrivals": latencies,
    "poisson": poisson,
    "loading": loading,
    "llama": llama,
    "penalties": penalties,
}


def _p99(values: list[float]) -> float:
    """As numpy's percentile: between two values in proportion."""
    return float(np.percentile(values, 99))


def show(text: str) -> None:
    """Progress goes to the terminal at once."""
    print(text, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Measure, write and print; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--formats", default="bf16,fp8,int4,bf16+fp8", help="weights[+pages],...")
    parser.add_argument("--workloads", nargs="+", help="parts of the names of throughput rows")
    parser.add_argument("--rounds", type=int, default=5, help="runs of a row (5)")
    parser.add_argument("--long-rounds", type=int, default=5, help="runs of long rows (5)")
    parser.add_argument("--poisson", default="r1-distill-qwen-1.5b:bf16", help="shape:weights,...")
    parser.add_argument("--http", action="store_true", help="Poisson arrivals through HTTP")
    add_options(parser)
    parser.add_argument(
        "--rates",
        dest="given_rates",
        type=float,
        nargs="+",
        help="a second; by default the shape's",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=POISSON_SECONDS)
    parser.add_argument("--running", type=int, default=512, help="most requests in a step")
    parser.add_argument("--llama-requests", type=int, default=2048)
    parser.add_argument("--commit", default=commit(), help="what the rows say was measured")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file to write or update")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks/engine.py needs an NVIDIA GPU, or --cpu", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name()
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    show(json.dumps(asdict(ceilings)))
    rows: list[Row] = []
    for part in options.only:
        rows += PARTS[part](ceilings, options)
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
        write(options.output, rows, options.commit, gpu, asdict(ceilings), **versions)
        draw(options.output)
    for row in rows:
        show(line(row))
    show(f"ceilings: {asdict(ceilings)}; written to {options.output}")
    return int(any(is_missed(row) for row in rows))
