"""The engine on tiny models: answers, limits, failures, and memory that comes back."""

import dataclasses
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek_worker.errors import RequestTooLarge
from deepseek_worker.sequence import Request, SamplingParams

PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, key and value, heads, head_dim, tokens, float32
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def request(name, prompt, **sampling):
    options = {"temperature": 0.0, "max_tokens": 8}
    return Request(name, tuple(prompt), SamplingParams(**(options | sampling)))


def prompt(length, seed=0):
    return [(index * 13 + seed * 29 + 5) % 120 for index in range(length)]


@torch.inference_mode()
def greedy(model, tokens, num_new):
    tokens = list(tokens)
    for _ in range(num_new):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-num_new:] if num_new else []


def test_greedy_answers_equal_transformers_in_a_mixed_batch(tiny, make_engine, generate):
    folder, model = tiny
    prompts = [prompt(length, length) for length in (1, 2, 15, 16, 17, 40, 90)]

    answers = generate(make_engine(folder, max_batch_tokens=24), prompts, max_tokens=10)

    assert answers == [greedy(model, tokens, 10) for tokens in prompts]


@pytest.mark.parametrize("seed", range(40))
def test_shared_prefixes_at_page_borders_under_pressure_change_no_token(
    seed, tiny, make_engine, generate, complete
):
    draw = random.Random(seed)
    folder, _ = tiny
    shared = prompt(96, seed)
    prompts = []
    for index in range(8):
        length = 16 * draw.randint(1, 5) + draw.choice((-1, 0, 1))
        prompts.append(shared[:length] + prompt(draw.randint(0, 3), index))
    options = {"max_tokens": draw.randint(1, 8)}
    expected = generate(
        make_engine(folder, prefix_cache=False, kv_cache_bytes=400 * PAGE_BYTES), prompts, **options
    )
    engine = make_engine(
        folder,
        kv_cache_bytes=draw.randint(8, 14) * PAGE_BYTES,
        max_batch_tokens=draw.choice((16, 33, 256)),
        max_context_tokens=128,
    )

    assert generate(engine, prompts, **options) == expected
    assert generate(engine, prompts, **options) == expected
    assert engine.stats().held_pages == 0


def test_a_repeated_prompt_is_read_from_the_cache(tiny, make_engine, complete):
    engine = make_engine(tiny[0])
    first = complete(engine, [request("a", prompt(50))])["a"]

    second = complete(engine, [request("b", prompt(50))])["b"]

    assert first[-1].cached_tokens == 0
    assert second[-1].cached_tokens == 48
    assert [o.token_ids for o in first] == [o.token_ids for o in second]


def test_salts_keep_the_cache_apart(tiny, make_engine, complete):
    engine = make_engine(tiny[0])
    complete(engine, [Request("a", tuple(prompt(50)), GREEDY, cache_salt="one")])

    other = complete(engine, [Request("b", tuple(prompt(50)), GREEDY, cache_salt="two")])["b"]

    assert other[-1].cached_tokens == 0


def test_twice_the_pool_of_demand_ends_by_preemption(tiny, make_engine, generate):
    folder, model = tiny
    engine = make_engine(folder, kv_cache_bytes=8 * PAGE_BYTES, max_context_tokens=100)
    prompts = [prompt(20, seed) for seed in range(8)]

    answers = generate(engine, prompts, max_tokens=24)

    assert answers == [greedy(model, tokens, 24) for tokens in prompts]
    assert engine.stats().num_preemptions > 0


def test_an_end_token_finishes_and_is_named(tiny, make_engine, complete):
    folder, model = tiny
    third = greedy(model, prompt(9), 3)[-1]

    outputs = complete(
        make_engine(folder), [request("a", prompt(9), stop_token_ids=(third,), max_tokens=20)]
    )["a"]

    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_token_id == third
    assert outputs[-1].token_ids == (third,)
    assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)


