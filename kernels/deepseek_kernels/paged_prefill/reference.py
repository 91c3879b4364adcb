"""Causal attention of new tokens over keys and values in pages, after any cached prefix.

The new tokens of a sequence are its last: token `i` of `n` sees all tokens up to
`length - n + i`. All arithmetic is fp32. Tokens that have nothing to attend to give zeros.
"""

import torch
from torch import Tensor

from deepseek_kernels.paged_decode.reference import attend, gather


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    window: int | None,
) -> Tensor:
    """Return `softmax(query · keys · scale) · values`, `[tokens, heads, head_dim]`.

    Tokens past the last sequence's, which pad a batch, give zeros.
    """
    _, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    grouped = query.float().view(-1, kv_heads, heads // kv_heads, head_dim)
    out = torch.zeros_like(grouped)
    starts, totals = query_starts.tolist(), lengths.tolist()
    for sequence, length in enumerate(totals):
        tokens = slice(starts[sequence], starts[sequence + 1])
        table = page_table[sequence]
        keys = gather(key_cache, key_scale, table, length)
        values = gather(value_cache, value_scale, table, length)
        out[tokens] = attend(grouped[tokens], keys, values, scale, window)
    return out.view(-1, heads, head_dim).to(query.dtype)
