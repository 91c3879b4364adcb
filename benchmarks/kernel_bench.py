"""How kernels are measured: cold L2, random data, candidate and baselines alternated.

A row is built with several sets of inputs, enough that one pass over them leaves nothing of the
first in the L2 cache. One CUDA graph calls a function once on every set; its replays, taken in
turns with the baselines' over several rounds, give the time of one call. Ceilings are measured
in the same process just before.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from deepseek_kernels.cost import Cost

COLD_BYTES = 320 * 2**20
"""More than five times the L2 cache of an H200."""

is_measuring = True
"""False in processes that only compile."""

ROUNDS = 5
SUSTAINED_MICROSECONDS = 500_000.0
ROUND_MICROSECONDS = 4_000.0
"""Time spent on one function in one round, at least one replay."""


@dataclass(frozen=True)
class Ceilings:
    """What this card does at best in this process."""

    copy_gb_per_s: float
    """`copy_` of a large tensor, bytes read plus bytes written."""
    read_gb_per_s: float
    """A sum by a Triton kernel: bytes read."""
    bf16_tflop_per_s: float
    """8192^3 matmul of random data, ten of them; so is the next."""
    fp8_tflop_per_s: float
    sustained_bf16_tflop_per_s: float
    """The same after half a second of them: within 60 ms the card is at its limit of power."""
    host_to_device_gb_per_s: float
    """Copies of pinned memory."""
    device_to_host_gb_per_s: float


@dataclass(frozen=True)
class Timing:
    """Time of one call."""

    median_us: float
    p20_us: float
    p80_us: float


@dataclass
class Workload:
    """One shape, ready to be measured. Every list has one call per set of inputs."""

    candidate: Sequence[Callable[[], object]]
    cost: Cost
    check: Callable[[], None]
    """Raises when the candidate's result is wrong: no speed is reported for wrong results."""
    baselines: Mapping[str, Sequence[Callable[[], object]]] = field(default_factory=dict)
    graph: bool = True
    """False where calls cannot be captured: they are then timed one by one with events."""
    eager: bool = False
    """Whether to report also the time of an eager call, host work included."""


@dataclass
class Result:
    """The timings of a workload and what is derived from them."""

    candidate: Timing
    baselines: dict[str, Timing]
    cost: Cost
    ceilings: Ceilings
    eager_us: float | None = None

    @property
    def gb_per_s(self) -> float:
        """Bytes of the cost over time."""
        return self.cost.bytes / self.candidate.median_us / 1e3

    @property
    def tflop_per_s(self) -> float:
        """Operations of the cost over time."""
        return self.cost.flops / self.candidate.median_us / 1e6

    def of_copy(self) -> float:
        """Fraction of the copy ceiling."""
        return self.gb_per_s / self.ceilings.copy_gb_per_s

    def times_faster(self, baseline: str) -> float:
        """Time of a baseline over own time."""
        return self.baselines[baseline].median_us / self.candidate.median_us


@dataclass(frozen=True)
class Row:
    """One line of the table: a workload, the figure taken from it, and its bar."""

    name: str
    build: Callable[[], Workload]
    value: Callable[[Result], float]
    unit: str
    bar: float
    stretch: float
    baseline: str = ""
    """What the figure is relative to, in words."""
    better: Literal["higher", "lower"] = "higher"


def prepare(row: Row) -> None:
    """Call what a row measures once, so that the compilers' caches have it."""
    workload = row.build()
    for calls in (workload.candidate, *workload.baselines.values()):
        calls[0]()
    torch.cuda.synchronize()


def sets(count: int) -> int:
    """Return a number of sets of inputs, or few where nothing is measured."""
    return count if is_measuring else min(count, 2)


