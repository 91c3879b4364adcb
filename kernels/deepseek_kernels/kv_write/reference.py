"""Rotary position embedding of queries and keys, and the write of keys and values to pages.

Rotation and quantization are fp32; a cache in a floating-point type gets the value rounded
once. Positions outside the table give NaN. Tokens whose slot is negative are not written.
"""

import torch
from torch import Tensor

from deepseek_kernels._quantize import encode, quantize_rows


def rope_kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    interleaved: bool,
) -> None:
    """Rotate `query` in place and write rotated keys, and values, to their slots."""
    query.copy_(rotate(query, positions, cos_sin, interleaved))
    _write(rotate(key, positions, cos_sin, interleaved), key_cache, slots, key_scale)
    _write(value.float(), value_cache, slots, value_scale)


def mla_rope_kv_write(
    query_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    interleaved: bool,
) -> None:
    """Rotate `query_rope` in place and write latent and rotated key parts to their slots."""
    query_rope.copy_(rotate(query_rope, positions, cos_sin, interleaved))
    rotated = rotate(key_rope[:, None], positions, cos_sin, interleaved)[:, 0]
    row = torch.cat([latent.float(), rotated], dim=-1)
    _write(row[:, None], cache[:, :, None], slots, scale)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Return `x`, `[tokens, heads, head_dim]`, rotated in its first `rotary_dim` columns, fp32."""
    rotary_dim = cos_sin.shape[1]
    known = (positions >= 0) & (positions < cos_sin.shape[0])
    angles = cos_sin[positions.where(known, 0)].where(known[:, None], torch.nan)
    cos, sin = angles[:, None].chunk(2, dim=-1)
    turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:].float()
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat([torch.stack(pair, dim=-1).flatten(-2), rest], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _write(values: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    """Write fp32 `[tokens, heads, dim]` to a cache `[pages, page_tokens, heads, dim]`."""
    live = slots >= 0
    values, slots = values[live], slots[live]
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    if cache.dtype == torch.int8 and scale is not None:
        tokens, heads, dim = values.shape
        codes, scales = quantize_rows(values.reshape(tokens * heads, dim), torch.int8, dim)
        cache[page, offset] = codes.view(tokens, heads, dim)
        scale[page, offset] = scales.view(tokens, heads)
    elif cache.dtype == torch.float8_e4m3fn:
        scaled = values if scale is None else values / scale[:, None]
        # Indexed writes do not know fp8; its bytes do.
        cache.view(torch.uint8)[page, offset] = encode(scaled, cache.dtype).view(torch.uint8)
    else:
        cache[page, offset] = values.to(cache.dtype)
