"""Whole checkpoints of every format: loaded, answering, counted, and refused where they are wrong.

The reference is transformers' model with the matrices that the files mean.
"""

import copy
from functools import partial, update_wrapper

import pytest
import torch

from deepseek_worker.errors import BrokenCheckpoint, UnsupportedModel
from deepseek_worker.layers.attention import Span, TorchAttention
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.quantization.build import as_stored, everything_plain
from deepseek_worker.sequence import Request, SamplingParams
from deepseek_worker.weights.checkpoint import open_checkpoint
from deepseek_worker.weights.loading import load

PROMPT = tuple((31 * index + 5) % 120 for index in range(40))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8_BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}  # fmt: skip
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}


def compressed(storage, weights, inputs=None, ignore=("lm_head",)):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def int4(**more):
    return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128} | more


ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}

# Name: writer's name and options, quantization_config, bytes' format in memory.
CASES = {
    "gptq": ("gptq", {}, GPTQ),
    "gptq with zero points": ("gptq", {"symmetric": False}, GPTQ | {"sym": False}),
    "gptq v2": (
        "gptq",
        {"symmetric": False, "v2": True},
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq act-order": ("gptq", {"is_sorted": True}, GPTQ | {"desc_act": True}),
    "gptq groups of 32": ("gptq", {"group_size": 32}, GPTQ | {"group_size": 32}),
    "gptq of 8 bits": (
        "gptq",
        {"bits": 8, "group_size": -1},
        GPTQ | {"bits": 8, "group_size": -1},
    ),
    "awq": ("awq", {}, AWQ),
    "packed": ("packed", {}, compressed("pack-quantized", int4())),
    "packed with zero points": (
        "packed",
        {"symmetric": False},
        compressed("pack-quantized", int4(symmetric=False)),
    ),
    "packed act-order": (
        "packed",
        {"is_sorted": True},
        compressed("pack-quantized", int4(actorder="group")),
    ),
    "int8": (
        "eight_bits",
        {"kind": "int"},
        compressed("int-quantized", ROWS | {"type": "int"}),
    ),
    "fp8": ("eight_bits", {}, compressed("float-quantized", ROWS)),
    "fp8 for the whole matrix": ("eight_bits", {"strategy": "tensor"}, FP8_TENSOR),
    "fp8 by token": ("eight_bits", {}, compressed("float-quantized", ROWS, TOKENS)),
    "fp8 by block": ("blocks", {}, FP8_BLOCKS),
}
# Inputs that share a scale, where they are quantized: all of a token's, or 128.
INPUT_GROUPS = {"fp8 for the whole matrix": 0, "fp8 by token": 0, "fp8 by block": 128}


@pytest.fixture
def saved(save_quantized, formats):
    def save(case, **options):
        writer, arguments, config = CASES[case]
        function = getattr(formats, writer)
        write = update_wrapper(partial(function, **arguments), function)
        write.__code__ = function.__code__
        return save_quantized(write, config, **options)

    return save


def logprobs_of(engine, complete):
    """Of each prompt token, given those before it."""
    request = Request("a", PROMPT, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    rows = complete(engine, [request])["a"]
    scored = [row for output in rows for row in output.prompt_logprobs or ()]
    return torch.tensor([row.logprob for row in scored[1:]])


@torch.inference_mode()
def expected_logprobs(model):
    scores = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return scores[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]


def quantize_inputs(model, group):
    """Round the inputs of all projections to e4m3, by hand."""

    def round_to_e4m3(module, inputs):
        (x,) = inputs
        parts = []
        for part in x.split(group or x.shape[-1], -1):
            scale = part.abs().amax(-1, keepdim=True) / 448
            parts.append((part / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale)
        return (torch.cat(parts, -1),)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(round_to_e4m3)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "llama") for case in CASES),
        ("gptq act-order", "qwen2"),
        ("awq", "qwen2"),
        ("fp8 by block", "qwen2"),
    ],
)
def test_a_checkpoint_answers_as_its_matrices_mean(case, kind, saved, make_engine, complete):
    folder, model = saved(case, kind=kind)
    engine = make_engine(folder)

    found = logprobs_of(engine, complete)

    tolerance = 2e-3
    if case in INPUT_GROUPS:
        quantize_inputs(model, INPUT_GROUPS[case])
        # A value on the border between two codes may fall on either side.
        tolerance = 0.05
    assert (found - expected_logprobs(model)).abs().max() < tolerance
    stats = engine.stats()
    assert stats.measured_bytes["weights"] == stats.predicted_bytes["weights"]


@torch.inference_mode()
def logits_in_bf16(folder):
    """Of the worker's decoder, with bfloat16 activations and pages."""
    checkpoint = open_checkpoint(folder)
    stored = checkpoint.config.quantization
    storage = everything_plain if stored is None else as_stored(stored, stored.native)
    decoder = Decoder(checkpoint.config, torch.bfloat16, torch.device("cpu"), storage)
    load(decoder, checkpoint, lambda _: None)
    pool = KvPool(
        checkpoint.config, num_pages=3, page_tokens=16, formats=("bf16",) * 2, device=decoder.device
    )
    attention = TorchAttention(pool, 4, torch.bfloat16, decoder.rope)
    plan = attention.plan([Span([0, 1, 2], 0, len(PROMPT))])
    hidden = decoder.forward(torch.tensor(PROMPT), attention, plan)
    return decoder.logits(hidden).float()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("case", [None, "gptq act-order", "awq", "int8", *list(CASES)[-4:]])
