"""Options: strict, frozen, each with a help text."""

import pytest
from pydantic import ValidationError

from deepseek_worker.config import EngineConfig, LoadConfig, ServerConfig, served_name


def test_a_model_is_all_that_is_needed(tmp_path):
    config = EngineConfig(model=tmp_path)

    assert (config.page_tokens, config.prefix_cache) == (16, True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_context_token": 5}, "max_context_token"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"memory_limit_percent": 101}, "memory_limit_percent"),
        ({"device": "tpu"}, "device"),
        ({"weights": "int2"}, "weights"),
        ({"kv_cache": "fp4"}, "kv_cache"),
        ({"activations": "4bit"}, "activations"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_options_are_refused_by_name(changes, named):
    with pytest.raises(ValidationError, match=named):
        EngineConfig(model="m", **changes)


def test_nothing_changes_after_the_start():
    config = ServerConfig()

    with pytest.raises(ValidationError, match="frozen"):
        config.port = 1


@pytest.mark.parametrize("model", [EngineConfig, ServerConfig, LoadConfig])
def test_no_two_models_share_a_flag(model):
    others = [m for m in (EngineConfig, ServerConfig, LoadConfig) if m is not model]

    assert not any(set(model.model_fields) & set(other.model_fields) for other in others)


def test_adapters_are_named_by_an_equals_sign():
    config = EngineConfig(model="m", lora=["terse=/adapters/a=b", "sql-7b=adapter.safetensors"])

    assert [(a.name, str(a.path)) for a in config.lora] == [
        ("terse", "/adapters/a=b"),
        ("sql-7b", "adapter.safetensors"),
    ]
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["terse"], "expected NAME=PATH"),
        (["=path"], "expected NAME=PATH"),
        (["terse="], "expected NAME=PATH"),
        (["with space=path"], "name"),
        (["a=one", "b=two", "a=three"], "--lora names two adapters 'a'"),
    ],
)
def test_adapters_that_cannot_be_told_apart_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig(model="m", lora=given)


def test_the_served_name_is_the_model_s_by_default(tmp_path):
    config = EngineConfig(model=tmp_path / "small.gguf")

    assert served_name(config, ServerConfig()) == "small"
    assert served_name(config, ServerConfig(served_model_name="large")) == "large"
