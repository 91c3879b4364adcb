"""Decode attention over a paged KV cache: GQA and MQA, 8-bit caches, windows, sparse pages."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.paged_decode import reference

MAX_HEAD_DIM = 256
MAX_GROUP = 128
SCALES = (2.0**-40, 2.0**40)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend from one token of each sequence to the tokens in the sequence's pages.

    Args:
        query: `[sequences, heads, head_dim]` fp16, bf16 or fp32; heads at any stride.
        key_cache: `[pages, page_tokens, kv_heads, head_dim]`, any strides but the last; the
            type of `query`, float8_e4m3fn or int8.
        value_cache: As `key_cache` and in its type.
        page_table: `[sequences, max_pages]` int32: where the pages of a sequence lie. For
            page-sparse attention `[sequences, kv_heads, max_pages]` as `select_pages` makes it.
            Entries past a sequence's length are not read.
        lengths: `[sequences]` int32, or `[sequences, kv_heads]` with a page table per head:
            tokens in those pages, the new one included. 0 gives zeros.
        scale: Of the scores; None for `head_dim ** -0.5`.
        key_scale: For int8, `[pages, page_tokens, kv_heads]` fp32. For fp8, `[kv_heads]` fp32,
            1 where absent. `value = code * scale`.
        value_scale: As `key_scale`.
        window: How many tokens the new one sees, itself included; None for all.

    Returns:
        `[sequences, heads, head_dim]` in the type of `query`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("query", query, shape=("sequences", "heads", "head_dim"), dtypes=FLOATS)
    sequences = query.shape[0]
    kv_heads = check_cache(query, key_cache, value_cache, key_scale, value_scale)
    if isinstance(page_table, Tensor) and page_table.dim() == 3:
        check_tensor(
            "page_table",
            page_table,
            shape=(sequences, kv_heads, "max_pages"),
            dtypes=(torch.int32,),
            like=query,
        )
        check_tensor(
            "lengths", lengths, shape=(sequences, kv_heads), dtypes=(torch.int32,), like=query
        )
        if window is not None:
            raise ValueError("window is given; a page table per head allows none")
    else:
        check_tensor(
            "page_table",
            page_table,
            shape=(sequences, "max_pages"),
            dtypes=(torch.int32,),
            like=query,
        )
        check_tensor("lengths", lengths, shape=(sequences,), dtypes=(torch.int32,), like=query)
    if window is not None:
        check_range("window", window, 1, 2**30)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    check_range("scale", scale, *SCALES)
    return _paged_decode(
        query,
        key_cache,
        value_cache,
        page_table,
        lengths,
        scale,
        key_scale,
        value_scale,
        window,
    )


def cost(query: Tensor, key_cache: Tensor, tokens: int) -> Cost:
    """Return the work of one call over `tokens` tokens, the sum of what its sequences see.

    Reads of scales and page tables are left out: they are below a percent for all but int8.
    """
    sequences, heads, head_dim = query.shape
    moved = 2 * tokens * key_cache.shape[2] * head_dim * key_cache.element_size()
    moved += 2 * query.numel() * query.element_size() + 4 * sequences
    return Cost(moved, 4 * tokens * heads * head_dim)


def check_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> int:
    """Refuse caches and scales that do not fit a query `[any, heads, head_dim]`.

    Returns:
        The number of KV heads.
    """
    _, heads, head_dim = query.shape
    check_range("the head dimension of query", head_dim, 1, MAX_HEAD_DIM)
    types = (query.dtype, torch.float8_e4m3fn, torch.int8)
    shape = ("pages", "page_tokens", "kv_heads", head_dim)
    check_tensor("key_cache", key_cache, shape=shape, dtypes=types, like=query)
    pages, page_tokens, kv_heads, _ = key_cache.shape
    check_tensor(
        "value_cache", value_cache, shape=key_cache.shape, dtypes=(key_cache.dtype,), like=query
    )
    if kv_heads == 0 or heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ValueError(
            f"query has {heads} heads and key_cache {kv_heads}; required is a multiple, "
            f"up to {MAX_GROUP} times"
        )
    if page_tokens == 0:
        raise ValueError("key_cache has pages of 0 tokens; required is at least 1")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.element_size() == 1:
            check_pairs(name, cache)
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        check_scale(name, scale, key_cache, (pages, page_tokens, kv_heads))
    return kv_heads


def check_pairs(name: str, cache: Tensor) -> None:
    """Refuse 8-bit caches whose neighbouring columns do not share an aligned 16-bit element."""
    uneven = [n for n in (*cache.stride()[:-1], cache.storage_offset(), cache.shape[-1]) if n % 2]
    if uneven:
        raise ValueError(
            f"{name} has shape {list(cache.shape)}, strides {list(cache.stride())} and offset "
            f"{cache.storage_offset()}; 8-bit caches need an even head dimension, even strides "
            "and an even offset"
        )


def check_scale(
    name: str, scale: Tensor | None, cache: Tensor, shape: tuple[int, int, int]
) -> None:
    """Refuse scales that a cache does not have; `shape` is `pages, page_tokens, kv_heads`."""
    if cache.dtype == torch.int8:
        if scale is None:
            raise ValueError(f"{name} is absent; an int8 cache needs one of {list(shape)} fp32")
        if list(scale.shape) != list(shape):
            raise ValueError(f"{name} has shape {list(scale.shape)}; required is {list(shape)}")
    elif scale is None:
        return
    elif cache.dtype == torch.float8_e4m3fn:
        check_tensor(
            name, scale, shape=shape[2:], dtypes=(torch.float32,), like=cache, contiguous=True
        )
    else:
        raise ValueError(f"{name} is given; a cache of {cache.dtype} has no scale")
    if scale.dtype != torch.float32 or scale.device != cache.device:
        raise ValueError(
            f"{name} is {scale.dtype} on {scale.device}; required is float32 on {cache.device}"
        )


def _fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


_paged_decode = Operation(reference.paged_decode, fake=_fake)
