"""Figures of the operator beside their bars, in benchmarks/results/cpu/operator.json.

Two commands measure them, `python benchmarks/operator.py` and `make test-long`: each replaces its
own rows and keeps those of the other.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/cpu/operator.json"

Row = Mapping[str, Any]


def row(
    name: str, what: str, value: float, unit: str, bar: float | None = None, **more: Any
) -> dict[str, Any]:
    """One figure, beside its bar where it has one; less is better for all of them."""
    verdict = {} if bar is None else {"bar": bar, "met": value <= bar}
    return {
        "name": name, "what": what, "value": round(value, 3), "unit": unit, "better": "lower",
        **verdict, **more,
    }  # fmt: skip


def origin(load_before: float) -> dict[str, Any]:
    """When, where and of what a figure is: the machine's load before and after, and the commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    return {
        "machine": {
            "cores": os.cpu_count(),
            "load_before": round(load_before, 2),
            "load_after": round(os.getloadavg()[0], 2),
        },
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
    }


def record(rows: Iterable[Row], path: Path = RESULTS, **about: Any) -> None:
    """Write rows in the place of those of the same name, and keep all others.

    Args:
        rows: What was measured.
        path: The file.
        about: What to say of the whole file; what is not given stays.
    """
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    merged = {old["name"]: old for old in known.pop("rows", [])}
    merged |= {new["name"]: new for new in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {**known, **about, "rows": list(merged.values())}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def verdict(found: Row) -> str:
    """A row for a terminal."""
    words = f"{found['name']}: {found['value']} {found['unit']}"
    if "bar" not in found:
        return words
    return f"{words} (bar {found['bar']}, {'met' if found['met'] else 'NOT MET'})"
