"""From a body to a request that can be served, or to the field that is wrong with it.

Pure. A field that is unknown, of a wrong type or out of its range is refused by its name, and so
is one that is known but has no effect yet; nothing is silently ignored but what only concerns
OpenAI's own accounts.
"""

import difflib
import json
import re
from typing import Any, TypeVar, get_args

import msgspec

from deepseek_worker.errors import InvalidRequest
from deepseek_worker.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    Role,
)
from deepseek_worker.sequence import SamplingParams

MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_LOGIT_BIASES = 1024

# Fields that the engine cannot follow yet, and the values with which they ask for nothing.
_NO_EFFECT_YET: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}

_Request = TypeVar("_Request", bound=GenerationRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)


def parse_completion(body: bytes) -> CompletionRequest:
    """Read the body of `POST /v1/completions`.

    Raises:
        InvalidRequest: with the field, what was given and what is allowed.
    """
    request = _decode(_completion_decoder, body)
    _check(request)
    if request.best_of not in (None, request.num_choices):
        raise InvalidRequest(
            f"Invalid 'best_of': {request.best_of} with n = {request.num_choices}; choosing the "
            "best of more answers is not supported by this version.",
            "best_of",
            "unsupported_parameter",
        )
    if len(request.prompts) * request.num_choices > MAX_PROMPTS:
        raise InvalidRequest(
            f"Invalid 'prompt': {len(request.prompts)} prompts with n = {request.num_choices}; "
            f"one request may ask for {MAX_PROMPTS} answers.",
            "prompt",
            "invalid_value",
        )
    return request


def parse_chat(body: bytes) -> ChatRequest:
    """Read the body of `POST /v1/chat/completions`.

    Raises:
        InvalidRequest: with the field, what was given and what is allowed.
    """
    request = _decode(_chat_decoder, body)
    _check(request)
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise InvalidRequest(
            f"'max_tokens' is {request.max_tokens} and 'max_completion_tokens' is "
            f"{request.max_completion_tokens}; give one of them.",
            "max_tokens",
            "invalid_value",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest(
            "'top_logprobs' needs 'logprobs' to be true.", "top_logprobs", "invalid_value"
        )
    _check_messages(request.messages)
    return request


def sampling_params(
    request: CompletionRequest | ChatRequest, max_tokens: int | None, vocab_size: int
) -> SamplingParams:
    """How the engine shall choose tokens.

    Args:
        request: A checked request.
        max_tokens: Most tokens to generate; None fills the context.
        vocab_size: Token ids are below it.

    Raises:
        InvalidRequest: a token id that the model does not have, or more least than most tokens.
    """
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"Invalid 'min_tokens': {min_tokens} is more than the {max_tokens} tokens that may "
            "be generated.",
            "min_tokens",
            "invalid_value",
        )
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    echoes = isinstance(request, CompletionRequest) and request.echo
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_or(request.min_p, 0.0),
        seed=None if request.seed is None else request.seed % (1 << 63),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.wanted_logprobs,
        prompt_logprobs=request.wanted_logprobs if echoes else None,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
    )


def check_token_ids(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Refuse ids that the model does not have.

    Raises:
        InvalidRequest: naming the first of them.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        at, wrong = next(
            (at, token_id)
            for at, token_id in enumerate(token_ids)
            if not 0 <= token_id < vocab_size
        )
        raise InvalidRequest(
            f"Invalid '{param}[{at}]': the model has no token {shown(wrong)}; its ids are 0 to "
            f"{vocab_size - 1}.",
            f"{param}[{at}]",
            "invalid_value",
        )


def shown(value: Any) -> str:
    """A value as JSON, cut to what fits into a message."""
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
    return text if len(text) <= 100 else f"{text[:100]}…"


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(given) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"Invalid 'logit_bias': {len(given)} entries, {MAX_LOGIT_BIASES} are allowed.",
            "logit_bias",
            "invalid_value",
        )
    for key in given:
        if not (key.isascii() and key.isdigit() and int(key[:20]) < vocab_size):
            raise InvalidRequest(
                f"Invalid 'logit_bias': {shown(key)} is no token id of the model; they are 0 to "
                f"{vocab_size - 1}.",
                "logit_bias",
                "invalid_value",
            )
    return tuple((int(key), bias) for key, bias in given.items())


