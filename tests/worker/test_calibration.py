"""A checkpoint that is rounded while a text runs through the model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_worker.errors import BrokenCheckpoint, UnsupportedModel
from deepseek_worker.layers.attention import Span, TorchAttention
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.quantization.build import rounded
from deepseek_worker.quantization.schemes import Scheme
from deepseek_worker.weights.calibration import TEXT, load_calibrated
from deepseek_worker.weights.checkpoint import open_checkpoint
from deepseek_worker.weights.loading import load

CPU = torch.device("cpu")
# Longer than one sequence of the model's 256 positions, with a short rest.
TOKEN_IDS = [(17 * index + index // 5) % 128 for index in range(600)]


def loaded(folder, scheme, *, calibrated, dtype=torch.float32, report=lambda _: None):
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.config, dtype, CPU, rounded(scheme))
    if calibrated:
        load_calibrated(decoder, checkpoint, TOKEN_IDS, "float32", report)
    else:
        load(decoder, checkpoint, report)
    return decoder


@torch.inference_mode()
def logits(decoder):
    """Of the tokens, read once more as one prompt."""
    pool = KvPool(
        decoder.config, num_pages=1, page_tokens=256, formats=("float32",) * 2, device=CPU
    )
    attention = TorchAttention(pool, decoder.config.num_heads, torch.float32, decoder.rope)
    plan = attention.plan([Span([0], 0, 256)])
    return decoder.logits(decoder.forward(torch.tensor(TOKEN_IDS[:256]), attention, plan))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "scheme", [Scheme("fp8"), Scheme("int8"), Scheme("int8", "8bit"), Scheme("int4")], ids=str
)
def test_every_projection_is_filled_and_nothing_else_stays(kind, scheme, make_checkpoint):
    folder, _ = make_checkpoint(kind)
    fractions = []

    nearest = loaded(folder, scheme, calibrated=False)
    calibrated = loaded(folder, scheme, calibrated=True, report=fractions.append)

    assert fractions[-1] == 1.0
    assert fractions == sorted(fractions)
    assert calibrated.weight_bytes() == nearest.weight_bytes()
    for one, other in zip(nearest.layers(), calibrated.layers(), strict=True):
        assert type(one) is type(other)


@pytest.mark.parametrize("activations", ["16bit", "8bit"])
def test_answers_are_nearer_to_the_unrounded_model(activations, make_checkpoint):
    folder, _ = make_checkpoint(hidden_size=128, intermediate_size=256)
    exact = logits(loaded(folder, Scheme("plain"), calibrated=False))
    scheme = Scheme("int8", activations)

    nearest = logits(loaded(folder, scheme, calibrated=False))
    calibrated = logits(loaded(folder, scheme, calibrated=True))

    assert (calibrated - exact).norm() < (nearest - exact).norm()


def test_a_missing_tensor_is_named_before_anything_is_read(make_checkpoint):
    folder, _ = make_checkpoint()
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.config, torch.float32, CPU, rounded(Scheme("fp8")))
    del checkpoint.shapes["model.layers.1.mlp.up_proj.weight"]

    with pytest.raises(BrokenCheckpoint, match="up_proj"):
        load_calibrated(decoder, checkpoint, TOKEN_IDS, "float32", lambda _: None)


def test_weights_that_make_infinite_numbers_are_refused_by_where_they_show(make_checkpoint):
    folder, _ = make_checkpoint()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = float("inf")
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(BrokenCheckpoint, match=r"inputs to model\.layers\.1\.self_attn\.o_proj"):
        loaded(folder, Scheme("int8"), calibrated=True)


@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_weights_that_are_not_rounded_cannot_be_calibrated(weights, tiny, make_engine):
    with pytest.raises(UnsupportedModel, match="nothing is rounded then"):
        make_engine(tiny[0], weights=weights, rounding="calibrated")


def test_quantized_checkpoints_cannot_be_calibrated(make_checkpoint, make_engine):
    folder, _ = make_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedModel, match="quantized already"):
        make_engine(folder, weights="fp8", rounding="calibrated")


def test_the_text_is_long_enough_and_not_the_one_that_is_measured():
    text = TEXT.read_text(encoding="utf-8")

    assert len(text) > 30_000
    assert "Alice" not in text
