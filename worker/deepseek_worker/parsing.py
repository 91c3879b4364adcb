"""Takes the text of an answer apart, as it grows: thought, content, tool calls. Pure.

A text that may be the beginning of a marker is held back until it is clear, and so is white space
that a marker may turn out to follow: what a stream brings, put together, is what the whole text
gives, wherever it is cut.
"""

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from deepseek_worker.chat_format import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    CLOSE_THOUGHT,
    OPEN_THOUGHT,
    SEPARATOR,
    CallForm,
    Start,
)

FENCE = re.compile(r"```\w*")


@dataclass(slots=True)
class CallPart:
    """What a tool call gained."""

    index: int
    id: str | None = None
    """Set with the call's first part, like the name."""
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parts:
    """What an answer gained."""

    thought: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def extend(self, later: "Parts") -> None:
        """Add what came after."""
        self.thought += later.thought
        self.content += later.content
        for part in later.calls:
            if self.calls and self.calls[-1].index == part.index:
                self.calls[-1].arguments += part.arguments
            else:
                self.calls.append(part)


class AnswerParser:
    """Reads one answer.

    Args:
        start: Where the answer begins.
        call_form: How the model writes tool calls; None if it was given no tools.
        max_calls: Calls after which the answer ends; None for no limit.
    """

    def __init__(
        self, start: Start, call_form: CallForm | None = None, max_calls: int | None = None
    ) -> None:
        self._call_form = call_form
        self._max_calls = max_calls
        self._text = ""
        self._is_final = False
        self._is_fresh = start == "thought"
        """White space at this place belongs to a marker."""
        self._num_calls = 0
        self._parts = Parts()
        steps: dict[Start, Callable[[], bool]] = {
            "thought": self._read_thought,
            "answer": self._read_content,
            "either": self._look_for_thought,
        }
        self._step = steps[start]
        self.is_complete = False
        """Whether the calls that were allowed have come; the rest is ignored."""

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._num_calls

    def push(self, text: str) -> Parts:
        """What is certain after this text."""
        self._text += text
        return self._run()

    def finish(self) -> Parts:
        """What was held back, once no more text comes."""
        self._is_final = True
        return self._run()

    def _run(self) -> Parts:
        # Each step takes something off the text, or says that it waits for more.
        while not self.is_complete and self._step():
            pass
        parts, self._parts = self._parts, Parts()
        return parts

    def _look_for_thought(self) -> bool:
        said = self._text.lstrip()
        if said.startswith(OPEN_THOUGHT):
            self._text = said.removeprefix(OPEN_THOUGHT)
            return self._go_on(self._read_thought, is_fresh=True)
        if OPEN_THOUGHT.startswith(said) and not self._is_final:
            return False
        return self._go_on(self._read_content)

    def _read_thought(self) -> bool:
        text, marker = self._until(CLOSE_THOUGHT)
        self._parts.thought += text
        return marker is not None and self._go_on(self._read_content, is_fresh=True)

    def _read_content(self) -> bool:
        markers = () if self._call_form is None else (CALLS_BEGIN, CALL_BEGIN)
        text, marker = self._until(*markers)
        self._parts.content += text
        if marker == CALL_BEGIN:
            return self._go_on(self._read_name)
        return marker is not None and self._go_on(self._read_between_calls)

    def _read_between_calls(self) -> bool:
        self._text = self._text.lstrip()
        for marker, step in ((CALL_BEGIN, self._read_name), (CALLS_END, self._read_content)):
            if self._text.startswith(marker):
                self._text = self._text.removeprefix(marker)
                return self._go_on(step, is_fresh=step == self._read_content)
            if marker.startswith(self._text) and not self._is_final:
                return False
        return bool(self._text) and self._go_on(self._read_content)

    def _read_name(self) -> bool:
        """`NAME<sep>`, or `function<sep>NAME` and the end of the line."""
        head, found, rest = self._text.partition(SEPARATOR)
        if found and self._call_form == "v3":
            head, found, rest = rest.partition("\n")
        end = min(
            (at for m in (CALL_END, CALLS_END) if (at := self._text.find(m)) >= 0), default=-1
        )
        if (end >= 0 and end < len(self._text) - len(rest)) or (not found and self._is_final):
            # No call, whatever it is: better shown than lost.
            return self._go_on(self._read_content)
        if not found:
            return False
        self._text = rest
        part = CallPart(self._num_calls, f"call_{uuid.uuid4().hex[:24]}", head.strip())
        self._num_calls += 1
        self._parts.calls.append(part)
        return self._go_on(self._skip_fence, is_fresh=True)

    def _skip_fence(self) -> bool:
        said = self._text.lstrip()
        fence = FENCE.match(said)
        if not self._is_final and (fence.end() == len(said) if fence else "```".startswith(said)):
            return False
        self._text = said[fence.end() :] if fence else said
        return self._go_on(self._read_arguments, is_fresh=True)

    def _read_arguments(self) -> bool:
        text, marker = self._until(CALL_END, CALLS_END, also="`")
        if text:
            if not self._parts.calls:
                self._parts.calls.append(CallPart(self._num_calls - 1))
            self._parts.calls[-1].arguments += text
        if marker is None:
            return False
        self.is_complete = self._num_calls == self._max_calls
        if marker == CALLS_END:
            return self._go_on(self._read_content, is_fresh=True)
        return self._go_on(self._read_between_calls)

    def _go_on(self, step: Callable[[], bool], *, is_fresh: bool = False) -> bool:
        self._step, self._is_fresh = step, is_fresh
        return True

    def _until(self, *markers: str, also: str = "") -> tuple[str, str | None]:
        """Take the text up to the first marker, or as much as certainly comes before one.

        White space before a marker, and the characters `also`, are dropped with it.
        """
        if self._is_fresh:
            self._text = self._text.lstrip()
            self._is_fresh = not self._text
        text = self._text
        found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._text = text[at + len(marker) :]
            return _stripped(text[:at], also), marker
        num_kept = 0
        if markers and not self._is_final:
            begun = max(_num_begun(text, marker) for marker in markers)
            num_kept = len(text) - len(_stripped(text[: len(text) - begun], also))
        elif also:
            # The end of a call that was cut off.
            text = _stripped(text, also)
        self._text = text[len(text) - num_kept :]
        return text[: len(text) - num_kept], None


def _stripped(text: str, also: str) -> str:
    end = len(text)
    while end and (text[end - 1].isspace() or text[end - 1] in also):
        end -= 1
    return text[:end]


def _num_begun(text: str, marker: str) -> int:
    """The longest end of `text` that is a beginning of `marker`."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
