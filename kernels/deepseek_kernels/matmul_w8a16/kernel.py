"""The kernels of `matmul`, which decode 8-bit weights as they arrive."""

import torch
from torch import Tensor

from deepseek_kernels._configs import pick
from deepseek_kernels.matmul.kernel import gemv, skinny


def matmul_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Launch the kernel for `reference.matmul_w8a16`.

    From the tokens on at which arithmetic counts more than bytes, the library multiplies with
    the decoded codes, which is exact, and the scale follows.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    if tokens == 1:
        return gemv(x, weight, scale, bias, pick("matmul_w8a16_gemv", n=rows, k=columns))
    config = pick("matmul_w8a16", m=tokens, n=rows, k=columns)
    if config.get("library"):
        out = torch.nn.functional.linear(x, weight.to(x.dtype)).mul_(scale)
        return out if bias is None else out.add_(bias)
    return skinny(x, weight, x.dtype, config, weight_scale=scale, bias=bias)
