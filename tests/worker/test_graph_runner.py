"""The GPU's runner on a CPU: the same steps, called instead of captured, one step ahead."""

import dataclasses
import itertools
import random

import pytest
import torch

from deepseek_worker.graph_runner import MAX_CHUNKS, Step, graph_bytes, step_shapes
from deepseek_worker.sequence import Request, SamplingParams
from deepseek_worker.startup import graph_runner
from deepseek_worker.step_arrays import StepLayout, StepShape

PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4


@pytest.fixture
def make_both(tiny, make_engine):
    """The reference engine and one that keeps ahead."""

    def make(**options):
        options = {"max_running_requests": 8, "max_batch_tokens": 64} | options
        return make_engine(tiny[0], **options), make_engine(tiny[0], graph_runner, **options)

    return make


def request(name, prompt, **sampling):
    options = {"temperature": 0.0, "max_tokens": 8}
    return Request(name, tuple(prompt), SamplingParams(**(options | sampling)))


def prompt(length, seed=0):
    return [(index * 13 + seed * 29 + 5) % 120 for index in range(length)]


def tokens_of(outputs):
    return {name: [t for o in list_ for t in o.token_ids] for name, list_ in outputs.items()}


def test_greedy_answers_equal_the_reference_in_mixed_batches(make_both, generate):
    reference, ahead = make_both()
    prompts = [prompt(length, length) for length in (1, 2, 15, 16, 17, 40, 90, 33, 5, 60)]

    assert generate(ahead, prompts, max_tokens=10) == generate(reference, prompts, max_tokens=10)


@pytest.mark.parametrize("seed", range(6))
def test_prefixes_chunks_and_preemption_change_no_token(seed, make_both, generate):
    draw = random.Random(seed)
    shared = prompt(96, seed)
    prompts = []
    for index in range(8):
        length = 16 * draw.randint(1, 5) + draw.choice((-1, 0, 1))
        prompts.append(shared[:length] + prompt(draw.randint(0, 3), index))
    reference, ahead = make_both(
        kv_cache_bytes=draw.randint(8, 14) * PAGE_BYTES,
        max_batch_tokens=draw.choice((16, 33, 64)),
        max_context_tokens=128,
    )

    for _ in range(2):
        assert generate(ahead, prompts, max_tokens=6) == generate(reference, prompts, max_tokens=6)
    assert ahead.stats().held_pages == 0


PENALTIES = {
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 2.0, "frequency_penalty": 0.5},
    "biases": {"logit_bias": ((3, 100.0), (7, -100.0))},
    "least tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(60))},
    "all": {
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4,
        "logit_bias": ((3, 5.0), (90, -9.0)), "min_tokens": 4, "stop_token_ids": (3, 17),
        "temperature": 0.9, "top_p": 0.9, "seed": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("sampling", [{}, *PENALTIES.values()], ids=["none", *PENALTIES])
def test_a_step_is_committed_after_the_next_is_launched(sampling, make_both):
    _, ahead = make_both()
    ahead.add(request("a", prompt(9), **(sampling | {"max_tokens": 3})))

    produced = []
    while ahead.has_work():
        produced.append([o.token_ids for o in ahead.step()])

    assert [len(outputs) for outputs in produced] == [0, 1, 1, 1]


def test_an_end_token_drops_what_was_computed_ahead(make_both, complete):
    reference, ahead = make_both()
    third = tokens_of(complete(reference, [request("a", prompt(9), max_tokens=3)]))["a"][-1]
    asked = [request("a", prompt(9), stop_token_ids=(third,), max_tokens=20)]

    outputs = complete(ahead, asked)["a"]

    assert [o.finish_reason for o in outputs] == [None, None, "stop"]
    assert outputs[-1].token_ids == (third,)
    assert ahead.stats().held_pages == 0
    assert ahead.stats().num_generated_tokens == 3


def test_seeds_bring_the_same_tokens_in_any_company(make_both, complete):
    _, alone = make_both()
    _, beside = make_both()
    wanted = request("a", prompt(9), temperature=1.0, top_p=0.9, seed=7, max_tokens=12)
    others = [request(str(n), prompt(20 + n, n), temperature=1.0) for n in range(6)]

    first = tokens_of(complete(alone, [wanted]))["a"]
    second = tokens_of(complete(beside, [*others, wanted]))["a"]

    assert first == second
    assert len(set(first)) > 3


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0, "frequency_penalty": 0.5},
        {"logit_bias": ((3, 100.0), (7, -100.0))},
        {"min_tokens": 6, "stop_token_ids": tuple(range(60))},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_what_needs_logits_on_the_host_equals_the_reference(sampling, make_both, complete):
    reference, ahead = make_both()
    requests = [request("a", prompt(50), **sampling), request("b", prompt(9, 4))]

    expected, outputs = complete(reference, requests), complete(ahead, requests)

    assert tokens_of(outputs) == tokens_of(expected)
    for name in ("a", "b"):
        for given, wanted in zip(outputs[name], expected[name], strict=True):
            assert_close(given.logprobs, wanted.logprobs)
            assert_close(given.prompt_logprobs, wanted.prompt_logprobs)


