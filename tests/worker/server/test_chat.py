"""Thoughts, tools and structures over real connections; the engine follows a script."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deepseek_worker.chat_format import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    ChatFormat,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 99}},
            "additionalProperties": False,
        },
    },
}
CALL = ChatFormat.of("").written_call("look", '{"at": 1}')
THINKING = "{{ '</think>' }}{{ '<｜tool▁sep｜>' }}{% if tools %}{{ tool_calls }}{% endif %}"


@pytest.fixture(scope="module")
def thinking(scripted_module: Any) -> Iterator[Any]:
    """A model whose template opens the thought and knows tools, in the form of V3.1."""
    with scripted_module.running(roomy(scripted_module), chat_template=THINKING) as server:
        yield server


def roomy(scripted: Any) -> Any:
    engine = scripted.Engine()
    engine.max_context_tokens = engine.pool_pages = 4096
    return engine


def streamed(server: Any, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a stream adds up to, as the message of an answer that is not streamed."""
    chunks = server.events(server.chat(stream=True, **body))
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("role", "content", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls.append({**part, "function": dict(part["function"])})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return message, chunks


def test_a_thought_comes_apart_from_the_answer(thinking: Any) -> None:
    thinking.engine.reply = lambda _: "Hm,\nso. </think>\n\nYes 🙂".encode()

    body = thinking.chat().json()
    message, chunks = streamed(thinking)

    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes 🙂",
        "refusal": None,
        "reasoning_content": "Hm,\nso.",
    }
    assert choice["finish_reason"] == "stop"
    # The marker is a part of the thought.
    thought_tokens = len("Hm,\nso. </think>")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought_tokens}
    assert (message["content"], message["reasoning_content"]) == ("Yes 🙂", "Hm,\nso.")
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_thought_that_is_cut_off_is_no_answer(thinking: Any) -> None:
    thinking.engine.reply = lambda _: b"abcdefgh"

    (choice,) = thinking.chat(max_tokens=4).json()["choices"]

    assert choice["finish_reason"] == "length"
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "abcd")


def test_calls_come_whole_and_as_deltas(thinking: Any) -> None:
    call = f'{CALL_BEGIN}look{SEPARATOR}{{"at": "ü"}}{CALL_END}'
    text = f"Hm</think>Let me see.{CALLS_BEGIN}{call}{call}{CALLS_END}"
    thinking.engine.reply = lambda _: text.encode()

    (choice,) = thinking.chat(tools=[TOOL]).json()["choices"]
    message, chunks = streamed(thinking, tools=[TOOL])

    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["reasoning_content"] == "Hm"
    calls = choice["message"]["tool_calls"]
    assert [(c["type"], c["function"]) for c in calls] == 2 * [
        ("function", {"name": "look", "arguments": '{"at": "ü"}'})
    ]
    assert len({c["id"] for c in calls}) == 2
    assert [(c["type"], c["function"]) for c in message["tool_calls"]] == [
        (c["type"], c["function"]) for c in calls
    ]
    assert message["content"] == "Let me see."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    (request, _) = thinking.engine.seen[-2:]
    assert bytes(request.prompt_token_ids).startswith(b'[{"type": "function", "function": {"name"')


def test_an_answer_of_calls_alone_has_no_content(scripted: Any) -> None:
    engine = roomy(scripted)
    engine.reply = lambda _: f"{CALLS_BEGIN}{CALL}{CALLS_END}".encode()

    with scripted.running(engine) as server:
        (choice,) = server.chat(tools=[TOOL], max_tokens=500).json()["choices"]

    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"at": 1}'
    # This template does not know tools: the model is told in words.
    prompt = bytes(engine.seen[-1].prompt_token_ids).decode()
    assert prompt.startswith("<system>## Tools\n")
    assert "### look\nDescription: Looks." in prompt


def test_without_parallel_calls_the_first_ends_the_answer(thinking: Any) -> None:
    call = f"{CALL_BEGIN}look{SEPARATOR}{{}}{CALL_END}"
    thinking.engine.reply = lambda _: f"</think>{CALLS_BEGIN}{call}{call * 20}".encode()

    (choice,) = thinking.chat(tools=[TOOL], parallel_tool_calls=False).json()["choices"]

    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    thinking.wait_until_idle()


