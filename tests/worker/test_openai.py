"""What requests mean, once they are read."""

import json
from typing import Any

import pytest

from deepseek_worker.errors import InvalidRequest
from deepseek_worker.validation import parse_chat, parse_completion


def chat(**body: Any) -> Any:
    full = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    return parse_chat(json.dumps(full).encode())


def completion(**body: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **body}).encode())


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], [[1], [True]], [1.5], [None]])
def test_a_prompt_that_is_neither_text_nor_tokens_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="Invalid 'prompt'"):
        _ = completion(prompt=prompt).prompts


def test_odd_but_legal_conversations_reach_the_template_in_its_own_words() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "system", "content": "Really."},
            {"role": "user", "name": "Ann", "content": [
                {"type": "text", "text": "one"}, {"type": "text", "text": "two"},
            ]},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
            {"role": "user", "content": ""},
        ]
    )  # fmt: skip

    assert request.template_messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Really."},
        {"role": "user", "content": "one\ntwo", "name": "Ann"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_a_tool_message_that_answers_a_call_is_accepted() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    request = chat(
        messages=[
            {"role": "user", "content": "what time is it"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "noon", "tool_call_id": "c1"},
        ]
    )

    assert request.template_messages()[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    ]


def test_logprobs_are_asked_for_as_each_endpoint_does() -> None:
    asked = [
        chat().wanted_logprobs,
        chat(logprobs=False).wanted_logprobs,
        chat(logprobs=True).wanted_logprobs,
        chat(logprobs=True, top_logprobs=4).wanted_logprobs,
        completion(logprobs=0).wanted_logprobs,
    ]

    assert asked == [None, None, 0, 4, 0]


def test_prompts_are_texts_or_tokens() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1], [2, 3], []]).prompts == ((1,), (2, 3), ())


def test_stop_is_one_text_or_several() -> None:
    asked = [chat(stop=stop).stop_strings for stop in (None, "a", ["a", "b"], [])]

    assert asked == [(), ("a",), ("a", "b"), ()]


def test_tokens_are_limited_by_either_name() -> None:
    assert chat().wanted_tokens is None
    assert chat(max_tokens=3).wanted_tokens == 3
    assert chat(max_completion_tokens=4).wanted_tokens == 4
    assert chat(max_tokens=5, max_completion_tokens=5).wanted_tokens == 5
    assert (chat().default_tokens, completion().default_tokens) == (None, 16)
