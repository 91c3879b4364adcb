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
    FormatType,
    FunctionType,
    GenerationRequest,
    Message,
    NamedTool,
    Role,
    StructuredOutputs,
    ToolChoiceWord,
)
from deepseek_worker.sequence import MAX_LOGIT_BIASES, SamplingParams

MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 128 << 10
MAX_SCHEMA_DEPTH = 48
MAX_GRAMMAR_BYTES = 64 << 10
MAX_ALTERNATIVES = 1024
MAX_SHOWN_CHARACTERS = 100
# Below it the likeliest token is taken: logits that are divided by less may not stay finite.
LEAST_TEMPERATURE = 1e-5

# Fields that the engine cannot follow yet, and the values with which they ask for nothing.
_NO_EFFECT_YET: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "store": (None, False),
    "suffix": (None, ""),
    "verbosity": (None,),
    "web_search_options": (None,),
}

_Request = TypeVar("_Request", bound=msgspec.Struct)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)


def parse_completion(body: bytes) -> CompletionRequest:
    """Read the body of `POST /v1/completions`.

    Raises:
        InvalidRequest: with the field, what was given and what is allowed.
    """
    request = decode(_completion_decoder, body)
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
    request = decode(_chat_decoder, body)
    check_chat(request)
    return request


def check_chat(request: ChatRequest) -> None:
    """Refuse what no type can tell.

    Raises:
        InvalidRequest: with the field, what was given and what is allowed.
    """
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
    _check_turn(request)
    _check_tools(request)


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
    wanted = (request.prompt_logprobs, request.wanted_logprobs if echoes else None)
    prompt_logprobs = max((number for number in wanted if number is not None), default=None)
    temperature = _or(request.temperature, 1.0)
    return SamplingParams(
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_or(request.min_p, 0.0),
        seed=None if request.seed is None else request.seed % (1 << 63),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.wanted_logprobs,
        prompt_logprobs=prompt_logprobs,
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
    return shortened(json.dumps(value, ensure_ascii=False).encode(errors="replace").decode())


def shortened(text: str) -> str:
    """A client's words, cut to what fits into a message."""
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


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
        # As JSON writes numbers, so that no token is named twice.
        if not (re.fullmatch("0|[1-9][0-9]{0,18}", key) and int(key) < vocab_size):
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
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest(
            "'prompt_logprobs' comes with whole answers only; set 'stream' to false.",
            "prompt_logprobs",
            "invalid_value",
        )
    _check_structure(request)
    stops = request.stop_strings
    if len(stops) > MAX_STOPS or "" in stops:
        raise InvalidRequest(
            f"Invalid 'stop': expected up to {MAX_STOPS} texts, none of them empty, got "
            f"{shown(request.stop)}.",
            "stop",
            "invalid_value",
        )


def _check_structure(request: GenerationRequest) -> None:
    given, form = request.structured_outputs, request.response_format
    is_free = form is None or form.type == "text"
    if given is None and is_free:
        return
    if given is not None and not is_free:
        raise InvalidRequest(
            "Give 'response_format' or 'structured_outputs', not both.",
            "structured_outputs",
            "invalid_value",
        )
    refuse_min_tokens(request)
    if given is not None:
        _check_structured_outputs(given)
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise InvalidRequest(
                "Missing required parameter: 'response_format.json_schema'.",
                "response_format.json_schema",
                "missing_required_parameter",
            )
        _check_schema(form.json_schema.schema or {}, "response_format.json_schema.schema")


def refuse_min_tokens(request: GenerationRequest) -> None:
    """Refuse to keep an answer going that a grammar ends.

    Raises:
        InvalidRequest: `min_tokens` is given.
    """
    if request.min_tokens:
        raise InvalidRequest(
            "'min_tokens' cannot be combined with a structure of the answer, which decides where "
            "it ends; leave it out.",
            "min_tokens",
            "invalid_value",
        )


def _check_structured_outputs(given: StructuredOutputs) -> None:
    if len(given.kinds) != 1:
        raise InvalidRequest(
            "Invalid 'structured_outputs': expected one of json, json_object, regex, choice and "
            f"grammar, got {', '.join(given.kinds) or 'none'}.",
            "structured_outputs",
            "invalid_value",
        )
    if given.json is not None:
        try:
            schema = given.json_schema
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"Invalid 'structured_outputs.json': expected a JSON schema, got "
                f"{shown(given.json)}: {error}.",
                "structured_outputs.json",
                "invalid_value",
            ) from None
        _check_schema(schema, "structured_outputs.json")
    if given.choice is not None and not (
        1 <= len(given.choice) <= MAX_ALTERNATIVES and all(given.choice)
    ):
        raise InvalidRequest(
            f"Invalid 'structured_outputs.choice': expected 1 to {MAX_ALTERNATIVES} texts, none "
            f"of them empty, got {shown(given.choice)}.",
            "structured_outputs.choice",
            "invalid_value",
        )
    for text in (given.regex or "", given.grammar or "", "".join(given.choice or ())):
        if (num_bytes := len(text.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
            (kind,) = given.kinds
            raise InvalidRequest(
                f"Invalid 'structured_outputs.{kind}': it has {num_bytes} bytes, "
                f"{MAX_GRAMMAR_BYTES} are allowed.",
                f"structured_outputs.{kind}",
                "invalid_value",
            )


def _check_schema(schema: dict[str, Any], param: str) -> None:
    num_bytes = len(msgspec.json.encode(schema))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"Invalid '{param}': the schema has {num_bytes} bytes, {MAX_SCHEMA_BYTES} are allowed.",
            param,
            "invalid_value",
        )
    depth = 0
    level: list[Any] = [schema]
    while level := [
        child
        for value in level
        for child in (value.values() if isinstance(value, dict) else value)
        if isinstance(child, dict | list)
    ]:
        depth += 1
        if depth > 2 * MAX_SCHEMA_DEPTH:
            raise InvalidRequest(
                f"Invalid '{param}': the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels.",
                param,
                "invalid_value",
            )


def _check_turn(request: ChatRequest) -> None:
    if not request.continue_final_message:
        return
    if request.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' contradict each other; set one "
            "of them to false.",
            "continue_final_message",
            "invalid_value",
        )
    last = request.messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        lack = " with tool calls" if last.tool_calls else "" if last.content else " without content"
        raise InvalidRequest(
            "'continue_final_message' needs a last message of the role 'assistant' with some "
            f"content and no tool calls, got one of the role '{last.role}'{lack}.",
            "continue_final_message",
            "invalid_value",
        )


