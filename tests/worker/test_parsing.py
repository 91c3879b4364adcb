"""Thought, content and tool calls, wherever the text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_worker.chat_format import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    CLOSE_THOUGHT,
    MARKERS,
    OPEN_THOUGHT,
    SEPARATOR,
)
from deepseek_worker.parsing import AnswerParser, Parts

V3_CALL = f'{CALL_BEGIN}function{SEPARATOR}look\n```json\n{{"at": "a `b` c"}}\n```{CALL_END}'
V31_CALL = f'{CALL_BEGIN}look{SEPARATOR}{{"at": "a `b` c"}}{CALL_END}'


def read(pieces: list[str], *options: Any) -> tuple[str, str, list[tuple[int, str | None, str]]]:
    parser = AnswerParser(*options)
    whole = Parts()
    for piece in pieces:
        whole.extend(parser.push(piece))
    whole.extend(parser.finish())
    calls = [(part.index, part.name, part.arguments) for part in whole.calls]
    assert all((part.id or "").startswith("call_") for part in whole.calls)
    return whole.thought, whole.content, calls


@pytest.mark.parametrize(
    ("start", "text", "thought", "content"),
    [
        ("thought", "I see.\n</think>\n\nYes.", "I see.", "Yes."),
        ("thought", "\nI see", "I see", ""),
        ("thought", "</think>\n\nYes", "", "Yes"),
        ("thought", "a < b </thin", "a < b </thin", ""),
        ("thought", "one</think>two</think>three", "one", "two</think>three"),
        ("answer", " <think>no</think>", "", " <think>no</think>"),
        ("either", "<think>\nHm\n</think>\nYes", "Hm", "Yes"),
        ("either", "\n<think>Hm", "Hm", ""),
        ("either", "  Yes <think>", "", "  Yes <think>"),
        ("either", "<thin", "", "<thin"),
        ("either", "", "", ""),
    ],
)
def test_a_thought_ends_where_its_marker_is(
    start: str, text: str, thought: str, content: str
) -> None:
    assert read([text], start) == (thought, content, [])
    assert read(list(text), start) == (thought, content, [])


@pytest.mark.parametrize(("form", "call"), [("v3", V3_CALL), ("v3.1", V31_CALL)])
def test_calls_are_read_in_both_forms(form: str, call: str) -> None:
    other = call.replace("look", "go").replace('"a `b` c"', "[1, 2]")
    text = f"Let me see.\n{CALLS_BEGIN}{call}\n{other}{CALLS_END}"

    _, content, calls = read([text], "answer", form)

    assert content == "Let me see."
    assert [(at, name, json.loads(arguments)) for at, name, arguments in calls] == [
        (0, "look", {"at": "a `b` c"}),
        (1, "go", {"at": [1, 2]}),
    ]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("v3.1", f"{CALL_BEGIN}f{SEPARATOR}{{}}{CALL_END}", "", [(0, "f", "{}")]),
        ("v3.1", f"{CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}{{}}{CALLS_END} x", "x", [(0, "f", "{}")]),
        ("v3.1", f'{CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}{{"a": "b ', "", [(0, "f", '{"a": "b')]),
        ("v3", f"{CALL_BEGIN}function{SEPARATOR}f\n{{}}{CALL_END}", "", [(0, "f", "{}")]),
        ("v3", f"{CALL_BEGIN}function{SEPARATOR}f\n```{{}}```{CALL_END}", "", [(0, "f", "{}")]),
        ("v3", f"{CALL_BEGIN}function{SEPARATOR}f", f"function{SEPARATOR}f", []),
        ("v3.1", f"{CALL_BEGIN}odd{CALL_END} text", f"odd{CALL_END} text", []),
        ("v3.1", f"{CALLS_BEGIN} text", "text", []),
        (None, f"{CALLS_BEGIN}{V31_CALL}", f"{CALLS_BEGIN}{V31_CALL}", []),
        ("v3", "a < b <｜tool", "a < b <｜tool", []),
        ("v3", "spaces stay  \n", "spaces stay  \n", []),
    ],
    ids=[
        "without the outer marker", "without its own end", "cut off", "without a fence",
        "fence on the same line", "cut off in its name", "no name", "no call after all", "no tools",
        "only a beginning", "no marker at all",
    ],
)  # fmt: skip
def test_calls_that_are_not_as_they_should_be_are_not_lost(
    form: Any, text: str, content: str, calls: list[Any]
) -> None:
    assert read([text], "answer", form) == ("", content, calls)
    assert read(list(text), "answer", form) == ("", content, calls)


def test_after_the_last_allowed_call_the_answer_is_complete() -> None:
    parser = AnswerParser("answer", "v3.1", 1)

    parts = parser.push(f"{CALLS_BEGIN}{V31_CALL}{V31_CALL}{CALLS_END} more")
    parts.extend(parser.finish())

    assert parser.is_complete
    assert [part.index for part in parts.calls] == [0]
    assert parts.content == ""


def test_text_is_sent_as_soon_as_it_can_be_no_marker() -> None:
    parser = AnswerParser("thought", "v3")

    assert parser.push("Hm, </").thought == "Hm,"
    assert parser.push("b> ok").thought == " </b> ok"
    assert parser.push("</think>Yes").content == "Yes"
    assert parser.push(f"{CALL_BEGIN}function{SEPARATOR}f").calls == []
    (part,) = parser.push('\n```json\n{"a"').calls
    assert (part.name, part.arguments) == ("f", '{"a"')
    (part,) = parser.push(": 1}\n``").calls
    assert (part.id, part.name, part.arguments) == (None, None, ": 1}")
    assert parser.push(f"`{CALL_END}") == Parts()


TEXTS = st.lists(
    st.sampled_from(
        [
            *MARKERS,
            "function",
            "f",
            "g",
            "\n",
            " ",
            "```json",
            "```",
            "`",
            '{"a": 1}',
            "{",
            "<",
            "x",
        ]
    ),
    max_size=14,
).map("".join)


@settings(max_examples=300)
@given(
    text=TEXTS,
    start=st.sampled_from(["thought", "answer", "either"]),
    form=st.sampled_from([None, "v3", "v3.1"]),
    max_calls=st.sampled_from([None, 1]),
)
def test_how_the_text_is_cut_changes_nothing(
    text: str, start: str, form: Any, max_calls: int | None
) -> None:
    options = (start, form, max_calls)
    whole = read([text], *options)

    assert read(list(text), *options) == whole
    for at in range(len(text) + 1):
        assert read([text[:at], text[at:]], *options) == whole


@given(text=TEXTS, data=st.data())
def test_nothing_but_markers_and_white_space_is_lost(text: str, data: st.DataObject) -> None:
    thought, content, calls = read([text], "answer", None)

    assert (thought, content, calls) == ("", text, [])
    thought, content, _ = read([text], "thought")
    before, found, after = text.partition(CLOSE_THOUGHT)
    assert thought == (before.strip() if found else before.lstrip())
    assert content == after.lstrip()
    assert OPEN_THOUGHT not in content or OPEN_THOUGHT in text
