"""GGUF files written by llama.cpp's own library, against transformers' weights."""

import gguf
import numpy as np
import pytest
import torch

from deepseek_worker.errors import BrokenCheckpoint, UnsupportedModel
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.weights.gguf import BLOCK_NAMES, TOP_NAMES, GgufCheckpoint
from deepseek_worker.weights.loading import load

GGUF_OF = {theirs: ours for ours, theirs in TOP_NAMES.items()}


def gguf_name(name: str) -> str:
    if name in GGUF_OF:
        return GGUF_OF[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    (short,) = [ours for ours, theirs in BLOCK_NAMES.items() if theirs == part]
    return f"blk.{layer}.{short}.{kind}"


def interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    return (
        tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
        .swapaxes(1, 2)
        .reshape(tensor.shape)
    )


def write(path, model, architecture, kind=gguf.GGMLQuantizationType.F32, **extra):
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    tied = config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = parameter.numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = interleaved(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = interleaved(values, config.num_key_value_heads)
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else kind
        data = gguf.quants.quantize(np.ascontiguousarray(values), stored)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
    ids=["llama", "llama with biases", "qwen2", "qwen2 tied"],
)
def test_every_weight_comes_back_in_transformers_order(
    architecture, changes, make_checkpoint, tmp_path
):
    _, model = make_checkpoint(architecture, **changes)

    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", model, architecture))

    expected = model.state_dict()
    if changes.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    assert set(checkpoint.shapes) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    decoder = Decoder(checkpoint.config, torch.float32, torch.device("cpu"))
    load(decoder, checkpoint, lambda _: None)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_dequantizes_as_the_library_does(kind, make_checkpoint, tmp_path):
    _, model = make_checkpoint("qwen2")
    stored = gguf.GGMLQuantizationType[kind]

    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", model, "qwen2", stored))

    name = "model.layers.0.mlp.down_proj.weight"
    weight = model.state_dict()[name].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, stored), stored)
    assert torch.equal(checkpoint.tensor(name).float(), torch.from_numpy(expected))


def test_a_type_that_is_not_served_names_the_tensor(make_checkpoint, tmp_path):
    _, model = make_checkpoint("qwen2", hidden_size=256, intermediate_size=256, head_dim=64)
    path = write(tmp_path / "m.gguf", model, "qwen2", gguf.GGMLQuantizationType.TQ1_0)
    checkpoint = GgufCheckpoint(path)

    with pytest.raises(UnsupportedModel, match=r"token_embd\.weight is stored as TQ1_0"):
        checkpoint.tensor("model.embed_tokens.weight")


def test_an_architecture_that_is_not_served_is_named(make_checkpoint, tmp_path):
    _, model = make_checkpoint("qwen2")

    with pytest.raises(UnsupportedModel, match="phi3"):
        GgufCheckpoint(write(tmp_path / "m.gguf", model, "phi3"))


def test_a_rope_scaling_that_is_not_served_is_named(make_checkpoint, tmp_path):
    _, model = make_checkpoint("qwen2")
    path = write(tmp_path / "m.gguf", model, "qwen2", qwen2__rope__scaling__type="longrope")

    with pytest.raises(UnsupportedModel, match="longrope"):
        GgufCheckpoint(path)


def test_a_file_cut_inside_a_tensor_names_it(make_checkpoint, tmp_path):
    _, model = make_checkpoint("qwen2")
    path = write(tmp_path / "m.gguf", model, "qwen2")
    content = path.read_bytes()
    path.write_bytes(content[:-5000])

    with pytest.raises(BrokenCheckpoint, match=r"tensor \S+ reaches to byte"):
        GgufCheckpoint(path)


def test_llama_3_factors_divide_the_frequencies(make_checkpoint, tmp_path):
    from deepseek_worker.layers.rope import inverse_frequencies

    _, model = make_checkpoint("llama")
    plain = GgufCheckpoint(write(tmp_path / "a.gguf", model, "llama")).config
    state = model.state_dict()
    model.state_dict = lambda: state | {"rope_freqs.weight": torch.full((8,), 4.0)}
    GGUF_OF["rope_freqs.weight"] = "rope_freqs.weight"

    scaled = GgufCheckpoint(write(tmp_path / "b.gguf", model, "llama")).config

    del model.state_dict
    expected = inverse_frequencies(plain.rope, 16)[0] / 4
    assert torch.equal(inverse_frequencies(scaled.rope, 16)[0], expected)