class Spelled:
    """A guide to a given answer, token by token."""

    def __init__(self, *tokens, error_after=99):
        self.left = list(tokens)
        self.num_taken, self.error_after = 0, error_after

    def allowed_tokens(self):
        return (1 << self.left[0]).to_bytes(16, "little")

    def advance(self, token_id):
        assert token_id == self.left.pop(0)
        self.num_taken += 1

    @property
    def is_finished(self):
        return not self.left

    @property
    def error(self):
        return "too hard" if self.num_taken >= self.error_after else None


def guided(name, length, guide, **sampling):
    return dataclasses.replace(request(name, prompt(length), **sampling), guide=guide)


def test_a_guide_leads_its_own_answer_and_ends_it(tiny, make_engine, complete, generate):
    folder, _ = tiny
    (free,) = generate(make_engine(folder), [prompt(20)])
    requests = [
        guided("g", 20, Spelled(7, 100, 3)),
        request("free", prompt(20)),
        guided("random", 30, Spelled(1, 2), temperature=1.5),
        guided("cut", 20, Spelled(9, 9, 9), max_tokens=2),
    ]

    outputs = complete(make_engine(folder), requests)

    tokens = {name: [t for o in outs for t in o.token_ids] for name, outs in outputs.items()}
    assert tokens == {"g": [7, 100, 3], "free": free, "random": [1, 2], "cut": [9, 9]}
    ends = {
        name: (outs[-1].finish_reason, outs[-1].stop_token_id) for name, outs in outputs.items()
    }
    # The last token belongs to the answer: the grammar ended it, not the token.
    assert ends == {
        "g": ("stop", None),
        "free": ("length", None),
        "random": ("stop", None),
        "cut": ("length", None),
    }


def test_a_guide_keeps_its_place_over_a_preemption(tiny, make_engine, complete):
    folder, _ = tiny
    engine = make_engine(folder, kv_cache_bytes=4 * PAGE_BYTES)
    spelled = {str(seed): [seed + 1] * 30 for seed in range(3)}

    outputs = complete(
        engine,
        [guided(name, 15, Spelled(*tokens), max_tokens=40) for name, tokens in spelled.items()],
    )

    assert engine.stats().num_preemptions
    assert {n: [t for o in outs for t in o.token_ids] for n, outs in outputs.items()} == spelled


def test_a_guide_that_fails_ends_its_request_alone(tiny, make_engine, complete):
    folder, _ = tiny
    engine = make_engine(folder)

    outputs = complete(
        engine,
        [guided("bad", 20, Spelled(7, 7, 7, error_after=2)), request("good", prompt(20))],
    )

    assert (outputs["bad"][-1].finish_reason, outputs["bad"][-1].error_reason) == (
        "error",
        "GuideFailed",
    )
    assert outputs["bad"][-1].error == "too hard"
    assert outputs["good"][-1].finish_reason == "length"
    assert engine.stats().held_pages == 0


def test_min_tokens_holds_the_end_token_back(tiny, make_engine, generate):
    folder, model = tiny
    first = greedy(model, prompt(9), 1)[0]

    (answer,) = generate(
        make_engine(folder), [prompt(9)], stop_token_ids=(first,), min_tokens=5, max_tokens=6
    )

    assert first not in answer[:5]
    assert len(answer) >= 5


def test_no_tokens_asked_reads_the_prompt_only(tiny, make_engine, complete):
    (output,) = complete(make_engine(tiny[0]), [request("a", prompt(9), max_tokens=0)])["a"]

    assert output.token_ids == ()
    assert output.finish_reason == "length"


def test_without_max_tokens_the_context_is_filled(tiny, make_engine, generate):
    engine = make_engine(tiny[0], max_context_tokens=40)

    (answer,) = generate(engine, [prompt(30)], max_tokens=None)

    assert len(answer) == 10


@torch.inference_mode()
@pytest.mark.parametrize("length", [1, 16, 17, 49, 50])
def test_prompt_logprobs_equal_transformers_also_in_chunks(tiny, make_engine, complete, length):
    folder, model = tiny
    tokens = prompt(length)
    engine = make_engine(folder, max_batch_tokens=16)

    (output,) = complete(engine, [request("a", tokens, max_tokens=0, prompt_logprobs=3)])["a"]

    expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    scored = output.prompt_logprobs
    assert len(scored) == length
    assert scored[0] is None
    for position, entry in enumerate(scored[1:]):
        assert entry.token_id == tokens[position + 1]
        assert entry.logprob == pytest.approx(
            float(expected[position, tokens[position + 1]]), abs=1e-3
        )
        assert [token for token, _ in entry.top] == expected[position].topk(3).indices.tolist()


