"""The page of measured figures shows what was measured, met or not."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import performance  # noqa: E402


def row(**changes: Any) -> dict[str, Any]:
    return {"name": "a", "value": 2.0, "unit": "s", "better": "lower", "bar": 1.0} | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"value": 1.0}, True),
        ({"better": "higher"}, True),
        ({"better": "higher", "value": 0.5}, False),
        ({"bar": None}, None),
    ],
    ids=["above a limit", "at a limit", "above a floor", "below a floor", "no bar"],
)
def test_a_bar_is_met_or_missed(changes: dict[str, Any], expected: bool | None) -> None:
    assert performance.is_met(row(**changes)) is expected


def test_a_missed_bar_is_shown_as_missed(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    result = {"gpu": None, "versions": {"python": "3.11"}, "commit": "b1", "rows": [row()]}
    result["rows"] += [row(value=0.5, commit="a9"), row(bar=None)]
    (tmp_path / "cpu/engine.json").write_text(json.dumps(result))

    page = performance.page(tmp_path)

    assert "| a | 2 | s | ≤ 1 | **missed** | b1 |" in page
    assert "| a | 0.5 | s | ≤ 1 | met | a9 |" in page
    assert "1 of 2 bars are met." in page


def test_a_curve_is_a_table_of_its_own_and_plots_are_shown(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    points = [{"rate": 300.0, "first_p99_ms": 12.5}, {"rate": 1200.0, "first_p99_ms": 99.0}]
    rows = [row(name="arrivals, 7B: highest rate", curve=points), row()]
    result = {"gpu": "a card", "versions": {}, "commit": "", "rows": rows}
    (tmp_path / "h200/engine.json").write_text(json.dumps(result))
    (tmp_path / "h200/engine-arrivals.svg").write_text("<svg/>")

    page = performance.page(tmp_path)

    table = "| rate | first p99 ms |\n|---:|---:|\n| 300 | 12.5 |\n| 1,200 | 99 |"
    assert f"arrivals, 7B:\n\n{table}" in page
    assert page.count("---:|---:|\n") == 1
    assert "![engine arrivals](../benchmarks/results/h200/engine-arrivals.svg)" in page


SHAPE = "r1-distill-qwen-1.5b, bf16, 512 in, 128 out"
EIGHT = f"{SHAPE}: 8 workers on one card"
# What pages say, and the row of a result file that it comes from.
IN_PROSE = {
    ("docs/tenants.md", "h200/sharing"): {
        "137": f"{EIGHT}, steady: cost",
        "0.115": f"{EIGHT}, steady: cost over that of 8 whole cards",
        "116": f"{EIGHT}, steady: time to first token, p99",
        "15.6": f"{SHAPE}: a whole card for each tenant, steady: time to first token, p99",
        "0.67": f"{EIGHT}, all at once, over one worker for all",
        "0.98": (
            f"{EIGHT}, one greedy: the slowest other's tokens a second, over those without it"
        ),
    },
    ("docs/quantization.md", "cpu/quality"): {
        "1.9": "FP8 weights, inputs in 16 bits",
        "0.27": "FP8 weights, calibrated, inputs in 16 bits",
        "3.2": "INT8 weights, inputs in INT8",
        "0.69": "FP8 weights, calibrated, inputs in FP8",
        "-0.048": "INT8 weights, calibrated, inputs in INT8 but of `down`",
        "67": "INT4 weights, rounded to nearest in groups of 128",
        "10.5": "INT4 weights, calibrated, in groups of 128",
    },
}


@pytest.mark.parametrize(("page", "result"), IN_PROSE)
def test_figures_in_prose_are_the_measured_ones(page: str, result: str) -> None:
    rows = json.loads((performance.RESULTS / f"{result}.json").read_text())["rows"]
    measured = {found["name"]: found["value"] for found in rows}
    text = (ROOT / page).read_text()

    for shown, name in IN_PROSE[page, result].items():
        assert f"{measured[name]:.{len(shown.partition('.')[2])}f}" == shown
        assert re.search(rf"(?<![\d.]){re.escape(shown)}(?!\.?\d)", text), shown


def test_committed_results_have_what_the_page_needs() -> None:
    for path in performance.RESULTS.glob("*/*.json"):
        result = json.loads(path.read_text())
        assert {"gpu", "versions", "commit", "rows"} <= result.keys(), path
        for found in result["rows"]:
            assert {"name", "value", "unit", "better"} <= found.keys(), (path, found)
            assert found["better"] in {"higher", "lower"}, (path, found)
            assert found.get("met", performance.is_met(found)) in {
                performance.is_met(found),
                None,
            }, (path, found)
