"""Writes the answers to `POST /v1/responses`: whole, or as a stream of typed events. Pure.

An answer is a list of items: a thought, a message, calls. In a stream each item is announced,
grows by deltas and is said again when it is done; the whole answer is the last event.
"""

import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from deepseek_worker.answers import ErrorBody, Usage, encode
from deepseek_worker.generation import Piece
from deepseek_worker.parsing import CallPart
from deepseek_worker.rendering import Head
from deepseek_worker.responses import ResponsesRequest

Item = dict[str, Any]
_INCOMPLETE = {"length": "max_output_tokens"}


class ResponseRenderer:
    """Writes one answer."""

    done = b""
    """Such streams end with their last event."""

    def __init__(self, head: Head, request: ResponsesRequest) -> None:
        self._head = head
        self._request = request
        self._items: list[Item] = []
        self._num_events = 0
        self._finish_reason: str | None = None

    def events(self, pieces: Iterable[Piece]) -> bytes:
        """The events that bring `pieces`."""
        events = b""
        if not self._num_events:
            for kind in ("created", "in_progress"):
                events += self._event(f"response.{kind}", response=self._response("in_progress"))
        for piece in pieces:
            events += self._piece(piece)
        return events

    def usage_event(self, usage: Usage) -> bytes:
        """The last event, which is the whole answer."""
        response = self._response(self._status, usage)
        return self._event(f"response.{self._status}", response=response)

    def error_event(self, body: ErrorBody) -> bytes:
        """The last event of an answer that cannot be completed."""
        error = body.error
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        said = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", **said) + self._event("response.failed", response=response)

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> Item:
        """The answer in one body."""
        for piece in pieces:
            self._piece(piece)
        return self._response(self._status, usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason in _INCOMPLETE else "completed"

    def _piece(self, piece: Piece) -> bytes:
        events = b""
        if piece.thought:
            events += self._grow_text("reasoning", piece.thought)
        if piece.text:
            events += self._grow_text("message", piece.text)
        for part in piece.calls:
            events += self._grow_call(part)
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
            if not self._items:
                # An answer without any text is a message nevertheless.
                events += self._open(_new_item("message"))
            events += self._close(self._status)
        return events

    def _grow_text(self, kind: str, text: str) -> bytes:
        events = b""
        if not self._items or self._items[-1]["type"] != kind:
            events += self._close("completed") + self._open(_new_item(kind))
        item = self._items[-1]
        item["content"][0]["text"] += text
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        logprobs: Item = {"logprobs": []} if kind == "message" else {}
        delta = self._event(
            f"response.{name}.delta", **self._place, content_index=0, delta=text, **logprobs
        )
        return events + delta

    def _grow_call(self, part: CallPart) -> bytes:
        events = b""
        if part.id is not None:
            item = _new_item("function_call") | {"call_id": part.id, "name": part.name}
            events += self._close("completed") + self._open(item)
        if not part.arguments:
            return events
        self._items[-1]["arguments"] += part.arguments
        return events + self._event(
            "response.function_call_arguments.delta", **self._place, delta=part.arguments
        )

    def _open(self, item: Item) -> bytes:
        self._items.append(item)
        bare = {**item, "content": []} if "content" in item else item
        events = self._event("response.output_item.added", output_index=self._at, item=bare)
        if "content" in item:
            events += self._event(
                "response.content_part.added",
                **self._place,
                content_index=0,
                part=item["content"][0],
            )
        return events

    def _close(self, status: str) -> bytes:
        """Say the newest item again, as a whole."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            events = self._event("response.function_call_arguments.done", **self._place, **said)
        else:
            (part,) = item["content"]
            is_message = item["type"] == "message"
            name = "output_text" if is_message else "reasoning_text"
            place = {**self._place, "content_index": 0}
            logprobs: Item = {"logprobs": []} if is_message else {}
            events = self._event(f"response.{name}.done", **place, text=part["text"], **logprobs)
            events += self._event("response.content_part.done", **place, part=part)
        return events + self._event("response.output_item.done", output_index=self._at, item=item)

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    @property
    def _place(self) -> Item:
        return {"item_id": self._items[-1]["id"], "output_index": self._at}

    def _event(self, kind: str, **said: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **said}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"

    def _response(self, status: str, usage: Usage | None = None) -> Item:
        asked, head = self._request, self._head
        text_format: Any = {"type": "text"}
        if asked.text is not None and asked.text.format is not None:
            given = msgspec.to_builtins(asked.text.format)
            text_format = {key: value for key, value in given.items() if value is not None}
        is_incomplete = status == "incomplete"
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": _INCOMPLETE["length"]} if is_incomplete else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": head.model,
            "output": self._items,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": text_format},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _new_item(kind: str) -> Item:
    prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
    item: Item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
    if kind == "reasoning":
        return item | {"summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
    if kind == "message":
        text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return item | {"role": "assistant", "content": [text]}
    return item | {"arguments": ""}


def _usage(usage: Usage) -> Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens
        },
        "total_tokens": usage.total_tokens,
    }