def test_tools_that_may_not_be_used_are_not_shown(thinking: Any) -> None:
    text = f"{CALLS_BEGIN}{CALL}{CALLS_END}"
    thinking.engine.reply = lambda _: f"</think>{text}".encode()

    (choice,) = thinking.chat(tools=[TOOL], tool_choice="none").json()["choices"]

    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"
    assert b"look" not in bytes(thinking.engine.seen[-1].prompt_token_ids)


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "look"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_comes_whatever_the_model_wants_to_say(
    thinking: Any, tool_choice: Any, stream: bool
) -> None:
    thinking.engine.reply = lambda _: b"Hm</think>" + b"no! " * 200
    asked = {"tools": [TOOL], "tool_choice": tool_choice, "parallel_tool_calls": False}

    if stream:
        message, _ = streamed(thinking, **asked)
    else:
        message = thinking.chat(**asked).json()["choices"][0]["message"]

    assert message["reasoning_content"] == "Hm"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "look"
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_an_answer_has_the_structure_that_was_asked_for(api: Any) -> None:
    api.engine.reply = lambda _: b'no {"x": 12, "y": "ignored"}' + b"9" * 100
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer", "maximum": 99}},
        "required": ["x"],
        "additionalProperties": False,
    }
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}

    whole = api.chat(n=2, **asked).json()["choices"]
    chunks = api.events(api.complete(stream=True, max_tokens=200, **asked))

    assert [json.loads(choice["message"]["content"]).keys() for choice in whole] == 2 * [{"x"}]
    assert [choice["finish_reason"] for choice in whole] == ["stop", "stop"]
    assert json.loads(api.text_of(chunks)).keys() == {"x"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"json": {"type": "text"}}, "Invalid type: text"),
    ],
)
def test_a_structure_that_cannot_be_kept_is_refused_alone(
    api: Any, given: dict[str, Any], says: str
) -> None:
    api.engine.gate.clear()
    (kind,) = given
    with api.connect() as connection:
        api.send(connection, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 3})
        response = api.complete(structured_outputs=given)
        api.engine.gate.set()
        answer = connection.recv(1 << 16)

    error = api.error_of(response)
    assert response.status_code == 400
    assert error["param"] == f"structured_outputs.{kind}"
    assert says in error["message"]
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_structure_that_takes_too_long_is_refused(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepseek_worker.client.GRAMMAR_SECONDS", 0.0)

    response = api.complete(structured_outputs={"regex": "abc"})

    assert response.status_code == 400
    assert "within 0 s; simplify it" in api.error_of(response)["message"]


def test_a_tokenizer_that_grammars_cannot_follow_is_said(scripted: Any) -> None:
    with scripted.running(follows_grammars=False) as api:
        response = api.complete(structured_outputs={"regex": "abc"})

    assert response.status_code == 400
    assert api.error_of(response)["code"] == "unsupported_parameter"


def test_the_last_message_can_be_continued(api: Any, thinking: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]

    api.chat(messages=messages, continue_final_message=True, max_tokens=1)
    assert bytes(api.engine.seen[-1].prompt_token_ids) == b"<user>hi\n<assistant>I am"

    thinking.engine.reply = lambda _: b" sure"
    body = thinking.chat(messages=messages, continue_final_message=True).json()
    assert body["choices"][0]["message"]["content"] == " sure"

    messages[1]["content"] = "<think>I am"
    body = thinking.chat(messages=messages, continue_final_message=True).json()
    assert body["choices"][0]["message"]["reasoning_content"].strip() == "sure"


def test_a_turn_need_not_be_opened(api: Any) -> None:
    api.chat(add_generation_prompt=False, max_tokens=1)

    assert bytes(api.engine.seen[-1].prompt_token_ids) == b"<user>hello\n"


def test_logprobs_of_the_prompt_come_by_token(api: Any) -> None:
    asked = {"prompt_logprobs": 1, "max_tokens": 1}

    completion = api.complete(prompt="hey", **asked).json()["choices"][0]
    chat = api.chat(**asked).json()

    e = {"logprob": -0.5, "rank": 1, "decoded_token": "e"}
    assert completion["prompt_logprobs"][:2] == [None, {str(ord("e")): e}]
    assert len(completion["prompt_logprobs"]) == 3
    assert completion["logprobs"] is None
    assert chat["prompt_logprobs"][0] is None
    assert chat["prompt_logprobs"][1] == {
        str(ord("u")): {"logprob": -0.5, "rank": 1, "decoded_token": "u"}
    }


def test_an_echo_has_its_own_number_of_alternatives(api: Any) -> None:
    body = api.complete(prompt="hey", prompt_logprobs=3, echo=True, logprobs=1, max_tokens=0)

    (choice,) = body.json()["choices"]
    assert choice["logprobs"]["top_logprobs"][1:] == [{"e": -0.5}, {"y": -0.5}]
    assert len(choice["prompt_logprobs"][1]) == 3
