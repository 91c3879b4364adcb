"""`POST /v1/responses`: OpenAI's newer form of a chat, read into the older one. Pure.

Nothing is stored: a conversation goes on by sending its items again, as clients do that set
`store` to false.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from deepseek_worker.errors import InvalidRequest, RequestError
from deepseek_worker.openai import (
    CalledFunction,
    ChatRequest,
    CountFromOne,
    Function,
    FunctionType,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Salt,
    StructuredOutputs,
    Tool,
    ToolCall,
    ToolChoiceWord,
)
from deepseek_worker.validation import check_chat, decode, shortened, shown

# Fields that have no effect here, and the values with which they ask for nothing.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "store": (None, False),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
# Thoughts come in plain text, which may be sent back: there is nothing to encrypt.
_INCLUDES = ("reasoning.encrypted_content",)
# What the older form calls the fields of this one, in messages about them.
_NAMES = (
    (r"\bmessages\b", "input"),
    (r"\bresponse_format\.json_schema\b", "text.format"),
    (r"\btool_call_id\b", "call_id"),
    (r"\bresponse_format\b", "text.format"),
    (r"\.function\.", "."),
    (r"\bmax_tokens\b", "max_output_tokens"),
)

Role = Literal["system", "developer", "user", "assistant"]
TextFormatType = Literal["text", "json_object", "json_schema"]


class TextFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the answer has to look like."""

    type: TextFormatType
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """How the answer's text comes."""

    format: TextFormat | None = None
    verbosity: None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """How the model thinks; it alone decides."""

    effort: None = None
    summary: None = None
    generate_summary: None = None


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

    type: FunctionType
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """The function that the model has to call."""

    type: FunctionType
    name: str


class InputMessage(Struct, forbid_unknown_fields=True, kw_only=True, tag="message"):
    """A turn of the conversation."""

    role: Role
    content: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Struct, forbid_unknown_fields=True, kw_only=True, tag="function_call"):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(Struct, forbid_unknown_fields=True, kw_only=True, tag="function_call_output"):
    """What a call gave."""

    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None


class InputThought(Struct, forbid_unknown_fields=True, kw_only=True, tag="reasoning"):
    """What the model thought before its next item."""

    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


InputItem = InputMessage | InputCall | InputCallOutput | InputThought


class ResponsesStreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is sent."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: CountFromOne | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoiceWord | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None

    # As in the other requests.
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Salt | None = None

    # OpenAI's accounts use these; here they change nothing.
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    user: Any = None

    background: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    store: Any = None
    top_logprobs: Any = None
    truncation: Any = None


_decoder = msgspec.json.Decoder(ResponsesRequest)


def parse_response(body: bytes) -> tuple[ResponsesRequest, ChatRequest]:
    """Read the body of `POST /v1/responses`, and say it as a chat.

    Raises:
        InvalidRequest: with the field, what was given and what is allowed.
    """
    request = decode(_decoder, body)
    for field, neutral in _NO_EFFECT.items():
        if getattr(request, field) not in neutral:
            raise InvalidRequest(
                f"'{field}' is not supported by this version; leave it out.",
                field,
                "unsupported_parameter",
            )
    if wrong := [name for name in request.include or () if name not in _INCLUDES]:
        raise InvalidRequest(
            f"Invalid 'include': {shown(wrong[0])} is not supported by this version; leave it out.",
            "include",
            "unsupported_parameter",
        )
    messages, origins = _messages(request)
    chat = _chat(request, messages)
    try:
        check_chat(chat)
    except InvalidRequest as error:
        raise renamed(error, origins) from None
    return request, chat


def renamed(error: RequestError, origins: Sequence[str] = ()) -> RequestError:
    """A chat's error in the words of this form; `origins` names the field of each message."""
    message, param = str(error), error.param or ""
    if at := re.match(r"messages\[(\d+)\]", param):
        origin = origins[int(at[1])]
        message, param = message.replace(at[0], origin), param.replace(at[0], origin)
    for old, new in _NAMES:
        message, param = re.sub(old, new, message), re.sub(old, new, param)
    return type(error)(message, param or None, error.code)