def test_logprobs_of_the_answer_are_the_models_own(tiny, make_engine, complete):
    outputs = complete(
        make_engine(tiny[0]),
        [request("a", prompt(9), logprobs=2, logit_bias=((3, 100.0),), temperature=0.7, seed=1)],
    )["a"]

    for output in outputs:
        (entry,) = output.logprobs
        assert entry.token_id == 3
        assert entry.rank > 1
        assert entry.top[0][1] > entry.logprob


def test_a_seed_gives_the_same_answer_in_any_company(tiny, make_engine, generate, complete):
    folder, _ = tiny
    sampling = {"temperature": 1.0, "top_p": 0.95, "seed": 42, "max_tokens": 20}
    (alone,) = generate(make_engine(folder), [prompt(9)], **sampling)
    engine = make_engine(folder, kv_cache_bytes=10 * PAGE_BYTES, max_context_tokens=128)
    company = [request(f"c{seed}", prompt(30, seed), temperature=0.8) for seed in range(6)]

    outputs = complete(engine, [*company, request("a", prompt(9), **sampling)])

    assert [token for output in outputs["a"] for token in output.token_ids] == alone


def test_requests_without_seed_differ(tiny, make_engine, generate):
    answers = generate(make_engine(tiny[0]), [prompt(9)] * 4, temperature=1.5, max_tokens=12)

    assert len({tuple(answer) for answer in answers}) > 1


def test_a_request_that_can_never_fit_is_refused_at_once_and_others_go_on(
    tiny, make_engine, generate
):
    engine = make_engine(tiny[0], kv_cache_bytes=8 * PAGE_BYTES)

    assert engine.max_context_tokens == 128
    with pytest.raises(RequestTooLarge, match=r"129 tokens.*128"):
        engine.validate(request("a", prompt(129), max_tokens=0))
    with pytest.raises(RequestTooLarge, match="max_tokens is 100"):
        engine.validate(request("a", prompt(29), max_tokens=100))
    with pytest.raises(RequestTooLarge):
        engine.validate(request("a", prompt(128), max_tokens=None))
    assert len(generate(engine, [prompt(4)])[0]) == 8


def test_aborting_frees_the_pages_before_the_next_step(tiny, make_engine):
    engine = make_engine(tiny[0], prefix_cache=False)
    engine.add(request("a", prompt(50), max_tokens=100))
    engine.step()
    engine.step()

    (output,) = engine.abort("a")

    assert output.finish_reason == "abort"
    assert engine.stats().free_pages == engine.stats().pool_pages
    assert not engine.has_work()
    assert engine.abort("a") == []


def test_two_thousand_requests_with_random_aborts_leave_nothing_behind(tiny, make_engine):
    draw = random.Random(11)
    engine = make_engine(tiny[0], kv_cache_bytes=40 * PAGE_BYTES, max_running_requests=32)
    live: set[str] = set()
    finished = 0
    for number in range(2000):
        tokens = prompt(draw.randint(1, 40), draw.randint(0, 5))
        engine.add(request(str(number), tokens, max_tokens=draw.randint(0, 6)))
        live.add(str(number))
        if draw.random() < 0.3:
            name = draw.choice(sorted(live))
            engine.abort(name)
            live.discard(name)
        if number % 8 == 0:
            for output in engine.step():
                if output.finish_reason is not None:
                    live.discard(output.request_id)
                    finished += 1
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason is not None:
                live.discard(output.request_id)
                finished += 1

    engine.scheduler.check()
    stats = engine.stats()
    assert not live
    assert finished > 1000
    assert (stats.held_pages, stats.waiting_pages, stats.num_waiting) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.pool_pages
    assert engine._sequences == {}