def sets_for(bytes_per_set: int, *, least: int = 2, most: int = 64) -> int:
    """Return how many sets of inputs make the cache cold for each."""
    return sets(max(least, min(most, -(-COLD_BYTES // max(bytes_per_set, 1)) + 1)))


def compare(workload: Workload, ceilings: Ceilings) -> Result:
    """Check a workload, then time it and its baselines in turns."""
    workload.check()
    torch.cuda.synchronize()
    functions = {"": workload.candidate, **workload.baselines}
    runners = {name: _Runner(calls, workload.graph) for name, calls in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for round_index in range(ROUNDS):
        names = list(runners) if round_index % 2 == 0 else list(reversed(runners))
        for name in names:
            samples[name] += runners[name].sample()
    timings = {name: _timing(values) for name, values in samples.items()}
    eager = _eager_microseconds(workload.candidate) if workload.eager else None
    del runners
    return Result(timings.pop(""), timings, workload.cost, ceilings, eager)


class _Runner:
    """Replays one function over all sets of inputs and samples the time of one call."""

    def __init__(self, calls: Sequence[Callable[[], object]], graph: bool) -> None:
        self._calls = calls
        self._graph: torch.cuda.CUDAGraph | None = None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        if graph:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                for call in calls:
                    call()
        self._pass()
        microseconds = self._pass()
        self._passes = max(1, min(50, int(ROUND_MICROSECONDS / microseconds)))

    def _pass(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if self._graph is not None:
            self._graph.replay()
        else:
            for call in self._calls:
                call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def sample(self) -> list[float]:
        return [self._pass() / len(self._calls) for _ in range(self._passes)]


def _timing(values: list[float]) -> Timing:
    if len(values) == 1:
        return Timing(values[0], values[0], values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return Timing(statistics.median(values), cuts[1], cuts[7])


def _eager_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the time of a call issued from Python, many in a row, so mostly the host's."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 200
    start.record()
    for index in range(count):
        calls[index % len(calls)]()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


@triton.jit
def _sum_kernel(x_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):
    b_sum = tl.zeros([BLOCK], dtype=tl.int32)
    for i_block in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0), num_stages=4):
        b_sum += tl.load(x_ptr + i_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(b_sum, 0))


def median_microseconds(call: Callable[[], Any], count: int = 10) -> float:
    """Return the median time of a large call outside a graph."""
    for _ in range(3):
        call()
    values = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        values.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(values)


def measure_ceilings() -> Ceilings:
    """Measure what the card does at best: copies, reads, matmuls, the host link."""
    copy, read = _memory_gb_per_s(2**30)
    bf16, fp8, sustained = _matmul_tflop_per_s(8192)
    up, down = _host_gb_per_s(256 * 2**20)
    return Ceilings(copy, read, bf16, fp8, sustained, up, down)


def _memory_gb_per_s(elements: int) -> tuple[float, float]:
    source = torch.randint(0, 2**31 - 1, (elements,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    partial = torch.empty(132 * 8, dtype=torch.int32, device="cuda")

    def read(grid: int, block: int) -> None:
        _sum_kernel[(grid,)](source, partial, elements // block, BLOCK=block, num_warps=8)

    copy = median_microseconds(lambda: target.copy_(source))
    fastest = min(
        median_microseconds(functools.partial(read, grid, block))
        for grid, block in ((528, 8192), (1056, 8192), (528, 4096))
    )
    return 8 * elements / copy / 1e3, 4 * elements / fastest / 1e3


def _matmul_tflop_per_s(size: int) -> tuple[float, float, float]:
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    ones = torch.ones(size, 1, device="cuda")

    def fp8() -> object:
        return torch._scaled_mm(
            a8, b8.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16
        )

    def bf16() -> object:
        return a @ b.t()

    mega_flops = 2 * size**3 / 1e6
    short, short_fp8 = median_microseconds(bf16), median_microseconds(fp8)
    for _ in range(int(SUSTAINED_MICROSECONDS / short)):
        bf16()
    sustained = median_microseconds(bf16, int(SUSTAINED_MICROSECONDS / 5 / short))
    return mega_flops / short, mega_flops / short_fp8, mega_flops / sustained


def _host_gb_per_s(size: int) -> tuple[float, float]:
    host = torch.empty(size, dtype=torch.uint8).pin_memory()
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    up = median_microseconds(lambda: device.copy_(host, non_blocking=True))
    down = median_microseconds(lambda: host.copy_(device, non_blocking=True))
    return size / up / 1e3, size / down / 1e3
