"""From what a client asks to what the engine computes: texts to tokens, tokens to choices.

Pure, and callable from any thread: reading a long text takes a while.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from deepseek_worker.answers import TokenTexts
from deepseek_worker.chat_format import CLOSE_THOUGHT, MARKERS, ChatFormat, Start
from deepseek_worker.detokenizer import Detokenizer
from deepseek_worker.errors import InvalidRequest, RequestTooLarge
from deepseek_worker.generation import Choice
from deepseek_worker.markers import MarkerSearch
from deepseek_worker.openai import ChatRequest, CompletionRequest, Prompt
from deepseek_worker.parsing import AnswerParser
from deepseek_worker.sequence import Request, SamplingParams, Structure
from deepseek_worker.tokenizer import Tokenizer
from deepseek_worker.validation import check_token_ids, sampling_params

# They come from the request itself, or from the model.
RESERVED_TEMPLATE_NAMES = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
)
# Stands behind a message that is to be continued; what the template writes after it is cut off.
HERE = "\ue000here\ue000"


@dataclass(frozen=True)
class Model:
    """What the server knows of the loaded model."""

    tokenizer: Tokenizer
    max_context_tokens: int
    vocab_size: int
    """Token ids are below it; the tokenizer may know fewer."""
    device: str
    chat_format: ChatFormat = field(init=False)
    shown_bytes: Callable[[int], bytes] = field(init=False)
    """What a token adds to a text: nothing, for special ones."""
    chat_bytes: Callable[[int], bytes] = field(init=False)
    """The same in a chat, whose markers of thoughts and calls have to be seen."""
    texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        """Derive what every request needs."""
        special = self.tokenizer.special_token_ids
        token_bytes = functools.cache(self.tokenizer.token_bytes)
        markers = {marker.encode() for marker in MARKERS}
        hidden = frozenset(token for token in special if token_bytes(token) not in markers)
        object.__setattr__(self, "texts", TokenTexts(token_bytes))
        object.__setattr__(
            self, "shown_bytes", lambda token: b"" if token in special else token_bytes(token)
        )
        object.__setattr__(
            self, "chat_bytes", lambda token: b"" if token in hidden else token_bytes(token)
        )
        object.__setattr__(self, "chat_format", ChatFormat.of(self.tokenizer.chat_template))

    def grammar_marker(self, marker: str) -> str:
        """A marker as a grammar writes it: the token that it is, or its text."""
        token_ids = self.tokenizer.encode(marker, add_special_tokens=False)
        if len(token_ids) == 1 and token_ids[0] in self.tokenizer.marker_token_ids:
            return f"<[{token_ids[0]}]>"
        return json.dumps(marker, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat's prompt."""

    token_ids: tuple[int, ...]
    start: Start
    """Where the answer begins."""