@pytest.mark.parametrize("length", [8, 12])
@pytest.mark.parametrize("max_tokens", [0, 1, 8])
def test_prompt_logprobs_come_also_where_their_pages_go_before_they_are_seen(
    max_tokens, length, make_both, complete
):
    # The last chunk is launched, and the next step's tokens take its pages.
    reference, ahead = make_both(
        page_tokens=1,
        kv_cache_bytes=40 * PAGE_BYTES // 16,
        max_context_tokens=40,
        max_batch_tokens=3,
    )
    older = [request(str(n), prompt(6, n), max_tokens=30) for n in range(2)]
    scored = request("a", prompt(length, 3), max_tokens=max_tokens, prompt_logprobs=1)

    outputs = complete(ahead, [*older, scored])["a"]

    expected = complete(reference, [scored])["a"]
    assert ahead.stats().num_preemptions > 0
    assert tokens_of({"a": outputs}) == tokens_of({"a": expected})
    (given,) = (o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None)
    (wanted,) = (o.prompt_logprobs for o in expected if o.prompt_logprobs is not None)
    assert_close(given, wanted)


def penalized_requests():
    """Greedy ones with each kind of penalties among some without."""
    changes = {"max_tokens": 30, "temperature": 0.0}
    return [
        request(f"{name} {seed}", prompt(20 + 3 * seed, seed), **(sampling | changes))
        for seed in range(2)
        for name, sampling in [("none", {}), *PENALTIES.items()]
    ]


@pytest.mark.parametrize("pages", [8, 100])
def test_penalties_beside_each_other_and_after_preemptions_equal_the_reference(
    pages, make_both, complete
):
    reference, ahead = make_both(kv_cache_bytes=pages * PAGE_BYTES, max_context_tokens=96)

    for _ in range(2):
        # The second time all slots have had somebody.
        outputs = tokens_of(complete(ahead, penalized_requests()))
        assert outputs == tokens_of(complete(reference, penalized_requests()))

    assert bool(ahead.stats().num_preemptions) == (pages == 8)
    assert ahead.runner._penalties.num_bytes <= 8 * (128 * 4 + 1024 * 8)


def test_requests_without_penalties_take_no_memory_for_them(make_both, complete):
    _, ahead = make_both()

    complete(ahead, [request("a", prompt(9), temperature=0.7, top_k=4)])

    assert ahead.runner._penalties.num_bytes == 0


@pytest.mark.parametrize("sampling", PENALTIES.values(), ids=PENALTIES)
def test_a_step_that_is_repeated_after_its_tokens_were_chosen_gives_the_same(
    sampling, make_both, complete
):
    _, ahead = make_both()
    _, other = make_both()
    requests = [
        request("a", prompt(20), **(sampling | {"max_tokens": 20})),
        request("b", prompt(30, 1), max_tokens=20),
    ]
    expected = tokens_of(complete(ahead, requests))
    choose, calls = other.runner._choose_adjusted, iter(range(10**6))

    def runs_out(*given):
        choose(*given)
        if next(calls) in (0, 4):
            raise torch.OutOfMemoryError("CUDA out of memory")

    object.__setattr__(other.runner, "_choose_adjusted", runs_out)

    assert tokens_of(complete(other, requests)) == expected
    assert other.stats().num_out_of_memory_retries == 2


