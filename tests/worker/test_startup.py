"""From options to an engine, and what is refused before a weight is read."""

import pytest
import torch

from deepseek_worker.config import EngineConfig
from deepseek_worker.errors import ModelNotFound, ModelTooLarge, UnsupportedModel
from deepseek_worker.startup import load_engine

PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, key and value, heads, head_dim, tokens, float32


def prompt(length):
    return [(index * 13 + 5) % 120 for index in range(length)]


def test_bfloat16_weights_and_cache_are_served(tiny, make_engine, generate):
    engine = make_engine(tiny[0], weights="bf16", kv_cache="bf16")
    mixed = make_engine(tiny[0], dtype="float32", kv_cache="bf16")

    assert engine.stats().page_bytes * 2 == PAGE_BYTES
    assert mixed.stats().page_bytes * 2 == PAGE_BYTES
    for subject in (engine, mixed):
        assert [len(answer) for answer in generate(subject, [prompt(5), prompt(30)])] == [8, 8]


def test_random_weights_need_a_config_only(tiny, tmp_path, make_engine, generate):
    (tmp_path / "config.json").write_text((tiny[0] / "config.json").read_text())

    engine = make_engine(tmp_path, load_format="dummy")

    assert len(generate(engine, [prompt(5)])[0]) == 8


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8"])
def test_every_format_answers_and_is_predicted_to_the_byte(
    load_format, weights, kv_cache, tiny, make_engine, generate
):
    engine = make_engine(tiny[0], load_format=load_format, weights=weights, kv_cache=kv_cache)

    answers = generate(engine, [prompt(5), prompt(30)])

    stats = engine.stats()
    assert [len(answer) for answer in answers] == [8, 8]
    assert stats.measured_bytes["weights"] == stats.predicted_bytes["weights"]
    assert stats.measured_bytes["kv_cache"] == stats.predicted_bytes["kv_cache"]


def test_8_bit_keys_of_a_model_with_outliers_are_warned_of(make_checkpoint, make_engine, caplog):
    folder, model = make_checkpoint("qwen2", tie_word_embeddings=True)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias.mul_(200)
    model.save_pretrained(folder)

    make_engine(folder, kv_cache="int8")
    assert "Keys of the layers [1]" in caplog.text
    caplog.clear()
    make_engine(folder)
    assert "Keys of" not in caplog.text


def test_flags_that_contradict_each_other_are_refused(tiny):
    config = EngineConfig(model=tiny[0], device="cpu", weights="int4", activations="8bit")

    with pytest.raises(UnsupportedModel, match="activations is '8bit'"):
        load_engine(config, lambda _: None)


def test_a_model_larger_than_the_limit_says_what_is_missing(tiny):
    config = EngineConfig(model=tiny[0], device="cpu", memory_limit_bytes=2**20)

    with pytest.raises(ModelTooLarge, match=r"needs [\d,]+ MiB .*may use 1 MiB"):
        load_engine(config, lambda _: None)


def test_a_pool_larger_than_the_limit_is_refused(tiny):
    config = EngineConfig(
        model=tiny[0], device="cpu", memory_limit_bytes=2**30, kv_cache_bytes=2**31
    )

    with pytest.raises(ModelTooLarge):
        load_engine(config, lambda _: None)


def test_a_missing_model_is_said(tmp_path):
    with pytest.raises(ModelNotFound, match="does not exist"):
        load_engine(EngineConfig(model=tmp_path / "none", device="cpu"), lambda _: None)


def test_a_context_beyond_the_models_positions_is_refused(tiny):
    with pytest.raises(UnsupportedModel, match="made for 256"):
        load_engine(EngineConfig(model=tiny[0], max_context_tokens=257), lambda _: None)


def test_contradicting_precisions_are_refused(tiny):
    config = EngineConfig(model=tiny[0], device="cpu", weights="bf16", dtype="float32")

    with pytest.raises(UnsupportedModel, match="bf16"):
        load_engine(config, lambda _: None)


def test_predicted_weights_are_the_measured_ones(tiny, make_engine):
    stats = make_engine(tiny[0]).stats()

    assert stats.measured_bytes["weights"] == stats.predicted_bytes["weights"]
    assert stats.measured_bytes["kv_cache"] == stats.predicted_bytes["kv_cache"]
