"""Absorbed MLA decode attention over a paged cache of latent and rotary parts."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.mla_decode import reference
from deepseek_kernels.mla_decode.reference import LATENT, ROPE
from deepseek_kernels.paged_decode import SCALES, check_pairs


def mla_decode(
    query: Tensor,
    cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """Attend from one token of each sequence to the latents in the sequence's pages.

    Args:
        query: `[sequences, heads, 576]` fp16, bf16 or fp32: each head's query times the key
            projection (512), then its rotated part (64).
        cache: `[pages, page_tokens, 576]`, any strides but the last; the type of `query`, or
            float8_e4m3fn.
        page_table: `[sequences, max_pages]` int32; entries past a length are not read.
        lengths: `[sequences]` int32: tokens in those pages, the new one included; 0 gives zeros.
        scale: Of the scores. DeepSeek's is `192 ** -0.5` times YaRN's factor squared.
        cache_scale: `[1]` fp32 of an fp8 cache, 1 where absent; `value = code * scale`.

    Returns:
        `[sequences, heads, 512]` in the type of `query`: latents, before the value projection.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("query", query, shape=("sequences", "heads", LATENT + ROPE), dtypes=FLOATS)
    sequences = query.shape[0]
    types = (query.dtype, torch.float8_e4m3fn)
    shape = ("pages", "page_tokens", LATENT + ROPE)
    check_tensor("cache", cache, shape=shape, dtypes=types, like=query)
    if cache.shape[1] == 0:
        raise ValueError("cache has pages of 0 tokens; required is at least 1")
    int32 = (torch.int32,)
    table = (sequences, "max_pages")
    check_tensor("page_table", page_table, shape=table, dtypes=int32, like=query)
    check_tensor("lengths", lengths, shape=(sequences,), dtypes=int32, like=query)
    if cache.element_size() == 1:
        check_pairs("cache", cache)
    if cache_scale is not None:
        if cache.dtype != torch.float8_e4m3fn:
            raise ValueError(f"cache_scale is given; a cache of {cache.dtype} has no scale")
        check_tensor("cache_scale", cache_scale, shape=(1,), dtypes=(torch.float32,), like=query)
    check_range("scale", scale, *SCALES)
    return _mla_decode(query, cache, page_table, lengths, scale, cache_scale)


def cost(query: Tensor, cache: Tensor, tokens: int) -> Cost:
    """Return the work of one call over `tokens` tokens, the sum of the sequences' lengths."""
    sequences, heads, _ = query.shape
    moved = tokens * (LATENT + ROPE) * cache.element_size()
    moved += sequences * heads * (2 * LATENT + ROPE) * query.element_size()
    return Cost(moved, 2 * tokens * heads * (2 * LATENT + ROPE))


def _fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty((*query.shape[:2], LATENT), dtype=query.dtype, device=query.device)


_mla_decode = Operation(reference.mla_decode, fake=_fake)
