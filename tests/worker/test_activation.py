"""The gated activation."""

import torch

from deepseek_worker.layers.activation import silu_and_mul


def test_the_gate_is_the_first_half():
    gate, up = torch.randn(2, 5, 8)

    result = silu_and_mul(torch.cat((gate, up), dim=-1))

    assert torch.allclose(result, gate * torch.sigmoid(gate) * up, atol=1e-6)


def test_large_inputs_saturate():
    extreme = torch.tensor([[1e4, -1e4, 1.0, 1.0]])

    assert silu_and_mul(extreme).tolist() == [[1e4, 0.0]]
