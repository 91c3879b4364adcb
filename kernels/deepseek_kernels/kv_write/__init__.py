"""RoPE fused with the write of keys and values to the paged cache, for GQA, MQA and MLA."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.kv_write import reference

CACHE_TYPES = (*FLOATS, torch.float8_e4m3fn, torch.int8)
MLA_CACHE_TYPES = (*FLOATS, torch.float8_e4m3fn)


def rope_kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Rotate queries in place and write rotated keys, and values, to their pages.

    Args:
        query: `[tokens, query_heads, head_dim]` fp16, bf16 or fp32; rotated in place.
        key: `[tokens, kv_heads, head_dim]` in the type of `query`; left as it is.
        value: As `key`.
        positions: `[tokens]` int64, rows of `cos_sin`; others give NaN.
        cos_sin: `[positions, rotary_dim]` fp32, cosines then sines. Columns of a head from
            `rotary_dim` on are not rotated.
        key_cache: `[pages, page_tokens, kv_heads, head_dim]`, any strides but the last;
            fp16, bf16, fp32, float8_e4m3fn or int8.
        value_cache: As `key_cache` and in its type.
        slots: `[tokens]` int64, `page * page_tokens + offset`; negative ones are not written.
        key_scale: For int8, `[pages, page_tokens, kv_heads]` fp32, written: each head of each
            token has its own. For fp8, `[kv_heads]` fp32, read; 1 where absent.
            `value = code * scale`.
        value_scale: As `key_scale`.
        interleaved: Whether rotated pairs are neighbours (GPT-J, DeepSeek) instead of halves
            (NeoX, Llama, Qwen).

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("query", query, shape=("tokens", "query_heads", "head_dim"), dtypes=FLOATS)
    tokens, _, head_dim = query.shape
    same = (query.dtype,)
    check_tensor("key", key, shape=(tokens, "kv_heads", head_dim), dtypes=same, like=query)
    heads = key.shape[1]
    check_tensor("value", value, shape=(tokens, heads, head_dim), dtypes=same, like=query)
    _check_places(query, positions, cos_sin, slots, interleaved)
    page = ("pages", "page_tokens", heads, head_dim)
    check_tensor("key_cache", key_cache, shape=page, dtypes=CACHE_TYPES, like=query)
    pages = key_cache.shape[:2]
    check_tensor(
        "value_cache",
        value_cache,
        shape=(*pages, heads, head_dim),
        dtypes=(key_cache.dtype,),
        like=query,
    )
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        _check_scale(name, scale, key_cache, (*pages, heads) if _dynamic(key_cache) else (heads,))
    _rope_kv_write(
        query,
        key,
        value,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        slots,
        key_scale,
        value_scale,
        interleaved,
    )


def mla_rope_kv_write(
    query_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    *,
    scale: Tensor | None = None,
    interleaved: bool = True,
) -> None:
    """Rotate the rotary part of MLA queries in place and write latent and key to their pages.

    Args:
        query_rope: `[tokens, heads, rotary_dim]` fp16, bf16 or fp32; rotated in place.
        latent: `[tokens, latent_dim]` in the same type, already normalised.
        key_rope: `[tokens, rotary_dim]` in the same type; left as it is.
        positions: `[tokens]` int64, rows of `cos_sin`; others give NaN.
        cos_sin: `[positions, rotary_dim]` fp32, cosines then sines.
        cache: `[pages, page_tokens, latent_dim + rotary_dim]`, any strides but the last;
            fp16, bf16, fp32 or float8_e4m3fn.
        slots: `[tokens]` int64, `page * page_tokens + offset`; negative ones are not written.
        scale: `[1]` fp32 for an fp8 cache, `value = code * scale`; 1 where absent.
        interleaved: Whether rotated pairs are neighbours (DeepSeek) instead of halves.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    shape = ("tokens", "heads", "rotary_dim")
    check_tensor("query_rope", query_rope, shape=shape, dtypes=FLOATS)
    tokens, _, rotary = query_rope.shape
    same = (query_rope.dtype,)
    check_tensor("latent", latent, shape=(tokens, "latent_dim"), dtypes=same, like=query_rope)
    check_tensor("key_rope", key_rope, shape=(tokens, rotary), dtypes=same, like=query_rope)
    _check_places(query_rope, positions, cos_sin, slots, interleaved)
    if cos_sin.shape[1] != rotary:
        raise ValueError(f"cos_sin has {cos_sin.shape[1]} columns; required is {rotary}")
    row = ("pages", "page_tokens", latent.shape[1] + rotary)
    check_tensor("cache", cache, shape=row, dtypes=MLA_CACHE_TYPES, like=query_rope)
    _check_scale("scale", scale, cache, (1,))
    _mla_rope_kv_write(
        query_rope, latent, key_rope, positions, cos_sin, cache, slots, scale, interleaved
    )


def cost(query: Tensor, kv_elements: int, rotary_dim: int, cache_dtype: torch.dtype) -> Cost:
    """Return the work of one call; `kv_elements` are those written to the cache for a token."""
    tokens = query.shape[0]
    size = query.element_size()
    moved = 2 * query.numel() * size + tokens * kv_elements * (size + cache_dtype.itemsize)
    return Cost(moved + tokens * (4 * rotary_dim + 16), 3 * query.numel())


def _dynamic(cache: Tensor) -> bool:
    return cache.dtype == torch.int8


def _check_places(
    query: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor, interleaved: bool
) -> None:
    tokens, _, head_dim = query.shape
    for name, tensor in (("positions", positions), ("slots", slots)):
        check_tensor(
            name, tensor, shape=(tokens,), dtypes=(torch.int64,), like=query, contiguous=True
        )
    check_tensor(
        "cos_sin",
        cos_sin,
        shape=("positions", "rotary_dim"),
        dtypes=(torch.float32,),
        like=query,
        contiguous=True,
    )
    rotary = cos_sin.shape[1]
    if rotary % 2 or not 2 <= rotary <= head_dim:
        raise ValueError(
            f"cos_sin has {rotary} columns; allowed are even numbers from 2 to {head_dim}"
        )
    if interleaved and rotary & (rotary - 1):
        raise ValueError(f"cos_sin has {rotary} columns; interleaved needs a power of two")


def _check_scale(name: str, scale: Tensor | None, cache: Tensor, shape: Sequence[int]) -> None:
    if scale is None:
        if _dynamic(cache):
            raise ValueError(f"{name} is absent; an int8 cache needs one of {list(shape)} fp32")
        return
    if cache.dtype in FLOATS:
        raise ValueError(f"{name} is given; a cache of {cache.dtype} has no scale")
    strided = _dynamic(cache)
    if not isinstance(scale, Tensor) or list(scale.shape) != list(shape):
        given = list(scale.shape) if isinstance(scale, Tensor) else type(scale).__name__
        raise ValueError(f"{name} is {given}; required is a tensor of {list(shape)}")
    if scale.dtype != torch.float32 or scale.device != cache.device:
        raise ValueError(
            f"{name} is {scale.dtype} on {scale.device}; required is float32 on {cache.device}"
        )
    if not strided and not scale.is_contiguous():
        raise ValueError(f"{name} has strides {list(scale.stride())}; it must be contiguous")


def _fake(*_: object) -> None:
    return None


_rope_kv_write = Operation(
    reference.rope_kv_write,
    fake=_fake,
    mutates=("query", "key_cache", "value_cache", "key_scale", "value_scale"),
)
_mla_rope_kv_write = Operation(
    reference.mla_rope_kv_write, fake=_fake, mutates=("query_rope", "cache")
)
