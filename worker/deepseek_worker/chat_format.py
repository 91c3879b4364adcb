"""How a model writes thoughts and tool calls, found out from its chat template. Pure.

DeepSeek's models mark a tool call by tokens, in two forms:

    V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
             ```json
             ARGUMENTS
             ```<｜tool▁call▁end｜>
    V3.1     <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>

all calls of an answer between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>. A model whose
template knows neither is told of the first form in words; so are the R1 distills, whose templates
write calls of earlier turns but list no tools.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (
    OPEN_THOUGHT, CLOSE_THOUGHT, CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR,
)  # fmt: skip

CallForm = Literal["v3", "v3.1"]
Start = Literal["thought", "answer", "either"]
"""Where an answer begins: inside a thought, after one, or where the model says."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What has to be known of a template to feed it and to read the answers."""

    call_form: CallForm
    thinks: bool
    """Whether answers may hold a thought."""
    lists_tools: bool
    """Whether the template tells the model of the request's tools."""
    writes_calls: bool
    """Whether the template writes the tool calls of earlier turns."""
    calls_stand_alone: bool = False
    """Whether it does so only in turns without content, as those of the R1 distills."""

    @classmethod
    def of(cls, template: str) -> "ChatFormat":
        """Read a template, as a text."""
        return cls(
            call_form="v3.1" if SEPARATOR in template and "```json" not in template else "v3",
            thinks=CLOSE_THOUGHT in template,
            lists_tools=re.search(r"\btools\b", template) is not None,
            writes_calls="tool_calls" in template,
            calls_stand_alone="['content'] is none" in template
            and "'tool_calls' in message" not in template,
        )

    def start_of(self, prompt: str, continued: str | None) -> Start:
        """Where the answer to a prompt begins.

        Args:
            prompt: The template's text.
            continued: The beginning of the answer, when the client gave it.
        """
        if not self.thinks:
            return "answer"
        if continued is not None and OPEN_THOUGHT in continued:
            is_open = continued.rfind(OPEN_THOUGHT) > continued.rfind(CLOSE_THOUGHT)
            return "thought" if is_open else "answer"
        if continued is not None and continued.strip():
            return "answer"
        end = prompt.rstrip()
        if end.endswith(OPEN_THOUGHT):
            return "thought"
        return "answer" if end.endswith(CLOSE_THOUGHT) else "either"

    def written_call(self, name: str, arguments: str) -> str:
        """One call between its markers, as the model itself would write it."""
        if self.call_form == "v3.1":
            return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"
        return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"

    def with_tools(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Messages that tell the model of its tools, for a template that does not."""
        text = self._tools_in_words(tools)
        first = messages[0] if messages else {}
        if first.get("role") != "system":
            return [{"role": "system", "content": text}, *messages]
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *messages[1:]]

    def with_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose calls the template writes: as text, if it knows no calls."""
        if not self.writes_calls:
            return [self._with_calls_as_text(message) for message in messages]
        if not self.calls_stand_alone:
            return messages
        parted = []
        for message in messages:
            if message.get("tool_calls") and message.get("content"):
                text = {key: value for key, value in message.items() if key != "tool_calls"}
                parted += [text, {**message, "content": None}]
            else:
                parted.append(message)
        return parted

    def _with_calls_as_text(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if not calls:
            return message
        written = "\n".join(self.written_call(call["name"], call["arguments"]) for call in calls)
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        content = f"{message.get('content') or ''}{CALLS_BEGIN}{written}{CALLS_END}"
        return {**others, "content": content}

    def _tools_in_words(self, tools: list[dict[str, Any]]) -> str:
        described = "\n\n".join(_described(tool["function"]) for tool in tools)
        example = self.written_call("NAME", "ARGUMENTS")
        return (
            f"## Tools\nYou have access to the following tools:\n\n{described}\n\n"
            "To call tools, write nothing but this, once for each call between the first and the "
            f"last marker:\n{CALLS_BEGIN}{example}{CALLS_END}\n"
            "NAME is the name of a tool, ARGUMENTS is JSON that follows the tool's parameters."
        )


def _described(function: dict[str, Any]) -> str:
    parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    description = function.get("description") or ""
    return f"### {function['name']}\nDescription: {description}\n\nParameters: {parameters}"
