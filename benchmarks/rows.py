"""Rows of a result file: made, judged, shown, and merged into the file. Needs no torch."""

import json
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def make_row(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    bar: float | None = None,
    better: str | None = None,
    **more: float | str | None,
) -> Row:
    """The median of some runs beside what it has to reach.

    Args:
        name: What was measured; the key by which a later run replaces the row.
        values: One for each run.
        unit: Of the values.
        bar: What has to be reached; None where there is nothing to reach.
        better: "higher" or "lower"; by default lower for milliseconds and higher for all else.
        **more: Further fields, such as `note`, `stretch` (the aim) and `baseline`; without None.
    """
    row: Row = {
        "name": name,
        "value": rounded(statistics.median(values)),
        "unit": unit,
        "better": better or ("lower" if unit == "ms" else "higher"),
        "bar": None if bar is None else rounded(bar),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
        "runs": len(values),
    }
    return row | {
        key: rounded(value) if isinstance(value, float) else value
        for key, value in more.items()
        if value is not None
    }


def rounded(value: float) -> float:
    """To five digits."""
    return float(f"{value:.5g}")


def is_missed(row: Row) -> bool:
    """Whether a row has a bar and does not reach it."""
    if row["bar"] is None:
        return False
    is_met = row["value"] >= row["bar"] if row["better"] == "higher" else row["value"] <= row["bar"]
    return not is_met


def line(row: Row) -> str:
    """A row for the terminal."""
    bar = "" if row["bar"] is None else f"bar {row['bar']:,.6g}"
    missed = "MISSED" if is_missed(row) else ""
    spread = f"({row['min']:,.6g} to {row['max']:,.6g})" if row["runs"] > 1 else ""
    return f"{row['value']:>10,.6g} {row['unit']:<10} {row['name']}  {spread} {bar} {missed}"


def commit() -> str:
    """Of the working tree, for the option of that name."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def read_values(path: Path) -> dict[str, float]:
    """The value of each row of a file by its name; none where there is no file."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["name"]: row["value"] for row in rows}


def write(
    path: Path,
    rows: Sequence[Row],
    commit: str,
    gpu: str | None,
    ceilings: Mapping[str, float],
    **versions: str | None,
) -> None:
    """Replace the measured rows in the file, and say what they were measured on.

    Args:
        path: JSON file.
        rows: What was measured; rows of other names stay.
        commit: Of the code that was measured.
        gpu: Its name; None on a CPU.
        ceilings: What the machine can do, measured in the same run.
        **versions: Of programs, besides Python's, torch's and Triton's.
    """
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = {row["name"]: row for row in before}
    merged |= {row["name"]: row | {"commit": commit} for row in rows}
    result = {
        "gpu": gpu,
        "versions": {
            "torch": version("torch"),
            "triton": version("triton"),
            "python": platform.python_version(),
            **versions,
        },
        "commit": commit,
        "ceilings": {name: rounded(value) for name, value in ceilings.items()},
        "rows": list(merged.values()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
