"""The matrix product with a weight as models store it."""

from torch import Tensor


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, `[tokens, out_features]`, summed in fp32."""
    product = x.float() @ weight.float().t()
    return (product if bias is None else product + bias.float()).to(x.dtype)
