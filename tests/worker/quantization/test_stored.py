"""What a quantization_config means, and what is refused by the name of its field."""

import pytest

from deepseek_worker.errors import UnsupportedModel
from deepseek_worker.quantization.schemes import PLAIN, Scheme
from deepseek_worker.quantization.stored import StoredQuantization, stored_quantization

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
ROWS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


def compressed(storage="pack-quantized", weights=INT4, inputs=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | more


def read(quantization):
    return stored_quantization({"quantization_config": quantization})


def test_without_a_quantization_config_nothing_is_quantized():
    assert stored_quantization({}) is None
    assert stored_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("quantization", "stored", "native"),
    [
        (
            GPTQ | {"desc_act": True, "sym": False},
            StoredQuantization(
                "gptq", 4, group_size=128, is_symmetric=False, is_sorted=True, zeros_less_one=True
            ),
            Scheme("int4", zero_points=True, is_sorted=True),
        ),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1},
            StoredQuantization("gptq", 8),
            Scheme("int8"),
        ),
        (
            GPTQ | {"group_size": 64},
            StoredQuantization("gptq", 4, group_size=64, zeros_less_one=True),
            PLAIN,
        ),
        (
            AWQ,
            StoredQuantization("awq", 4, group_size=128, is_symmetric=False),
            Scheme("int4", zero_points=True),
        ),
        (
            FP8,
            StoredQuantization(
                "blocks", 8, is_float=True, scale_name="weight_scale_inv", activations="8bit"
            ),
            Scheme("fp8_block", "8bit"),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            StoredQuantization("rows", 8, is_float=True, has_one_scale=True, activations="8bit"),
            Scheme("fp8", "8bit"),
        ),
        (compressed(), StoredQuantization("packed", 4, group_size=128), Scheme("int4")),
        (
            compressed("int-quantized", ROWS, {"num_bits": 8, "type": "int", "dynamic": True}),
            StoredQuantization("rows", 8, activations="8bit"),
            Scheme("int8", "8bit"),
        ),
        (
            compressed("float-quantized", ROWS | {"type": "float", "strategy": "tensor"}),
            StoredQuantization("rows", 8, is_float=True, has_one_scale=True),
            Scheme("fp8", "16bit"),
        ),
        (
            compressed(
                "float-quantized",
                ROWS | {"type": "float", "strategy": "block", "block_structure": "128x128"},
                {"num_bits": 8, "type": "float"},
            ),
            StoredQuantization("blocks", 8, is_float=True, activations="8bit"),
            Scheme("fp8_block", "8bit"),
        ),
    ],
)
def test_each_format_is_understood(quantization, stored, native):
    assert read(quantization) == stored
    assert read(quantization).native == native


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"bits": 4}, "quant_method None"),
        (GPTQ | {"bits": 3}, "bits 3"),
        (GPTQ | {"bits": None}, "bits None"),
        (GPTQ | {"group_size": 0}, "group_size 0"),
        (GPTQ | {"group_size": "big"}, "group_size 'big'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (AWQ | {"bits": 8}, "bits 8"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8 | {"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
        (FP8 | {"activation_scheme": "other"}, "activation_scheme 'other'"),
        (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        (compressed(config_groups={}), "config_groups"),
        (compressed(sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
        (compressed(weights=INT4 | {"num_bits": 2}), "bits 2"),
        (compressed(weights=INT4 | {"type": "float"}), "weights.type 'float'"),
        (compressed(weights=INT4 | {"strategy": "tensor"}), "weights.strategy 'tensor'"),
        (compressed(inputs={"num_bits": 8}), "input_activations"),
        (compressed("int-quantized", ROWS | {"symmetric": False}), "weights.symmetric False"),
        (compressed("int-quantized", ROWS | {"strategy": "block"}), "weights.strategy 'block'"),
        (compressed("int-quantized", ROWS, {"num_bits": 4}), "input_activations"),
        (
            compressed("int-quantized", ROWS, {"num_bits": 8, "symmetric": False}),
            "input_activations.symmetric",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(quantization, named):
    with pytest.raises(UnsupportedModel, match=named):
        read(quantization)


@pytest.mark.parametrize(
    ("quantization", "covered", "plain"),
    [
        (GPTQ, ["model.layers.0.mlp.up_proj"], ["lm_head"]),
        (GPTQ | {"lm_head": True}, ["lm_head"], []),
        (
            GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]},
            ["model.layers.3.mlp.up_proj"],
            ["model.layers.3.mlp.down_proj", "model.layers.3.self_attn.k_proj"],
        ),
        (
            AWQ | {"modules_to_not_convert": ["layers.1"]},
            ["model.layers.10.mlp.up_proj"],
            ["model.layers.1.mlp.up_proj", "lm_head"],
        ),
        (
            compressed(ignore=["re:.*down_proj", "model.layers.0.self_attn.q_proj"]),
            ["lm_head", "model.layers.1.self_attn.q_proj"],
            ["model.layers.5.mlp.down_proj", "model.layers.0.self_attn.q_proj"],
        ),
    ],
)
def test_lists_of_modules_are_understood(quantization, covered, plain):
    stored = read(quantization)

    assert [name for name in (*covered, *plain) if stored.covers(name)] == covered


def test_messages_tell_the_format():
    assert str(read(GPTQ | {"group_size": 32})) == "gptq, 4 bits in groups of 32"
    assert str(read(FP8)) == "blocks, fp8"
