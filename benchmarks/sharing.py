"""Workers that share a card against one that has all of it: throughput, cost, latency, isolation.

Every worker is started as in a pod, with random weights of one shape and its part of the card as
`--memory-limit-bytes`; every tenant sends the same requests, from processes of its own. Parts, each
of which may be measured alone (`--only`) and replaces its rows in the file:

- `whole`: one worker with the card: the requests of one tenant, then those of all.
- `shared`: one worker a tenant, with equal parts of the card: the requests of all at once; then,
  for isolation, one tenant sends many times as many as the others and takes no byte of theirs.

Each is measured with all requests at once, which says what is possible, and at a steady rate, which
says what a tenant waits. A card costs the same whoever uses it, so cost is card-seconds for each
million output tokens. `--device cpu --model FOLDER` tries the same with little on a CPU.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# This folder last: its operator.py is not the standard library's.
sys.path = [path for path in sys.path if path != str(ROOT / "benchmarks")]
sys.path.append(str(ROOT / "benchmarks"))

from engine_http import (  # noqa: E402 - after the path
    SHAPES,
    Answers,
    Load,
    Served,
    add_options,
    arrivals,
    make_model,
    make_prompts,
    send_all,
    starting,
)
from rows import Row, commit, is_missed, line, make_row, read_values, write  # noqa: E402 - after the path

OUTPUT = ROOT / "benchmarks" / "results" / "h200" / "sharing.json"
MIB = 2**20
MAX_RUNNING = 512
REFUSED = (429, 503)
"""How a worker says that it has too much to do."""


@dataclass(frozen=True)
class Size:
    """What each tenant sends."""

    num_in: int
    num_out: int
    num_requests: int
    """All at once."""
    rate: float
    """Requests a second of the steady load."""
    seconds: float


@dataclass(frozen=True)
class Figures:
    """What one load showed, over all tenants that sent it."""

    tokens_per_s: float
    """Output tokens of all, from the first arrival to the last token."""
    each: tuple[float, ...]
    """The same of each tenant, until its own last token."""
    first_p99_ms: float
    gap_mean_ms: float
    """Between tokens."""

    @property
    def fairness(self) -> float:
        """The slowest tenant's tokens a second over the fastest's."""
        return min(self.each) / max(self.each)


def figures(runs: Sequence[Answers], num_out: int) -> Figures:
    """What the answers of each tenant show.

    Raises:
        RuntimeError: a request has no complete answer.
    """
    missing = [answer["status"] for answers in runs for answer in answers if not answer["ok"]]
    if missing:
        raise RuntimeError(f"{len(missing)} requests have no complete answer: {missing[:5]}")
    all_answers = [answer for answers in runs for answer in answers]
    first = [1e3 * (answer["times"][0] - answer["arrival"]) for answer in all_answers]
    gaps = [
        1e3 * (answer["times"][-1] - answer["times"][0]) / max(1, num_out - 1)
        for answer in all_answers
    ]
    ends = [max(answer["times"][-1] for answer in answers) for answers in runs]
    counts = [num_out * len(answers) for answers in runs]
    return Figures(
        tokens_per_s=sum(counts) / max(ends),
        each=tuple(count / end for count, end in zip(counts, ends, strict=True)),
        first_p99_ms=_percentile(first, 0.99),
        gap_mean_ms=statistics.mean(gaps),
    )


def outcomes(answers: Answers) -> dict[str, int]:
    """How many were answered, refused as too many, or ended otherwise."""
    refused = sum(answer["status"] in REFUSED for answer in answers)
    answered = sum(answer["ok"] for answer in answers)
    return {
        "answered": answered,
        "refused": refused,
        "broken": len(answers) - answered - refused,
    }


def card_seconds(tokens_per_s: float, num_cards: int = 1) -> float:
    """For a million output tokens."""
    return num_cards * 1e6 / tokens_per_s


def whole_rows(
    name: str, tenants: int, one: Figures, everybody: Figures, steady: Figures
) -> list[Row]:
    """One worker with the whole card.

    Args:
        name: Shape and lengths.
        tenants: How many there are.
        one: All requests of one tenant at once.
        everybody: All requests of all tenants at once.
        steady: The steady load of one tenant.
    """
    own = f"{name}: a whole card for each tenant"
    return [
        make_row(f"{own}, all at once", [one.tokens_per_s], "tokens/s"),
        make_row(f"{own}, cost", [card_seconds(one.tokens_per_s)], "card s/Mtoken", better="lower"),
        make_row(f"{own}, steady: time to first token, p99", [steady.first_p99_ms], "ms"),
        make_row(f"{own}, steady: between tokens, mean", [steady.gap_mean_ms], "ms"),
        make_row(
            f"{own}, steady: cost",
            [card_seconds(steady.tokens_per_s)],
            "card s/Mtoken",
            better="lower",
        ),
        make_row(
            f"{name}: one worker for {tenants} tenants, all at once",
            [everybody.tokens_per_s],
            "tokens/s",
        ),
    ]


def shared_rows(
    name: str, tenants: int, burst: Figures, steady: Figures, whole: Mapping[str, float]
) -> list[Row]:
    """Workers that share a card.

    Args:
        name: Shape and lengths.
        tenants: How many workers there are.
        burst: All requests of all tenants at once.
        steady: The steady load of all tenants.
        whole: Values of the rows of `whole_rows`, by name; comparisons with missing ones are left
            out.
    """
    shared = f"{name}: {tenants} workers on one card"
    own = f"{name}: a whole card for each tenant"
    together = f"{name}: one worker for {tenants} tenants, all at once"
    rows = [
        make_row(f"{shared}, all at once", [burst.tokens_per_s], "tokens/s"),
        make_row(f"{shared}, all at once: slowest over fastest tenant", [burst.fairness], "times"),
        make_row(
            f"{shared}, cost", [card_seconds(burst.tokens_per_s)], "card s/Mtoken", better="lower"
        ),
        make_row(f"{shared}, steady: time to first token, p99", [steady.first_p99_ms], "ms"),
        make_row(f"{shared}, steady: between tokens, mean", [steady.gap_mean_ms], "ms"),
        make_row(
            f"{shared}, steady: cost",
            [card_seconds(steady.tokens_per_s)],
            "card s/Mtoken",
            better="lower",
        ),
    ]
    measured = {row["name"]: row["value"] for row in rows}
    for load, bar in (("cost", 1.0), ("steady: cost", 1.1 / tenants)):
        if (apart := whole.get(f"{own}, {load}")) is not None:
            rows.append(
                make_row(
                    f"{shared}, {load} over that of {tenants} whole cards",
                    [measured[f"{shared}, {load}"] / apart],
                    "times",
                    bar=bar,
                    better="lower",
                )
            )
    if (at_most := whole.get(together)) is not None:
        rows.append(
            make_row(
                f"{shared}, all at once, over one worker for all",
                [burst.tokens_per_s / at_most],
                "times",
                note="one worker reads the weights once for all tenants: a ceiling",
            )
        )
    return rows


@dataclass(frozen=True)
class Held:
    """What the processes hold while one tenant is greedy."""

    limit_bytes: int
    before: tuple[int, ...]
    during: tuple[int, ...]
    """The most of each worker; the greedy one's is the first."""
    source: str
    """Who says so."""


