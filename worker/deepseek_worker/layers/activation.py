"""The gate of the feed-forward block."""

from torch import Tensor
from torch.nn.functional import silu

import deepseek_kernels


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for `[tokens, 2 * intermediate_size]`, gate first."""
    if gate_up.is_cuda:
        return deepseek_kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
