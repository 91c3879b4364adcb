"""How requests are cut into steps, and whose steps they share, changes no answer."""

import dataclasses
import functools
import itertools
import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_worker.config import EngineConfig
from deepseek_worker.sequence import Request, SamplingParams
from deepseek_worker.startup import graph_runner, load_engine

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, key and value, heads, head_dim, float32
CONTEXT = 48


class Wandering:
    """A guide to a few tokens at each place, which depend on all before."""

    error = None

    def __init__(self, length):
        self.seed, self.left = length, length

    def allowed_tokens(self):
        draw = random.Random(self.seed)
        return sum(1 << token for token in draw.sample(range(60, 128), 5)).to_bytes(16, "little")

    def advance(self, token_id):
        self.seed, self.left = 31 * self.seed + token_id, self.left - 1

    @property
    def is_finished(self):
        return self.left == 0


DRAWN = st.fixed_dictionaries(
    {"temperature": st.just(0.8), "seed": st.integers(0, 2**63 - 1)},
    optional={"top_p": st.just(0.9), "top_k": st.just(5), "min_p": st.just(0.05)},
)
WISHES = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from((0, 1, 2, 8, 28, 28))},
    optional={
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "stop_token_ids": st.sampled_from(((7,), (7, 9), tuple(range(60)))),
        "min_tokens": st.integers(1, 5),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(0.4),
        "presence_penalty": st.just(0.8),
        "logit_bias": st.just(((3, 5.0), (90, -9.0))),
    },
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, and the steps before which it comes and goes."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    guided_tokens: int
    adapter: str | None = None
    salt: str = ""
    comes: int = 0
    goes: int | None = None

    def request(self, name):
        guide = Wandering(self.guided_tokens) if self.guided_tokens else None
        return Request(
            name, self.prompt, self.sampling, self.salt, adapter=self.adapter, guide=guide
        )


@st.composite
def asked(draw):
    kind = draw(st.integers(0, 1))
    length = draw(st.sampled_from((1, 2, 3, 4, 7, 8, 9, 15, 16, 17)))
    shared = [(13 * index + 29 * kind + 5) % 120 for index in range(length)]
    prompt = shared + draw(st.lists(st.integers(0, 119), max_size=2))
    sampling = {"temperature": 0.0} | draw(WISHES) | draw(st.one_of(st.just({}), DRAWN))
    return Asked(
        tuple(prompt),
        SamplingParams(**sampling),
        guided_tokens=draw(st.sampled_from((0, 0, 0, 12))),
        adapter=draw(st.sampled_from((None, None, "one", "two"))),
        salt=draw(st.sampled_from(("", "", "", "salt"))),
        comes=draw(st.sampled_from((0, 0, 0, 3, 9))),
        goes=draw(st.sampled_from((None, None, None, 12))),
    )


# Three of these need more than twice the smallest pool.
LONG = [
    Asked((5, 8, first), SamplingParams(temperature=0, max_tokens=36), guided_tokens=0)
    for first in range(3)
]


def choice(one, number):
    """One more answer to a request, as the API asks for it."""
    sampling = one.sampling
    if sampling.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=sampling.seed ^ number)
    return dataclasses.replace(one, sampling=sampling)


OPTIONS = st.fixed_dictionaries(
    {
        "max_batch_tokens": st.sampled_from((1, 2, 7, 8, 16, 48)),
        "max_running_requests": st.sampled_from((2, 8, 8)),
        "kv_cache_bytes": st.sampled_from((48, 48, 480)).map(lambda n: n * TOKEN_BYTES),
        "page_tokens": st.sampled_from((1, 4, 8)),
        "prefix_cache": st.booleans(),
        "kv_cache": st.sampled_from(("auto", "auto", "int8")),
    }
)


@pytest.fixture(scope="module", params=[None, graph_runner], ids=["torch", "ahead"])
def load(request, tiny, make_adapter):
    """Makes engines whose runner has its results at once, and ones that keep ahead."""
    folder, model = tiny
    lora = [
        {"name": name, "path": make_adapter(model, seed=seed)}
        for seed, name in enumerate(("one", "two"))
    ]

    def load(**options):
        options = {"device": "cpu", "max_context_tokens": CONTEXT, "lora": lora} | options
        return load_engine(EngineConfig(model=folder, **options), lambda _: None, request.param)

    return load


