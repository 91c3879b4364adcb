"""From pieces of answers to the bodies that clients get, streamed or whole. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from deepseek_worker.answers import (
    DONE,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ErrorBody,
    FunctionDelta,
    TextOffsets,
    TokenTexts,
    ToolCall,
    ToolCallDelta,
    Usage,
    event,
)
from deepseek_worker.generation import Piece
from deepseek_worker.openai import ChatRequest, CompletionRequest
from deepseek_worker.parsing import CallPart


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    """The model that really answers."""


class ChatRenderer:
    """Writes the answers to `POST /v1/chat/completions`."""

    done = DONE

    def __init__(self, head: Head, request: ChatRequest, texts: TokenTexts) -> None:
        self._head = head
        self._texts = texts
        self._wants_logprobs = request.wanted_logprobs is not None
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        # Every chunk but the last says null where the client asked for usage.
        self._no_usage: UnsetType | None = None if request.include_usage else UNSET
        self._greeted: set[int] = set()

    def events(self, pieces: Iterable[Piece]) -> bytes:
        """The events that bring `pieces`; none for what cannot be sent yet."""
        return b"".join(map(self._piece_events, pieces))

    def usage_event(self, usage: Usage) -> bytes:
        """The event before the end, if the client asked for it."""
        return event(self._chunk([], usage)) if self._no_usage is None else b""

    def error_event(self, body: ErrorBody) -> bytes:
        """What a stream says that cannot be completed."""
        return event(body)

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> ChatCompletion:
        """The answer in one body, from the whole of each choice."""
        pieces = list(pieces)
        choices = [
            ChatChoice(
                piece.choice, _message(piece), self._logprobs(piece), piece.finish_reason or "stop"
            )
            for piece in pieces
        ]
        head = self._head
        answer = ChatCompletion(
            head.id, "chat.completion", head.created, head.model, choices, usage
        )
        if self._wants_prompt_logprobs:
            answer.prompt_logprobs = self._texts.prompt(pieces[0].prompt_logprobs or ())
        return answer

    def _piece_events(self, piece: Piece) -> bytes:
        events = b""
        is_new = piece.choice not in self._greeted
        if piece.text or piece.thought or piece.calls or piece.logprobs or is_new:
            delta = _delta(piece)
            if is_new:
                delta.role = "assistant"
                self._greeted.add(piece.choice)
            choice = ChatChunkChoice(piece.choice, delta, self._logprobs(piece), None)
            events += event(self._chunk([choice], self._no_usage))
        if piece.finish_reason is not None:
            last = ChatChunkChoice(piece.choice, ChatDelta(), None, piece.finish_reason)
            events += event(self._chunk([last], self._no_usage))
        return events

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        head = self._head
        return ChatChunk(head.id, "chat.completion.chunk", head.created, head.model, choices, usage)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return self._texts.chat(piece.logprobs) if self._wants_logprobs else None


def _message(piece: Piece) -> ChatMessage:
    message = ChatMessage("assistant", piece.text)
    if piece.thought:
        message.reasoning_content = piece.thought
    if piece.calls:
        message.content = piece.text or None
        message.tool_calls = [
            ToolCall(part.id or "", "function", CalledFunction(part.name or "", part.arguments))
            for part in piece.calls
        ]
    return message


def _delta(piece: Piece) -> ChatDelta:
    """What is new; an empty content where nothing else is, as the API has it."""
    delta = ChatDelta()
    if piece.thought:
        delta.reasoning_content = piece.thought
    if piece.calls:
        delta.tool_calls = [_call_delta(part) for part in piece.calls]
    if piece.text or not (piece.thought or piece.calls):
        delta.content = piece.text
    return delta


def _call_delta(part: CallPart) -> ToolCallDelta:
    if part.id is None:
        return ToolCallDelta(part.index, function=FunctionDelta(arguments=part.arguments))
    function = FunctionDelta(part.name, part.arguments)
    return ToolCallDelta(part.index, part.id, "function", function)


class CompletionRenderer:
    """Writes the answers to `POST /v1/completions`.

    Args:
        head: What every chunk repeats.
        request: What the client asked for.
        texts: How single tokens are written.
        shown_bytes: What a token adds to a text.
        echoes: The text before each choice's own: its prompt, if the client wants it back.
    """

    done = DONE

    def __init__(
        self,
        head: Head,
        request: CompletionRequest,
        texts: TokenTexts,
        shown_bytes: Callable[[int], bytes],
        echoes: list[str],
    ) -> None:
        self._head = head
        self._texts = texts
        self._wanted_logprobs = request.wanted_logprobs
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._no_usage: UnsetType | None = None if request.include_usage else UNSET
        self._echoes = dict(enumerate(echoes))
        self._offsets = [TextOffsets(shown_bytes, echo) for echo in echoes]

    def events(self, pieces: Iterable[Piece]) -> bytes:
        """The events that bring `pieces`; none for what cannot be sent yet."""
        return b"".join(map(self._piece_events, pieces))

    def usage_event(self, usage: Usage) -> bytes:
        """The event before the end, if the client asked for it."""
        return event(self._answer([], usage)) if self._no_usage is None else b""

    def error_event(self, body: ErrorBody) -> bytes:
        """What a stream says that cannot be completed."""
        return event(body)

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> Completion:
        """The answer in one body, from the whole of each choice."""
        return self._answer([self._choice(piece) for piece in pieces], usage)

    def _piece_events(self, piece: Piece) -> bytes:
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return b""
        return event(self._answer([self._choice(piece)], self._no_usage))

    def _choice(self, piece: Piece) -> CompletionChoice:
        text = self._echoes.pop(piece.choice, "") + piece.text
        choice = CompletionChoice(piece.choice, text, self._logprobs(piece), piece.finish_reason)
        if self._wants_prompt_logprobs:
            choice.prompt_logprobs = self._texts.prompt(piece.prompt_logprobs or ())
        return choice

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        head = self._head
        return Completion(head.id, "text_completion", head.created, head.model, choices, usage)

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if self._wanted_logprobs is None:
            return None
        offsets = self._offsets[piece.choice]
        return self._texts.completion(piece.logprobs, self._wanted_logprobs, offsets)