def _chat(request: ResponsesRequest, messages: list[Message]) -> ChatRequest:
    choice = request.tool_choice
    tool_choice: ToolChoiceWord | NamedTool | None
    if isinstance(choice, NamedFunctionTool):
        tool_choice = NamedTool("function", NamedFunction(choice.name))
    else:
        tool_choice = choice
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        stream=request.stream,
        response_format=_response_format(request.text),
        structured_outputs=request.structured_outputs,
        chat_template_kwargs=request.chat_template_kwargs,
        cache_salt=request.cache_salt,
        tools=[_tool(tool) for tool in request.tools or ()],
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
    )


def _tool(tool: FunctionTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    given = text.format
    schema = None
    if given.type == "json_schema":
        if given.schema is None:
            raise InvalidRequest(
                "Missing required parameter: 'text.format.schema'.",
                "text.format.schema",
                "missing_required_parameter",
            )
        schema = JsonSchemaFormat(name=given.name, schema=given.schema)
    return ResponseFormat(type=given.type, json_schema=schema)


def _messages(request: ResponsesRequest) -> tuple[list[Message], list[str]]:
    """The turns, and the field that each comes from."""
    messages, origins = [], []
    if request.instructions:
        messages.append(Message(role="system", content=request.instructions))
        origins.append("instructions")
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)], [*origins, "input"]
    if not request.input:
        raise InvalidRequest(
            "Invalid 'input': it is empty; at least one item is needed.", "input", "invalid_value"
        )
    thought = ""
    for at, given in enumerate(request.input):
        where = f"input[{at}]"
        item = _item(given, where)
        if isinstance(item, InputThought):
            thought += _joined(item.content or [], f"{where}.content", ("reasoning_text",))
            continue
        message = _message(item, where)
        last = messages[-1] if messages else None
        if isinstance(item, InputCall) and last and last.role == "assistant" and not thought:
            # One turn of a chat holds a text and all its calls.
            last.tool_calls = [*(last.tool_calls or ()), *(message.tool_calls or ())]
            continue
        if message.role == "assistant" and thought:
            message.reasoning_content, thought = thought, ""
        messages.append(message)
        origins.append(where)
    return messages, origins


def _item(given: dict[str, Any], where: str) -> InputItem:
    # A message need not say that it is one.
    typed = given if "type" in given else {"type": "message", **given}
    try:
        item: InputItem = msgspec.convert(typed, InputItem)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")
        said = shortened(said)
        field = path.rstrip("`")
        param = f"{where}.{field}" if field else where
        allowed = (
            f"roles are {', '.join(get_args(Role))}"
            if field == "role"
            else "items are of the types message, function_call, function_call_output and reasoning"
        )
        raise InvalidRequest(
            f"Invalid '{param}': {said[:1].lower()}{said[1:]}; {allowed}.", param, "invalid_value"
        ) from None
    return item


def _message(item: InputMessage | InputCall | InputCallOutput, where: str) -> Message:
    if isinstance(item, InputCall):
        call = ToolCall(id=item.call_id, function=CalledFunction(item.name, item.arguments))
        return Message(role="assistant", tool_calls=[call])
    if isinstance(item, InputCallOutput):
        output = item.output
        if not isinstance(output, str):
            output = _joined(output, f"{where}.output", ("input_text",))
        return Message(role="tool", tool_call_id=item.call_id, content=output)
    content = item.content
    if not isinstance(content, str):
        content = _joined(content, f"{where}.content", ("input_text", "output_text", "text"))
    return Message(role=item.role, content=content)


def _joined(parts: list[dict[str, Any]], where: str, types: tuple[str, ...]) -> str:
    for at, part in enumerate(parts):
        if part.get("type") not in types or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"Invalid '{where}[{at}]': expected a part of the type {' or '.join(types)} with "
                f"its 'text', got {shown(part)}.",
                f"{where}[{at}]",
                "invalid_value",
            )
    return "\n".join(part["text"] for part in parts)
