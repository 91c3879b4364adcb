"""Attention of one new token per sequence over keys and values in pages.

All arithmetic is fp32. A sequence that has nothing to attend to gives zeros.
"""

import torch
from torch import Tensor


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    window: int | None,
) -> Tensor:
    """Return `softmax(query · keys · scale) · values`, `[sequences, heads, head_dim]`.

    With a page table and lengths per head (three and two dimensions), every KV head of a
    sequence has pages of its own.
    """
    sequences, heads, head_dim = query.shape
    kv_heads = key_cache.shape[2]
    grouped = query.float().view(sequences, kv_heads, heads // kv_heads, head_dim)
    out = torch.zeros_like(grouped)
    for sequence in range(sequences):
        if lengths.dim() == 1:
            table, length = page_table[sequence], int(lengths[sequence])
            keys = gather(key_cache, key_scale, table, length)
            values = gather(value_cache, value_scale, table, length)
            out[sequence] = attend(grouped[sequence][None], keys, values, scale, window)[0]
            continue
        for head in range(kv_heads):
            one = slice(head, head + 1)
            table, length = page_table[sequence, head], int(lengths[sequence, head])
            keys = gather(key_cache[:, :, one], _of_head(key_scale, head), table, length)
            values = gather(value_cache[:, :, one], _of_head(value_scale, head), table, length)
            query_group = grouped[sequence, one][None]
            out[sequence, one] = attend(query_group, keys, values, scale, window)[0]
    return out.view(sequences, heads, head_dim).to(query.dtype)


def gather(cache: Tensor, scale: Tensor | None, table: Tensor, length: int) -> Tensor:
    """Return the first `length` tokens of a sequence's pages, `[length, kv_heads, dim]` fp32.

    Args:
        cache: `[pages, page_tokens, kv_heads, dim]`.
        scale: None, `[kv_heads]`, or `[pages, page_tokens, kv_heads]`.
        table: `[max_pages]`.
        length: In tokens.
    """
    tokens = torch.arange(length, device=cache.device)
    page, offset = table[tokens // cache.shape[1]].long(), tokens % cache.shape[1]
    if cache.dtype == torch.float8_e4m3fn:
        # Indexed reads do not know fp8; its bytes do.
        values = cache.view(torch.uint8)[page, offset].view(cache.dtype).float()
    else:
        values = cache[page, offset].float()
    if scale is None:
        return values
    return values * (scale[:, None] if scale.dim() == 1 else scale[page, offset][..., None])


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend from the last tokens of a sequence to all tokens before and including each.

    Args:
        query: `[tokens, kv_heads, group, dim]` fp32, the sequence's last tokens.
        keys: `[length, kv_heads, dim]` fp32.
        values: As `keys`.
        scale: Of the scores.
        window: How many tokens a token sees, itself included; None for all.

    Returns:
        `[tokens, kv_heads, group, dim]` fp32; zeros where there is nothing to see.
    """
    count, length = query.shape[0], keys.shape[0]
    scores = torch.einsum("nhgd,thd->nhgt", query, keys) * scale
    last = torch.arange(length - count, length, device=query.device)[:, None]
    tokens = torch.arange(length, device=query.device)
    seen = tokens <= last
    if window is not None:
        seen &= tokens > last - window
    seen = seen[:, None, None]
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return torch.einsum("nhgt,thd->nhgd", weights, values)


def _of_head(scale: Tensor | None, head: int) -> Tensor | None:
    return None if scale is None else scale[..., head : head + 1]
