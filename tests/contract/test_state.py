"""The document of GET /state."""

import json

import pytest
from pydantic import ValidationError

from deepseek_contract.state import MemoryState, WorkerState

STATE = WorkerState(
    phase="ready",
    served_name="r1",
    model_id="deepseek-ai/R1",
    device="cpu",
    started_at=1.0,
    memory=MemoryState(predicted_bytes={"weights": 5}, measured_bytes={}, limit_bytes=10),
)


def test_what_a_worker_writes_the_operator_reads() -> None:
    assert WorkerState.from_json(STATE.model_dump_json()) == STATE


def test_a_newer_worker_may_say_more() -> None:
    body = STATE.model_dump() | {"new": 1}
    body["memory"]["new"] = 2

    assert WorkerState.from_json(json.dumps(body)) == STATE


@pytest.mark.parametrize(
    "change",
    [{"phase": "sleeping"}, {"free_pages": -1}, {"memory": None}, {"loading_progress": 1.5}],
)
def test_nonsense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        WorkerState.from_json(json.dumps(STATE.model_dump() | change))
