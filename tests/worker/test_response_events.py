"""Answers of `POST /v1/responses`: the events, put together, are the whole answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_worker.answers import error_answer, usage
from deepseek_worker.errors import WorkerError
from deepseek_worker.generation import Piece
from deepseek_worker.parsing import CallPart
from deepseek_worker.rendering import Head
from deepseek_worker.response_events import ResponseRenderer
from deepseek_worker.responses import parse_response

USAGE = usage(3, 9, 2, 4)


def renderer(**body: Any) -> ResponseRenderer:
    asked, _ = parse_response(json.dumps({"model": "m", "input": "hi", **body}).encode())
    return ResponseRenderer(Head("resp_1", 7, "real"), asked)


def read(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        kind, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def stream(pieces: list[Piece]) -> list[dict[str, Any]]:
    writes = renderer()
    return read(b"".join(writes.events([piece]) for piece in pieces) + writes.usage_event(USAGE))


def nameless(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


def test_a_text_grows_between_its_beginning_and_its_end() -> None:
    events = stream([Piece(0, "Hel"), Piece(0, "lo", [], "stop")])

    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == []
    assert [event["delta"] for event in events[4:6]] == ["Hel", "lo"]
    assert events[6]["text"] == "Hello"
    response = events[-1]["response"]
    assert (response["id"], response["model"], response["status"]) == (
        "resp_1",
        "real",
        "completed",
    )
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 12,
    }


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    whole = renderer().whole([Piece(0, "Hel", [], "length")], USAGE)

    assert whole["status"] == whole["output"][0]["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert stream([Piece(0, "Hel", [], "length")])[-1]["type"] == "response.incomplete"


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    (item,) = renderer().whole([Piece(0, "", [], "stop")], USAGE)["output"]

    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_an_answer_that_fails_says_so_last() -> None:
    writes = renderer()
    data = writes.events([Piece(0, "Hel")])

    events = read(data + writes.error_event(error_answer(WorkerError("it broke"))[1]))

    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["message"] == events[-1]["response"]["error"]["message"] == "it broke"
    assert events[-1]["response"]["status"] == "failed"


def test_what_was_asked_for_is_said_again() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True, "description": "d"}
    asked = {
        "instructions": "Be kind.", "temperature": 0.5, "tools": [tool], "tool_choice": "none",
        "metadata": {"a": "b"}, "max_output_tokens": 9, "parallel_tool_calls": False,
    }  # fmt: skip
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}

    writes = renderer(**asked, text={"format": form})
    whole = read(writes.events([Piece(0, "", [], "stop")]))[0]["response"]

    assert {key: whole[key] for key in asked} == asked
    assert whole["text"] == {"format": form}


def pieces_of(cuts: list[tuple[str, str]]) -> list[Piece]:
    """Thought, text and two calls, in pieces."""
    pieces = [Piece(0, **{kind: text}) for kind, text in cuts]
    pieces.append(Piece(0, calls=[CallPart(0, "call_1", "f", "{")]))
    pieces.append(Piece(0, calls=[CallPart(0, arguments="}"), CallPart(1, "call_2", "g")]))
    pieces.append(Piece(0, calls=[CallPart(1, arguments="{}")], finish_reason="tool_calls"))
    return pieces


@given(
    thoughts=st.lists(st.text(min_size=1, max_size=3), max_size=3),
    texts=st.lists(st.text(min_size=1, max_size=3), max_size=3),
)
def test_the_events_put_together_are_the_whole_answer(
    thoughts: list[str], texts: list[str]
) -> None:
    cuts = [("thought", thought) for thought in thoughts] + [("text", text) for text in texts]
    whole = Piece(0)
    for piece in pieces_of(cuts):
        whole.extend(piece)

    events = stream(pieces_of(cuts))

    output = renderer().whole([whole], USAGE)["output"]
    assert nameless(events[-1]["response"]["output"]) == nameless(output)
    grown: list[str] = ["" for _ in output]
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] += event["delta"]
    assert grown == [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        for item in output
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert all(item["status"] == "completed" for item in done)


@pytest.mark.parametrize("kind", ["thought", "text"])
def test_ids_of_items_stay_the_same(kind: str) -> None:
    events = stream([Piece(0, **{kind: "a"}), Piece(0, finish_reason="stop", **{kind: "b"})])

    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {events[-1]["response"]["output"][0]["id"]}
