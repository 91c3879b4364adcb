"""Options: strict, frozen, each with a help text."""

import pytest
from pydantic import ValidationError

from deepseek_worker.config import EngineConfig, LoadConfig, ServerConfig


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
        ({"weights": "int8"}, "not served yet"),
        ({"kv_cache": "fp8"}, "not served yet"),
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
