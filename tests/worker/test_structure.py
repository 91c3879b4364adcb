"""From requests to grammars: which texts the grammars accept."""

import json
from types import SimpleNamespace
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
from deepseek_worker.errors import InvalidRequest
from deepseek_worker.grammar import GrammarCompiler
from deepseek_worker.sequence import Structure
from deepseek_worker.structure import chat_structure, completion_structure
from deepseek_worker.validation import parse_chat, parse_completion

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
V3, V31 = ChatFormat.of(""), ChatFormat.of(SEPARATOR)
TOKENIZER: Any = SimpleNamespace(
    token_bytes=lambda token: bytes([token]) if token < 256 else b"<end>",
    eos_token_ids=frozenset({256}),
    marker_token_ids=frozenset({256}),
    encode=lambda text, add_special_tokens=False: list(text.encode()),
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, 257)


def chat(start: Any = "answer", form: Any = "v3", **body: Any) -> Structure | None:
    messages = [{"role": "user", "content": "x"}]
    asked = parse_chat(json.dumps({"model": "m", "messages": messages, **body}).encode())
    return chat_structure(asked, start, form, json.dumps)


def tool(name: str, strict: bool | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": POINT, "strict": strict}}


def accepts(compiler: GrammarCompiler, structure: Structure | None, text: str) -> bool:
    """Whether the text is a whole answer."""
    assert structure is not None
    guide = compiler.compile(structure)()
    for byte in text.encode():
        bits = guide.allowed_tokens()
        if guide.is_finished or (bits is not None and not bits[byte // 8] >> byte % 8 & 1):
            return False
        guide.advance(byte)
    bits = guide.allowed_tokens()
    return guide.is_finished or (bits is not None and bool(bits[32] & 1))


def test_a_free_answer_has_no_structure() -> None:
    assert chat() is None
    assert chat(response_format={"type": "text"}) is None
    assert chat(tools=[tool("f")]) is None
    assert chat(tools=[tool("f", True)], tool_choice="none") is None
    assert completion_structure(parse_completion(b'{"model": "m", "prompt": "x"}')) is None


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {}]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": POINT}}},
            '{"x": -3}',
            '{"x": 1.5}',
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "[1]", "word"),
        ({"structured_outputs": {"json": POINT}}, '{ "x" :1}', "{}"),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, '{"x":1}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": "[a-c]+/\\d"}}, "abc/7", "abc/x"),
        ({"structured_outputs": {"choice": ['say "hi"\n', "ü/\\"]}}, "ü/\\", "say"),
        ({"structured_outputs": {"grammar": 'start: "a" b\nb: "c" | "d"'}}, "ad", "ab"),
    ],
    ids=[
        "json_object", "json_schema", "any JSON", "json", "json as a text", "json_object too",
        "regex", "choice", "grammar",
    ],
)  # fmt: skip
def test_answers_have_the_structure_that_was_asked_for(
    compiler: GrammarCompiler, body: dict[str, Any], good: str, bad: str
) -> None:
    plain = parse_completion(json.dumps({"model": "m", "prompt": "x", **body}).encode())

    for structure in (chat(**body), completion_structure(plain)):
        assert accepts(compiler, structure, good)
        assert not accepts(compiler, structure, bad)
    thinking = chat("thought", **body)
    assert accepts(compiler, thinking, f"so {bad}</think>{good}")
    assert not accepts(compiler, thinking, f"so</think>{bad}")
    assert not accepts(compiler, thinking, good)


def test_a_model_cannot_write_white_space_for_ever(compiler: GrammarCompiler) -> None:
    structure = chat(response_format={"type": "json_object"})

    assert accepts(compiler, structure, '{\n  "a": 1\n}')
    assert not accepts(compiler, structure, "{" + 100 * " " + "}")


def written(chat_format: ChatFormat, *calls: tuple[str, str]) -> str:
    inner = "".join(chat_format.written_call(*call) for call in calls)
    return f"{CALLS_BEGIN}{inner}{CALLS_END}"


@pytest.mark.parametrize(("form", "chat_format"), [("v3", V3), ("v3.1", V31)])
def test_a_required_call_is_one_of_the_tools(
    compiler: GrammarCompiler, form: str, chat_format: ChatFormat
) -> None:
    structure = chat(form=form, tools=[tool("f"), tool("g")], tool_choice="required")
    one, two = ("f", '{"x": 1}'), ("g", '{"x": 2}')

    assert accepts(compiler, structure, written(chat_format, one))
    assert accepts(compiler, structure, written(chat_format, one, two))
    assert not accepts(compiler, structure, written(chat_format, ("h", "{}")))
    assert not accepts(compiler, structure, written(chat_format, ("f", "{}")))
    assert not accepts(compiler, structure, "Hello")
    only_one = chat(form=form, tools=[tool("f")], tool_choice="required", parallel_tool_calls=False)
    assert accepts(compiler, only_one, written(chat_format, one))
    assert not accepts(compiler, only_one, written(chat_format, one, one))


def test_a_named_tool_is_the_one_that_is_called(compiler: GrammarCompiler) -> None:
    named = {"type": "function", "function": {"name": "g"}}
    structure = chat("thought", tools=[tool("f"), tool("g")], tool_choice=named)

    assert accepts(compiler, structure, "hm</think>\n\n" + written(V3, ("g", '{"x": 1}')))
    assert not accepts(compiler, structure, "hm</think>" + written(V3, ("f", '{"x": 1}')))


def test_strict_tools_are_followed_once_the_model_calls_them(compiler: GrammarCompiler) -> None:
    structure = chat(tools=[tool("f", True)])

    assert accepts(compiler, structure, "Let me see. " + written(V3, ("f", '{"x": 1}')))
    assert not accepts(compiler, structure, "Let me see. " + written(V3, ("f", '{"y": 1}')))
    assert structure is not None
    assert structure.begin_after == (CALLS_BEGIN,)
    both = chat("thought", tools=[tool("f", True)])
    assert both is not None
    assert both.begin_after == ("</think>", CALLS_BEGIN)


def test_an_answer_beside_tools_has_its_structure_or_is_a_call(compiler: GrammarCompiler) -> None:
    structure = chat(tools=[tool("f")], response_format={"type": "json_object"})

    assert accepts(compiler, structure, '{"any": 1}')
    assert accepts(compiler, structure, written(V3, ("f", '{"x": 1}')))
    assert not accepts(compiler, structure, "word")
    with pytest.raises(InvalidRequest, match="cannot be combined with tools"):
        chat(tools=[tool("f")], structured_outputs={"grammar": 'start: "a"'})


def test_a_tool_without_parameters_takes_any_object(compiler: GrammarCompiler) -> None:
    bare = {"type": "function", "function": {"name": "f"}}
    structure = chat(form="v3.1", tools=[bare], tool_choice="required")
    call = f"{CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}%s{CALL_END}{CALLS_END}"

    assert accepts(compiler, structure, call % '{"a": 1}')
    assert not accepts(compiler, structure, call % "1")
