"""What is refused at the door: wrong values, what can never fit, and what is too much now.

No torch, and nothing here changes: `Engine.validate` may be called from any thread.
"""

import math
from dataclasses import dataclass

from deepseek_worker.errors import InvalidRequest, QueueFull, RequestTooLarge
from deepseek_worker.sequence import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine serves within, all defaults resolved."""

    max_context_tokens: int
    max_running_requests: int
    max_batch_tokens: int
    max_queued_requests: int
    retries_per_batch: int = 3


def check_request(request: Request, limits: Limits, vocab_size: int, num_unfinished: int) -> None:
    """Raise unless the request can be queued beside `num_unfinished` others.

    Raises:
        InvalidRequest: the prompt is empty or a value is out of range.
        RequestTooLarge: prompt and answer exceed the context.
        QueueFull: too many requests wait already.
    """
    _check_sampling(request.sampling, vocab_size)
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty; it needs at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(f"prompt token ids have to be in [0, {vocab_size})")
    max_tokens = request.sampling.max_tokens
    num_asked = len(prompt) + (1 if max_tokens is None else max_tokens)
    if num_asked > limits.max_context_tokens:
        raise RequestTooLarge(
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, but the "
            f"context is {limits.max_context_tokens} tokens; shorten one of them"
        )
    most = limits.max_running_requests + limits.max_queued_requests
    if num_unfinished >= most:
        raise QueueFull(f"{num_unfinished} requests run or wait already; try again later")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    ranges = {
        "temperature": (sampling.temperature, 0.0, math.inf),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "top_k": (sampling.top_k, 0, math.inf),
        "max_tokens": (sampling.max_tokens or 0, 0, math.inf),
        "min_tokens": (sampling.min_tokens, 0, math.inf),
        "presence_penalty": (sampling.presence_penalty, -math.inf, math.inf),
        "frequency_penalty": (sampling.frequency_penalty, -math.inf, math.inf),
        "repetition_penalty": (sampling.repetition_penalty, 0.0, math.inf),
    }
    for name, (value, low, high) in ranges.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(f"{name} is {value}; it has to be in [{low}, {high}] and finite")
    if sampling.top_p == 0 or sampling.repetition_penalty == 0:
        raise InvalidRequest("top_p and repetition_penalty have to be above 0")
    ids = [*sampling.stop_token_ids, *(token_id for token_id, _ in sampling.logit_bias)]
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"token id {token_id} is not in [0, {vocab_size})")