def encode_prompts(model: Model, prompts: tuple[Prompt, ...]) -> list[tuple[int, ...]]:
    """The tokens of each prompt.

    Raises:
        InvalidRequest: one has no tokens, or tokens that the model does not have.
    """
    encoded = []
    for at, prompt in enumerate(prompts):
        token_ids = tuple(model.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
        param = "prompt" if len(prompts) == 1 else f"prompt[{at}]"
        check_token_ids(token_ids, model.vocab_size, param)
        if not token_ids:
            raise InvalidRequest(
                f"Invalid '{param}': it is empty; at least one token is needed.", param
            )
        encoded.append(token_ids)
    return encoded


def encode_chat(model: Model, asked: ChatRequest) -> Conversation:
    """The tokens of a conversation, by the model's own template.

    Raises:
        TemplateError: the template is missing or refuses the messages.
        InvalidRequest: the request would replace what the template gets from it, or asks to
            continue a message that the template does not keep as it is.
    """
    options = asked.chat_template_kwargs or {}
    if taken := RESERVED_TEMPLATE_NAMES & options.keys():
        raise InvalidRequest(
            f"Invalid 'chat_template_kwargs': {', '.join(sorted(taken))} cannot be given here; "
            "they come from the request itself and from the model.",
            "chat_template_kwargs",
        )
    messages, chat_format = asked.template_messages(), model.chat_format
    continued: str | None = None
    if asked.continue_final_message:
        continued = messages[-1]["content"]
        messages[-1]["content"] += HERE
    messages = chat_format.with_calls(messages)
    tools: list[dict[str, Any]] = msgspec.to_builtins(asked.callable_tools)
    if tools and not chat_format.lists_tools:
        messages, tools = chat_format.with_tools(messages, tools), []
    text = model.tokenizer.apply_chat_template(
        messages,
        tools=tools or None,
        add_generation_prompt=asked.opens_turn,
        **options,
    )
    if continued is not None:
        text = _before_here(text, continued)
    token_ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
    if not token_ids:
        raise InvalidRequest(
            "Invalid 'messages': the chat template makes no prompt of them.", "messages"
        )
    return Conversation(token_ids, chat_format.start_of(text, continued))


def _before_here(text: str, continued: str) -> str:
    before, found, _ = text.partition(HERE)
    if not found or not before.endswith(continued):
        raise InvalidRequest(
            "The model's chat template does not write the last message as it is, so it cannot be "
            "continued; leave 'continue_final_message' out.",
            "continue_final_message",
            "invalid_value",
        )
    return before


def num_characters(asked: CompletionRequest | ChatRequest) -> int:
    """How much text a request brings."""
    if isinstance(asked, CompletionRequest):
        return sum(len(prompt) for prompt in asked.prompts if isinstance(prompt, str))
    return sum(len(message["content"] or "") for message in asked.template_messages())


def echo(model: Model, prompt: Prompt) -> str:
    """The prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(model.shown_bytes, prompt)).decode(errors="replace")


def choices(
    model: Model,
    asked: CompletionRequest | ChatRequest,
    prompts: list[tuple[int, ...]],
    answer_id: str,
    *,
    start: Start = "answer",
    structure: Structure | None = None,
    adapter: str | None = None,
) -> list[Choice]:
    """The answers to compute: `n` to each prompt, numbered through.

    Args:
        model: What is known of the model.
        asked: What the client asked for.
        prompts: Their tokens.
        answer_id: Part of every request's id.
        start: Where a chat's answers begin.
        structure: What each answer has to look like.
        adapter: The LoRA adapter that computes them.

    Raises:
        RequestTooLarge: a prompt and its answer do not fit the context together.
        InvalidRequest: a token id that the model does not have.
    """
    planned: list[Choice] = []
    for number, token_ids in enumerate(prompts):
        max_tokens = _max_tokens(asked, len(token_ids), model.max_context_tokens)
        sampling = sampling_params(asked, max_tokens, model.vocab_size)
        for _ in range(asked.num_choices):
            index = len(planned)
            request = Request(
                request_id=f"{answer_id}-{index}",
                prompt_token_ids=token_ids,
                sampling=_with_seed_of_choice(sampling, index),
                cache_salt=asked.cache_salt or "",
                structure=structure,
                adapter=adapter,
            )
            planned.append(_choice(model, asked, number, request, start))
    return planned


def _choice(
    model: Model,
    asked: CompletionRequest | ChatRequest,
    number: int,
    request: Request,
    start: Start,
) -> Choice:
    index = int(request.request_id.rpartition("-")[2])
    min_tokens = asked.min_tokens or 0
    if isinstance(asked, CompletionRequest):
        detokenizer = Detokenizer(model.shown_bytes, asked.stop_strings, min_tokens)
        echoed = asked.wanted_logprobs if asked.echo else None
        return Choice(index, number, request, detokenizer, num_echoed_logprobs=echoed)
    form = model.chat_format.call_form if asked.callable_tools else None
    return Choice(
        index,
        number,
        request,
        Detokenizer(model.chat_bytes, asked.stop_strings, min_tokens),
        AnswerParser(start, form, asked.max_calls),
        MarkerSearch((CLOSE_THOUGHT,)) if start == "thought" else None,
    )


def _max_tokens(asked: CompletionRequest | ChatRequest, num_prompt_tokens: int, limit: int) -> int:
    """Most tokens to generate, within the context.

    Raises:
        RequestTooLarge: prompt and answer do not fit together.
    """
    room = limit - num_prompt_tokens
    wanted = asked.wanted_tokens
    if wanted is None:
        # At least one token: an answer without any would be none.
        wanted = max(1, room if asked.default_tokens is None else min(asked.default_tokens, room))
    if wanted > room:
        param = "prompt" if isinstance(asked, CompletionRequest) else "messages"
        raise RequestTooLarge(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the prompt, {wanted} "
            "in the completion). Shorten the prompt or lower 'max_tokens'.",
            param,
            "context_length_exceeded",
        )
    return wanted


def _with_seed_of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    if sampling.seed is None or index == 0:
        return sampling
    # Else all answers to a prompt would be the same.
    return replace(sampling, seed=(sampling.seed + index) % (1 << 63))