class Counting:
    """A guide to ever the next token after the last, which has to be known for that."""

    error = None

    def __init__(self, first, length):
        self.next, self.left = first, length

    def allowed_tokens(self):
        return (1 << self.next).to_bytes(16, "little")

    def advance(self, token_id):
        assert token_id == self.next
        self.next, self.left = self.next + 1, self.left - 1

    @property
    def is_finished(self):
        return self.left == 0


@pytest.mark.parametrize("pages", [8, 100])
def test_a_guide_knows_every_token_before_the_next(pages, make_both, complete):
    def guided():
        free = [request(f"f{seed}", prompt(20, seed), max_tokens=12) for seed in range(3)]
        led = [
            dataclasses.replace(
                request(f"g{seed}", prompt(15, seed), max_tokens=40, temperature=seed),
                guide=Counting(20 * seed, 30),
            )
            for seed in range(4)
        ]
        return [*free, *led]

    reference, ahead = make_both(kv_cache_bytes=pages * PAGE_BYTES, max_context_tokens=96)

    outputs = complete(ahead, guided())

    tokens = tokens_of(outputs)
    assert tokens == tokens_of(complete(reference, guided()))
    assert all(tokens[f"g{seed}"] == list(range(20 * seed, 20 * seed + 30)) for seed in range(4))
    assert [outputs[f"g{seed}"][-1].finish_reason for seed in range(4)] == ["stop"] * 4
    assert bool(ahead.stats().num_preemptions) == (pages == 8)
    assert ahead.stats().held_pages == 0


def assert_close(given, wanted):
    assert (given is None) == (wanted is None)
    for one, other in zip(given or (), wanted or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2}, {"frequency_penalty": 0.5}], ids=str)
def test_logits_that_are_not_finite_end_their_request_alone(sampling, make_both, complete):
    reference, ahead = make_both()
    good = complete(reference, [request("good", prompt(20))])["good"]
    ahead.runner._decoder.embedding.weight[77] = float("nan")

    bad = request("bad", [*prompt(19), 77], **sampling)
    outputs = complete(ahead, [bad, request("good", prompt(20))])

    assert outputs["bad"][-1].error_reason == "NonFiniteLogits"
    assert tokens_of(outputs)["good"] == tokens_of({"good": good})["good"]
    assert ahead.stats().held_pages == 0


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_running_out_of_memory_splits_the_batch(num_failures, make_both, complete):
    reference, ahead = make_both()
    requests = [request(str(n), prompt(20 + n, n)) for n in range(6)]
    expected = complete(reference, requests)
    forward = ahead.runner.forward
    calls = iter(range(10**6))

    def runs_out(inputs):
        # The first steps pass, so that a step is under way when memory runs out.
        if 2 <= next(calls) < 2 + num_failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(inputs)

    object.__setattr__(ahead.runner, "forward", runs_out)

    outputs = complete(ahead, requests)

    assert tokens_of(outputs) == tokens_of(expected)
    assert ahead.stats().num_out_of_memory_retries == num_failures


def test_a_failure_comes_after_the_tokens_before_it(make_both, complete):
    reference, ahead = make_both()
    expected = tokens_of(complete(reference, [request("a", prompt(9), max_tokens=2)]))["a"]
    forward = ahead.runner.forward
    calls = iter(range(10**6))

    def breaks(inputs):
        if next(calls) >= 2:
            raise ValueError("broken")
        return forward(inputs)

    object.__setattr__(ahead.runner, "forward", breaks)

    outputs = complete(ahead, [request("a", prompt(9), max_tokens=8)])["a"]

    assert [t for o in outputs for t in o.token_ids] == expected
    assert outputs[-1].error_reason == "InternalError"


