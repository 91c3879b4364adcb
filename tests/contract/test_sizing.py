"""Sizing against published parameter counts, vLLM's table of KV bytes and a real file."""

import pytest
from gguf import GGUFReader

import model
from deepseek_contract.sizing import (
    Prediction,
    UnknownShapeError,
    kv_bytes_per_token,
    kv_layer_bytes,
    kv_page_bytes,
    product_bytes,
    shape_of_config,
    shape_of_gguf,
    weight_bytes,
    workspace_bytes,
)


def dense(
    architecture: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    **more: object,
) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        **more,
    }


QWEN_1_5B = dense("Qwen2ForCausalLM", 28, 1536, 12, 2, 8960, 151_936)
QWEN_7B = dense("Qwen2ForCausalLM", 28, 3584, 28, 4, 18_944, 152_064)
QWEN_14B = dense("Qwen2ForCausalLM", 48, 5120, 40, 8, 13_824, 152_064)
QWEN_32B = dense("Qwen2ForCausalLM", 64, 5120, 40, 8, 27_648, 152_064)
LLAMA_8B = dense("LlamaForCausalLM", 32, 4096, 32, 8, 14_336, 128_256)
LLAMA_70B = dense("LlamaForCausalLM", 80, 8192, 64, 8, 28_672, 128_256)
DEEPSEEK_7B = dense("LlamaForCausalLM", 30, 4096, 32, 32, 11_008, 102_400)
DEEPSEEK_67B = dense("LlamaForCausalLM", 95, 8192, 64, 8, 22_016, 102_400)
V2_LITE = dense("DeepseekV2ForCausalLM", 27, 2048, 16, 16, 10_944, 102_400) | {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
V3 = dense("DeepseekV3ForCausalLM", 61, 7168, 128, 128, 18_432, 129_280) | {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
SMOLLM2 = dense(
    "LlamaForCausalLM", 30, 576, 9, 3, 1536, 49_152, tie_word_embeddings=True, head_dim=64
)


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [
        pytest.param(QWEN_1_5B, 28_672, id="R1-Distill-Qwen-1.5B"),
        pytest.param(QWEN_7B, 57_344, id="R1-Distill-Qwen-7B"),
        pytest.param(QWEN_14B, 196_608, id="R1-Distill-Qwen-14B"),
        pytest.param(QWEN_32B, 262_144, id="R1-Distill-Qwen-32B"),
        pytest.param(LLAMA_8B, 131_072, id="R1-Distill-Llama-8B"),
        pytest.param(LLAMA_70B, 327_680, id="R1-Distill-Llama-70B"),
        pytest.param(DEEPSEEK_7B, 491_520, id="DeepSeek-LLM-7B"),
        pytest.param(DEEPSEEK_67B, 389_120, id="DeepSeek-LLM-67B"),
        pytest.param(V2_LITE, 31_104, id="V2-Lite"),
        pytest.param(V3, 70_272, id="V3"),
    ],
)
def test_the_kv_of_a_token_takes_the_bytes_of_the_published_table(
    config: dict[str, object], kv_bytes: int
) -> None:
    assert kv_bytes_per_token(shape_of_config(config), "bf16") == kv_bytes


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        pytest.param(SMOLLM2, 134_515_008, id="SmolLM2-135M"),
        pytest.param(QWEN_1_5B, 1_777_088_000, id="R1-Distill-Qwen-1.5B"),
        pytest.param(QWEN_7B, 7_615_616_512, id="R1-Distill-Qwen-7B"),
        pytest.param(QWEN_14B, 14_770_033_664, id="R1-Distill-Qwen-14B"),
        pytest.param(QWEN_32B, 32_763_876_352, id="R1-Distill-Qwen-32B"),
        pytest.param(LLAMA_8B, 8_030_261_248, id="R1-Distill-Llama-8B"),
        pytest.param(LLAMA_70B, 70_553_706_496, id="R1-Distill-Llama-70B"),
        pytest.param(V2_LITE, 15_706_484_224, id="V2-Lite"),
        pytest.param(V3, 671_026_419_200, id="V3"),
    ],
)
def test_parameters_are_as_many_as_published(
    config: dict[str, object], num_parameters: int
) -> None:
    assert shape_of_config(config).num_parameters == num_parameters


def test_an_explicit_head_dim_counts_and_not_the_quotient() -> None:
    shape = shape_of_config(dense("LlamaForCausalLM", 1, 64, 4, 2, 128, 100, head_dim=32))

    assert kv_bytes_per_token(shape, "float32") == 2 * 2 * 32 * 4
    assert shape.matrices()[0] == (128, 64)


def test_tied_embeddings_are_counted_once() -> None:
    tied = shape_of_config(SMOLLM2)
    untied = shape_of_config(SMOLLM2 | {"tie_word_embeddings": False})

    assert untied.num_parameters - tied.num_parameters == 49_152 * 576


@pytest.mark.parametrize(
    ("flags", "bias_parameters"),
    [
        pytest.param({}, 0, id="no bias"),
        pytest.param({"attention_bias": True}, 64 + 32 + 32 + 64, id="attention"),
        pytest.param({"mlp_bias": True}, 128 + 128 + 64, id="feed-forward"),
    ],
)
def test_biases_of_llama_are_counted(flags: dict[str, bool], bias_parameters: int) -> None:
    plain = shape_of_config(dense("LlamaForCausalLM", 1, 64, 4, 2, 128, 100))
    shape = shape_of_config(dense("LlamaForCausalLM", 1, 64, 4, 2, 128, 100, **flags))

    assert shape.num_parameters - plain.num_parameters == bias_parameters


