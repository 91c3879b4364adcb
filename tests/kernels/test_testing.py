"""The comparison that all kernel tests rest on can fail."""

import pytest
import torch

from deepseek_kernels.testing import TOLERANCES, assert_close, difference

BY_TYPE = pytest.mark.parametrize(
    "dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def reference_of(dtype):
    torch.manual_seed(20)
    spread = torch.randn(4096, dtype=torch.float64)
    return (spread * 40).clamp(-120, 120).to(dtype)


@BY_TYPE
def test_equal_tensors_pass(dtype):
    assert_close("x", reference_of(dtype), reference_of(dtype))


@BY_TYPE
def test_twice_the_rms_tolerance_fails(dtype):
    reference = reference_of(dtype)
    share = 2 * TOLERANCES[dtype].relative_rms
    sign = torch.where(torch.arange(reference.numel()) % 2 == 0, 1.0, -1.0).double()
    wrong = reference.double() * (1 + share * sign)

    # Where a type cannot hold so small an error, the error of as many elements as amount to it.
    moved = wrong.to(dtype)
    if moved.double().sub(reference.double()).norm() < 1.5 * share / 2 * reference.double().norm():
        step = reference.double() * 1.13 + torch.sign(reference.double())
        norm = reference.double().norm()
        sums = (step.to(dtype).double() - reference.double()).square().cumsum(0).sqrt()
        count = int((sums < share * norm).sum()) + 1
        moved = torch.cat([step[:count].to(dtype), reference[count:]])

    assert difference(moved, reference) is not None


@BY_TYPE
def test_twice_the_largest_error_in_one_element_fails(dtype):
    reference = reference_of(dtype)
    at = int(reference.double().abs().argmax())
    top = 2.0 ** torch.floor(torch.log2(reference[at].double().abs()))
    unit = 1.0 if dtype == torch.int8 else float(top * torch.finfo(dtype).eps)
    wrong = reference.clone()
    moved = reference[at].double() - torch.sign(reference[at].double()) * unit * (
        2 * TOLERANCES[dtype].max_ulps
    )
    wrong[at] = moved.to(dtype)

    assert difference(wrong, reference) is not None


@BY_TYPE
def test_unwritten_output_fails(dtype):
    reference = reference_of(dtype)
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    wrong = reference.clone()
    wrong[-1] = poison

    assert difference(wrong, reference) is not None


def test_special_values_must_stand_where_the_reference_has_them():
    inf, nan = float("inf"), float("nan")
    reference = torch.tensor([1.0, inf, nan])

    assert difference(torch.tensor([1.0, inf, nan]), reference) is None
    assert difference(torch.tensor([1.0, -inf, nan]), reference) is not None
    assert difference(torch.tensor([1.0, nan, inf]), reference) is not None
    assert difference(torch.tensor([1.0, 2.0, nan]), reference) is not None


def test_shape_and_type_must_agree():
    assert "is torch.float16" in difference(torch.zeros(2).half(), torch.zeros(2))
    assert "[3]" in difference(torch.zeros(3), torch.zeros(2))


def test_integers_must_be_equal():
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == "1 of 2 elements differ"


def test_the_failure_names_output_and_error():
    with pytest.raises(AssertionError, match=r"codes: relative RMS error .*; allowed is 4.00e-06"):
        assert_close("codes", torch.ones(4), torch.zeros(4) + 1.1)