@torch.inference_mode()
def test_errors_are_those_of_torch_in_bf16(case, kind, saved, make_checkpoint):
    """RMS error of the logits: at most 1.2 times that of transformers on the same matrices."""
    folder, model = make_checkpoint(kind) if case is None else saved(case, kind=kind)
    exact = model(torch.tensor([PROMPT])).logits[0]
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    if case in INPUT_GROUPS:
        quantize_inputs(rounded, INPUT_GROUPS[case])

    error = (logits_in_bf16(folder) - exact).square().mean().sqrt()

    reference = (rounded(torch.tensor([PROMPT])).logits[0].float() - exact).square().mean().sqrt()
    assert 0 < error <= 1.2 * reference


@pytest.mark.parametrize("case", ["gptq act-order", "awq", "fp8 by block", "int8"])
def test_bf16_dequantizes_any_checkpoint(case, saved, make_engine, complete):
    folder, model = saved(case)

    engine = make_engine(folder, weights="bf16")

    assert (logprobs_of(engine, complete) - expected_logprobs(model)).abs().max() < 0.1
    num_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert engine.stats().measured_bytes["weights"] == num_bytes


def test_modules_that_are_not_converted_stay_plain(save_quantized, formats, make_engine, complete):
    config = AWQ | {"modules_to_not_convert": ["model.layers.0", "k_proj"]}
    folder, model = save_quantized(formats.awq, config, skip=("layers.0.", "k_proj"))
    engine = make_engine(folder)

    found = logprobs_of(engine, complete)

    assert (found - expected_logprobs(model)).abs().max() < 2e-3
    stats = engine.stats()
    assert stats.measured_bytes["weights"] == stats.predicted_bytes["weights"]


def test_parts_that_are_sorted_differently_are_multiplied_one_by_one(
    save_quantized, formats, make_engine, complete
):
    seeds = iter(range(1000))

    def write(weight):
        return formats.gptq(weight, is_sorted=True, seed=next(seeds))

    folder, model = save_quantized(write, GPTQ | {"desc_act": True})

    found = logprobs_of(make_engine(folder), complete)

    assert (found - expected_logprobs(model)).abs().max() < 2e-3


def test_biases_of_zero_that_the_architecture_has_not_are_allowed(saved, make_engine, complete):
    def add(tensors, value=0.0):
        tensors["model.layers.0.mlp.down_proj.bias"] = torch.full((160,), value)

    folder, model = saved("gptq", edit=add)

    found = logprobs_of(make_engine(folder), complete)

    assert (found - expected_logprobs(model)).abs().max() < 2e-3


def remove(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("case", "edit", "named"),
    [
        ("gptq", remove(f"{DOWN}.qweight"), rf"lacks tensor {DOWN}\.qweight"),
        ("gptq", remove(f"{DOWN}.scales"), rf"lacks tensor {DOWN}\.scales"),
        ("gptq act-order", remove(f"{DOWN}.g_idx"), rf"lacks tensor {DOWN}\.g_idx"),
        ("awq", remove(f"{DOWN}.qzeros"), rf"lacks tensor {DOWN}\.qzeros"),
        ("packed", remove(f"{DOWN}.weight_shape"), rf"lacks tensor {DOWN}\.weight_shape"),
        ("fp8 by block", remove(f"{DOWN}.weight_scale_inv"), "weight_scale_inv"),
        ("fp8", remove(f"{DOWN}.weight_scale"), rf"lacks tensor {DOWN}\.weight_scale"),
        ("gptq", put(f"{DOWN}.stray", torch.ones(1)), rf"has tensor {DOWN}\.stray"),
        ("awq", put(f"{DOWN}.weight", torch.ones(160, 288)), rf"has tensor {DOWN}\.weight"),
        (
            "gptq",
            put(f"{DOWN}.qweight", torch.ones(36, 159, dtype=torch.int32)),
            rf"{DOWN}\.qweight has shape \[36, 159\].*asks for \[36, 160\]",
        ),
        (
            "gptq",
            put(f"{DOWN}.scales", torch.ones(2, 160)),
            rf"{DOWN}\.scales has shape \[2, 160\].*asks for \[3, 160\]",
        ),
        (
            "fp8 by block",
            put(f"{DOWN}.weight_scale_inv", torch.ones(2, 2)),
            r"weight_scale_inv has shape \[2, 2\].*asks for \[2, 3\]",
        ),
        (
            "fp8",
            put(f"{DOWN}.weight", torch.ones(160, 288, dtype=torch.bfloat16)),
            rf"{DOWN}\.weight is stored as bfloat16.*asks for float8_e4m3fn",
        ),
        (
            "gptq",
            put(f"{DOWN}.bias", torch.ones(160)),
            rf"{DOWN}\.bias is not zero, but the architecture has no bias",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused_by_the_name_of_its_tensor(
    case, edit, named, saved, make_engine
):
    folder, _ = saved(case, edit=edit)

    with pytest.raises(BrokenCheckpoint, match=named):
        make_engine(folder)


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_quantized_weights_are_not_quantized_again(weights, saved, make_engine):
    folder, _ = saved("gptq")

    with pytest.raises(UnsupportedModel, match="checkpoint is quantized, as int4"):
        make_engine(folder, weights=weights)


def test_the_format_of_the_checkpoint_may_be_named(saved, make_engine):
    folder, _ = saved("awq")

    assert make_engine(folder, weights="int4").stats().num_running == 0


def test_random_weights_take_the_format_of_the_config(saved, make_engine, generate):
    folder, _ = saved("gptq act-order")
    (folder / "model.safetensors").unlink()

    engine = make_engine(folder, load_format="dummy")

    assert len(generate(engine, [PROMPT])[0]) == 8
