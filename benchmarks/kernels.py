"""Measures every kernel on a GPU beside its baselines, the card's ceilings and its bar.

Usage: python benchmarks/kernels.py [--only PART]... [--list] [--output FILE] [--commit NAME]
       [--jobs N]

Rows live in `benchmarks/kernel_rows/<family>.py` as `ROWS`. With `--only` the rows whose
`<family>/<name>` contains PART are measured and replace those of the same name in the file; a
row says at which commit it was measured and what the copy ceiling was then. Before anything is
measured, `--jobs` processes compile what the rows need.
"""

import argparse
import importlib
import json
import platform
import subprocess
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# This folder last: its operator.py is not the standard library's.
sys.path = [path for path in sys.path if path != str(ROOT / "benchmarks")]
sys.path = [str(ROOT / "kernels"), *sys.path, str(ROOT / "benchmarks")]

import kernel_bench  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from kernel_bench import Ceilings, Result, Row, compare, measure_ceilings  # noqa: E402
from kernel_limits import LIMITS  # noqa: E402

import deepseek_kernels  # noqa: E402

OUTPUT = ROOT / "benchmarks" / "results" / "h200" / "kernels.json"


def main() -> int:
    options = _options()
    known = _rows()
    parts = [part.lower() for part in options.only]
    rows = [
        row
        for name, row in known.items()
        if not parts or any(part in name.lower() for part in parts)
    ]
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    if not rows:
        print(f"no row contains any of {options.only}; see --list", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py needs an NVIDIA GPU and found none", file=sys.stderr)
        return 2
    deepseek_kernels.set_backend("triton")
    if options.share is not None:
        return _prepare(rows[options.share :: options.jobs])
    _compile(options.jobs)
    ceilings = measure_ceilings()
    print(json.dumps(asdict(ceilings)), flush=True)
    measured, failed = [], []
    for row in rows:
        try:
            torch.manual_seed(20)
            measured.append(_record(row, compare(row.build(), ceilings)))
            print(_line(measured[-1]), flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(row.name)
        torch.cuda.empty_cache()
    for row in measured:
        row["commit"] = options.commit
    _write(options.output, ceilings, measured, {row.name for row in known.values()})
    print()
    print(_table(measured))
    print(f"ceilings: {_words(ceilings)}")
    for name in failed:
        print(f"FAILED {name}")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", action="append", default=[], help="part of the rows' names")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument("--commit", default=_commit(), help="what the rows say was measured")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file to write or update")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile; 0 for none")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _compile(jobs: int) -> None:
    """Run this command `jobs` times with a share of the rows each, to fill the caches."""
    command = [sys.executable, *sys.argv, "--jobs", str(jobs)]
    shares = [subprocess.Popen([*command, "--share", str(share)]) for share in range(jobs)]
    for share in shares:
        share.wait()


def _prepare(rows: list[Row]) -> int:
    kernel_bench.is_measuring = False
    for row in rows:
        try:
            kernel_bench.prepare(row)
        except Exception as error:
            # What is wrong shows when the row is measured.
            print(f"not prepared: {row.name}: {type(error).__name__}", file=sys.stderr)
        torch.cuda.empty_cache()
    return 0


def _commit() -> str:
    """Return the checkout's commit, or nothing outside a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _rows() -> dict[str, Row]:
    """Return the rows of all families by `<family>/<name>`."""
    families = sorted((ROOT / "benchmarks" / "kernel_rows").glob("*.py"))
    return {
        f"{family.stem}/{row.name}": row
        for family in families
        for row in importlib.import_module(f"kernel_rows.{family.stem}").ROWS
    }


def _record(row: Row, result: Result) -> dict[str, Any]:
    value = row.value(result)
    met = value >= row.bar if row.better == "higher" else value <= row.bar
    note = {"note": LIMITS[row.name]} if not met and row.name in LIMITS else {}
    return note | {
        "name": row.name,
        "value": _round(value),
        "unit": row.unit,
        "better": row.better,
        "bar": row.bar,
        "stretch": row.stretch,
        "met": met,
        "baseline": row.baseline,
        "microseconds": _round(result.candidate.median_us),
        "microseconds_p20": _round(result.candidate.p20_us),
        "microseconds_p80": _round(result.candidate.p80_us),
        "eager_microseconds": None if result.eager_us is None else _round(result.eager_us),
        "gb_per_s": _round(result.gb_per_s),
        "tflop_per_s": _round(result.tflop_per_s),
        "fraction_of_copy": _round(result.of_copy()),
        "fraction_of_bf16_matmul": _round(result.tflop_per_s / result.ceilings.bf16_tflop_per_s),
        "times_faster_than": {name: _round(result.times_faster(name)) for name in result.baselines},
        "copy_gb_per_s": _round(result.ceilings.copy_gb_per_s),
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _write(path: Path, ceilings: Ceilings, measured: list[dict[str, Any]], known: set[str]) -> None:
    """Replace the measured rows in the file and drop rows that no longer exist."""
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {row["name"]: row for row in before if row["name"] in known}
    rows |= {row["name"]: row for row in measured}
    document = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "commit": measured[-1]["commit"] if measured else "",
        "ceilings": {name: _round(value) for name, value in asdict(ceilings).items()},
        "rows": [rows[name] for name in sorted(rows)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    mark = "met   " if row["met"] else "MISSED"
    ratios = ", ".join(f"{ratio}x {name}" for name, ratio in row["times_faster_than"].items())
    eager = "" if row["eager_microseconds"] is None else f"{row['eager_microseconds']:.1f} us eager"
    return (
        f"{row['name']:<52} {row['microseconds']:>9.1f} us {row['gb_per_s']:>7.0f} GB/s "
        f"{row['tflop_per_s']:>6.0f} TFLOP/s {row['fraction_of_copy']:>5.2f} of copy | "
        f"{row['value']:>7.3g} {row['unit']}, bar {row['bar']:g} ({row['stretch']:g}) {mark} | "
        f"{ratios} {eager}"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    return "\n".join(_line(row) for row in rows)


def _words(ceilings: Ceilings) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in asdict(ceilings).items())


if __name__ == "__main__":
    sys.exit(main())
