"""The benchmark of the start, on a tiny shape and a CPU."""

import json
from pathlib import Path

import pytest
import torch

from deepseek_worker.weights.safetensors import SafetensorsCheckpoint

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
BENCHMARK = "engine_loading"


@pytest.fixture
def shape(tmp_path):
    config = json.loads((ROOT / "benchmarks/shapes/r1-distill-qwen-1.5b/config.json").read_text())
    config |= {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    }  # fmt: skip
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_files_hold_what_the_config_asks_for(bench, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "FILE_BYTES", 200_000)
    folder = tmp_path / "checkpoint"
    folder.mkdir()

    num_bytes = bench.write_checkpoint(shape, folder, CPU)

    checkpoint = SafetensorsCheckpoint(folder)
    tensors = [checkpoint.tensor(name) for name in checkpoint.shapes]
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert sum(tensor.nbytes for tensor in tensors) == num_bytes
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors)


def test_each_format_has_a_row_beside_what_limits_it(bench, shape):
    rows = bench.measure(shape, CPU, 2, 55.0, formats=("fp8", "int8"))

    assert [row["name"].rpartition(" ")[2] for row in rows] == ["fp8", "int8"]
    for row in rows:
        assert (row["unit"], row["better"], row["runs"]) == ("GB/s", "higher", 2)
        assert row["value"] > 0
        assert row["note"].endswith("pinned copies 55.0 GB/s")


def test_calibrated_rounding_reads_the_text(bench, shape):
    row = bench.measure_calibrated(shape, "fp8", CPU, num_tokens=64)

    assert (row["unit"], row["better"]) == ("s", "lower")
    assert row["value"] > 0
