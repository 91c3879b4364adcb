"""What of a config.json is understood, and what is refused by name."""

import pytest

from deepseek_worker.errors import BrokenCheckpoint, UnsupportedModel
from deepseek_worker.models.config import from_hf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 500000.0,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}


def test_reads_the_shape():
    config = from_hf(LLAMA | {"eos_token_id": [5, 6], "torch_dtype": "float16"})

    assert config.head_dim == 16
    assert config.rope.theta == 500000.0
    assert config.rope.type == "default"
    assert config.eos_token_ids == {5, 6}
    assert config.dtype == "float16"
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)


def test_qwen2_has_biases_on_q_k_v_alone():
    config = from_hf(QWEN2 | {"use_sliding_window": False, "sliding_window": 4096})

    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)


def test_the_generation_config_names_the_end_tokens():
    assert from_hf(LLAMA | {"eos_token_id": 1}, {"eos_token_id": [2, 3]}).eos_token_ids == {2, 3}


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_rope_scaling_mean_the_same(spelling, key):
    config = from_hf(LLAMA | {spelling: {key: "linear", "factor": 4.0}})

    assert config.rope.type == "linear"
    assert config.rope.parameters["factor"] == 4.0
    assert config.rope.theta == 500000.0


def test_theta_may_be_inside_the_rope_parameters():
    parameters = {"rope_type": "default", "rope_theta": 12.0}

    assert from_hf(LLAMA | {"rope_parameters": parameters}).rope.theta == 12.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"rope_scaling": {"type": "foo"}}, "foo"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        from_hf(LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"hidden_size": 63}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes, named):
    with pytest.raises(BrokenCheckpoint, match=named):
        from_hf(LLAMA | changes)


def test_the_quantization_is_part_of_the_shape():
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    assert from_hf(LLAMA).quantization is None
    assert from_hf(LLAMA | {"quantization_config": quantization}).quantization.method == "blocks"


def test_dynamic_and_longrope_are_served_up_to_their_original_length():
    dynamic = from_hf(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    longrope = from_hf(
        LLAMA
        | {
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        }
    )

    assert dynamic.max_context_tokens == 256
    assert longrope.max_context_tokens == 64
