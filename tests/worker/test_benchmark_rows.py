"""Rows of the benchmarks' files: their values, their bars, and how later runs replace them."""

import json

import pytest

BENCHMARK = "rows"


@pytest.fixture
def rows(bench):
    return bench


def test_the_value_is_the_median_with_its_spread(rows):
    row = rows.make_row("r", [3.0, 1.0, 2.0], "ms", bar=2.0, note=None)

    assert (row["value"], row["min"], row["max"], row["runs"]) == (2.0, 1.0, 3.0, 3)
    assert "note" not in row
    assert not rows.is_missed(row)
    assert rows.is_missed(row | {"value": 2.1})
    assert "MISSED" in rows.line(row | {"value": 2.1})


@pytest.mark.parametrize(
    ("unit", "better", "is_missed"), [("tokens/s", None, False), ("times", "lower", True)]
)
def test_more_than_the_bar_is_met_or_missed_by_what_is_better(unit, better, is_missed, rows):
    assert rows.is_missed(rows.make_row("r", [5.0], unit, bar=4.0, better=better)) is is_missed


def test_a_later_run_replaces_its_own_rows_only(rows, tmp_path):
    path = tmp_path / "engine.json"

    first = [rows.make_row("a", [1.0], "ms"), rows.make_row("b", [2.0], "ms")]
    rows.write(path, first, "x", "a card", {"read": 1.0})
    rows.write(path, [rows.make_row("b", [3.0], "ms")], "y", "a card", {"read": 2.0}, cuda="13.0")

    document = json.loads(path.read_text())
    assert [(row["name"], row["value"], row["commit"]) for row in document["rows"]] == [
        ("a", 1.0, "x"),
        ("b", 3.0, "y"),
    ]
    assert (document["ceilings"], document["versions"]["cuda"]) == ({"read": 2.0}, "13.0")
    assert rows.read_values(path) == {"a": 1.0, "b": 3.0}
    assert rows.read_values(tmp_path / "none.json") == {}
