"""What the benchmark does around the measuring: its rows, their selection, the results file."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("kernels_py", ROOT / "benchmarks/kernels.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


def test_rows_have_names_of_their_own_and_a_stretch_beyond_the_bar(benchmark):
    rows = list(benchmark._rows().values())

    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    for row in rows:
        beyond = row.stretch >= row.bar if row.better == "higher" else row.stretch <= row.bar
        assert beyond, row.name


def test_every_limit_is_of_a_row(benchmark):
    assert set(benchmark.LIMITS) <= {row.name for row in benchmark._rows().values()}


def test_results_are_replaced_by_name_and_dropped_with_their_row(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark.torch.cuda, "get_device_name", lambda: "NVIDIA Example")
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"rows": [{"name": name, "value": 1} for name in "abc"]}))
    ceilings = benchmark.Ceilings(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)

    benchmark._write(path, ceilings, [{"name": "b", "value": 2, "commit": "c0ffee"}], {"a", "b"})

    written = json.loads(path.read_text())
    assert [(row["name"], row["value"]) for row in written["rows"]] == [("a", 1), ("b", 2)]
    assert written["commit"] == "c0ffee"
    assert written["ceilings"]["read_gb_per_s"] == 2.0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--only", "no such row"], 2, "no row contains any of"),
        (["--only", "norm/LayerNorm", "--list"], 0, "LayerNorm 16384x8192"),
    ],
)
def test_rows_are_selected_by_part_of_their_name(
    benchmark, monkeypatch, capsys, arguments, code, message
):
    monkeypatch.setattr(sys, "argv", ["kernels.py", *arguments])

    assert benchmark.main() == code

    printed = capsys.readouterr()
    assert message in printed.out + printed.err
    assert "add+RMSNorm" not in printed.out


def test_it_starts_as_a_command_beside_a_benchmark_named_operator():
    command = [sys.executable, ROOT / "benchmarks/kernels.py", "--list"]

    assert "LayerNorm" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