@pytest.fixture(scope="module")
def alone(load):
    """The answer to a request that has the engine for itself, its prompt read in one step."""
    options = {"prefix_cache": False, "max_running_requests": 1, "max_batch_tokens": CONTEXT}
    options["kv_cache_bytes"] = CONTEXT * TOKEN_BYTES
    engines = {kind: load(kv_cache=kind, **options) for kind in ("auto", "int8")}
    number = functools.partial(pytest.approx, abs=1e-3)

    def alone(one, kv_cache):
        requests = [dataclasses.replace(one, comes=0, goes=None)]
        return answer(run(engines[kv_cache], requests)[0], number)

    return alone


def run_short(engine, calls, is_late):
    """Have memory run out in these of the engine's forward passes, where they can be divided.

    Late is after everything was launched, as on a GPU that has no room for logprobs.
    """
    forward, number = engine.runner.forward, itertools.count()

    def runs_out(inputs):
        is_short = next(number) in calls and sum(e.num_tokens for e in inputs.entries) > 1
        if is_short and not is_late:
            raise torch.OutOfMemoryError
        results = forward(inputs)
        if is_short:
            raise torch.OutOfMemoryError
        return results

    # Some runners have slots, or are frozen.
    object.__setattr__(engine.runner, "forward", runs_out)


def run(engine, everyone):
    """All outputs of each request."""
    outputs = [[] for _ in everyone]
    steps = 0
    while engine.has_work() or any(one.comes >= steps for one in everyone):
        for index, one in enumerate(everyone):
            if one.comes == steps:
                engine.validate(one.request(str(index)))
                engine.add(one.request(str(index)))
            if one.goes == steps:
                outputs[index] += engine.abort(str(index))
        for output in engine.step():
            outputs[int(output.request_id)].append(output)
        engine.scheduler.check()
        steps += 1
    return outputs


def answer(outputs, number=float):
    """Why it ends, its tokens, their logprobs, and the prompt's, which come once if at all."""

    def plain(row):
        top = [(token, number(logprob)) for token, logprob in row.top]
        return row.token_id, row.rank, number(row.logprob), top

    assert [o.finish_reason is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
    tokens = [token for o in outputs for token in o.token_ids]
    rows = [plain(row) for o in outputs for row in o.logprobs]
    scored = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    prompt = [[row and plain(row) for row in rows] for rows in scored]
    return (outputs[-1].finish_reason, outputs[-1].stop_token_id), tokens, rows, prompt


@given(
    num_long=st.integers(0, 3),
    others=st.lists(asked(), min_size=2, max_size=5),
    num_choices=st.sampled_from((1, 1, 3)),
    options=OPTIONS,
    short_calls=st.sampled_from(((), (), (1, 4, 5))),
    is_late=st.booleans(),
)
@settings(max_examples=15)
def test_an_answer_is_the_one_that_the_request_gets_alone(
    load, alone, num_long, others, num_choices, options, short_calls, is_late
):
    engine = load(**options)
    run_short(engine, short_calls, is_late)
    everyone = LONG[:num_long] + others + [choice(others[0], n) for n in range(1, num_choices)]

    outputs = run(engine, everyone)

    for one, given_ in zip(everyone, outputs, strict=True):
        end, tokens, rows, prompt = answer(given_)
        wanted_end, wanted_tokens, wanted_rows, wanted_prompt = alone(one, options["kv_cache"])
        if end == ("abort", None):
            assert tokens == wanted_tokens[: len(tokens)]
            assert rows == wanted_rows[: len(rows)]
        else:
            assert (end, tokens) == (wanted_end, wanted_tokens)
            assert rows == wanted_rows
            assert prompt == wanted_prompt
            asks = one.sampling.prompt_logprobs is not None
            assert [len(scored) for scored in prompt] == [len(one.prompt)] * asks
        assert all(output.cached_tokens < len(one.prompt) for output in given_)
    stats = engine.stats()
    assert (stats.held_pages, stats.waiting_pages) == (0, 0)
    assert stats.num_generated_tokens == sum(len(o.token_ids) for out in outputs for o in out)