def test_logits_that_are_not_finite_end_their_request_alone(tiny, make_engine, complete):
    engine = make_engine(tiny[0])
    good = complete(engine, [request("good", prompt(20))])["good"]
    decoder = engine.runner._decoder
    decoder.embedding.weight[77] = float("nan")

    outputs = complete(
        engine,
        [
            request("bad", [*prompt(19), 77]),
            request("good again", prompt(20)),
            request("bad too", [*prompt(33), 77, 1, 2]),
        ],
    )

    for name in ("bad", "bad too"):
        assert outputs[name][-1].finish_reason == "error"
        assert outputs[name][-1].error_reason == "NonFiniteLogits"
    assert [o.token_ids for o in outputs["good again"]] == [o.token_ids for o in good]
    assert engine.stats().num_non_finite_logits == 2
    # What the broken ones wrote is neither found nor seen under a mask.
    decoder.embedding.weight[77] = 0
    after = complete(engine, [request(str(n), prompt(3 + 5 * n)) for n in range(12)])
    assert all(outputs[-1].finish_reason == "length" for outputs in after.values())


def test_chunks_of_a_broken_prompt_are_not_found_again(tiny, make_engine, complete):
    engine = make_engine(tiny[0], max_batch_tokens=16)
    decoder = engine.runner._decoder
    row = decoder.embedding.weight[77].clone()
    decoder.embedding.weight[77] = float("nan")
    tokens = [1, 77, *prompt(40)]
    broken = complete(engine, [request("a", tokens)])["a"]
    decoder.embedding.weight[77] = row

    healed = complete(engine, [request("b", tokens)])["b"]

    assert broken[-1].error_reason == "NonFiniteLogits"
    assert healed[-1].finish_reason == "length"
    assert healed[-1].cached_tokens == 0


def test_pages_of_others_with_the_same_broken_beginning_are_not_found_either(
    tiny, make_engine, complete
):
    engine = make_engine(tiny[0], max_batch_tokens=96)
    decoder = engine.runner._decoder
    row = decoder.embedding.weight[77].clone()
    decoder.embedding.weight[77] = float("nan")
    tokens = [1, 77, *prompt(46)]
    # Nobody looks at the logits of the first, whose pages are those that are found. The second
    # computes the same pages in the same step.
    unseen = request("unseen", tokens, max_tokens=0)
    seen = request("seen", [*tokens, *prompt(16)])
    outputs = complete(engine, [unseen, seen])
    decoder.embedding.weight[77] = row

    healed = complete(engine, [request("healed", tokens)])["healed"]

    assert outputs["unseen"][-1].finish_reason == "length"
    assert outputs["seen"][-1].error_reason == "NonFiniteLogits"
    assert outputs["seen"][-1].cached_tokens == 0
    assert healed[-1].finish_reason == "length"
    assert healed[-1].cached_tokens == 0


