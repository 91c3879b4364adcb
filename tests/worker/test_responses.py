"""Bodies of `POST /v1/responses`: what chat they become, and what is wrong with the others."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_worker.errors import InvalidRequest
from deepseek_worker.openai import ChatRequest
from deepseek_worker.responses import ResponsesRequest, parse_response

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a cat"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def parse(**body: Any) -> ChatRequest:
    return parse_response(json.dumps({"model": "m", "input": "hi", **body}).encode())[1]


def turns(**body: Any) -> list[dict[str, Any]]:
    return parse(**body).template_messages()


def test_a_text_is_a_user_s_turn_and_instructions_come_before() -> None:
    assert turns() == [{"role": "user", "content": "hi"}]
    assert turns(instructions="Be kind.")[0] == {"role": "system", "content": "Be kind."}


def test_items_of_earlier_answers_become_turns_again() -> None:
    said = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {**CALL, "id": "fc_1", "status": "completed"},
        {**CALL, "call_id": "c2"},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "a dog"}]},
    ]

    system, user, assistant, one, two = turns(input=said)

    assert (system["role"], user["content"]) == ("system", "Where?")
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Hm")
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert one == {"role": "tool", "content": "a cat", "tool_call_id": "c1"}
    assert two["content"] == "a dog"


def test_options_have_the_same_meaning_by_other_names() -> None:
    chat = parse(
        max_output_tokens=7, temperature=0, top_p=0.5, seed=3, tools=[TOOL],
        tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    )  # fmt: skip

    assert (chat.max_tokens, chat.temperature, chat.top_p, chat.seed) == (7, 0.0, 0.5, 3)
    assert [tool.function.name for tool in chat.callable_tools] == ["look"]
    assert (chat.must_call, chat.max_calls) == (True, 1)
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema == {"type": "object"}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"input": []}, "input", "it is empty"),
        (
            {"input": [{"role": "robot", "content": "x"}]},
            "input[0].role",
            "'robot'; roles are system, developer, user, assistant.",
        ),
        ({"input": [{"type": "image", "url": "x"}]}, "input[0].type", "function_call_output"),
        ({"input": ["x"]}, "input[0]", "got \"x\""),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "input_text or output_text",
        ),
        ({"input": [OUTPUT], "instructions": "x"}, "input[0].call_id", "has the id \"c1\""),
        ({"input": [{"type": "x" * 5000}]}, "input[0].type", "xx…; items are of the types"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1, got 0"),
        ({"temperature": 3}, "temperature", "<= 2.0, got 3"),
        ({"store": True}, "store", "not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "got \"web_search\""),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "letters"),
        ({"tool_choice": "required"}, "tool_choice", "it asks for a tool"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "Missing"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "got \"xml\""),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "got \"high\""),
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_by_its_field(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(**body)

    assert error.value.param == param
    assert says in str(error.value)
    assert error.value.code


def test_what_asks_for_nothing_is_accepted() -> None:
    parse(store=False, include=["reasoning.encrypted_content"], truncation="disabled", user="me")
    parse(reasoning={"effort": None}, text={"format": {"type": "text"}}, metadata={"a": "b"})
    parse(stream=True, stream_options={"include_obfuscation": False}, top_logprobs=0)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
ITEM_LIKE = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]),
        "role": st.sampled_from(["user", "assistant"]),
        "content": st.text(max_size=3) | JSON_VALUES,
        "call_id": st.just("c"),
        "name": st.just("f"),
        "arguments": st.just("{}"),
        "output": st.text(max_size=2) | JSON_VALUES,
    },
)


@given(data=st.data())
def test_every_body_is_accepted_or_refused_and_nothing_else_happens(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(ResponsesRequest.__struct_fields__), max_size=3))
    body = {name: data.draw(JSON_VALUES) for name in names}
    body |= {"model": "m", "input": data.draw(st.lists(ITEM_LIKE, max_size=4) | JSON_VALUES)}

    try:
        request, chat = parse_response(json.dumps(body).encode())
    except InvalidRequest as error:
        str(error).encode()
    else:
        assert chat.template_messages()
        msgspec.json.encode(request)