def isolation_rows(
    name: str, tenants: int, held: Held, greedy: Answers, burst: Figures, others: Figures
) -> list[Row]:
    """What one greedy tenant takes and what the others notice.

    Args:
        name: Shape and lengths.
        tenants: How many workers there are.
        held: Bytes of each worker.
        greedy: What came of the greedy one's requests.
        burst: The others' figures while all send the same.
        others: The same while one is greedy.
    """
    shared = f"{name}: {tenants} workers on one card"
    grown = max(
        later - earlier for earlier, later in zip(held.before[1:], held.during[1:], strict=True)
    )
    what = outcomes(greedy)
    return [
        make_row(
            f"{shared}: bytes of the fullest worker over its limit",
            [max(held.before) / held.limit_bytes],
            "times",
            bar=1.0,
            better="lower",
            note=held.source,
        ),
        make_row(
            f"{shared}, one greedy: its bytes over its limit",
            [held.during[0] / held.limit_bytes],
            "times",
            bar=1.0,
            better="lower",
            note=held.source,
        ),
        make_row(
            f"{shared}, one greedy: bytes that another's memory grew by",
            [grown / MIB],
            "MiB",
            better="lower",
            note=held.source,
        ),
        make_row(
            f"{shared}, one greedy: its requests neither answered nor refused",
            [float(what["broken"])],
            "requests",
            bar=0.0,
            better="lower",
            note=f"{what['answered']} answered, {what['refused']} refused with 429 or 503",
        ),
        make_row(
            f"{shared}, one greedy: the slowest other's tokens a second, over those without it",
            [min(others.each) / min(burst.each[1:])],
            "times",
            note="every request of the others is answered; the card's time is shared, its memory "
            "is divided",
        ),
    ]


