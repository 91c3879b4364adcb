"""Poisson arrivals through HTTP: the whole worker, text prompts, streamed answers.

The worker is started as in a pod, with random weights of a published shape and a tokenizer of as
many tokens: the default model's, filled up. The clients are processes of their own
(`http_client.py`). `python benchmarks/engine.py --only poisson --http` measures on a GPU;
`python benchmarks/engine_http.py --device cpu --model FOLDER` tries the same on a CPU.
"""

import argparse
import functools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from curves import Point, svg, table
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ROOT / "benchmarks" / "shapes"
MAX_MILLISECONDS = 100.0
"""Of the 99th percentile of the time to the first token, at the highest rate."""
START_SECONDS = 600
LATE_SECONDS = 5.0
"""The end of a run, which is looked at on its own: a queue that grows shows there."""
NUM_IN, NUM_OUT = 128, 16
NAME = "bench"
Answers = list[dict[str, Any]]


def make_model(shape: Path, folder: Path, tokenizer: Path) -> None:
    """The shape's config, and a tokenizer that knows a text for every id of its vocabulary.

    Args:
        shape: Folder with config.json.
        folder: Gets both files.
        tokenizer: A GGUF file or folder whose tokenizer reads the prompts.
    """
    from deepseek_worker.tokenizer import load_tokenizer  # noqa: PLC0415 - not in the clients

    config = json.loads((shape / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    document = json.loads(load_tokenizer(tokenizer)._fast.to_str())
    vocab = document["model"]["vocab"]
    # Tokens without merges are never read, only written.
    for number in range(len(vocab), config["vocab_size"]):
        vocab[f"Ġx{number}"] = number
    (folder / "tokenizer.json").write_text(json.dumps(document))


def make_prompts(folder: Path, num: int, num_tokens: int, seed: int) -> list[str]:
    """Texts of words that are one token each."""
    words = _words(folder)
    draw = random.Random(seed)
    prompts = ["".join(f" {draw.choice(words)}" for _ in range(num_tokens)) for _ in range(num)]
    tokenizer = _tokenizer(folder)
    for prompt in prompts[:10]:
        found = len(tokenizer.encode(prompt).ids)
        if found != num_tokens:
            raise RuntimeError(f"a prompt has {found} tokens instead of {num_tokens}")
    return prompts


@functools.cache
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@functools.cache
def _words(folder: Path) -> list[str]:
    """Words that are one token each, with the space before them."""
    tokenizer = _tokenizer(folder)
    words = [
        token[1:]
        for token in tokenizer.get_vocab()
        if token.startswith("Ġ") and token[1:].isascii() and token[1:].isalpha()
    ]
    return sorted(word for word in words if len(tokenizer.encode(f" {word}").ids) == 1)


@dataclass(frozen=True)
class Load:
    """What one worker is sent."""

    port: int
    times: Sequence[float]
    """Arrivals, in seconds from the common start."""
    prompts: Sequence[str]
    num_clients: int
    num_out: int = NUM_OUT


class Served:
    """A worker that was started."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: IO[bytes]) -> None:
        self.port = port
        self._process = process
        self._log = log

    def wait_until_ready(self) -> None:
        """Until it answers.

        Raises:
            RuntimeError: it ended, or takes too long; with the end of its log.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{self.port}/health/ready", timeout=5
                ):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
            if self._process.poll() is not None or time.monotonic() > deadline:
                told = "\n".join([*self.warnings(), self._read_log()[-2000:]])
                raise RuntimeError(f"the worker did not start: {told}")

    @property
    def engine_pid(self) -> int:
        """The process that holds the device's memory."""
        return next(pid for pid, kind in self._processes() if kind.endswith("engine_process"))

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of the worker's processes by what they are."""
        tick = os.sysconf("SC_CLK_TCK")
        used: dict[str, float] = {}
        for number, kind in self._processes():
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / tick
            used[kind] = used.get(kind, 0.0) + seconds
        return used

    def warnings(self) -> list[str]:
        """Lines of its log that say more than that all is well."""
        levels = ('"level": "warning"', '"level": "error"')
        return [line for line in self._read_log().splitlines() if any(w in line for w in levels)]

    def stop(self) -> None:
        """End it, by force if it does not."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _processes(self) -> list[tuple[int, str]]:
        """The worker's processes, and which module each runs."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_text().split("\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except (FileNotFoundError, ProcessLookupError):
                continue  # It has ended since.
            # One that has just ended has no words any more.
            if len(words) > 2 and self._process.pid in (int(folder.name), int(parent)):
                found.append((int(folder.name), words[2]))
        return found

    def _read_log(self) -> str:
        # Not by reading on: the worker writes where this file's position is.
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


@contextmanager
def starting(model: Path, flags: Sequence[str]) -> Iterator[Served]:
    """Start a worker; it is not ready yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "deepseek_worker.main", "serve", f"--model={model}",
        f"--served-model-name={NAME}", "--host=127.0.0.1", f"--port={port}",
        "--load-format=dummy", "--no-prefix-cache", "--max-queued-requests=1000000", *flags,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        worker = Served(subprocess.Popen(command, stderr=log), port, log)
        try:
            yield worker
        finally:
            worker.stop()


@contextmanager
def serving(model: Path, flags: Sequence[str]) -> Iterator[Served]:
    """Start a worker and wait until it is ready."""
    with starting(model, flags) as worker:
        worker.wait_until_ready()
        yield worker


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of a Poisson process, from 0."""
    draw = random.Random(seed)
    times: list[float] = []
    now = draw.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += draw.expovariate(rate)
    return times


def send(port: int, times: Sequence[float], prompts: Sequence[str], num_clients: int) -> Answers:
    """Send a request at each time, from several processes in turn."""
    return send_all([Load(port, times, prompts, num_clients)])[0]


def send_all(loads: Sequence[Load], timeout_seconds: float = 120.0) -> list[Answers]:
    """Send to several workers at once; all have the same start.

    Args:
        loads: What each is sent.
        timeout_seconds: How long after the last arrival the last answer may end.

    Returns:
        The answers of each load.

    Raises:
        RuntimeError: a client failed.
    """
    # Time for the clients to start Python. Processes share this clock.
    started_at = time.monotonic() + 3.0
    program = str(Path(__file__).with_name("http_client.py"))
    answers: list[Answers] = [[] for _ in loads]
    with tempfile.TemporaryDirectory() as made:
        clients = []
        for number, load in enumerate(loads):
            body = {
                "model": NAME, "max_tokens": load.num_out, "ignore_eos": True, "temperature": 0.6,
                "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            requests = [
                (at, json.dumps({**body, "prompt": prompt}))
                for at, prompt in zip(load.times, load.prompts, strict=True)
            ]
            for index in range(load.num_clients):
                told = {
                    "port": load.port,
                    "started_at": started_at,
                    "requests": requests[index :: load.num_clients],
                    "end": f'"completion_tokens":{load.num_out}',
                    "timeout_seconds": max(load.times, default=0.0) + timeout_seconds,
                }
                files = [Path(made, f"{word}-{number}-{index}") for word in ("told", "answers")]
                files[0].write_text(json.dumps(told))
                process = subprocess.Popen([sys.executable, program, *map(str, files)])
                clients.append((process, files[1], answers[number]))
        failed = [code for client, _, _ in clients if (code := client.wait())]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(clients)} clients ended with {failed[0]}")
        for _, answered, of_load in clients:
            of_load.extend(json.loads(answered.read_text()))
    return answers


