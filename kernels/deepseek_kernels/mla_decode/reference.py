"""Decode attention of MLA in its absorbed form: all heads share one latent key and value.

A cached token is `[512 latent | 64 rope]`. The whole row is the key and its latent part the
value; the projections to heads are folded into the query and into what follows. All arithmetic
is fp32. A sequence that has nothing to attend to gives zeros.
"""

import torch
from torch import Tensor

from deepseek_kernels.paged_decode.reference import attend, gather

LATENT = 512
ROPE = 64


def mla_decode(
    query: Tensor,
    cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    cache_scale: Tensor | None,
) -> Tensor:
    """Return `softmax(query · rows · scale) · latents`, `[sequences, heads, 512]`."""
    sequences, heads, _ = query.shape
    out = torch.zeros((sequences, heads, LATENT), dtype=torch.float32, device=query.device)
    for sequence in range(sequences):
        length = int(lengths[sequence])
        rows = gather(cache[:, :, None], cache_scale, page_table[sequence], length)
        grouped = query[sequence].float()[None, None]
        out[sequence] = attend(grouped, rows, rows[..., :LATENT], scale, None)[0, 0]
    return out.to(query.dtype)