def test_a_request_that_fails_leaves_what_is_right_to_others(tiny, make_engine, complete):
    engine = make_engine(tiny[0])
    complete(engine, [request("first", prompt(33))])
    forward = engine.runner.forward

    def runs_out(inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    object.__setattr__(engine.runner, "forward", runs_out)
    failed = complete(engine, [request("fails", prompt(33))])["fails"]
    object.__setattr__(engine.runner, "forward", forward)

    again = complete(engine, [request("again", prompt(33))])["again"]

    assert failed[-1].error_reason == "OutOfMemory"
    assert again[-1].cached_tokens == 32


def test_prompt_logprobs_that_are_not_finite_are_an_error(tiny, make_engine, complete):
    engine = make_engine(tiny[0])
    engine.runner._decoder.embedding.weight[77] = float("nan")

    (output,) = complete(engine, [request("a", [5, 77, 9], max_tokens=0, prompt_logprobs=2)])["a"]

    assert output.error_reason == "NonFiniteLogits"
    assert output.prompt_logprobs is None


def test_an_exception_in_the_forward_pass_ends_only_its_cause(tiny, make_engine, complete):
    engine = make_engine(tiny[0])
    forward = engine.runner.forward

    def breaks_on_77(inputs):
        if 77 in inputs.token_ids.tolist():
            raise RuntimeError("device-side assert")
        return forward(inputs)

    object.__setattr__(engine.runner, "forward", breaks_on_77)

    outputs = complete(
        engine, [request("bad", [1, 77, 2]), *[request(str(n), prompt(9, n)) for n in range(5)]]
    )

    assert outputs["bad"][-1].error_reason == "InternalError"
    assert "device-side assert" in outputs["bad"][-1].error
    for number in range(5):
        assert outputs[str(number)][-1].finish_reason in ("length", "error")


@pytest.mark.parametrize("num_failures", [1, 2, 5])
def test_running_out_of_memory_splits_the_batch(num_failures, tiny, make_engine, complete):
    folder, _ = tiny
    requests = [request(str(n), prompt(20 + n, n)) for n in range(6)]
    expected = complete(make_engine(folder), requests)
    engine = make_engine(folder)
    forward = engine.runner.forward
    failures = iter(range(num_failures))

    def runs_out(inputs):
        if next(failures, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(inputs)

    object.__setattr__(engine.runner, "forward", runs_out)

    outputs = complete(engine, requests)

    assert outputs == expected
    assert engine.stats().num_out_of_memory_retries == num_failures
    assert engine.scheduler.max_batch_tokens < engine.limits.max_batch_tokens


def test_memory_that_never_suffices_ends_in_errors_not_in_a_loop(tiny, make_engine, complete):
    engine = make_engine(tiny[0])

    def runs_out(inputs):
        raise MemoryError

    object.__setattr__(engine.runner, "forward", runs_out)

    outputs = complete(engine, [request(str(n), prompt(40, n)) for n in range(3)])

    assert {o[-1].error_reason for o in outputs.values()} == {"OutOfMemory"}
    assert not engine.has_work()
    assert engine.stats().num_out_of_memory_failures == 3
    assert engine.stats().is_exhausted


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_batch_is_tried_again_as_often_as_it_is_told(retries, tiny, make_engine, complete):
    engine = make_engine(tiny[0], retries_per_batch=retries)
    sizes = []

    def runs_out(inputs):
        sizes.append(len(inputs.token_ids))
        raise MemoryError

    object.__setattr__(engine.runner, "forward", runs_out)

    complete(engine, [request("alone", prompt(40))])

    assert sizes == [40 >> n for n in range(retries + 1)]


def test_the_batch_grows_back_after_memory_ran_out(tiny, make_engine, generate):
    engine = make_engine(tiny[0], max_running_requests=4)
    engine.scheduler.max_batch_tokens = 8

    generate(engine, [prompt(9)], max_tokens=200)

    assert 8 < engine.scheduler.max_batch_tokens <= engine.limits.max_batch_tokens


def test_a_model_in_float16_that_overflows_gives_an_error_not_text(
    make_checkpoint, make_engine, complete
):
    folder, _ = make_checkpoint()
    copy = shutil.copytree(folder, folder.parent / "overflow", dirs_exist_ok=True)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e6
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})

    narrow = complete(make_engine(copy, dtype="float16"), [request("a", prompt(9))])["a"]
    wide = complete(make_engine(copy, dtype="bfloat16"), [request("a", prompt(9))])["a"]

    assert narrow[-1].error_reason == "NonFiniteLogits"
    assert wide[-1].finish_reason == "length"


def test_more_rows_than_the_tokenizer_has_tokens_are_no_trouble(
    make_checkpoint, make_engine, generate
):
    folder, _ = make_checkpoint(vocab_size=1003)

    answers = generate(
        make_engine(folder), [prompt(5, n) for n in range(50)], temperature=2.0, max_tokens=40
    )

    assert all(0 <= token < 1003 for answer in answers for token in answer)


def test_demand_follows_the_requests_and_ends_with_them(tiny, make_engine):
    engine = make_engine(tiny[0], kv_cache_bytes=10 * PAGE_BYTES)
    for number in range(4):
        engine.add(request(str(number), prompt(60, number), max_tokens=8))
    engine.step()
    busy = engine.stats()
    while engine.has_work():
        engine.step()
    after = engine.stats()

    assert busy.demand_percent == pytest.approx(160)
    assert after.demand_percent == 0
    assert after.cached_pages > 0
