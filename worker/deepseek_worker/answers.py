"""What clients get: the bodies of OpenAI's API, whole and in chunks.

Pure. The field order is that of the API's documentation; null is written where the API promises
a field, and a field is left out where it promises none.
"""

import codecs
from collections.abc import Callable, Iterable

import msgspec
from msgspec import UNSET, Struct, UnsetType

from deepseek_worker.errors import (
    BodyTooLarge,
    QueueFull,
    RequestError,
    RequestTooLarge,
    TemplateError,
    Unauthorized,
    Unavailable,
    UnknownModel,
    WorkerError,
)
from deepseek_worker.sequence import TokenLogprobs

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; no model's logprob is as low as this.
MIN_LOGPROB = -9999.0

LogprobEntry = tuple[int, TokenLogprobs | None]
"""A token and what is known of it: nothing for the first of a prompt."""

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(Struct):
    """Prompt tokens by how they were had."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Generated tokens by what they are."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens that a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Struct):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    """A token of a chat answer and its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """The tokens of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """The tokens of a completion, one list a property."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Struct):
    """A token that could stand at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt the alternatives by their ids; null for the first."""


class CompletionChoice(Struct):
    """One answer, or the part of it that a chunk brings."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """A whole completion, and each chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CalledFunction(Struct):
    """What the model calls."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Struct):
    """One call."""

    id: str
    type: str
    function: CalledFunction


class ChatMessage(Struct):
    """The assistant's turn."""

    role: str
    content: str | None
    """Null where the turn is nothing but calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(Struct):
    """A whole chat completion."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct, omit_defaults=True):
    """What a chunk adds to a call."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    """What a chunk adds to one of the turn's calls; the first brings id, type and name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class ChatDelta(Struct, omit_defaults=True):
    """What a chunk adds to the assistant's turn."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct):
    """The part of one answer that a chunk brings."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(Struct):
    """A chunk of a streamed chat completion."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct):
    """A name that requests may ask for."""

    id: str
    created: int
    owned_by: str
    max_model_len: int | None
    """Tokens of prompt and answer together; null while the model loads."""
    object: str = "model"
    parent: str | UnsetType = UNSET
    """The model that a LoRA adapter belongs to."""


class ModelList(Struct):
    """Every name that requests may ask for."""

    data: list[ModelCard]
    object: str = "list"


class Tokenized(Struct):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class Detokenized(Struct):
    """The text of tokens, special ones included."""

    prompt: str


class ErrorDetail(Struct):
    """What is wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """What comes in place of an answer."""

    error: ErrorDetail


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int
) -> Usage:
    """Token counts; a prompt counts once, however many answers it gets."""
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(cached_tokens),
        CompletionTokensDetails(reasoning_tokens),
    )


def event(body: Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


# The first entry that fits an error decides.
_STATUS: tuple[tuple[type[WorkerError], int, str, str], ...] = (
    (Unauthorized, 401, "invalid_request_error", "invalid_api_key"),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (BodyTooLarge, 413, "invalid_request_error", "request_too_large"),
    (RequestTooLarge, 400, "invalid_request_error", "context_length_exceeded"),
    (TemplateError, 400, "invalid_request_error", "invalid_messages"),
    (RequestError, 400, "invalid_request_error", "invalid_value"),
    (QueueFull, 429, "rate_limit_error", "engine_overloaded"),
    (Unavailable, 503, "service_unavailable", "unavailable"),
    (WorkerError, 500, "server_error", "internal_error"),
)


# What a larger model might have taken.
_TOO_NARROW = (UnknownModel, BodyTooLarge, RequestTooLarge)


def error_answer(error: WorkerError, degraded: str = "") -> tuple[int, ErrorBody]:
    """The status and the body that tell a client of an error.

    Args:
        error: What went wrong.
        degraded: A sentence for the errors that another model might not have made.
    """
    status, kind, code = next(row[1:] for row in _STATUS if isinstance(error, row[0]))
    param = None
    if isinstance(error, RequestError):
        param, code = error.param, error.code or code
    message = str(error)
    if degraded and isinstance(error, _TOO_NARROW):
        message = f"{message} {degraded}"
    return status, ErrorBody(ErrorDetail(message, kind, param, code))


class TokenTexts:
    """How tokens are written where they stand alone.

    Args:
        token_bytes: What a token stands for, special ones included.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    def text(self, token_id: int) -> str:
        """The token's text; its bytes in ASCII where it is only a part of a character."""
        data = self._token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat(self, entries: Iterable[LogprobEntry]) -> ChatLogprobs:
        """Logprobs in the form of chat completions."""
        return ChatLogprobs(
            [
                ChatTokenLogprob(
                    self.text(token_id),
                    _finite(entry.logprob),
                    list(self._token_bytes(token_id)),
                    [self._top(top, logprob) for top, logprob in entry.top],
                )
                for token_id, entry in entries
                if entry is not None
            ]
        )

    def completion(
        self, entries: Iterable[LogprobEntry], wanted: int, offsets: "TextOffsets"
    ) -> CompletionLogprobs:
        """Logprobs in the form of completions; `wanted` alternatives were asked for."""
        answer = CompletionLogprobs([], [], [] if wanted else None, [])
        for token_id, entry in entries:
            text = self.text(token_id)
            answer.tokens.append(text)
            answer.text_offset.append(offsets.take(token_id, text))
            answer.token_logprobs.append(None if entry is None else _finite(entry.logprob))
            if answer.top_logprobs is not None:
                answer.top_logprobs.append(None if entry is None else self._by_text(entry))
        return answer

    def prompt(self, entries: Iterable[TokenLogprobs | None]) -> PromptLogprobs:
        """Logprobs of a prompt's tokens by their ids."""
        return [None if entry is None else self._by_id(entry) for entry in entries]

    def _by_id(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranked = {
            token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)
        }
        ranked[entry.token_id] = (entry.logprob, entry.rank)
        return {
            str(token_id): PromptLogprob(_finite(logprob), rank, self.text(token_id))
            for token_id, (logprob, rank) in ranked.items()
        }

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(self.text(token_id), _finite(logprob), list(self._token_bytes(token_id)))

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, logprob in dict((*entry.top, (entry.token_id, entry.logprob))).items():
            name = self.text(token_id)
            # Two tokens may look alike: neither hides the other.
            named[f"token_id:{token_id}" if name in named else name] = _finite(logprob)
        return named


class TextOffsets:
    """Where in its answer's text each token begins, in characters.

    Args:
        shown_bytes: What a token adds to a text; nothing, for special ones.
        echo: The prompt before the answer, in which the client may have written special tokens.
    """

    def __init__(self, shown_bytes: Callable[[int], bytes], echo: str = "") -> None:
        self._shown_bytes = shown_bytes
        self._echo = echo
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._offset = 0

    def take(self, token_id: int, text: str) -> int:
        """The offset of the answer's next token, which alone is written as `text`."""
        offset = self._offset
        shown = self._shown_bytes(token_id)
        is_written = not shown and self._echo.startswith(text, offset)
        self._offset += len(text if is_written else self._decode(shown))
        return offset


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def model_list(
    names: Iterable[str], adapters: Iterable[str], created: int, max_model_len: int | None
) -> ModelList:
    """Every name that requests may ask for: those of the model, then its adapters."""
    parents = dict.fromkeys(names)
    cards = [ModelCard(name, created, "deepseek", max_model_len) for name in parents]
    parent = next(iter(parents))
    cards += [
        ModelCard(name, created, "deepseek", max_model_len, parent=parent) for name in adapters
    ]
    return ModelList(cards)
