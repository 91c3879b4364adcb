"""The feed-forward half of a block, against its parts."""

import pytest
import torch
from torch.nn.functional import silu

from deepseek_worker.layers.feed_forward import feed_forward
from deepseek_worker.layers.linear import Projection
from deepseek_worker.layers.norm import RmsNorm
from deepseek_worker.quantization.build import build_linear, rounded
from deepseek_worker.quantization.schemes import Scheme

HIDDEN, INTERMEDIATE = 256, 384


def made(scheme, dtype, device, *, has_bias=False):
    """Random gated and back projections, and a norm."""
    generator = torch.Generator(device).manual_seed(3)
    shapes = (
        ({"gate": INTERMEDIATE, "up": INTERMEDIATE}, HIDDEN),
        ({"down": HIDDEN}, INTERMEDIATE),
    )
    linears = [
        build_linear(Projection(parts, columns, has_bias), rounded(scheme), dtype, device)
        for parts, columns in shapes
    ]
    norm = RmsNorm("n", HIDDEN, 1e-5, dtype, device)
    for layer in (*linears, norm):
        layer.randomize(generator)
    return norm, *linears


def apart(norm, gate_up, down, x, residual):
    normalised, residual = norm(x, residual)
    gate, up = gate_up(normalised).chunk(2, dim=-1)
    return down(silu(gate) * up), residual


@pytest.mark.parametrize("has_bias", [False, True])
def test_is_the_gated_product_and_the_one_back(has_bias):
    layers = made(Scheme("plain"), torch.float32, torch.device("cpu"), has_bias=has_bias)
    x, residual = torch.randn(2, 5, HIDDEN)

    out, carried = feed_forward(*layers, x, residual.clone())

    expected, total = apart(*layers, x, residual)
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.equal(carried, total)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 100, 1024])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("scheme", "error"),
    [
        (Scheme("plain"), 0.01),
        (Scheme("fp8", "8bit"), 0.05),
        (Scheme("int8", "8bit"), 0.02),
        (Scheme("int4"), 0.01),
    ],
    ids=["bf16", "fp8", "int8", "int4"],
)
def test_kernels_in_one_give_what_they_give_apart(scheme, error, has_bias, tokens):
    layers = made(scheme, torch.bfloat16, torch.device("cuda"), has_bias=has_bias)
    x, residual = torch.randn(2, tokens, HIDDEN, device="cuda").bfloat16()

    out, carried = feed_forward(*layers, x, residual.clone())

    expected, total = apart(*layers, x, residual.clone())
    assert (out - expected).float().norm() < error * expected.float().norm()
    assert torch.equal(carried, total)
