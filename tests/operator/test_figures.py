"""Rows of two commands share a file."""

import json
from pathlib import Path

from figures import record, row, verdict


def test_rows_replace_their_own_and_keep_the_others(tmp_path: Path) -> None:
    path = tmp_path / "cpu" / "operator.json"
    mine = [row("a", "first", 1.0, "s", 2.0), row("b", "second", 5.0, "s", 2.0)]

    record(mine, path, commit="one", versions={"python": "3"})
    record([row("c", "third", 7.0, "requests")], path)
    record([row("a", "first", 3.0, "s", 2.0)], path, commit="two")

    found = json.loads(path.read_text())
    assert (found["commit"], found["versions"]) == ("two", {"python": "3"})
    assert [(r["name"], r["value"], r.get("met")) for r in found["rows"]] == [
        ("a", 3.0, False),
        ("b", 5.0, False),
        ("c", 7.0, None),
    ]
    assert [verdict(r) for r in found["rows"][1:]] == [
        "b: 5.0 s (bar 2.0, NOT MET)",
        "c: 7.0 requests",
    ]
