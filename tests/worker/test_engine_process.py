"""What the engine's process loads before it serves."""

from typing import Any

import pytest

from deepseek_worker.config import EngineConfig
from deepseek_worker.engine_process import grammars, load
from deepseek_worker.errors import ModelNotFound


class NoBytes:
    """A tokenizer whose tokens nobody can follow."""

    eos_token_ids = frozenset()

    @property
    def marker_token_ids(self) -> Any:
        raise NotImplementedError("no bytes")

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError("no bytes")


def test_a_model_that_is_not_there_is_an_error_of_the_load(tmp_path):
    with pytest.raises(ModelNotFound):
        load(EngineConfig(model=tmp_path / "nowhere", device="cpu"), lambda _: None)


def test_a_tokenizer_that_grammars_cannot_follow_is_no_reason_to_end(caplog):
    assert grammars(NoBytes(), 300) is None
    assert "No grammars for this tokenizer: no bytes" in caplog.text