def _check(request: GenerationRequest) -> None:
    for field, neutral in _NO_EFFECT_YET.items():
        if getattr(request, field, None) not in neutral:
            raise InvalidRequest(
                f"'{field}' is not supported by this version; leave it out.",
                field,
                "unsupported_parameter",
            )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "'stream_options' needs 'stream' to be true.", "stream_options", "invalid_value"
        )
    stops = request.stop_strings
    if len(stops) > MAX_STOPS or "" in stops:
        raise InvalidRequest(
            f"Invalid 'stop': expected up to {MAX_STOPS} texts, none of them empty, got "
            f"{shown(request.stop)}.",
            "stop",
            "invalid_value",
        )


def _check_messages(messages: list[Message]) -> None:
    if not messages:
        raise InvalidRequest(
            "Invalid 'messages': it is empty; at least one message is needed.",
            "messages",
            "invalid_value",
        )
    called: set[str] = set()
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        called |= {call.id for call in message.tool_calls or ()}
        if message.role == "tool" and message.tool_call_id not in called:
            raise InvalidRequest(
                f"Invalid '{where}': a message of the role 'tool' must answer a call of an "
                f"earlier assistant message; none has the id {shown(message.tool_call_id)}.",
                f"{where}.tool_call_id",
                "invalid_value",
            )
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(
                f"Invalid '{where}.content': expected a text or a list of text parts, got null; "
                "only the assistant may say nothing.",
                f"{where}.content",
                "invalid_type",
            )
        for field in ("annotations", "audio", "function_call", "refusal"):
            if getattr(message, field):
                raise InvalidRequest(
                    f"'{where}.{field}' is not supported by this version; leave it out.",
                    f"{where}.{field}",
                    "unsupported_parameter",
                )
        if isinstance(message.content, list):
            _check_parts(message.content, f"{where}.content")


def _check_parts(parts: list[dict[str, Any]], where: str) -> None:
    for at, part in enumerate(parts):
        if part.get("type") != "text":
            raise InvalidRequest(
                f"Invalid '{where}[{at}].type': the model reads 'text' only, got "
                f"{shown(part.get('type'))}.",
                f"{where}[{at}].type",
                "invalid_value",
            )
        if not isinstance(part.get("text"), str) or part.keys() != {"type", "text"}:
            raise InvalidRequest(
                f"Invalid '{where}[{at}]': expected the fields 'type' and 'text', got "
                f"{shown(part)}.",
                f"{where}[{at}]",
                "invalid_type",
            )


def _decode(decoder: "msgspec.json.Decoder[_Request]", body: bytes) -> _Request:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body, decoder.type) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is no JSON: {error}", code="invalid_json") from None


def _invalid(error: str, body: bytes, kind: Any) -> InvalidRequest:
    """Say in the API's words what msgspec said in its own."""
    at = re.fullmatch(r"(.*) - at `\$\.?([^`]*)`", error, re.DOTALL)
    said, path = at.groups() if at else (error, "")
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", said, re.DOTALL):
        param = f"{path}.{match[1]}".lstrip(".")
        near = difflib.get_close_matches(match[1], kind.__struct_fields__, 1) if not path else []
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return InvalidRequest(f"Unknown parameter: '{param}'.{hint}", param, "unknown_parameter")
    if match := re.fullmatch(r"Object missing required field `(.*)`", said):
        param = f"{path}.{match[1]}".lstrip(".")
        return InvalidRequest(
            f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
        )
    expected = said.partition(", got ")[0].replace("`", "")
    expected = expected[:1].lower() + expected[1:]
    if said.startswith("Invalid enum value"):
        expected = f"expected one of {', '.join(get_args(Role))}"
    if not path:
        return InvalidRequest(f"Invalid body: {expected}.", code="invalid_type")
    param = path.replace("[...]", "")
    try:
        given = shown(_at(json.loads(body), param))
    except (ValueError, RecursionError):
        given = "what is followed by no JSON"
    return InvalidRequest(f"Invalid '{param}': {expected}, got {given}.", param, "invalid_value")


def _at(value: Any, path: str) -> Any:
    """The part of a body that a path leads to."""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        value = value[int(index)] if index else value[key]
    return value
