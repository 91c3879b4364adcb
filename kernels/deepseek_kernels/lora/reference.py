"""The low-rank products of several adapters, each row by its own."""

from collections.abc import Sequence

import torch
from torch import Tensor


def lora_add(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, widths: Sequence[int]
) -> None:
    """Add `x @ a[i, part].T @ b[i].T` to each row of `out`, `i` being the row's adapter.

    Sums are in fp32; what is between the two products is rounded to the type of `x`. The columns
    of `out` are those of the parts one after another, `widths` of each.

    Source: LoRA, arXiv 2106.09685, section 4.1; the factor alpha / r is in `b` already.
    """
    for adapter in sorted(set(adapters.tolist())):
        if adapter < 0:
            continue
        rows = (adapters == adapter).nonzero().squeeze(1)
        inner = x[rows].float() @ a[adapter].flatten(0, 1).float().t()
        by_part = inner.to(x.dtype).float().view(len(rows), len(widths), -1).unbind(1)
        weights = b[adapter].float().split_with_sizes(list(widths))
        product = torch.cat([one @ w.t() for one, w in zip(by_part, weights, strict=True)], 1)
        out[rows] = (out[rows].float() + product).to(out.dtype)
