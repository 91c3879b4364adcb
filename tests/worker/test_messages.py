"""What goes between the processes comes out as it went in, however the socket cuts it."""

import random

import pytest

from deepseek_worker.admission import Limits
from deepseek_worker.messages import (
    Abort,
    Ask,
    Compile,
    Compiled,
    Facts,
    Frames,
    Status,
    Step,
    Submit,
    frame,
    read_from_engine,
    read_to_engine,
)
from deepseek_worker.progress import Failure, Progress
from deepseek_worker.sequence import Output, Request, SamplingParams, Structure, TokenLogprobs
from deepseek_worker.stats import EngineStats

STRUCTURE = Structure("start: /a/", "structured_outputs.regex", ("</think>",))
SAMPLING = SamplingParams(
    temperature=0.6,
    top_p=0.9,
    top_k=5,
    seed=2**63 - 1,
    max_tokens=7,
    stop_token_ids=(1, 2),
    logprobs=3,
    logit_bias=((5, -100.0), (6, 2.5)),
)
STATS = EngineStats(
    *range(8), {"weights": 10**12}, {"weights": 1, "kv_cache": 2}, *range(6), True, *range(4)
)

TO_ENGINE = [
    Submit("cmpl-1-0", (1, 2, 2**31 - 1), SAMPLING, "salt", STRUCTURE, None),
    Submit("cmpl-1-1", tuple(range(100_000)), SamplingParams(), "", None, "terse"),
    Abort("cmpl-1-0"),
    Compile(4, STRUCTURE),
    Ask(5),
]
FROM_ENGINE = [
    Step([]),
    Step(
        [
            Output("a", (7,)),
            Output("b", (8, 9), "stop", 9, cached_tokens=16),
            Output("c", finish_reason="error", error="ärger", error_reason="NonFiniteLogits"),
            Output(
                "d",
                (1,),
                logprobs=(TokenLogprobs(1, -0.25, 2, ((4, -0.1), (1, -0.25))),),
                prompt_logprobs=(None, TokenLogprobs(3, float("-inf"), 1)),
            ),
        ]
    ),
    Compiled(4, None),
    Compiled(4, "no grammar"),
    Status(None, Progress("loading", 0.25, 1.0, 2.0), None, None),
    Status(
        6,
        Progress("failed", 1.0, 1.0, 2.0, Failure("DeviceFault", "gone", 1)),
        STATS,
        Facts("cuda", 151_936, Limits(4096, 256, 8192, 1024), True),
    ),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_what_goes_to_the_engine_arrives(message):
    (body,) = Frames().feed(frame(message))

    assert read_to_engine(body) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_what_comes_from_the_engine_arrives(message):
    (body,) = Frames().feed(frame(message))

    assert read_from_engine(body) == message


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_put_together_however_they_are_cut(seed):
    draw = random.Random(seed)
    stream = b"".join(map(frame, FROM_ENGINE * 3))
    frames, seen, at = Frames(), [], 0

    while at < len(stream):
        end = at + draw.choice([1, 2, 3, 7, 100, 1000])
        seen += [read_from_engine(body) for body in frames.feed(stream[at:end])]
        at = end

    assert seen == FROM_ENGINE * 3


def test_a_request_arrives_without_its_guide():
    request = Request("r", (1, 2), SAMPLING, "salt", STRUCTURE, "terse", guide=object())

    arrived = Submit.of(request).request()

    assert arrived == request
    assert arrived.guide is None


def test_a_token_of_a_step_costs_few_bytes():
    one, many = (
        len(frame(Step([Output("cmpl-" + "0" * 32 + "-0", (100_000,))] * n))) for n in (1, 257)
    )

    assert (many - one) / 256 < 60
