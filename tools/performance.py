"""docs/performance.md: every measured figure beside its bar, from benchmarks/results.

A result file is `{"gpu", "versions", "commit", "ceilings": {name: number}, "rows": [...]}`; a row
has `name`, `value` and `unit`, `better` ("higher" or "lower"), and where there is one a `bar`, a
`note`, the `commit` it was measured at, the name in words, `what`, and a `curve`: points of one
table. Plots lie beside the file,
under names that begin with its own.
"""

import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks/results"
COMMANDS = {
    "cpu/engine": "python benchmarks/engine.py --cpu",
    "cpu/operator": "python benchmarks/operator.py",
    "h200/engine": "python benchmarks/engine.py",
    "cpu/quality": "python benchmarks/quality.py",
    "h200/kernels": "python benchmarks/kernels.py",
    "h200/sharing": "python benchmarks/sharing.py",
}
HEAD = """\
<!-- Generated from benchmarks/results by tools/generate.py; do not edit. -->
# Measured figures

The command above each table measures it, with the packages that `make setup` puts into `.venv`;
anyone can repeat it. A bar is what a figure has to reach; a figure that does not is shown as
missed. Ceilings are what the machine itself reached in the last run. Rows are measured again when
their code has changed much, each with the commit that it names; one that the history lacks is of
earlier code, which was changed before it was committed here.
"""


def page(results: Path = RESULTS) -> str:
    """The whole page."""
    parts = [HEAD]
    for path in sorted(results.glob("*/*.json")):
        parts += _section(f"{path.parent.name}/{path.stem}", json.loads(path.read_text()))
        for plot in sorted(path.parent.glob(f"{path.stem}-*.svg")):
            folder = f"../benchmarks/results/{path.parent.name}"
            parts += [f"![{plot.stem.replace('-', ' ')}]({folder}/{plot.name})", ""]
    return "\n".join(parts)


def is_met(row: dict[str, Any]) -> bool | None:
    """Whether a row reaches its bar; None where it has none."""
    if row.get("bar") is None:
        return None
    if row["better"] == "higher":
        return bool(row["value"] >= row["bar"])
    return bool(row["value"] <= row["bar"])


def _section(name: str, result: dict[str, Any]) -> list[str]:
    about = [str(result["gpu"])] if result.get("gpu") else []
    about += [f"{key} {value}" for key, value in sorted(result["versions"].items())]
    ceilings = ", ".join(
        f"{key.replace('_', ' ')} {_number(value)}"
        for key, value in result.get("ceilings", {}).items()
        if isinstance(value, int | float)
    )
    lines = [f"## {name.replace('/', ': ')}", "", f"`{COMMANDS[name]}`", "", f"{', '.join(about)}."]
    if ceilings:
        lines += ["", f"Ceilings: {ceilings}."]
    verdicts = [met for row in result["rows"] if (met := is_met(row)) is not None]
    if verdicts:
        lines += ["", f"{sum(verdicts)} of {len(verdicts)} bars are met."]
    lines += ["", "| what | measured | unit | bar | | commit |", "|---|---:|---|---:|---|---|"]
    lines += [_row({"commit": result["commit"]} | row) for row in result["rows"]]
    for row in result["rows"]:
        if points := row.get("curve"):
            lines += [
                "",
                f"{row.get('what', row['name']).partition(': ')[0]}:",
                "",
                *_curve(points),
            ]
    return [*lines, ""]


def _curve(points: list[dict[str, float]]) -> list[str]:
    titles = [title.replace("_", " ") for title in points[0]]
    lines = [f"| {' | '.join(titles)} |", "|" + "---:|" * len(titles)]
    return lines + [f"| {' | '.join(map(_number, point.values()))} |" for point in points]


def _row(row: dict[str, Any]) -> str:
    met = is_met(row)
    bar = "" if met is None else ("≥ " if row["better"] == "higher" else "≤ ") + _number(row["bar"])
    verdict = {True: "met", False: "**missed**", None: ""}[met]
    remark = "; ".join(filter(None, (verdict, row.get("note"))))
    cells = (
        row.get("what", row["name"]),
        _number(row["value"]),
        row["unit"],
        bar,
        remark,
        row["commit"][:7],
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
