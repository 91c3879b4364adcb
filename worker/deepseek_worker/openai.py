"""What clients may ask: the bodies of OpenAI's API, field by field.

Pure. `validation.py` reads bodies into these, and says what is wrong with the others.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from deepseek_worker.errors import InvalidRequest

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_CHARACTERS = 1024
DEFAULT_COMPLETION_TOKENS = 16

Role = Literal["system", "developer", "user", "assistant", "tool"]
FormatType = Literal["text", "json_object", "json_schema"]
ToolChoiceWord = Literal["none", "auto", "required"]
FunctionType = Literal["function"]
Prompt = str | tuple[int, ...]
# Bounded, so that every sum of them can be written out.
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
CountFromOne = Annotated[int, Meta(ge=1, le=1 << 31)]
# The engine gets a copy for each answer.
StopTokenIds = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]
Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)]
# Logits are divided by it, and have to stay finite.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=2)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Padding against eavesdroppers who count bytes; never sent here."""


class JsonSchemaFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """The schema of an answer; always kept, whether `strict` says so or not."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """What an answer has to look like, in OpenAI's words."""

    type: FormatType
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """What an answer has to look like; one of these."""

    json: dict[str, Any] | str | None = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In llguidance's dialect of Lark, which begins with the rule `start`."""

    @property
    def kinds(self) -> list[str]:
        """Which of them are given."""
        fields = ("json", "json_object", "regex", "choice", "grammar")
        return [name for name in fields if getattr(self, name) not in (None, False)]

    @property
    def json_schema(self) -> dict[str, Any]:
        """The schema, read if it is a text.

        Raises:
            ValueError: the text is no JSON object.
        """
        schema = msgspec.json.decode(self.json) if isinstance(self.json, str) else self.json
        if not isinstance(schema, dict):
            raise ValueError("expected a JSON object")  # noqa: TRY004 - it is about a text
        return schema


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request share."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    """0 and -1 keep every token."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Alternatives beside each token of the prompt."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # OpenAI's accounts use these; here they change nothing.
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    user: Any = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Where the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: Any = None

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens to generate; None if the client did not say."""
        return self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """Most tokens to generate if the client does not say."""
        return DEFAULT_COMPLETION_TOKENS

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives beside each token."""
        return self.logprobs

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, each a text or token ids.

        Raises:
            InvalidRequest: the list is empty or mixed.
        """
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if not self.prompt:
            raise InvalidRequest("Invalid 'prompt': it is empty.", "prompt", "invalid_value")
        if _is_token_ids(self.prompt):
            return (tuple(self.prompt),)
        if all(isinstance(item, str) for item in self.prompt):
            return tuple(self.prompt)
        if all(isinstance(item, list) and _is_token_ids(item) for item in self.prompt):
            return tuple(map(tuple, self.prompt))
        raise InvalidRequest(
            "Invalid 'prompt': expected a text, a list of texts, a list of token ids or a list of "
            "lists of token ids.",
            "prompt",
            "invalid_type",
        )


class Function(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""
    strict: bool | None = None
    """Whether the arguments have to follow the schema, however the model came to call."""


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the model may use."""

    type: FunctionType
    function: Function


class NamedFunction(Struct, forbid_unknown_fields=True):
    """Which function."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """The tool that the model has to use."""

    type: FunctionType
    function: NamedFunction


class CalledFunction(Struct, forbid_unknown_fields=True):
    """What an earlier turn called."""

    name: str
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """One call of an earlier turn."""

    id: str
    function: CalledFunction
    type: FunctionType = "function"
    index: int | None = None


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn of a conversation."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None

    # An answer of the API may be sent back as it came; these are empty in ours.
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    refusal: Any = None


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_tokens: CountFromOne | None = None
    max_completion_tokens: CountFromOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """Whether the template opens the assistant's turn; true by default."""
    continue_final_message: bool | None = None
    """Whether the answer goes on with the last message, which is the assistant's."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceWord | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def opens_turn(self) -> bool:
        """Whether the template opens the assistant's turn."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [t for t in self.tools or () if t.function.name == choice.function.name]
        return [] if choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def max_calls(self) -> int | None:
        """Most calls in one answer; None for no limit."""
        is_named = isinstance(self.tool_choice, NamedTool)
        return 1 if is_named or self.parallel_tool_calls is False else None

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens to generate; None if the client did not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def default_tokens(self) -> int | None:
        """Most tokens to generate if the client does not say; None for what the context holds."""
        return None

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives beside each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates expect it."""
        return [_template_message(message) for message in self.messages]


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    """Whether a text begins with the token with which the model's texts begin."""
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


def _is_token_ids(items: list[Any]) -> bool:
    # bool is a kind of int, but true is no token. There may be millions.
    return set(map(type, items)) <= {int}


def _template_message(message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    # Templates were written before the role `developer`, and ask for tool_calls by its presence.
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or (None if message.tool_calls else ""),
    }
    for field in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(message, field):
            turn[field] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return turn
