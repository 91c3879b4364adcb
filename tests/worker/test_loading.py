"""The checkpoint and the decoder are compared completely before a weight is touched."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.weights.checkpoint import open_checkpoint
from deepseek_worker.weights.loading import fill_with_random, load

CPU = torch.device("cpu")


@pytest.fixture
def edit(tmp_path, make_checkpoint):
    """Change the tensors of a saved model, then try to load it."""

    def change(edit_tensors, **changes):
        source = make_checkpoint(**changes)[0]
        folder = shutil.copytree(source, tmp_path / "edited", dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        edit_tensors(tensors)
        save_file(tensors, folder / "model.safetensors")
        checkpoint = open_checkpoint(folder)
        decoder = Decoder(checkpoint.config, torch.float32, CPU)
        load(decoder, checkpoint, lambda _: None)
        return decoder

    return change


def test_a_missing_tensor_is_named(edit):
    with pytest.raises(BrokenCheckpoint, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj"):
        edit(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def test_many_missing_tensors_are_counted(edit):
    with pytest.raises(BrokenCheckpoint, match="and 16 more"):
        edit(lambda tensors: tensors.clear())


def test_a_left_over_tensor_is_named(edit):
    with pytest.raises(BrokenCheckpoint, match=r"has tensor model\.layers\.0\.stray"):
        edit(lambda tensors: tensors.update({"model.layers.0.stray": torch.ones(2)}))


def test_biases_that_the_architecture_has_not_are_named(edit):
    with pytest.raises(BrokenCheckpoint, match=r"q_proj\.bias"):
        edit(
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
        )


def test_a_wrong_shape_is_named_with_both_shapes(edit):
    with pytest.raises(BrokenCheckpoint, match=r"norm.weight has shape \[63\].*asks for \[64\]"):
        edit(lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))


def test_old_rotary_buffers_are_allowed(edit):
    edit(
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        )
    )


def test_scales_of_the_kv_cache_are_allowed(edit):
    scale = torch.ones(1)
    edit(lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": scale}))

    with pytest.raises(BrokenCheckpoint, match="q_scale"):
        edit(lambda tensors: tensors.update({"model.layers.0.self_attn.q_scale": scale}))


def test_a_head_beside_tied_embeddings_is_ignored(edit):
    edit(
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(128, 64)}),
        tie_word_embeddings=True,
    )


def test_an_untied_model_without_head_is_refused(edit):
    with pytest.raises(BrokenCheckpoint, match=r"lm_head\.weight"):
        edit(lambda tensors: tensors.pop("lm_head.weight"))


def test_progress_rises_to_one(tiny):
    checkpoint = open_checkpoint(tiny[0])
    fractions = []

    load(Decoder(checkpoint.config, torch.float32, CPU), checkpoint, fractions.append)

    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_random_weights_depend_on_the_seed_alone(tiny):
    config = open_checkpoint(tiny[0]).config

    def table(seed):
        decoder = Decoder(config, torch.float32, CPU)
        fill_with_random(decoder, seed)
        return decoder.embedding.weight

    assert torch.equal(table(1), table(1))
    assert not torch.equal(table(1), table(2))