def test_random_requests_and_aborts_leave_nothing_behind(make_both):
    draw = random.Random(11)
    _, engine = make_both(kv_cache_bytes=9 * PAGE_BYTES, max_context_tokens=96)
    live: set[str] = set()
    for number in range(100):
        tokens = prompt(draw.randint(1, 14), draw.randint(0, 5))
        engine.add(request(str(number), tokens, max_tokens=draw.randint(0, 60)))
        live.add(str(number))
        if draw.random() < 0.3:
            name = draw.choice(sorted(live))
            engine.abort(name)
            live.discard(name)
        for output in engine.step():
            if output.finish_reason is not None:
                live.discard(output.request_id)
        engine.scheduler.check()
    while engine.has_work():
        live -= {o.request_id for o in engine.step() if o.finish_reason is not None}

    assert not live
    assert engine._sequences == {}
    stats = engine.stats()
    assert stats.held_pages == 0
    assert stats.num_preemptions > 0


def test_more_prompts_than_a_step_has_room_for_take_several(make_both, generate):
    reference, ahead = make_both(max_running_requests=80, max_batch_tokens=400)
    prompts = [prompt(3, seed) for seed in range(MAX_CHUNKS + 9)]

    answers = generate(ahead, prompts, max_tokens=3)

    assert answers == generate(reference, prompts, max_tokens=3)


@pytest.mark.parametrize(("running", "tokens"), [(1, 1), (1, 8), (3, 5), (256, 8192), (300, 1000)])
def test_some_shape_holds_every_step(running, tokens):
    decoding, *ladders = step_shapes(running, tokens)

    assert decoding[-1] == StepShape(running, running, 0, running)
    assert sum(map(len, (decoding, *ladders))) < 250
    assert [ladder[-1].tokens for ladder in ladders] == [tokens] * len(ladders)
    assert [ladder[-1].decoding for ladder in ladders] == sorted(
        ladder[-1].decoding for ladder in ladders
    )
    assert ladders[0][-1].decoding == 0
    assert ladders[-1][-1].decoding == running
    for ladder in (decoding, *ladders):
        assert ladder == sorted(ladder)
        for smaller, larger in itertools.pairwise(ladder[:-1]):
            assert larger.tokens <= max(smaller.tokens + 16, smaller.tokens * 1.13)
    for ladder, narrower in zip(ladders[2:], ladders[1:-1], strict=True):
        # What is left out of a ladder fits the narrower one.
        assert ladder[0].tokens == 16 or narrower[-1].decoding >= ladder[0].decoding // 4


def test_what_the_driver_keeps_grows_with_steps_and_layers():
    """1.38 MiB were measured for a step of 28 layers."""
    num_steps = sum(map(len, step_shapes(256, 8192)))

    assert graph_bytes(256, 8192, 28) == pytest.approx(num_steps * 1.38 * 2**20, rel=0.05)


def test_a_first_capture_without_memory_leaves_the_others_a_pool_that_torch_takes(
    make_both, monkeypatch
):
    """Of a pool whose only graph was given up, torch's allocator fails with an internal error."""
    _, ahead = make_both()
    pools = iter(["given up", "taken"])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    used = []

    def capture(_, pool):
        used.append(pool)
        if len(used) == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Step, "capture", capture)
    runner = ahead.runner
    runner._fitting = [step for ladder in runner._ladders for step in ladder]

    runner.capture(lambda _: None)

    assert used == ["given up"] + ["taken"] * (len(runner._fitting) - 1)


def test_arrays_lie_apart_and_unused_page_tables_are_not_copied():
    layout = StepLayout(StepShape(40, 8, 3, 8), max_pages=5, has_adapters=True)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    numbers, tensors = layout.numbers(memory), layout.tensors(memory)
    names = list(numbers.__slots__)

    for value, name in enumerate(names):
        getattr(numbers, name).fill(value)

    for value, name in enumerate(names):
        assert getattr(tensors, name).unique().tolist() == [value]
    assert layout.num_bytes - layout.used_bytes(8) == 0
    assert layout.num_bytes - layout.used_bytes(2) == 6 * 5 * 4


def test_without_adapters_a_step_brings_no_numbers_for_them():
    shape = StepShape(40, 8, 3, 8)
    without, with_ = (StepLayout(shape, 5, has_adapters=has) for has in (False, True))
    memory = torch.zeros(with_.num_bytes, dtype=torch.uint8)

    assert without.tensors(memory).adapters.shape == (0,)
    assert with_.tensors(memory).adapters.shape == (40,)
    assert with_.num_bytes - without.num_bytes == 4 * 40