def _check_tools(request: ChatRequest) -> None:
    tools = request.tools or []
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"Invalid 'tools': {len(tools)} tools, {MAX_TOOLS} are allowed.",
            "tools",
            "invalid_value",
        )
    names: set[str] = set()
    for at, tool in enumerate(tools):
        name = tool.function.name
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise InvalidRequest(
                f"Invalid 'tools[{at}].function.name': expected 1 to 64 letters, digits, "
                f"underscores and dashes, got {shown(name)}.",
                f"tools[{at}].function.name",
                "invalid_value",
            )
        if name in names:
            raise InvalidRequest(
                f"Invalid 'tools[{at}].function.name': another tool is called {shown(name)} too.",
                f"tools[{at}].function.name",
                "invalid_value",
            )
        names.add(name)
        _check_schema(tool.function.parameters or {}, f"tools[{at}].function.parameters")
    if request.must_call and not request.callable_tools:
        wanted = request.tool_choice
        what = shown(wanted.function.name) if isinstance(wanted, NamedTool) else "a tool"
        raise InvalidRequest(
            f"Invalid 'tool_choice': it asks for {what}; 'tools' has "
            f"{', '.join(sorted(names)) or 'none'}.",
            "tool_choice",
            "invalid_value",
        )
    if request.must_call or any(tool.function.strict for tool in request.callable_tools):
        refuse_min_tokens(request)


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


def decode(decoder: "msgspec.json.Decoder[_Request]", body: bytes) -> _Request:
    """Read a body.

    Raises:
        InvalidRequest: with the field, what was given and what is allowed.
    """
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
        name = shortened(match[1])
        param = f"{path}.{name}".lstrip(".")
        near = difflib.get_close_matches(name, kind.__struct_fields__, 1) if not path else []
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
        expected = f"expected one of {', '.join(_words_at(path))}"
    if not path:
        return InvalidRequest(f"Invalid body: {expected}.", code="invalid_type")
    param = path.replace("[...]", "")
    try:
        given = f", got {shown(_at(json.loads(body), param))}"
    except (ValueError, LookupError, TypeError, RecursionError):
        # Followed by no JSON, a number of thousands of digits, or a field that is there twice.
        given = ""
    return InvalidRequest(f"Invalid '{param}': {expected}{given}.", param, "invalid_value")


def _words_at(path: str) -> tuple[str, ...]:
    """The words that are allowed where a path leads to."""
    words = {
        "role": Role,
        "tool_choice": ToolChoiceWord,
        "format.type": FormatType,
        "type": FunctionType,
    }
    return get_args(next(kind for end, kind in words.items() if path.endswith(end)))


def _at(value: Any, path: str) -> Any:
    """The part of a body that a path leads to."""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        value = value[int(index)] if index else value[key]
    return value