def test_16_bit_weights_take_two_bytes_a_parameter() -> None:
    shape = shape_of_config(LLAMA_8B)

    assert weight_bytes(shape, "bf16") == 2 * 8_030_261_248
    assert weight_bytes(shape, "float32") == 4 * 8_030_261_248


def test_quantized_weights_keep_embeddings_and_carry_scales() -> None:
    shape = shape_of_config(dense("LlamaForCausalLM", 1, 256, 2, 2, 256, 1000))
    num_linear = 7 * 256 * 256
    num_plain = shape.num_parameters - num_linear

    assert weight_bytes(shape, "fp8") == 2 * num_plain + num_linear + 7 * 256 * 4
    assert weight_bytes(shape, "fp8_block") == 2 * num_plain + num_linear + 7 * 2 * 2 * 4
    assert weight_bytes(shape, "int8") == 2 * num_plain + num_linear + 7 * 256 * 4
    assert weight_bytes(shape, "int4") == 2 * num_plain + num_linear // 2 + 7 * 256 * 2 * 2
    assert weight_bytes(shape, "int4_zero_points") == weight_bytes(shape, "int4") + 7 * 256 * 2
    assert weight_bytes(shape, "int8", plain_bytes=4) == 4 * num_plain + num_linear + 7 * 256 * 4


def test_4_bit_weights_are_filled_up_to_whole_tiles() -> None:
    # 65 rows take two tiles of 64, 576 columns three of 256.
    assert product_bytes(65, 576, "int4") == 128 * 768 // 2 + 128 * 6 * 2


def test_4_bit_weights_of_the_served_models_are_hardly_filled_up() -> None:
    for config in (QWEN_1_5B, QWEN_7B, QWEN_14B, QWEN_32B, LLAMA_8B, LLAMA_70B, DEEPSEEK_7B):
        for rows, columns in shape_of_config(config).products():
            packed = rows * columns // 2 + rows * (columns // 128) * 2
            assert product_bytes(rows, columns, "int4") <= 1.01 * packed


def test_products_hold_the_same_parameters_as_matrices() -> None:
    for config in (QWEN_7B, SMOLLM2, V2_LITE, V3):
        shape = shape_of_config(config)
        products = sum(rows * columns for rows, columns in shape.products())
        assert products == sum(rows * columns for rows, columns in shape.matrices())


def test_each_layer_of_a_page_has_its_own_precision_and_begins_aligned() -> None:
    shape = shape_of_config(dense("LlamaForCausalLM", 3, 64, 4, 1, 128, 100, head_dim=6))

    assert kv_layer_bytes(shape, "bf16", 16) == 16 * 2 * 6 * 2
    assert kv_layer_bytes(shape, "int8", 16) == 16 * 2 * (6 + 4)
    assert kv_layer_bytes(shape, "fp8", 1) == 16
    assert kv_page_bytes(shape, ("bf16", "int8", "fp8"), 16) == 384 + 320 + 192


def test_the_workspace_grows_with_tokens_and_with_rows_of_logits() -> None:
    shape = shape_of_config(QWEN_7B)

    def workspace(num_tokens: int, num_rows: int) -> int:
        return workspace_bytes(
            shape, num_tokens=num_tokens, num_logit_rows=num_rows, activation_bytes=2
        )

    assert workspace(0, 256) == 256 * 152_064 * 16
    assert workspace(8192, 0) == 8192 * (3 * 3584 + 3 * 18_944) * 2


def prediction(limit_bytes: int) -> Prediction:
    return Prediction(
        limit_bytes=limit_bytes,
        weight_bytes=1000,
        workspace_bytes=100,
        context_bytes=50,
        page_bytes=20,
    )


def test_pages_fill_what_is_left() -> None:
    assert prediction(1209).num_pages == 2
    assert prediction(1209).missing_bytes == 0
    assert prediction(1209).bytes_by_kind == {
        "weights": 1000,
        "kv_cache": 40,
        "workspace": 100,
        "context": 50,
    }


def test_a_model_without_room_for_a_page_says_how_much_is_missing() -> None:
    assert prediction(1169).num_pages == 0
    assert prediction(1169).missing_bytes == 1
    assert prediction(500).num_pages == 0
    assert prediction(500).missing_bytes == 670


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel", id="unknown"),
        pytest.param({"architectures": []}, "None", id="no architecture"),
        pytest.param({"hidden_size": None}, "hidden_size", id="missing size"),
        pytest.param({"num_hidden_layers": 0}, "num_hidden_layers", id="no layers"),
        pytest.param({"vocab_size": "many"}, "vocab_size", id="text for a number"),
    ],
)
def test_a_config_that_tells_no_shape_is_refused_by_name(
    change: dict[str, object], named: str
) -> None:
    with pytest.raises(UnknownShapeError, match=named):
        shape_of_config(LLAMA_8B | change)


def test_a_gguf_of_another_architecture_is_refused_by_name() -> None:
    with pytest.raises(UnknownShapeError, match="mamba"):
        shape_of_gguf({"general.architecture": "mamba"}, [])


@pytest.mark.model
def test_the_embedded_model_has_exactly_the_parameters_that_its_shape_tells() -> None:
    reader = GGUFReader(model.fetch())
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    num_elements = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}

    shape = shape_of_gguf(metadata, num_elements.keys())

    assert shape == shape_of_config(SMOLLM2)
    assert shape.num_parameters == sum(num_elements.values())
    assert kv_bytes_per_token(shape, "float32") == 30 * 2 * 3 * 64 * 4
