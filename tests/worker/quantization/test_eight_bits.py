"""Weights of 8 bits: what they multiply, against the product written out in float64."""

import pytest
import torch

from deepseek_kernels import quantize
from deepseek_worker.layers.linear import RANDOM_STD, InputFormat, Projection
from deepseek_worker.quantization.build import build_linear, rounded
from deepseek_worker.quantization.eight_bits import BlockScaledLinear, RowScaledLinear
from deepseek_worker.quantization.schemes import Scheme

CPU = torch.device("cpu")
FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
SCHEMES = [
    Scheme("fp8", "16bit"),
    Scheme("fp8", "8bit"),
    Scheme("fp8_block", "8bit"),
    Scheme("int8", "16bit"),
    Scheme("int8", "8bit"),
]


def names(scheme):
    return f"{scheme.weights}-{scheme.activations}"


def filled(scheme, *, bias=True, dtype=torch.float32, columns=160):
    """A projection of two parts, and its weight and bias before rounding."""
    torch.manual_seed(0)
    projection = Projection({"a": 128, "b": 70}, columns, bias)
    layer = build_linear(projection, rounded(scheme), dtype, CPU)
    weight = torch.randn(198, columns) * torch.logspace(-2, 0, 198)[:, None]
    offset = torch.randn(198)
    for slot in layer.slots():
        rows = slice(0, 128) if slot.name.startswith("a.") else slice(128, 198)
        slot.store((weight if slot.name.endswith("weight") else offset)[rows].to(dtype))
    layer.pack()
    return layer, weight, offset


def rounded_input(x, scheme):
    """What `x` is after its quantization, by the definition."""
    if scheme.activations == "16bit":
        return x.double()
    if scheme.weights == "fp8_block":
        parts = [rounded_input(part, Scheme("fp8", "8bit")) for part in x.split(128, 1)]
        return torch.cat(parts, 1)
    largest = {"fp8": 448.0, "int8": 127.0}[scheme.weights]
    scale = x.abs().amax(1, keepdim=True) / largest
    codes = x / scale
    codes = codes.round() if scheme.weights == "int8" else codes.to(torch.float8_e4m3fn)
    return codes.double() * scale.double()


def kept_weight(layer, scheme):
    scale = layer.scale
    if scheme.weights == "fp8_block":
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scale = scale[: layer.weight.shape[0], : layer.weight.shape[1]]
    else:
        scale = scale[:, None]
    return layer.weight.double() * scale.double()


@pytest.mark.parametrize("scheme", SCHEMES, ids=names)
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_multiplies_the_rounded_input_with_the_kept_weight(scheme, tokens, bias):
    layer, _, offset = filled(scheme, bias=bias)
    x = torch.randn(tokens, 160)

    product = layer(x)

    expected = rounded_input(x, scheme) @ kept_weight(layer, scheme).T
    expected += offset.double() if bias else 0
    assert product.shape == (tokens, 198)
    assert (product - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("scheme", SCHEMES, ids=names)
def test_the_kept_weight_is_the_nearest(scheme):
    layer, weight, _ = filled(scheme)

    error = (kept_weight(layer, scheme) - weight).abs()

    # Half a step: 1/16 of the value in FP8, 1/254 of the row's largest in INT8.
    if scheme.weights == "int8":
        assert (error <= weight.abs().amax(1, keepdim=True) / 253).all()
    else:
        assert (error <= weight.abs() / 15 + weight.abs().max() / 448 / 2**9).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=names)
def test_nothing_but_codes_scales_and_bias_is_kept(scheme):
    layer, weight, _ = filled(scheme)

    num_bytes = sum(tensor.nbytes for tensor in layer.parameters())

    scales = 2 * 2 if scheme.weights == "fp8_block" else 198
    assert num_bytes == weight.numel() + 4 * scales + 4 * 198
    assert layer._stored.take() == []


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Scheme("fp8", "16bit"), None),
        (Scheme("fp8", "8bit"), InputFormat(torch.float8_e4m3fn, None)),
        (Scheme("int8", "8bit"), InputFormat(torch.int8, None)),
        (Scheme("fp8_block", "8bit"), InputFormat(torch.float8_e4m3fn, 128)),
    ],
    ids=lambda value: names(value) if isinstance(value, Scheme) else "",
)
def test_an_input_that_a_norm_has_quantized_gives_the_same(scheme, expected):
    layer, _, _ = filled(scheme, columns=256)
    x = torch.randn(5, 256)

    assert layer.input_format == expected
    if expected is not None:
        codes = quantize(x, dtype=expected.dtype, group_columns=expected.group_columns)
        assert torch.equal(layer.multiply_codes(*codes, torch.float32), layer(x))


@pytest.mark.parametrize("scheme", SCHEMES, ids=names)
def test_random_weights_have_the_size_of_plain_ones_and_depend_on_the_seed(scheme):
    def random(seed):
        projection = Projection({"a": 130}, 300, True)
        layer = build_linear(projection, rounded(scheme), torch.bfloat16, CPU)
        layer.randomize(torch.Generator().manual_seed(seed))
        layer.pack()
        return layer

    first, again, other = random(1), random(1), random(2)

    assert kept_weight(first, scheme).std() == pytest.approx(RANDOM_STD, rel=0.05)
    assert torch.equal(first.weight.view(torch.uint8), again.weight.view(torch.uint8))
    assert not torch.equal(first.weight.view(torch.uint8), other.weight.view(torch.uint8))
    assert first(torch.randn(3, 300, dtype=torch.bfloat16)).isfinite().all()


def test_each_scheme_has_its_class():
    assert isinstance(filled(Scheme("fp8_block", "8bit"))[0], BlockScaledLinear)
    assert isinstance(filled(Scheme("int8", "16bit"))[0], RowScaledLinear)
