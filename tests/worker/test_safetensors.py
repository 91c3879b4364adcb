"""A folder of safetensors: whole, sharded, and broken in every way seen in public."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_worker.errors import BrokenCheckpoint, ModelNotFound
from deepseek_worker.weights.safetensors import INDEX, SafetensorsCheckpoint


@pytest.fixture
def whole(tiny, tmp_path):
    return shutil.copytree(tiny[0], tmp_path / "whole")


@pytest.fixture
def sharded(make_checkpoint, tmp_path):
    folder, _ = make_checkpoint(shard="60KB")
    return shutil.copytree(folder, tmp_path / "sharded")


def test_reads_every_tensor_as_stored(whole, tiny):
    checkpoint = SafetensorsCheckpoint(whole)

    expected = tiny[1].state_dict()
    assert set(checkpoint.shapes) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_reads_shards(sharded):
    assert len(list(sharded.glob("*.safetensors"))) >= 3

    checkpoint = SafetensorsCheckpoint(sharded)

    assert "model.layers.1.mlp.down_proj.weight" in checkpoint.shapes


def test_names_the_shards_that_are_missing(sharded):
    second = sorted(sharded.glob("*.safetensors"))[1]
    second.unlink()

    with pytest.raises(BrokenCheckpoint, match=second.name):
        SafetensorsCheckpoint(sharded)


def test_an_index_that_names_a_wrong_file_is_refused(sharded):
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(
        file for file in files if file != index["weight_map"]["model.norm.weight"]
    )
    (sharded / INDEX).write_text(json.dumps(index))

    with pytest.raises(BrokenCheckpoint, match=r"model\.norm\.weight"):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_a_broken_index_is_refused(sharded, text):
    (sharded / INDEX).write_text(text)

    with pytest.raises(BrokenCheckpoint, match=INDEX):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.99])
def test_a_file_cut_short_is_named(whole, kept):
    file = whole / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])

    with pytest.raises(BrokenCheckpoint, match=r"model\.safetensors is cut short"):
        SafetensorsCheckpoint(whole)


def test_a_tensor_in_two_files_is_refused(whole):
    save_file({"model.norm.weight": torch.ones(64)}, whole / "other.safetensors", metadata={})

    with pytest.raises(BrokenCheckpoint, match=r"model\.norm\.weight"):
        SafetensorsCheckpoint(whole)


def test_no_weights_at_all_and_folders_in_their_place_are_refused(whole):
    weights = whole / "model.safetensors"
    weights.unlink()
    with pytest.raises(ModelNotFound, match=r"no \.safetensors file"):
        SafetensorsCheckpoint(whole)

    weights.mkdir()
    with pytest.raises(BrokenCheckpoint, match=r"model\.safetensors"):
        SafetensorsCheckpoint(whole)


def test_a_broken_config_is_named(whole):
    (whole / "config.json").write_text("{")

    with pytest.raises(BrokenCheckpoint, match=r"config\.json"):
        SafetensorsCheckpoint(whole)


def test_bfloat16_is_kept(whole):
    tensors = load_file(whole / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, whole / "model.safetensors"
    )

    assert SafetensorsCheckpoint(whole).tensor("model.norm.weight").dtype == torch.bfloat16
