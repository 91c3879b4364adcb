"""Bodies that are refused, by field, value and what is allowed; and what the others mean."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_worker.errors import InvalidRequest
from deepseek_worker.openai import ChatRequest, CompletionRequest
from deepseek_worker.validation import (
    parse_chat,
    parse_completion,
    sampling_params,
)

VOCAB_SIZE = 1000


def chat(**body: Any) -> Any:
    full = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    return parse_chat(json.dumps(full).encode())


def completion(**body: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **body}).encode())


def refused(parse: Any, **body: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as error:
        sampling_params(parse(**body), None, VOCAB_SIZE)
    assert error.value.code
    return error.value.param, str(error.value)


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


DEEP = nested(60)


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", -1, ">= 0.0, got -1"),
        ("temperature", 2.1, "<= 2.0, got 2.1"),
        ("temperature", 1e6, "<= 2.0, got 1000000.0"),
        ("temperature", 999999, "<= 2.0, got 999999"),
        ("temperature", "1", 'got "1"'),
        ("temperature", True, "got true"),
        ("top_p", -1, "> 0.0, got -1"),
        ("top_p", 0, "> 0.0, got 0"),
        ("top_p", 1.1, "<= 1.0, got 1.1"),
        ("top_k", -2, ">= -1, got -2"),
        ("top_k", 1.5, "got 1.5"),
        ("min_p", 1.5, "<= 1.0, got 1.5"),
        ("presence_penalty", -3, ">= -2.0, got -3"),
        ("presence_penalty", 3, "<= 2.0, got 3"),
        ("frequency_penalty", -3, ">= -2.0, got -3"),
        ("frequency_penalty", 3, "<= 2.0, got 3"),
        ("repetition_penalty", 0, ">= 0.01, got 0"),
        ("repetition_penalty", 1e-45, ">= 0.01, got 1e-45"),
        ("n", 0, ">= 1, got 0"),
        ("n", -1, ">= 1, got -1"),
        ("n", 10**6, "<= 128, got 1000000"),
        ("seed", 2**70, "got 1180591620717411303424"),
        ("seed", 1.5, "got 1.5"),
        ("max_tokens", -1, "got -1"),
        ("max_tokens", "many", 'got "many"'),
        ("max_tokens", 10**4299, "<= 2147483648, got 1000"),
        ("logit_bias", {"999999": 1}, '"999999" is no token id of the model; they are 0 to 999'),
        ("logit_bias", {"x": 1}, '"x" is no token id'),
        ("logit_bias", {"-1": 1}, '"-1" is no token id'),
        ("logit_bias", {"\u0661": 1}, "is no token id"),
        ("logit_bias", {"9" * 5000: 1}, "is no token id"),
        ("logit_bias", {"0" * 5000 + "1": 1}, "is no token id"),
        ("logit_bias", {"01": 1, "1": 1}, '"01" is no token id'),
        ("logit_bias", {"1": 101}, "<= 100.0"),
        ("logit_bias", {"1": "x"}, "float"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "1025 entries, 1024 are allowed"),
        ("stop", "", "none of them empty"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", ["a"] * 17, "up to 16 texts"),
        ("stop", [1], "got 1"),
        ("stop", {}, "got {}"),
        ("stop_token_ids", [5, 1000], "the model has no token 1000; its ids are 0 to 999"),
        ("stop_token_ids", [5] * 1025, "length <= 1024, got [5, 5"),
        ("cache_salt", "x" * 1025, 'length <= 1024, got "xx'),
        ("min_tokens", -1, ">= 0, got -1"),
        ("min_tokens", 10**4299, "<= 2147483648, got 1000"),
        ("stream", "yes", 'got "yes"'),
        ("model", 7, "got 7"),
        ("functions", [{}], "not supported by this version"),
        ("store", True, "not supported by this version"),
        ("reasoning_effort", "high", "not supported by this version"),
        ("prompt_logprobs", 21, "<= 20, got 21"),
        ("response_format", {"type": "xml"}, 'one of text, json_object, json_schema, got "xml"'),
        ("response_format", {"type": "json_schema"}, "Missing required parameter"),
        ("response_format", "json", 'got "json"'),
        ("structured_outputs", {}, "got none"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ("structured_outputs", {"xml": 1}, "Unknown parameter"),
        ("temprature", 1, "Unknown parameter: 'temprature'. Did you mean 'temperature'?"),
        ("x - at `$.n`", 1, "Unknown parameter"),
        ("stream_options", {"include_usage": True}, "needs 'stream'"),
    ],
)
def test_a_wrong_value_is_refused_by_its_field(
    parse: Any, field: str, value: Any, says: str
) -> None:
    param, message = refused(parse, **{field: value})

    assert param is not None
    assert param == field or re.split(r"[.\[]", param)[0] == field
    assert says in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"top_logprobs": 5}, "top_logprobs", "needs 'logprobs'"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20, got 21"),
        ({"logprobs": 1}, "logprobs", "got 1"),
        ({"max_tokens": 0}, "max_tokens", ">= 1, got 0"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one of them"),
        ({"messages": []}, "messages", "it is empty"),
        ({"messages": "hi"}, "messages", 'got "hi"'),
        ({"messages": None}, "messages", "got null"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing required parameter"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role",
            'expected one of system, developer, user, assistant, tool, got "robot"',
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "got null"),
        (
            {"messages": [{"role": "user", "content": "x", "mood": 1}]},
            "messages[0].mood",
            "Unknown parameter: 'messages[0].mood'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "the model reads 'text' only, got \"image_url\"",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0]",
            "expected the fields 'type' and 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "refusal": "no"}]},
            "messages[0].refusal",
            "not supported",
        ),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "set 'stream' to false"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing required parameter"),
        (
            {"tools": [{"type": "retrieval", "function": {"name": "f"}}]},
            "tools[0].type",
            'expected one of function, got "retrieval"',
        ),
        ({"tools": [tool("a b")]}, "tools[0].function.name", 'dashes, got "a b"'),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name", "another tool"),
        ({"tools": [tool("f")] * 129}, "tools", "129 tools, 128 are allowed"),
        ({"tools": [tool("f", DEEP)]}, "tools[0].function.parameters", "deeper than 48"),
        ({"tool_choice": "required"}, "tool_choice", "it asks for a tool; 'tools' has none"),
        ({"tool_choice": "always"}, "tool_choice", 'none, auto, required, got "always"'),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool("f")]},
            "tool_choice",
            "it asks for \"g\"; 'tools' has f",
        ),
        ({"tool_choice": "required", "tools": [tool("f")], "min_tokens": 1}, "min_tokens", "ends"),
        ({"continue_final_message": True}, "continue_final_message", "one of the role 'user'."),
        (
            {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True},
            "continue_final_message",
            "one of the role 'assistant' without content.",
        ),
        (
            {
                "messages": [{"role": "assistant", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
            "contradict each other",
        ),
        (
            {"messages": [{"role": "tool", "content": "42", "tool_call_id": "c1"}]},
            "messages[0].tool_call_id",
            'none has the id "c1"',
        ),
    ],
)
def test_a_wrong_chat_is_refused_by_its_field(body: dict[str, Any], param: str, says: str) -> None:
    assert refused(chat, **body)[0] == param
    assert says in refused(chat, **body)[1]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"logprobs": 21}, "logprobs", "<= 20, got 21"),
        ({"logprobs": True}, "logprobs", "got true"),
        ({"best_of": 3}, "best_of", "not supported by this version"),
        ({"best_of": 10**4299}, "best_of", "<= 2147483648, got 1000"),
        ({"suffix": "end"}, "suffix", "not supported by this version"),
        ({"prompt": {}}, "prompt", "got {}"),
        ({"prompt": None}, "prompt", "got null"),
        ({"prompt": ["a"] * 129, "n": 8}, "prompt", "129 prompts with n = 8"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "Did you mean"),
    ],
)
def test_a_wrong_completion_is_refused_by_its_field(
    body: dict[str, Any], param: str, says: str
) -> None:
    assert refused(completion, **body)[0] == param
    assert says in refused(completion, **body)[1]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b'{"model": "m", "prompt": "a\xff"}', "UTF-8"),
        (b'{"model": "m", "prompt": "hi", "temperature": NaN}', "invalid character"),
        (b'{"model": "m", "prompt": "hi", "temperature": Infinity}', "invalid character"),
        (b'{"model": "m", "prompt": "\\ud800"}', "truncated"),
        (b'{"model": "m", "prompt": ' + b"[" * 100_000, "recursion"),
        (b'{"model": "m", "prompt": "hi"} x', "trailing"),
    ],
)
def test_what_is_no_json_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)The body is no JSON: .*{says}") as error:
        parse_completion(body)

    assert error.value.code == "invalid_json"


def test_a_number_beyond_all_numbers_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidRequest, match="Invalid 'temperature'"):
        parse_completion(b'{"model": "m", "prompt": "hi", "temperature": 1e999}')


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"stop": ["a", 5], "stop": "x"}', "'stop[1]': expected str."),
        (b'{"stream_options": {"include_usage": 5}, "stream_options": 3}', "expected bool | null."),
        (b'{"max_tokens": %b}' % (b"9" * 5000), "'max_tokens': integer value out of range."),
    ],
    ids=["a list", "an object", "digits"],
)
def test_a_wrong_value_that_cannot_be_shown_is_refused_by_its_field(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_completion(body)

    assert says in str(error.value)


def test_a_long_name_is_not_sent_back_whole() -> None:
    param, message = refused(chat, **{"x" * 1_000_000: 1})

    assert param == f"{'x' * 100}…"
    assert len(message) < 400


def test_a_wrong_field_before_broken_json_is_refused_too() -> None:
    with pytest.raises(InvalidRequest, match="Invalid 'temperature'"):
        parse_completion(b'{"temperature": "hot", "prompt": [[')


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b'"x"'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Invalid body: expected object"):
        parse_completion(body)


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}, "store": False, "structured_outputs": None},
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x"},
        {"temperature": None, "stop": None, "seed": None, "logit_bias": None, "n": None},
        {"prompt_cache_key": "k", "modalities": ["text"]},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
    ids=["asks for nothing", "accounts", "null", "caches", "stream"],
)
def test_what_changes_nothing_is_accepted(parse: Any, body: dict[str, Any]) -> None:
    parse(**body)


def test_without_tools_a_chat_may_talk_of_them() -> None:
    chat(tools=[], tool_choice="none", parallel_tool_calls=True)
    chat(tool_choice="auto")


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"json": DEEP}, "json", "deeper than 48 levels"),
        ({"json": {"description": "x" * 140_000}}, "json", "131072 are allowed"),
        ({"json": "{"}, "json", "expected a JSON schema"),
        ({"json": "[1]"}, "json", "expected a JSON object"),
        ({"regex": "a" * 70_000}, "regex", "it has 70000 bytes, 65536 are allowed"),
        ({"grammar": "a" * 70_000}, "grammar", "65536 are allowed"),
        ({"choice": []}, "choice", "1 to 1024 texts"),
        ({"choice": ["a", ""]}, "choice", "none of them empty"),
        ({"choice": ["a"] * 1025}, "choice", "1 to 1024 texts"),
    ],
)
def test_a_structure_that_is_too_much_is_refused(given: Any, param: str, says: str) -> None:
    wrong, message = refused(chat, structured_outputs=given)

    assert wrong == f"structured_outputs.{param}"
    assert says in message
    assert len(message) < 400


def test_a_structure_decides_where_the_answer_ends() -> None:
    structure = {"response_format": {"type": "json_object"}}

    assert refused(chat, **structure, min_tokens=3)[0] == "min_tokens"
    assert refused(chat, **structure, structured_outputs={"regex": "a"})[0] == "structured_outputs"


def test_prompt_logprobs_serve_whoever_asks_for_more() -> None:
    request = completion(prompt_logprobs=5, echo=True, logprobs=2)

    assert sampling_params(request, 9, VOCAB_SIZE).prompt_logprobs == 5
    assert sampling_params(chat(prompt_logprobs=0), 9, VOCAB_SIZE).prompt_logprobs == 0


def test_sampling_follows_the_request() -> None:
    request = completion(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, min_tokens=2, ignore_eos=True,
        stop_token_ids=[7], logprobs=3, echo=True, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, logit_bias={"5": -100, "6": 1.5},
    )  # fmt: skip

    sampling = sampling_params(request, 9, VOCAB_SIZE)

    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 0)
    assert (sampling.min_p, sampling.seed) == (0.1, 2**63 - 1)
    assert (sampling.max_tokens, sampling.min_tokens) == (9, 2)
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (7,))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, ((5, -100.0), (6, 1.5)))


@pytest.mark.parametrize(
    ("given", "means"), [(1e-320, 0.0), (1e-45, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (None, 1.0)]
)
def test_a_temperature_near_zero_takes_the_likeliest_token(given: Any, means: float) -> None:
    assert sampling_params(chat(temperature=given), 9, VOCAB_SIZE).temperature == means


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="5 is more than the 3 tokens") as error:
        sampling_params(completion(min_tokens=5), 3, VOCAB_SIZE)

    assert error.value.param == "min_tokens"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
CALL_LIKE = st.fixed_dictionaries(
    {
        "id": st.just("c") | JSON_VALUES,
        "function": st.just({"name": "f", "arguments": "{}"}) | JSON_VALUES,
    }
)
MESSAGE_LIKE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={
        "content": st.text(max_size=2) | JSON_VALUES,
        "tool_calls": st.lists(CALL_LIKE, max_size=2) | JSON_VALUES,
        "tool_call_id": st.just("c") | JSON_VALUES,
        "other": JSON_VALUES,
    },
)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@given(data=st.data())
def test_every_body_is_accepted_or_refused_and_nothing_else_happens(
    parse: Any, data: st.DataObject
) -> None:
    kind = ChatRequest if parse is parse_chat else CompletionRequest
    required = {
        "model": st.just("m"),
        "messages": st.lists(MESSAGE_LIKE, max_size=3) | JSON_VALUES,
        "prompt": st.lists(st.text(max_size=2) | st.lists(st.integers())) | JSON_VALUES,
    }
    names = data.draw(st.lists(st.sampled_from(kind.__struct_fields__), max_size=3))
    body = {
        name: data.draw(required.get(name, JSON_VALUES), label=name)
        for name in {"model", *names, *(required.keys() & set(kind.__struct_fields__))}
    }

    try:
        request = parse(json.dumps(body).encode())
        sampling_params(request, 16, VOCAB_SIZE)
        if isinstance(request, ChatRequest):
            request.template_messages()
        else:
            assert request.prompts
    except InvalidRequest as error:
        str(error).encode()
