"""What is refused at the door, each by its name."""

import pytest

from deepseek_worker.admission import Limits, check_request
from deepseek_worker.errors import InvalidRequest, QueueFull, RequestTooLarge
from deepseek_worker.sequence import Request, SamplingParams

LIMITS = Limits(
    max_context_tokens=256, max_running_requests=1, max_batch_tokens=64, max_queued_requests=2
)


def check(tokens=(1, 2, 3), num_unfinished=0, **sampling):
    request = Request("r", tuple(tokens), SamplingParams(**sampling))
    check_request(request, LIMITS, 128, num_unfinished)


@pytest.mark.parametrize(
    ("tokens", "max_tokens"),
    [([1], None), ([1] * 255, 1), ([1] * 255, None), ([1] * 256, 0), ([127], 255)],
)
def test_what_just_fits_is_taken(tokens, max_tokens):
    check(tokens, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(256, None), (256, 1), (257, 0), (200, 57), (1, 10**9)]
)
def test_what_can_never_fit_is_refused_with_all_three_numbers(num_prompt, max_tokens):
    with pytest.raises(
        RequestTooLarge, match=f"{num_prompt} tokens and max_tokens is {max_tokens}.*256 tokens"
    ):
        check([1] * num_prompt, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": ((999_999, 1.0),)}, "token id 999999"),
        ({"stop_token_ids": (128,)}, "token id 128"),
    ],
)
def test_wild_values_are_refused_by_name(changes, named):
    with pytest.raises(InvalidRequest, match=named):
        check(**changes)


@pytest.mark.parametrize("tokens", [[], [128], [-1], [1, 2**70]])
def test_prompts_that_are_no_tokens_are_refused(tokens):
    with pytest.raises(InvalidRequest):
        check(tokens)


def test_a_full_queue_refuses():
    check(num_unfinished=2)

    with pytest.raises(QueueFull):
        check(num_unfinished=3)
