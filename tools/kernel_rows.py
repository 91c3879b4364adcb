"""kernels/README.md: the measured rows of each operation, between the markers of its section.

`<!-- rows: A | B -->` takes the rows whose names start with A or B from the benchmark's results;
what stands up to `<!-- end -->` is replaced. The text around is written by hand.
"""

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "kernels/README.md"
RESULTS = REPOSITORY / "benchmarks/results/h200/kernels.json"

_BLOCK = re.compile(r"(<!-- rows: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = (
    "| measured | µs | GB/s | of copy | figure | bar (stretch) | |\n"
    "|---|---:|---:|---:|---:|---:|---|\n"
)


def readme(text: str | None = None, results: Path = RESULTS) -> str:
    """The README with its blocks of rows as the results have them."""
    rows: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))["rows"]

    def block(match: re.Match[str]) -> str:
        starts = tuple(part.strip() for part in match[2].split("|"))
        lines = [_line(row) for row in rows if row["name"].startswith(starts)]
        return match[1] + (HEAD + "".join(lines) if lines else "Not measured yet.\n") + match[3]

    return _BLOCK.sub(block, README.read_text(encoding="utf-8") if text is None else text)


def _line(row: dict[str, Any]) -> str:
    sign = "≥" if row["better"] == "higher" else "≤"
    verdict = ("met" if row["met"] else "**missed**") + (
        f"; {row['note']}" if "note" in row else ""
    )
    return (
        f"| {row['name']} | {_number(row['microseconds'])} | {row['gb_per_s']:,.0f} "
        f"| {row['fraction_of_copy']:.2f} | {_number(row['value'])} {row['unit']} "
        f"| {sign} {row['bar']:g} ({row['stretch']:g}) | {verdict} |\n"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
