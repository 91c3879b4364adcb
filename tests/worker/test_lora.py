"""Rows with different adapters in one step, against models whose weights hold the adapter."""

import copy
import dataclasses
import itertools
import random
import re

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear

from deepseek_worker.config import LoraAdapter
from deepseek_worker.errors import BrokenCheckpoint, ModelTooLarge, UnknownModel
from deepseek_worker.layers.attention import Span, TorchAttention
from deepseek_worker.layers.lora import AdaptedLinear
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import BlockProjections, Decoder
from deepseek_worker.quantization.build import rounded
from deepseek_worker.quantization.schemes import Scheme
from deepseek_worker.sequence import Request, SamplingParams
from deepseek_worker.startup import graph_runner
from deepseek_worker.weights.adapters import attach, open_adapters
from deepseek_worker.weights.checkpoint import open_checkpoint
from deepseek_worker.weights.loading import load
from deepseek_worker.weights.peft import PREFIX

PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4
PROMPT = [(31 * index + 5) % 100 for index in range(48)]


@torch.inference_mode()
def logits(folder, adapters, used, *, dtype=torch.float32):
    """All logits of the prompt once for each entry of `used`, all in one step."""
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.config, dtype, torch.device("cpu"))
    load(decoder, checkpoint, lambda _: None)
    wanted = [LoraAdapter(name=f"a{n}", path=path) for n, path in enumerate(adapters)]
    attach(decoder, open_adapters(wanted, checkpoint.config))
    kv_format = "float32" if dtype == torch.float32 else "bf16"
    pool = KvPool(
        checkpoint.config,
        num_pages=3 * len(used),
        page_tokens=16,
        formats=(kv_format,) * 2,
        device=decoder.device,
    )
    attention = TorchAttention(pool, checkpoint.config.num_heads, dtype, decoder.rope)
    spans = [Span(range(3 * n, 3 * n + 3), 0, len(PROMPT)) for n in range(len(used))]
    rows = torch.tensor(used, dtype=torch.int32).repeat_interleave(len(PROMPT))
    token_ids = torch.tensor(PROMPT * len(used))
    hidden = decoder.forward(token_ids, attention, attention.plan(spans), rows)
    return decoder.logits(hidden).float().view(len(used), len(PROMPT), -1)


def close(found, expected):
    return (found - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 2.0),
        ({"rank": 16, "alpha": 4}, 0.25),
        ({"config": {"use_rslora": True}}, 4.0),
        ({"targets": ("k_proj", "up_proj")}, 2.0),
        (
            {"ranks": {"v_proj": 9, "gate_proj": 1}},
            lambda module: 8 / {"v": 9, "g": 1}.get(module.rpartition(".")[2][0], 4),
        ),
    ],
    ids=["all targets", "rank 16", "rslora", "two targets", "rank pattern"],
)
@torch.inference_mode()
def test_logits_equal_those_of_merged_weights(
    kind, options, scale, make_checkpoint, make_adapter, merge
):
    folder, model = make_checkpoint(kind)
    adapter = make_adapter(model, **options)

    (found,) = logits(folder, [adapter], [0])

    expected = merge(model, adapter, scale)(torch.tensor([PROMPT])).logits[0]
    assert close(found, expected)
    assert not close(model(torch.tensor([PROMPT])).logits[0], expected)


@torch.inference_mode()
def test_each_row_of_a_step_has_its_own_adapter(tiny, make_adapter, merge):
    folder, model = tiny
    adapters = [make_adapter(model, seed=seed, rank=2 + seed) for seed in range(3)]

    found = logits(folder, adapters, [2, -1, 0, 1, -1, 2])

    models = [merge(model, one, 8 / (2 + seed)) for seed, one in enumerate(adapters)]
    for rows, used in zip(found, [2, -1, 0, 1, -1, 2], strict=True):
        expected = (model if used < 0 else models[used])(torch.tensor([PROMPT])).logits[0]
        assert close(rows, expected)