class Card:
    """What the processes of workers hold: on a GPU by its driver, on a CPU by the kernel."""

    def __init__(self, device: str) -> None:
        self._is_gpu = device == "cuda"
        self.name = _ask("name")[0] if self._is_gpu else None
        self.source = "of the engine's process, by its resident set"
        self._others = self._used() if self._is_gpu else 0

    @property
    def gib(self) -> float:
        """Of the whole card."""
        return self.total_bytes / 2**30

    @property
    def total_bytes(self) -> int:
        """Of the whole card, or of the machine's memory that is available."""
        if self._is_gpu:
            return int(_ask("memory.total")[0]) * MIB
        return _kibibytes(Path("/proc/meminfo"), "MemAvailable") * 1024

    def held(self, workers: Sequence[Served]) -> tuple[int, ...]:
        """Bytes of each worker's engine.

        Where the driver does not tell processes apart, each has its part of what all hold.
        """
        pids = [worker.engine_pid for worker in workers]
        if not self._is_gpu:
            return tuple(_kibibytes(Path(f"/proc/{pid}/status"), "VmRSS") * 1024 for pid in pids)
        by_pid = read_processes(_ask("pid,used_memory", "compute-apps"))
        if set(pids) <= by_pid.keys():
            self.source = "of the engine's process, by NVML"
            return tuple(by_pid[pid] for pid in pids)
        self.source = "the workers' mean: the driver names no processes here"
        return (max(0, self._used() - self._others) // len(workers),) * len(workers)

    def _used(self) -> int:
        return int(_ask("memory.used")[0]) * MIB


def _ask(what: str, of: str = "gpu") -> list[str]:
    """What the driver says, a line for each card or process."""
    command = ["nvidia-smi", f"--query-{of}={what}", "--format=csv,noheader,nounits"]
    return subprocess.check_output(command, text=True).splitlines()


def read_processes(rows: Sequence[str]) -> dict[int, int]:
    """Bytes by process number; those whose memory the driver does not tell are left out."""
    found = {}
    for row in rows:
        number, _, mebibytes = (part.strip() for part in row.partition(","))
        if number.isdigit() and mebibytes.isdigit():
            found[int(number)] = int(mebibytes) * MIB
    return found


def _kibibytes(path: Path, key: str) -> int:
    return next(
        int(text.split()[1]) for text in path.read_text().splitlines() if text.startswith(f"{key}:")
    )


def _percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


@dataclass
class Bench:
    """A model folder, and the loads that are sent to workers of it."""

    folder: Path
    size: Size
    options: argparse.Namespace

    @contextmanager
    def workers(self, num: int, limit_bytes: int, api_processes: int) -> Iterator[list[Served]]:
        """Start workers: the first alone, which leaves compiled kernels for the others."""
        options = self.options
        # The tenants of each; room for all that they send at once, but for a greedy one.
        tenants = options.tenants // num
        flags = [
            f"--device={options.device}", f"--weights={options.weights}",
            f"--memory-limit-bytes={limit_bytes}", f"--api-processes={api_processes}",
            f"--max-context-tokens={4 * (self.size.num_in + self.size.num_out)}",
            f"--max-running-requests={min(options.running * tenants, MAX_RUNNING)}",
            f"--max-queued-requests={options.queued * tenants}",
        ]  # fmt: skip
        started = time.monotonic()
        with ExitStack() as stack:
            workers = [stack.enter_context(starting(self.folder, flags))]
            workers[0].wait_until_ready()
            show(f"first worker ready after {time.monotonic() - started:.0f} s")
            workers += [stack.enter_context(starting(self.folder, flags)) for _ in range(num - 1)]
            for worker in workers[1:]:
                worker.wait_until_ready()
            show(f"{num} workers ready after {time.monotonic() - started:.0f} s")
            yield workers
            for worker in workers:
                for warning in worker.warnings():
                    show(f"a worker's log: {warning}")

    def send(
        self, workers: Sequence[Served], num_each: Sequence[int], clients: int, seed: int
    ) -> list[Answers]:
        """Send each worker so many requests at once."""
        return self._send(workers, [[0.0] * num for num in num_each], clients, seed)

    def send_steadily(self, workers: Sequence[Served], clients: int, seed: int) -> list[Answers]:
        """Send each worker requests at the steady rate, at times of its own."""
        size = self.size
        times = [
            arrivals(size.rate, size.seconds, seed * len(workers) + index)
            for index in range(len(workers))
        ]
        return self._send(workers, times, clients, seed)

    def _send(
        self, workers: Sequence[Served], times: Sequence[list[float]], clients: int, seed: int
    ) -> list[Answers]:
        size = self.size
        loads = [
            Load(
                port=worker.port,
                times=own,
                prompts=make_prompts(self.folder, len(own), size.num_in, 1000 * seed + index),
                num_clients=clients,
                num_out=size.num_out,
            )
            for index, (worker, own) in enumerate(zip(workers, times, strict=True))
        ]
        return send_all(loads, timeout_seconds=self.options.timeout)

    def whole(self, name: str, card: Card) -> list[Row]:
        """One worker with the card."""
        size, options = self.size, self.options
        limit = card.total_bytes * options.percent // 100
        with self.workers(1, limit, options.api_processes or min(4, options.tenants)) as workers:
            self.send(workers, [options.warm_up], options.clients, 0)
            one = figures(self.send(workers, [size.num_requests], options.clients, 1), size.num_out)
            num = size.num_requests * options.tenants
            everybody = figures(self.send(workers, [num], options.clients, 2), size.num_out)
            steady = figures(self.send_steadily(workers, options.clients, 3), size.num_out)
        return whole_rows(name, options.tenants, one, everybody, steady)

    def shared(self, name: str, card: Card, whole: Mapping[str, float]) -> list[Row]:
        """One worker a tenant, and then one greedy tenant among them."""
        size, options, num = self.size, self.options, self.options.tenants
        limit = card.total_bytes * options.percent // 100 // num
        with self.workers(num, limit, options.api_processes or 1) as workers:
            each = [size.num_requests] * num
            self.send(workers, [options.warm_up] * num, 1, 0)
            burst = figures(self.send(workers, each, 1, 2), size.num_out)
            steady = figures(self.send_steadily(workers, 1, 3), size.num_out)
            before = card.held(workers)
            each[0] *= options.greedy
            with watched(card, workers) as most:
                greedy, *others = self.send(workers, each, 1, 4)
            held = Held(limit, before, tuple(most), card.source)
        rows = shared_rows(name, num, burst, steady, whole)
        return rows + isolation_rows(name, num, held, greedy, burst, figures(others, size.num_out))


@contextmanager
def watched(card: Card, workers: Sequence[Served]) -> Iterator[list[int]]:
    """Look each second what the workers hold; the list has the most of each."""
    most = [0] * len(workers)
    is_over = threading.Event()

    def look() -> None:
        while True:
            most[:] = map(max, most, card.held(workers))
            if is_over.wait(1.0):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


def show(text: str) -> None:
    """Progress goes to the terminal at once."""
    print(text, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Measure, write and print; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.set_defaults(warm_up=16)
    parser.add_argument("--only", nargs="+", choices=("whole", "shared"))
    parser.add_argument("--tenants", type=int, default=8, help="workers on the card (8)")
    parser.add_argument("--model", type=Path, default=SHAPES / "r1-distill-qwen-1.5b")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--percent", type=int, default=90, help="of the card that workers may use")
    parser.add_argument("--num-in", type=int, default=512, help="tokens of a prompt (512)")
    parser.add_argument("--num-out", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("--requests", type=int, default=64, help="of a tenant, at once (64)")
    parser.add_argument("--rate", type=float, default=8.0, help="of a tenant, steady, a second (8)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of the steady load (15)")
    parser.add_argument("--greedy", type=int, default=10, help="times the others' requests (10)")
    parser.add_argument("--running", type=int, default=256, help="most requests in a step (256)")
    parser.add_argument("--queued", type=int, default=256, help="most that wait beside them (256)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one load (240)")
    parser.add_argument("--commit", default=commit(), help="what the rows say was measured")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file to write or update")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and options.output == OUTPUT:
        parser.error(f"--output: {OUTPUT} is for figures of a GPU; name another file for a CPU's")
    size = Size(options.num_in, options.num_out, options.requests, options.rate, options.seconds)
    name = f"{options.model.name}, {options.weights}, {size.num_in} in, {size.num_out} out"
    card = Card(options.device)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_model(options.model, folder, options.tokenizer)
        bench = Bench(folder, size, options)
        for part in options.only or ("whole", "shared"):
            known = read_values(options.output)
            measured = (
                bench.whole(name, card) if part == "whole" else bench.shared(name, card, known)
            )
            write(options.output, measured, options.commit, card.name, {"card_gib": card.gib})
            rows += measured
    for row in rows:
        show(line(row))
    show(f"written to {options.output}")
    return int(any(is_missed(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