def point(rate: float, seconds: float, runs: Sequence[Answers]) -> Point:
    """What the runs of one rate show, each by its worst.

    Raises:
        RuntimeError: a request was not answered.
    """
    p50, p99, gaps = [], [], []
    for answers in runs:
        failed = [answer["status"] for answer in answers if not answer["ok"]]
        if failed:
            raise RuntimeError(f"{len(failed)} requests have no complete answer: {failed[:5]}")
        first = [1e3 * (answer["times"][0] - answer["arrival"]) for answer in answers]
        late = [
            1e3 * (answer["times"][0] - answer["arrival"])
            for answer in answers
            if answer["arrival"] >= seconds - LATE_SECONDS
        ]
        p50.append(float(np.percentile(first, 50)))
        p99.append(max(float(np.percentile(some, 99)) for some in (first, late) if some))
        gaps.append(
            statistics.mean(
                1e3 * (answer["times"][-1] - answer["times"][0]) / (NUM_OUT - 1)
                for answer in answers
            )
        )
    num = statistics.mean(len(answers) for answers in runs)
    ends = [max(answer["times"][-1] for answer in answers) for answers in runs]
    return Point(rate, max(p50), max(p99), max(gaps), num * NUM_OUT / max(ends))


def curve(
    shape: Path, flags: Sequence[str], options: argparse.Namespace
) -> tuple[list[Point], dict[str, float]]:
    """Measure one worker at growing rates, until the time to the first token is too long.

    Returns the points, and the processor time of each kind of process for a request, in
    milliseconds.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_model(shape, folder, options.tokenizer)
        with serving(folder, [*flags, "--max-context-tokens=512"]) as worker:
            warm = [index / 100 for index in range(options.warm_up)]
            send(worker.port, warm, make_prompts(folder, len(warm), NUM_IN, -1), options.clients)
            before, num_requests, points = worker.cpu_seconds(), 0, []
            for rate in options.rates:
                runs = []
                for seed in options.seeds:
                    times = arrivals(rate, options.seconds, seed)
                    prompts = make_prompts(folder, len(times), NUM_IN, seed)
                    runs.append(send(worker.port, times, prompts, options.clients))
                    num_requests += len(times)
                points.append(point(rate, options.seconds, runs))
                print(table(points[-1:]).splitlines()[-1], flush=True)
                if points[-1].first_p99_ms >= MAX_MILLISECONDS:
                    break
            after = worker.cpu_seconds()
    costs = {kind: 1e3 * (after[kind] - before[kind]) / num_requests for kind in after}
    return points, costs


def highest_rate(points: Sequence[Point]) -> float:
    """The highest rate before the first that is too slow; 0 if there is none."""
    best = 0.0
    for one in points:
        if one.first_p99_ms >= MAX_MILLISECONDS:
            break
        best = one.rate
    return best


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that this benchmark has of its own."""
    parser.add_argument("--clients", type=int, default=4, help="client processes (4)")
    parser.add_argument("--api-processes", type=int, help="of the worker; its default otherwise")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=Path.home() / ".cache/deepseek/models/smollm2/model.gguf",
        help="a model whose tokenizer reads the prompts; `python tools/model.py` fetches this one",
    )
    parser.add_argument("--warm-up", type=int, default=512, help="requests before all others")


def main(arguments: Sequence[str]) -> int:
    """Measure one shape and print its curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--model", type=Path, default=SHAPES / "r1-distill-qwen-1.5b")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--rates", type=float, nargs="+", default=[300, 600, 800, 1000, 1200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    options = parser.parse_args(arguments)
    flags = [f"--device={options.device}", f"--weights={options.weights}"]
    if options.api_processes:
        flags.append(f"--api-processes={options.api_processes}")
    points, costs = curve(options.model, flags, options)
    print(table(points))
    print(f"highest rate: {highest_rate(points):g} a second")
    for kind, milliseconds in costs.items():
        print(f"{kind}: {milliseconds:.2f} ms of processor time a request")
    if options.plot:
        options.plot.write_text(svg({options.model.name: points}, MAX_MILLISECONDS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
