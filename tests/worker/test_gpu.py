"""The engine on an NVIDIA GPU: kernels against float32, graphs against calls, ahead of the host.

Run by `make test-gpu`. The shape is that of R1-Distill-Qwen-7B with two layers and random weights.
"""

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import deepseek_kernels
from deepseek_worker.config import EngineConfig
from deepseek_worker.layers.attention import Span, TorchAttention
from deepseek_worker.layers.paged import DecodingRows, PagedAttention, PagedPlan, PromptRows
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.quantization.linears import FEW_TOKENS
from deepseek_worker.sequence import Request, SamplingParams
from deepseek_worker.startup import graph_runner, load_engine, torch_runner
from deepseek_worker.weights import transfer
from deepseek_worker.weights.loading import fill_with_random
from deepseek_worker.weights.peft import PREFIX, TARGETS, matrices_of
from deepseek_worker.weights.safetensors import SafetensorsCheckpoint, read_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = json.loads((SHAPES / "r1-distill-qwen-7b" / "config.json").read_text())
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS}))
    return folder


def make(folder, build_runner=graph_runner, capture=True, **options):
    defaults = {
        "load_format": "dummy",
        "device": "cuda",
        "kv_cache_bytes": 2**27,
        "max_context_tokens": 2048,
        "max_running_requests": 16,
        "max_batch_tokens": 256,
    }
    config = EngineConfig(model=folder, **(defaults | options))

    def build(*arguments):
        runner = build_runner(*arguments)
        if not capture:
            runner.capture = lambda report: None
        return runner

    return load_engine(config, lambda _: None, build)


@pytest.fixture(scope="module")
def captured(folder):
    return make(folder)


@pytest.fixture(scope="module")
def called(folder):
    return make(folder, capture=False)


def request(name, prompt, **sampling):
    options = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return Request(name, tuple(prompt), SamplingParams(**(options | sampling)))


def prompt(length, seed=0):
    return [(index * 131 + seed * 29 + 5) % 150000 for index in range(length)]


def run(engine, requests):
    outputs = {each.request_id: [] for each in requests}
    for each in requests:
        engine.add(each)
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check()
    return outputs


def tokens_of(outputs):
    return {name: [t for o in listed for t in o.token_ids] for name, listed in outputs.items()}


@pytest.fixture(scope="module")
def decoders(folder):
    config = read_config(folder)
    device = torch.device("cuda")
    narrow = Decoder(config, torch.bfloat16, device)
    fill_with_random(narrow, 0)
    wide = Decoder(config, torch.float32, device)
    for one, other in zip(narrow.layers(), wide.layers(), strict=True):
        for source, target in zip(one.parameters(), other.parameters(), strict=True):
            target.copy_(source)
    return narrow, wide


LENGTHS = (300, 17, 64, 1)


def spans_of(pages_each=20):
    return [
        Span(list(range(index * pages_each, (index + 1) * pages_each)), 0, length)
        for index, length in enumerate(LENGTHS)
    ]


def pool_of(decoder):
    kind = "bf16" if decoder.dtype == torch.bfloat16 else "float32"
    return KvPool(
        decoder.config,
        num_pages=100,
        page_tokens=16,
        formats=[kind] * NUM_LAYERS,
        device=decoder.device,
    )


@torch.inference_mode()
def logits_by_torch(decoder, token_ids):
    """All prompts and then one more token of each, by torch alone."""
    pool = pool_of(decoder)
    attention = TorchAttention(pool, decoder.config.num_heads, decoder.dtype, decoder.rope)
    deepseek_kernels.set_backend("reference")
    try:
        spans = spans_of()
        hidden = decoder.forward(token_ids, attention, attention.plan(spans))
        last = [Span(span.pages, span.end, span.end + 1) for span in spans]
        last.sort(key=lambda span: -span.end)
        decoded = decoder.forward(token_ids[:4], attention, attention.plan(last))
        return decoder.logits(torch.cat([hidden, decoded])).float()
    finally:
        deepseek_kernels.set_backend("auto")


