"""Rounding for inputs: what is made up for, and what smoothing leaves exact."""

import pytest
import torch

from deepseek_worker.layers.linear import Projection
from deepseek_worker.quantization.build import build_linear, rounded
from deepseek_worker.quantization.rounding import (
    Inputs,
    best_scale,
    compensated,
    relative_error,
    second_moments,
    smooth,
)
from deepseek_worker.quantization.schemes import Scheme

CPU = torch.device("cpu")


def correlated(tokens, columns):
    """Inputs of a few directions and a little noise, as those of language models are."""
    torch.manual_seed(3)
    directions = torch.randn(columns // 8, columns)
    return torch.randn(tokens, columns // 8) @ directions + 0.1 * torch.randn(tokens, columns)


def filled(scheme, weight, inputs=None):
    projection = Projection({"a": weight.shape[0]}, weight.shape[1], has_bias=False)
    layer = build_linear(projection, rounded(scheme), torch.float32, CPU)
    for slot in layer.slots():
        slot.store(weight)
    if inputs is not None:
        layer.round_for(inputs)
    layer.pack()
    return layer


def test_an_error_is_made_up_for_by_an_input_that_goes_along():
    # Both inputs are always equal: 0.4 + 0.4 is nearly 1, which rounding to nearest makes 0.
    weight = torch.tensor([[0.4, 0.4]])

    result = compensated(weight, torch.ones(2, 2), torch.ones(1, 1), 2, torch.round)

    assert result.tolist() == [[0.0, 1.0]]


def test_inputs_that_have_nothing_in_common_are_rounded_to_nearest():
    torch.manual_seed(0)
    weight, scale = torch.randn(5, 150), torch.rand(5, 2) + 0.5
    moments = torch.diag(torch.rand(150) + 0.1)

    result = compensated(weight, moments, scale, 128, torch.round)

    spread = scale.repeat_interleave(128, 1)[:, :150]
    assert torch.equal(result, (weight / spread).round())


def test_scales_are_chosen_by_what_rounding_distorts():
    # The large weight of the first row hardly counts, that of the second is all that counts.
    weight = torch.tensor([[1.4, 0.5, 0.5], [1.4, 0.5, 0.5]])
    importance = torch.tensor([[0.01, 1.0, 1.0], [1.0, 0.0, 0.0]])

    first, second = (
        best_scale(
            weight[row : row + 1],
            torch.diag(importance[row]),
            torch.ones(1, 1),
            3,
            clip,
            factors=(1, 0.5, 1.4),
        )
        for row in range(2)
    )

    assert first.item() == 0.5
    assert second.item() == pytest.approx(1.4)


def clip(values):
    return values.round().clamp(-1, 1)


def test_an_input_that_is_always_zero_does_no_harm():
    moments = torch.diag(torch.tensor([1.0, 0.0, 2.0]))

    result = compensated(
        torch.tensor([[0.6, 1.4, -2.2]]), moments, torch.ones(1, 1), 3, torch.round
    )

    assert result.tolist() == [[1.0, 1.0, -2.0]]


@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
def test_outputs_are_nearer_than_by_rounding_to_nearest(weights):
    inputs = correlated(400, 160)
    weight = torch.randn(48, 160)
    seen, unseen = inputs[:300], inputs[300:]
    scheme = Scheme(weights)

    nearest = filled(scheme, weight)(unseen) - unseen @ weight.t()
    calibrated = filled(scheme, weight, Inputs(seen, None))(unseen) - unseen @ weight.t()

    assert calibrated.norm() < 0.6 * nearest.norm()


def test_every_token_counts_alike():
    rows = torch.tensor([[3.0, 4.0], [3000.0, 0.0], [0.0, 0.0]])

    moments = second_moments(rows)

    assert torch.allclose(moments, torch.tensor([[1.36, 0.48], [0.48, 0.64]]))


def test_smoothing_moves_outliers_and_changes_no_product():
    torch.manual_seed(1)
    gain = torch.ones(32)
    rows, weight = torch.randn(64, 32), torch.randn(8, 32)
    rows[:, 5] *= 100
    gain[5] = 100
    outliers, product = rows[:, 5].clone(), rows @ weight.t()

    smoothed = smooth(Inputs(rows, gain), weight)

    # Powers of two: each term of the sums is the same number.
    assert torch.equal(rows @ smoothed.t(), product)
    # About the root of how far they stick out.
    assert gain[5] in (100 / 4, 100 / 8, 100 / 16)
    assert torch.equal(rows[:, 5] * (100 / gain[5]), outliers)


def test_inputs_that_no_norm_has_made_are_not_smoothed():
    rows, weight = torch.tensor([[100.0, 1.0]]), torch.ones(3, 2)

    assert smooth(Inputs(rows, None), weight) is weight
    assert rows.tolist() == [[100.0, 1.0]]


def test_the_error_is_that_of_the_worst_part():
    exact = torch.tensor([[3.0, 4.0, 1.0], [3.0, 4.0, 2.0]])
    rounded_ones = torch.tensor([[3.0, 4.5, 1.5], [3.0, 4.5, 2.0]])

    # 0.1 of the first part; half of the second for one token, and nothing for the other.
    assert relative_error(rounded_ones, exact, [2, 1]) == pytest.approx((0.5**2 / 2) ** 0.5)


def test_inputs_whose_outliers_cannot_be_smoothed_stay_in_16_bits():
    inputs = correlated(300, 160)
    weight = torch.randn(48, 160)
    # The output hardly depends on the seventh, but the others are rounded to its scale.
    weight[:, 7] *= 1e-3
    outliers = inputs.clone()
    outliers[:, 7] += 3000
    scheme = Scheme("int8", "8bit")

    assert filled(scheme, weight, Inputs(inputs, None)).input_format is not None
    assert filled(scheme, weight, Inputs(outliers, None)).input_format is None


def test_rounding_for_inputs_is_for_one_weight():
    inputs = correlated(300, 160)
    weight = torch.randn(48, 160)
    layer = filled(Scheme("fp8"), weight, Inputs(inputs, None))
    for slot in layer.slots():
        slot.store(weight)
    layer.pack()

    assert torch.equal(layer.weight.float(), filled(Scheme("fp8"), weight).weight.float())
