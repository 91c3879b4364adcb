"""The kernels' README shows the measured rows, every one of them, met or not."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import kernel_rows  # noqa: E402

ROW = {
    "name": "thing 8x8",
    "value": 0.5,
    "unit": "of copy",
    "better": "higher",
    "bar": 0.9,
    "stretch": 0.95,
    "met": False,
    "microseconds": 12.34,
    "gb_per_s": 2000.0,
    "fraction_of_copy": 0.5,
}


def test_blocks_are_filled_by_the_start_of_the_name(tmp_path: Path) -> None:
    results = tmp_path / "kernels.json"
    results.write_text(json.dumps({"rows": [ROW, ROW | {"name": "other"}]}))
    text = "before\n<!-- rows: thing | none -->\nold\n<!-- end -->\nafter\n"

    filled = kernel_rows.readme(text, results)

    assert "| thing 8x8 | 12.3 | 2,000 | 0.50 | 0.5 of copy | ≥ 0.9 (0.95) | **missed** |" in filled
    assert "old" not in filled
    assert "other" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("<!-- end -->\nafter\n")


def test_every_measured_row_is_shown_once() -> None:
    text = kernel_rows.README.read_text()
    rows = json.loads(kernel_rows.RESULTS.read_text())["rows"]

    for row in rows:
        assert text.count(f"| {row['name']} |") == 1, row["name"]


def test_every_exported_function_is_described() -> None:
    exported = re.findall(
        r'^    "(\w+)",$',
        (ROOT / "kernels/deepseek_kernels/__init__.py").read_text(),
        re.MULTILINE,
    )
    text = kernel_rows.README.read_text()

    assert exported
    assert [name for name in exported if f"`{name}" not in text and f"{name}(" not in text] == []