@torch.inference_mode()
def logits_by_kernels(decoder, token_ids):
    """The same by the kernels."""
    pool = pool_of(decoder)
    for layer in pool.layers:
        layer.pages.fill_(float("nan"))
    attention = PagedAttention(pool, decoder.config.num_heads, decoder.rope, 2048)
    spans = spans_of()

    def numbers(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=decoder.device)

    def plan(spans, decoding, prompts):
        positions = [p for span in spans for p in range(span.start, span.end)]
        slots = [
            span.pages[p // 16] * 16 + p % 16 for span in spans for p in range(span.start, span.end)
        ]
        starts = [0]
        for span in prompts:
            starts.append(starts[-1] + span.end - span.start)
        lengths = numbers([span.end for span in decoding])
        return PagedPlan(
            numbers(positions, torch.int64),
            numbers(slots, torch.int64),
            DecodingRows(
                numbers([list(span.pages) for span in decoding]),
                lengths,
                (lengths > 0)[:, None, None],
            )
            if decoding
            else None,
            PromptRows(
                numbers([list(span.pages) for span in prompts]),
                numbers(starts),
                numbers([span.end for span in prompts]),
            )
            if prompts
            else None,
        )

    hidden = decoder.forward(token_ids, attention, plan(spans, [], spans))
    last = [Span(span.pages, span.end, span.end + 1) for span in spans]
    last.sort(key=lambda span: -span.end)
    decoded = decoder.forward(token_ids[:4], attention, plan(last, last, []))
    return decoder.logits(torch.cat([hidden, decoded])).float()


def rms(tensor):
    return float(tensor.double().square().mean().sqrt())


def test_logits_are_as_close_to_float32_as_torchs(decoders):
    narrow, wide = decoders
    token_ids = torch.tensor([t for n in LENGTHS for t in prompt(n, n)], device="cuda")

    exact = logits_by_torch(wide, token_ids)
    error_of_torch = rms(logits_by_torch(narrow, token_ids) - exact)
    error = rms(logits_by_kernels(narrow, token_ids) - exact)

    assert error_of_torch > 0
    assert error <= 1.2 * error_of_torch


def test_captured_steps_equal_called_ones(captured, called):
    requests = [request(str(n), prompt(length, n)) for n, length in enumerate((1, 40, 17, 300, 2))]

    assert tokens_of(run(captured, requests)) == tokens_of(run(called, requests))


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Two adapters, of other ranks and targets, as the flags name them."""
    matrices, flags = matrices_of(read_config(folder)), []
    for name, rank, targets in (("one", 8, TARGETS), ("two", 64, ("q_proj", "down_proj"))):
        tensors = {}
        for module, shape in matrices.items():
            if module.endswith(targets):
                a, b = torch.randn(rank, shape.in_features), torch.randn(shape.out_features, rank)
                tensors[f"{PREFIX}{module}.lora_A.weight"] = 0.02 * a
                tensors[f"{PREFIX}{module}.lora_B.weight"] = 0.02 * b
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
        path = tmp_path_factory.mktemp(name)
        (path / "adapter_config.json").write_text(json.dumps(fields))
        save_file(tensors, path / "adapter_model.safetensors")
        flags.append(f"{name}={path}")
    return flags


@pytest.mark.parametrize("weights", ["auto", "fp8"])
def test_captured_steps_add_each_row_its_adapter(weights, folder, adapters):
    options = {"weights": weights, "lora": adapters, "max_running_requests": 4}
    captured, called = make(folder, **options), make(folder, capture=False, **options)
    plain = make(folder, torch_runner, **options)
    requests = [
        dataclasses.replace(request(f"{name}-{length}", prompt(length), logprobs=1), adapter=name)
        for name in (None, "one", "two")
        for length in (1, 40, 300)
    ]

    ours, again, theirs = (run(engine, requests) for engine in (captured, called, plain))

    assert tokens_of(ours) == tokens_of(again)
    first = {name: outputs[0].logprobs[0].logprob for name, outputs in ours.items()}
    step = 0.3 if weights == "fp8" else 0.15
    for name, outputs in theirs.items():
        assert first[name] == pytest.approx(outputs[0].logprobs[0].logprob, abs=step)
    answers = tokens_of(ours)
    assert len({tuple(answers[f"{name}-40"]) for name in (None, "one", "two")}) == 3


def test_sampled_captured_steps_equal_called_ones(captured, called):
    requests = [
        request(str(n), prompt(30, n), temperature=0.8, top_p=0.9, top_k=50, seed=n)
        for n in range(9)
    ]

    assert tokens_of(run(captured, requests)) == tokens_of(run(called, requests))


@pytest.mark.parametrize("number", [1, 9])
def test_penalized_captured_steps_equal_called_ones(number, captured, called):
    penalties = {
        "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7,
        "logit_bias": ((17, 3.0), (4000, -5.0)), "min_tokens": 5, "stop_token_ids": (3, 17),
    }  # fmt: skip
    requests = [
        request(str(n), prompt(30, n), **(penalties if n < number else {}), max_tokens=40)
        for n in range(12)
    ]

    assert tokens_of(run(captured, requests)) == tokens_of(run(called, requests))


def test_penalties_do_not_make_the_host_wait_for_a_step(captured):
    captured.add(request("a", prompt(9), frequency_penalty=0.5, max_tokens=6))

    produced = []
    while captured.has_work():
        produced.append(sum(len(output.token_ids) for output in captured.step()))

    assert produced == [0, 1, 1, 1, 1, 1, 1]


def test_what_a_sequence_generated_is_counted_on_the_device(captured):
    asked = [
        request(str(n), prompt(9, n), presence_penalty=1e4, max_tokens=60, temperature=n / 4)
        for n in range(8)
    ]

    for tokens in tokens_of(run(captured, asked)).values():
        assert len(set(tokens)) == 60


def test_a_repeated_prompt_is_read_from_the_cache(captured):
    first = run(captured, [request("a", prompt(200, 77))])["a"]
    second = run(captured, [request("b", prompt(200, 77))])["b"]

    assert second[-1].cached_tokens == 192
    assert [o.token_ids for o in first][:2] == [o.token_ids for o in second][:2]


def test_preemption_ends_with_every_token(folder):
    engine = make(folder, kv_cache_bytes=NUM_LAYERS * 2 * 4 * 128 * 2 * 16 * 30)

    outputs = run(engine, [request(str(n), prompt(50, n), max_tokens=60) for n in range(10)])

    assert all(len(tokens) == 60 for tokens in tokens_of(outputs).values())
    assert engine.stats().num_preemptions > 0
    assert engine.stats().held_pages == 0


def test_aborts_leave_no_page_and_no_memory_behind(captured):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for number in range(200):
        captured.add(request(str(number), prompt(5 + number % 60, number), max_tokens=9))
        captured.step()
        if number % 3 == 0:
            captured.abort(str(number))
    while captured.has_work():
        captured.step()
    torch.cuda.synchronize()

    assert captured.stats().held_pages == 0
    assert torch.cuda.memory_allocated() == before


def test_running_out_of_memory_splits_the_batch(captured, called):
    requests = [request(str(n), prompt(20 + n, n + 500)) for n in range(6)]
    expected = tokens_of(run(called, requests))
    forward, calls = captured.runner.forward, iter(range(10**6))

    def runs_out(inputs):
        if 2 <= next(calls) < 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(inputs)

    captured.runner.forward = runs_out
    try:
        outputs = run(captured, requests)
    finally:
        del captured.runner.forward

    assert {name: len(tokens) for name, tokens in tokens_of(outputs).items()} == {
        name: len(tokens) for name, tokens in expected.items()
    }
    assert captured.stats().num_out_of_memory_retries == 2


def test_memory_beyond_the_limit_is_refused_though_the_card_has_it(folder):
    limit = 40 * 2**30
    try:
        engine = make(folder, memory_limit_bytes=limit)
        asked = request("a", prompt(20))
        outputs = run(engine, [asked])

        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(limit, dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info()[0] > limit
        assert len(tokens_of(outputs)["a"]) == 12
        assert all(step._graph is not None for ladder in engine.runner._ladders for step in ladder)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_no_kernel_is_compiled_after_the_start(captured):
    import triton

    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given)
    try:
        run(
            captured,
            [request(str(n), prompt(n * 7 + 1, n), temperature=0.5 * n) for n in range(16)],
        )
        run(captured, [request("p", prompt(9), repetition_penalty=1.3, logprobs=2)])
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None

    assert compiled == []


def test_the_plain_runner_gives_the_same_first_tokens(folder, called):
    plain = make(folder, torch_runner)
    requests = [
        request(str(n), prompt(40 + n, n + 900), max_tokens=1, logprobs=1) for n in range(8)
    ]

    ours, theirs = run(called, requests), run(plain, requests)

    for name, (output,) in ours.items():
        (other,) = theirs[name]
        # Nearly equal tokens may change places in bf16.
        assert output.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=0.15)


@pytest.mark.parametrize(("step_tokens", "error"), [(FEW_TOKENS, 0.05), (256, 0.25)])
@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
def test_quantized_weights_score_prompts_as_the_plain_runner(weights, step_tokens, error, folder):
    """In short steps inputs stay in 16 bits; in long ones a rounding before moves whole codes."""
    options = {"weights": weights, "max_running_requests": 4, "max_batch_tokens": step_tokens}
    requests = [
        request(str(n), prompt(40 + n, n), max_tokens=1, prompt_logprobs=0) for n in range(4)
    ]

    ours, theirs = (
        torch.tensor([one.logprob for name in outputs for one in scored_of(outputs[name])])
        for outputs in (
            run(make(folder, **options), requests),
            run(make(folder, torch_runner, **options), requests),
        )
    )

    # Of random weights, and seen with noise of one bf16 rounding: 0.012 and 0.081.
    assert (ours - theirs).square().mean().sqrt() < error * theirs.std()


def scored_of(outputs):
    (logprobs,) = (output.prompt_logprobs for output in outputs if output.prompt_logprobs)
    return logprobs[1:]


def test_a_checkpoint_arrives_as_it_is_stored(folder, tmp_path, monkeypatch):
    """In pieces of all threads, while the tensors before are multiplied with."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(transfer, "AHEAD_BYTES", 1 << 22)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"t{index:03}": torch.randn(index * 37 + 1, 513, generator=generator).to(dtype)
        for index, dtype in enumerate([torch.bfloat16, torch.float32] * 40)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    checkpoint = SafetensorsCheckpoint(tmp_path)
    found = {name: checkpoint.extent(name) for name in tensors}
    load = torch.randn(2048, 2048, device="cuda")

    with closing(transfer.Transfer(found, torch.device("cuda"))) as moving:
        for name, stored in tensors.items():
            arrived = moving.tensor(name)
            load @ load
            # Freed at once, while the next ones are on their way into such memory.
            assert torch.equal(arrived.clone().cpu(), stored), name
