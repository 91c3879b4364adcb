"""Prefill attention over a paged KV cache: whole prompts, chunks after a prefix, windows."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.paged_decode import SCALES, check_cache
from deepseek_kernels.paged_prefill import reference


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend from each sequence's new tokens to its tokens up to and including each.

    Args:
        query: `[tokens, heads, head_dim]` fp16, bf16 or fp32: the new tokens of all sequences,
            one sequence after another; heads at any stride.
        key_cache: As in `paged_decode`, the new tokens' keys already written; likewise
            `value_cache`, `page_table`, `scale`, `key_scale` and `value_scale`.
        value_cache: As `key_cache` and in its type.
        page_table: `[sequences, max_pages]` int32.
        query_starts: `[sequences + 1]` int32: where the tokens of a sequence start in `query`,
            and where the last one's end. Tokens from there on give zeros.
        lengths: `[sequences]` int32: tokens in the pages, the new ones included.
        scale: Of the scores; None for `head_dim ** -0.5`.
        key_scale: Of an 8-bit cache.
        value_scale: Of an 8-bit cache.
        window: How many tokens a token sees, itself included; None for all.

    Returns:
        `[tokens, heads, head_dim]` in the type of `query`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("query", query, shape=("tokens", "heads", "head_dim"), dtypes=FLOATS)
    check_cache(query, key_cache, value_cache, key_scale, value_scale)
    int32 = (torch.int32,)
    shape = ("sequences", "max_pages")
    check_tensor("page_table", page_table, shape=shape, dtypes=int32, like=query)
    sequences = page_table.shape[0]
    check_tensor("lengths", lengths, shape=(sequences,), dtypes=int32, like=query)
    check_tensor("query_starts", query_starts, shape=(sequences + 1,), dtypes=int32, like=query)
    if window is not None:
        check_range("window", window, 1, 2**30)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    check_range("scale", scale, *SCALES)
    return _paged_prefill(
        query,
        key_cache,
        value_cache,
        page_table,
        query_starts,
        lengths,
        scale,
        key_scale,
        value_scale,
        window,
    )


def cost(query: Tensor, key_cache: Tensor, tokens: int, pairs: int) -> Cost:
    """Return the work of one call.

    Args:
        query: As in `paged_prefill`.
        key_cache: Likewise.
        tokens: The sum of the sequences' lengths.
        pairs: How many pairs of a new token and a token that it sees there are.
    """
    _, heads, head_dim = query.shape
    moved = 2 * tokens * key_cache.shape[2] * head_dim * key_cache.element_size()
    return Cost(moved + 2 * query.numel() * query.element_size(), 4 * pairs * heads * head_dim)


def _fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


_paged_prefill = Operation(reference.paged_prefill, fake=_fake)
