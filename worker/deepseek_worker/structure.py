"""From what a request says about the form of its answer to one grammar. Pure."""

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from deepseek_worker.chat_format import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    CLOSE_THOUGHT,
    SEPARATOR,
    CallForm,
    Start,
)
from deepseek_worker.errors import InvalidRequest
from deepseek_worker.openai import ChatRequest, CompletionRequest, GenerationRequest, Tool
from deepseek_worker.sequence import Structure

# Without a bound a model may write white space for ever.
WHITE_SPACE = r"[ \n\t]{0,16}"

Marker = Callable[[str], str]
"""A marker as a grammar writes it."""


def completion_structure(asked: CompletionRequest) -> Structure | None:
    """What the answers to a completion have to look like."""
    rules = _answer_rules(asked)
    return None if rules is None else Structure(*rules)


def chat_structure(
    asked: ChatRequest, start: Start, call_form: CallForm, marker: Marker
) -> Structure | None:
    """What the answers to a chat have to look like.

    Raises:
        InvalidRequest: a grammar of the client's beside tools.
    """
    rules = _answer_rules(asked)
    begin_after = (CLOSE_THOUGHT,) if start == "thought" else ()
    tools = asked.callable_tools
    if not tools:
        if rules is None:
            return None
        lark, param = rules
        if begin_after:
            # Models leave a line between a thought and what follows it.
            lark = re.sub("^start: answer\n", "start: /\\\\n{0,2}/ answer\n", lark)
        return Structure(lark, param, begin_after)
    calls = _Calls(tools, call_form, marker, only_one=asked.parallel_tool_calls is False)
    if asked.must_call:
        start_rule = "start: /\\n{0,2}/ calls" if begin_after else "start: calls"
        return Structure(f"{start_rule}\n{calls.rules(begun=False)}", "tools", begin_after)
    if rules is not None:
        lark, param = rules
        if not lark.startswith("start: answer\n"):
            raise InvalidRequest(
                "Invalid 'structured_outputs.grammar': it cannot be combined with tools that the "
                "model may call; set 'tool_choice' to 'none'.",
                "structured_outputs.grammar",
                "invalid_value",
            )
        answer = lark.partition("\n")[2]
        gap = "/\\n{0,2}/ " if begin_after else ""
        lark = f"start: {gap}(answer | calls)\n{answer}\n{calls.rules(begun=False)}"
        return Structure(lark, param, begin_after)
    if any(tool.function.strict for tool in tools):
        # Free text, until the model begins a call.
        lark = f"start: calls\n{calls.rules(begun=True)}"
        return Structure(lark, "tools", (*begin_after, CALLS_BEGIN))
    return None


class _Calls:
    """The rules of one or more tool calls."""

    def __init__(
        self, tools: list[Tool], form: CallForm, marker: Marker, *, only_one: bool
    ) -> None:
        self._tools = tools
        self._form = form
        self._marker = marker
        self._only_one = only_one

    def rules(self, *, begun: bool) -> str:
        """Lark rules, the first of them `calls`; with `begun` the first marker has come."""
        mark = self._marker
        first = "" if begun else mark(CALLS_BEGIN)
        more = "" if self._only_one else ' ("\\n"? call)*'
        lines = [f"calls: {first} call{more} {mark(CALLS_END)}"]
        names = " | ".join(f"call_{at}" for at in range(len(self._tools)))
        lines.append(f"call: {names}")
        for at, tool in enumerate(self._tools):
            name = tool.function.name
            if self._form == "v3":
                head = f'"function" {mark(SEPARATOR)} {_text(f"{name}{chr(10)}```json{chr(10)}")}'
                tail = _text("\n```")
            else:
                head, tail = f"{_text(name)} {mark(SEPARATOR)}", ""
            lines.append(
                f"call_{at}: {mark(CALL_BEGIN)} {head} arguments_{at} {tail} {mark(CALL_END)}"
            )
            lines.append(f"arguments_{at}: {_json_rule(_parameters(tool))}")
        return "\n".join(lines)


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    return {"type": "object"} if not parameters else {"type": "object", **parameters}


def _answer_rules(asked: GenerationRequest) -> tuple[str, str] | None:
    """A grammar and the field that asked for it; none where the answer is free.

    The grammar begins with the line `start: answer`, unless the client wrote it.
    """
    given, form = asked.structured_outputs, asked.response_format
    if given is not None:
        param, rule = f"structured_outputs.{given.kinds[0]}", ""
        if given.grammar is not None:
            return given.grammar, param
        if given.json is not None:
            rule = f"answer: {_json_rule(given.json_schema)}"
        elif given.regex is not None:
            rule = f"answer: {_regex(given.regex)}"
        elif given.choice is not None:
            # In capitals: one lexeme, whose size costs nothing in each step.
            rule = f"answer: ANSWER\nANSWER: {' | '.join(map(_text, given.choice))}"
        else:
            rule = f"answer: {_json_rule({'type': 'object'})}"
        return f"start: answer\n{rule}", param
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return f"start: answer\nanswer: {_json_rule({'type': 'object'})}", "response_format"
    schema = form.json_schema.schema if form.json_schema else None
    rule = _json_rule({} if schema is None else schema)
    return f"start: answer\nanswer: {rule}", "response_format.json_schema.schema"


def _json_rule(schema: dict[str, Any]) -> str:
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITE_SPACE, **(own if isinstance(own, dict) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def _regex(pattern: str) -> str:
    """A regular expression between slashes, as the library writes it."""
    grammar = json.loads(LLMatcher.grammar_from_regex(pattern))
    lark: str = grammar["grammars"][0]["lark_grammar"]
    return lark.partition(": ")[2]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