def add_as_peft_does(model, folder, scale):
    """Have a model's projections add an adapter unmerged, each product in the type of its input."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if "lora_A" not in name:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]

        def add(_module, inputs, output, a=a, b=b):
            x = inputs[0]
            return output + linear(linear(x, a.to(x.dtype)), b.to(x.dtype)) * scale

        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        model.get_submodule(module).register_forward_hook(add)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@torch.inference_mode()
def test_errors_are_those_of_torch_in_bf16(kind, make_checkpoint, make_adapter, merge):
    """RMS error of the logits: at most 1.2 times that of transformers with the same products.

    Of eight adapters together: of one alone it is mostly how a few roundings happen to fall.
    """
    folder, model = make_checkpoint(kind)
    adapters = [make_adapter(model, seed=seed) for seed in range(8)]
    exact, reference = [], []
    for adapter in adapters:
        exact.append(merge(model, adapter, 2.0)(torch.tensor([PROMPT])).logits)
        narrow = copy.deepcopy(model).to(torch.bfloat16)
        add_as_peft_does(narrow, adapter, 2.0)
        reference.append(narrow(torch.tensor([PROMPT])).logits.float())

    found = logits(folder, adapters, range(8), dtype=torch.bfloat16)

    error = (found - torch.cat(exact)).square().mean().sqrt()
    allowed = (torch.cat(reference) - torch.cat(exact)).square().mean().sqrt()
    assert 0 < error <= 1.2 * allowed


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("int8"),
        Scheme("fp8"),
        Scheme("fp8", "8bit"),
        Scheme("fp8_block"),
        Scheme("int8", "8bit"),
        Scheme("int4"),
    ],
    ids=lambda scheme: f"{scheme.weights}-{scheme.activations}",
)
@torch.inference_mode()
def test_what_is_added_to_quantized_products_is_not_quantized(
    scheme, make_checkpoint, make_adapter
):
    folder, model = make_checkpoint(hidden_size=128, intermediate_size=256)
    path = make_adapter(model)
    tensors = load_file(path / "adapter_model.safetensors")
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.config, torch.float32, torch.device("cpu"), rounded(scheme))
    load(decoder, checkpoint, lambda _: None)
    attach(decoder, open_adapters([LoraAdapter(name="a", path=path)], checkpoint.config))
    decoder.adapter_rows.value = torch.tensor([0, -1, 0], dtype=torch.int32)
    projections = BlockProjections.of(checkpoint.config, 1)

    for kind in ("qkv", "output", "gate_up", "down"):
        adapted, projection = getattr(decoder.blocks[1], kind), getattr(projections, kind)
        x = torch.randn(3, projection.in_features)
        added = adapted(x) - adapted.base(x)

        expected = torch.cat(
            [
                2.0
                * x
                @ (
                    tensors[f"{PREFIX}{part}.lora_B.weight"]
                    @ tensors[f"{PREFIX}{part}.lora_A.weight"]
                ).T
                for part in projection.parts
            ],
            dim=1,
        )
        assert (added[[0, 2]] - expected[[0, 2]]).abs().max() < 1e-4 * expected.abs().max()
        assert not added[1].any()


def request(name, adapter=None, length=20, seed=0, **sampling):
    prompt = tuple((index * 13 + seed * 29 + 5) % 120 for index in range(length))
    options = {"temperature": 0.0, "max_tokens": 8} | sampling
    return Request(name, prompt, SamplingParams(**options), adapter=adapter)


def tokens_of(outputs):
    return {name: [t for o in given for t in o.token_ids] for name, given in outputs.items()}


@torch.inference_mode()
def greedy(model, asked):
    tokens = list(asked.prompt_token_ids)
    for _ in range(asked.sampling.max_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(asked.prompt_token_ids) :]


@pytest.fixture(params=[None, graph_runner], ids=["torch", "graphs"])
def adapted(request, tiny, make_adapter, make_engine, merge):
    """An engine with the adapters `one` and `two`, and the model of each name."""
    folder, model = tiny
    paths = {name: make_adapter(model, seed=seed) for seed, name in enumerate(("one", "two"), 1)}
    models = {None: model} | {name: merge(model, path, 2.0) for name, path in paths.items()}

    def make(**options):
        options = {"max_running_requests": 8, "max_batch_tokens": 64} | options
        lora = [f"{name}={path}" for name, path in paths.items()]
        return make_engine(folder, request.param, lora=lora, **options)

    return make, models


NAMES = [None, "one", "two"]


def test_answers_in_a_mixed_batch_are_those_of_merged_models(adapted, complete):
    make, models = adapted
    requests = [
        request(f"{n}-{adapter}", adapter, length)
        for n, (adapter, length) in enumerate(itertools.product(NAMES, (1, 17, 40, 90)))
    ]

    answers = tokens_of(complete(make(), requests))

    for asked in requests:
        assert answers[asked.request_id] == greedy(models[asked.adapter], asked)
    first, second, third = ([answers[r.request_id] for r in requests[n : n + 4]] for n in (0, 4, 8))
    assert first != second != third != first


def test_a_batch_without_adapters_is_computed_without_them(adapted, complete, monkeypatch):
    make, models = adapted
    engine = make()
    if engine.runner.keeps_ahead:
        pytest.skip("captured steps are the same for all requests")
    monkeypatch.setattr("deepseek_kernels.lora_add", None)

    answers = tokens_of(complete(engine, [request("a"), request("b", seed=1)]))

    assert answers["a"] == greedy(models[None], request("a"))
    failed = complete(engine, [request("c", "one", seed=2)])["c"]
    assert failed[-1].finish_reason == "error"


def test_a_prefix_is_shared_within_an_adapter_only(adapted, complete):
    make, models = adapted
    engine = make()
    for name in (None, "one"):
        complete(engine, [request("first", name, 50)])

    cached = {
        name: complete(engine, [request("again", name, 50)])["again"][-1].cached_tokens
        for name in NAMES
    }
    answers = [tokens_of(complete(engine, [request("x", name, 50)]))["x"] for name in NAMES]

    assert cached == {None: 48, "one": 48, "two": 0}
    assert answers == [greedy(models[name], request("x", name, 50)) for name in NAMES]


@pytest.mark.parametrize("seed", range(4))
def test_preemption_chunks_and_the_cache_change_no_token(seed, adapted, complete):
    make, models = adapted
    draw = random.Random(seed)
    engine = make(kv_cache_bytes=8 * PAGE_BYTES, max_context_tokens=100, max_batch_tokens=24)
    requests = [
        request(str(n), draw.choice(NAMES), 20, seed=n % 3, max_tokens=24) for n in range(9)
    ]

    answers = tokens_of(complete(engine, requests))

    assert engine.stats().num_preemptions > 0
    assert engine.stats().held_pages == 0
    for asked in requests:
        assert answers[asked.request_id] == greedy(models[asked.adapter], asked)


def test_an_aborted_request_frees_its_pages_and_leaves_the_others_alone(adapted):
    make, models = adapted
    engine = make()
    for asked in (request("gone", "one"), request("stays", "two")):
        engine.add(asked)
    produced = []
    for _ in range(3):
        produced += engine.step()

    engine.abort("gone")

    while engine.has_work():
        produced += engine.step()
        engine.scheduler.check()
    tokens = [t for o in produced if o.request_id == "stays" for t in o.token_ids]
    assert tokens == greedy(models["two"], request("stays", "two"))
    assert engine.stats().held_pages == 0


def test_prompt_logprobs_are_the_adapter_s(adapted, complete):
    make, models = adapted
    asked = request("a", "two", 30, prompt_logprobs=0)

    outputs = complete(make(), [request("b", "one", 30, prompt_logprobs=0), asked])["a"]

    (scored,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    prompt = torch.tensor([asked.prompt_token_ids])
    with torch.inference_mode():
        expected = models["two"](prompt).logits[0].log_softmax(-1)
    for position, entry in enumerate(scored[1:], 1):
        wanted = expected[position - 1, asked.prompt_token_ids[position]]
        assert abs(entry.logprob - float(wanted)) < 1e-3


def test_adapters_are_in_the_ledger(adapted, tiny, make_engine):
    make, _ = adapted
    with_, without = make().stats(), make_engine(tiny[0]).stats()

    assert with_.measured_bytes["weights"] > without.measured_bytes["weights"]
    assert with_.predicted_bytes["weights"] == with_.measured_bytes["weights"]


def test_adapters_that_leave_no_page_are_refused(tiny, make_adapter, make_engine):
    folder, model = tiny
    adapter = make_adapter(model, rank=256)
    without = make_engine(folder, kv_cache_bytes=PAGE_BYTES).memory.predicted_bytes
    limit = sum(without.values()) + 100_000

    make_engine(folder, kv_cache_bytes=None, memory_limit_bytes=limit)
    with pytest.raises(ModelTooLarge, match="weights"):
        make_engine(
            folder, kv_cache_bytes=None, memory_limit_bytes=limit, lora=[f"large={adapter}"]
        )


def test_a_broken_adapter_ends_the_start_before_any_weight(
    tiny, make_adapter, make_engine, monkeypatch
):
    folder, model = tiny
    adapter = make_adapter(model, config={"r": 8})
    monkeypatch.setattr("deepseek_worker.startup.load", None)

    with pytest.raises(BrokenCheckpoint, match=re.escape("has shape [4, 64]")):
        make_engine(folder, lora=[f"terse={adapter}"])


def test_an_unknown_adapter_is_refused_by_the_engine_too(adapted):
    engine = adapted[0]()

    with pytest.raises(UnknownModel, match="no LoRA adapter 'three'"):
        engine.validate(dataclasses.replace(request("a"), adapter="three"))


def test_an_adapted_projection_takes_no_codes(tiny, make_adapter, make_engine):
    engine = make_engine(tiny[0], weights="int8", lora=[f"a={make_adapter(tiny[1])}"])

    (block, *_) = engine.runner._decoder.blocks
    assert isinstance(block.qkv, AdaptedLinear)
    assert block.qkv.base.taking_codes(100) is not None or block.qkv.base.input_format is None
    assert block.qkv.taking_codes(100) is None
