"""The gate of a gated MLP with the product before it, in fp32, rounded once."""

from torch import Tensor
from torch.nn import functional


def gated_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return `silu(x @ gate.T) * (x @ up.T)` for a weight whose first half of rows is the gate."""
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)
