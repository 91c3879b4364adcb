import pytest
import torch

from deepseek_kernels._quantize import MAXIMUM, encode, quantize_rows


@pytest.mark.parametrize("dtype", MAXIMUM, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("group", [1, 128, 256])
def test_largest_value_of_a_group_takes_the_largest_code(dtype, group):
    torch.manual_seed(20)
    values = torch.randn(3, 256)

    codes, scale = quantize_rows(values, dtype, group)

    largest = codes.float().abs().view(3, 256 // group, group).amax(-1)
    assert torch.equal(largest, torch.full_like(largest, MAXIMUM[dtype]))
    assert scale.shape == (3, 256 // group)
    back = codes.float().view(3, -1, group) * scale[..., None]
    step = scale[..., None] * (0.5 if dtype == torch.int8 else 16)
    assert (
        (back.view(3, 256) - values).abs() <= step.expand_as(back).reshape(3, 256) * 1.001
    ).all()


def test_int8_rounds_halves_to_even_and_saturates():
    scaled = torch.tensor([0.5, -0.5, 1.5, 1.49, -1.51, 126.6, 200.0, -200.0])

    assert encode(scaled, torch.int8).tolist() == [0, 0, 2, 1, -2, 127, 127, -127]


def test_fp8_saturates():
    assert encode(torch.tensor([1e6, -1e6]), torch.float8_e4m3fn).tolist() == [448.0, -448.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", MAXIMUM, ids=str)
def test_a_group_with_a_value_that_is_not_finite_does_not_come_back_finite(dtype, bad):
    values = torch.ones(1, 256)
    values[0, 3] = bad

    codes, scale = quantize_rows(values, dtype, 128)

    back = codes.float().view(1, 2, 128) * scale[..., None]
    assert not back[0, 0].isfinite().any()
    assert back[0, 1].isfinite().all()
