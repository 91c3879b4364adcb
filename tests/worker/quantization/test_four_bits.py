"""Weights of 4 bits in groups: rounding, orders of columns, segments."""

import pytest
import torch

from deepseek_worker.layers.linear import RANDOM_STD, Projection
from deepseek_worker.quantization.codes import GroupCodes, dequantize
from deepseek_worker.quantization.four_bits import GroupScaledLinear
from deepseek_worker.quantization.readers import Piece, PlainReader
from deepseek_worker.quantization.schemes import Scheme

CPU = torch.device("cpu")
SYMMETRIC = Scheme("int4")
WITH_ZEROS = Scheme("int4", zero_points=True)


def filled(scheme, columns=576, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    layer = GroupScaledLinear(
        Projection({"a": 96, "b": 40}, columns, bias), PlainReader(), scheme, dtype, CPU
    )
    weight, offset = torch.randn(136, columns), torch.randn(136)
    for slot in layer.slots():
        rows = slice(0, 96) if slot.name.startswith("a.") else slice(96, 136)
        slot.store((weight if slot.name.endswith("weight") else offset)[rows].to(dtype))
    layer.pack()
    return layer, weight, offset


@pytest.mark.parametrize("scheme", [SYMMETRIC, WITH_ZEROS], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("columns", [128, 256, 576, 100])
@pytest.mark.parametrize("tokens", [1, 33])
def test_multiplies_with_a_weight_half_a_step_away(scheme, columns, tokens):
    layer, weight, offset = filled(scheme, columns)
    x = torch.eye(columns)

    kept = (layer(x) - offset).T

    for part, rounded in zip(weight.split(128, 1), kept.split(128, 1), strict=True):
        if scheme.zero_points:
            step = (part.amax(1).clamp_min(0) - part.amin(1).clamp_max(0)) / 15
        else:
            step = part.abs().amax(1) / 7
        # The scale is bf16, and so is the product of code and scale.
        assert ((rounded - part).abs() <= 0.51 * step[:, None] + 0.005 * part.abs().amax()).all()
    y = torch.randn(tokens, columns)
    expected = y @ kept.T + offset
    assert (layer(y) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_k_of_576_has_a_short_last_group():
    layer, _, _ = filled(SYMMETRIC, 576)

    # Five groups, in tiles of two.
    assert layer.segments[0].scale.shape == (3, 192, 2)


def test_nothing_but_packed_codes_scales_and_bias_is_kept():
    layer, _, _ = filled(WITH_ZEROS, 512)

    num_codes = 192 * 512
    assert sum(tensor.nbytes for tensor in layer.weights()) == num_codes // 2 + num_codes // 128 * 3
    assert layer._stored.take() == []


class GivenCodes:
    """A reader that hands out prepared codes, whatever was stored."""

    def __init__(self, *parts):
        self.parts = list(parts)

    def pieces(self, rows, columns):
        yield Piece("codes", (1,))

    def read(self, pieces, rows, columns):
        return self.parts[int(pieces["codes"])]


def codes(rows, columns, order=None, zeros=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // 128)
    return GroupCodes(
        torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8),
        torch.rand(rows, groups, generator=generator).to(torch.float16) + 0.5,
        torch.randint(0, 16, (rows, groups), generator=generator, dtype=torch.uint8)
        if zeros
        else None,
        order,
    )


def built(*parts, columns=300, bias=True):
    names = {f"p{index}": part.codes.shape[0] for index, part in enumerate(parts)}
    layer = GroupScaledLinear(
        Projection(names, columns, bias), GivenCodes(*parts), SYMMETRIC, torch.float32, CPU
    )
    offset = torch.randn(sum(names.values()))
    first = 0
    for slot in layer.slots():
        index = int(slot.name[1])
        if slot.name.endswith("bias"):
            slot.store(offset[first : first + slot.shape[0]])
            first += slot.shape[0]
        else:
            slot.store(torch.tensor([index]))
    layer.pack()
    return layer, offset


@pytest.mark.parametrize("zeros", [False, True])
def test_columns_in_another_order_multiply_their_inputs(zeros):
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    part = codes(70, 300, order, zeros)
    layer, offset = built(part)
    x = torch.randn(4, 300)

    expected = x @ dequantize(part, 300).T + offset

    assert len(layer.segments) == 1
    assert torch.allclose(layer(x), expected, atol=1e-3)


def test_padding_columns_count_for_nothing():
    # Group 0 has two columns, the rest of it is padding that names input 0.
    part = codes(5, 256)
    part.codes[:, 2:128] = 8
    order = torch.zeros(256, dtype=torch.int64)
    order[:2] = torch.tensor([128, 129])
    order[128:] = torch.arange(128)
    part = GroupCodes(part.codes, part.scale, None, order)
    layer, offset = built(part, columns=130)
    x = torch.randn(4, 130)

    assert torch.allclose(layer(x), x @ dequantize(part, 130).T + offset, atol=1e-3)


def test_parts_in_the_same_order_are_one_segment_and_others_stay_apart():
    one = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    other = torch.randperm(300, generator=torch.Generator().manual_seed(4))
    parts = [
        codes(64, 300, one),
        codes(70, 300, one.clone(), seed=1),
        codes(8, 300, other, seed=2),
        codes(9, 300, None, seed=3),
    ]
    layer, offset = built(*parts)
    x = torch.randn(4, 300)

    expected = torch.cat([x @ dequantize(part, 300).T for part in parts], 1) + offset

    assert [segment.out_features for segment in layer.segments] == [134, 8, 9]
    assert torch.allclose(layer(x), expected, atol=1e-3)


@pytest.mark.parametrize("scheme", [SYMMETRIC, WITH_ZEROS], ids=["symmetric", "zero points"])
def test_random_weights_have_the_size_of_plain_ones(scheme):
    layer = GroupScaledLinear(
        Projection({"a": 130}, 600, True), PlainReader(), scheme, torch.float32, CPU
    )

    layer.randomize(torch.Generator().manual_seed(1))
    layer.pack()

    kept = (layer(torch.eye(600)) - layer.bias).T
    assert kept.shape == (130, 600)
    assert kept.std() == pytest.approx(RANDOM_STD, rel=0.05)
