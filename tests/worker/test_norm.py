"""RMSNorm with its residual, against the formula."""

import torch

from deepseek_worker.layers.norm import RmsNorm


def test_normalises_the_sum_and_hands_it_on():
    norm = RmsNorm("n", 6, 1e-5, torch.float32, torch.device("cpu"))
    norm.weight.normal_()
    x, residual = torch.randn(2, 4, 6)
    total = x + residual

    normalised, carried = norm(x, residual)

    rms = (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(normalised, total / rms * norm.weight, atol=1e-6)
    assert torch.equal(carried, total)


def test_without_residual_the_input_is_carried():
    norm = RmsNorm("n", 6, 1e-5, torch.float32, torch.device("cpu"))
    norm.weight.fill_(1)
    x = torch.randn(4, 6)

    _, carried = norm(x, None)

    assert carried is x


def test_a_row_of_zeros_stays_zero():
    norm = RmsNorm("n", 6, 1e-5, torch.float32, torch.device("cpu"))
    norm.weight.fill_(1)

    assert norm(torch.zeros(1, 6), None)[0].abs().max() == 0
