"""Makes the static tables of `_configs` on a GPU: never imported by the library.

`python -m deepseek_kernels.tuning [TABLE]...` times the candidates that `<op>/tune.py` declares
in `SPACES` on every bucket and writes `configs/<table>.json`. Commit what it writes: a process
that serves reads the table and tunes nothing.
"""

import argparse
import importlib
import json
import pkgutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

import deepseek_kernels
from deepseek_kernels import _configs

CONFIGS = Path(__file__).parent / "configs"

COLD_BYTES = 320 * 2**20


@dataclass(frozen=True)
class Space:
    """What `<op>/tune.py` declares in `SPACES`: one for each table of the operation."""

    op: str
    """Name of the table."""

    buckets: Sequence[Mapping[str, int]]
    """Limits in the order of the table; the last is empty."""

    candidates: Callable[[Mapping[str, int]], Sequence[Mapping[str, int]]]
    """Configurations to try in a bucket; at most a dozen, since every one is compiled."""

    workload: Callable[[Mapping[str, int]], tuple[Callable[[], object], int]]
    """Makes a call at the size of a bucket, and the bytes that it moves."""


def tune(space: Space) -> dict[str, Any]:
    """Return the table of the fastest candidate per bucket, as it is stored."""
    buckets = []
    for limits in space.buckets:
        timed = [
            (_microseconds(space, limits, config), dict(config))
            for config in space.candidates(limits)
        ]
        microseconds, best = min(timed, key=lambda one: one[0])
        listed = ", ".join(f"{list(config.values())} {time}" for time, config in timed)
        sys.stdout.write(f"{space.op} {dict(limits)}: {best} {microseconds} us of {listed}\n")
        buckets.append({"limits": dict(limits), "config": best})
    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "buckets": buckets,
    }


def _microseconds(space: Space, limits: Mapping[str, int], config: Mapping[str, int]) -> float:
    """Return the median time of a call under one configuration; infinite if it does not fit."""
    pick = _configs._pick

    def picked(op: str, sizes: tuple[tuple[str, int], ...]) -> dict[str, int]:
        return dict(config) if op == space.op else pick(op, sizes)

    with mock.patch.object(_configs, "_pick", picked):
        try:
            calls = [space.workload(limits)]
            copies = max(1, min(16, COLD_BYTES // max(calls[0][1], 1)))
            calls += [space.workload(limits) for _ in range(copies)]
            for call, _ in calls:
                call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call, _ in calls:
                    call()
        except triton.runtime.errors.OutOfResources:
            return float("inf")
    samples = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)) * 1e3 / len(calls))
    return round(statistics.median(samples[2:]), 2)


def spaces() -> dict[str, Space]:
    """Return the space of every table by name."""
    found: dict[str, Space] = {}
    for module in pkgutil.iter_modules(deepseek_kernels.__path__):
        tunes = Path(__file__).parent / module.name / "tune.py"
        if module.ispkg and tunes.exists():
            declared = importlib.import_module(f"deepseek_kernels.{module.name}.tune").SPACES
            found |= {space.op: space for space in declared}
    return found


def main() -> None:
    """Tune the named tables, or all, and write them."""
    parser = argparse.ArgumentParser(description="Make the tables of launch configurations.")
    parser.add_argument("op", nargs="*", help="tables; all when none is named")
    parser.add_argument("--output", type=Path, default=CONFIGS, help="folder of the tables")
    options = parser.parse_args()
    known = spaces()
    unknown = set(options.op) - set(known)
    if unknown:
        parser.error(f"unknown tables {sorted(unknown)}; known are {sorted(known)}")
    deepseek_kernels.set_backend("triton")
    options.output.mkdir(parents=True, exist_ok=True)
    for op in options.op or known:
        table = tune(known[op])
        (options.output / f"{op}.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
