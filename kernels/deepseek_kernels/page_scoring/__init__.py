"""Page-sparse decode: bounds of the keys in a page, scores of pages, and the choice of the best.

One step: `update_page_bounds` after the keys are written, then for the new queries
`page_scores`, `select_pages`, and `paged_decode` over the page table and lengths these return.
"""

from typing import Final

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.page_scoring import reference
from deepseek_kernels.paged_decode import check_scale

MAX_PAGES: Final = 32768
"""Of one sequence: a row of scores is kept in the registers of one program."""


def update_page_bounds(
    key_cache: Tensor, bounds: Tensor, slots: Tensor, *, key_scale: Tensor | None = None
) -> None:
    """Bound the keys of every page that was just written to, in place.

    Args:
        key_cache: `[pages, page_tokens, kv_heads, head_dim]` as in `paged_decode`, already
            written.
        bounds: `[pages, kv_heads, 2, head_dim]` fp16, bf16 or fp32, any strides but the last:
            least and largest values.
        slots: `[tokens]` int64, as given to `rope_kv_write`: tokens of one page are neighbours
            in rising order; negative ones are skipped.
        key_scale: Of an 8-bit cache, as in `paged_decode`.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    types = (*FLOATS, torch.float8_e4m3fn, torch.int8)
    shape = ("pages", "page_tokens", "kv_heads", "head_dim")
    check_tensor("key_cache", key_cache, shape=shape, dtypes=types)
    pages, page_tokens, kv_heads, head_dim = key_cache.shape
    check_range("the tokens of a page of key_cache", page_tokens, 1, 1024)
    check_bounds = (pages, kv_heads, 2, head_dim)
    check_tensor("bounds", bounds, shape=check_bounds, dtypes=FLOATS, like=key_cache)
    check_tensor(
        "slots",
        slots,
        shape=("tokens",),
        dtypes=(torch.int64,),
        like=key_cache,
        contiguous=True,
    )
    check_scale("key_scale", key_scale, key_cache, (pages, page_tokens, kv_heads))
    _update_page_bounds(key_cache, bounds, slots, key_scale)


def page_scores(
    query: Tensor, bounds: Tensor, page_table: Tensor, lengths: Tensor, *, page_tokens: int
) -> Tensor:
    """Bound the scores of each page from above, for each KV head the largest of its group.

    Args:
        query: `[sequences, heads, head_dim]` fp16, bf16 or fp32.
        bounds: `[pages, kv_heads, 2, head_dim]` in the type of `query`.
        page_table: `[sequences, max_pages]` int32.
        lengths: `[sequences]` int32, in tokens.
        page_tokens: Of a page.

    Returns:
        `[sequences, kv_heads, max_pages]` fp32, minus infinity past a sequence's pages.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("query", query, shape=("sequences", "heads", "head_dim"), dtypes=FLOATS)
    sequences, heads, head_dim = query.shape
    check_range("the head dimension of query", head_dim, 1, 256)
    shape = ("pages", "kv_heads", 2, head_dim)
    check_tensor("bounds", bounds, shape=shape, dtypes=(query.dtype,), like=query)
    kv_heads = bounds.shape[1]
    if kv_heads == 0 or heads % kv_heads or heads // kv_heads > 128:
        raise ValueError(
            f"query has {heads} heads and bounds {kv_heads}; required is a multiple, "
            "up to 128 times"
        )
    _check_table(page_table, lengths, sequences, page_tokens, query)
    return _page_scores(query, bounds, page_table, lengths, page_tokens)


def select_pages(
    scores: Tensor, page_table: Tensor, lengths: Tensor, *, pages: int, page_tokens: int
) -> tuple[Tensor, Tensor]:
    """Choose each KV head's best pages, always the last one among them.

    Args:
        scores: `[sequences, kv_heads, max_pages]` fp32, contiguous, from `page_scores`.
        page_table: `[sequences, max_pages]` int32.
        lengths: `[sequences]` int32, in tokens.
        pages: How many to keep, at most.
        page_tokens: Of a page.

    Returns:
        A page table `[sequences, kv_heads, pages]` and lengths `[sequences, kv_heads]` in
        tokens, both int32, for `paged_decode`. Pages keep their order; of equal scores the
        earlier page is kept.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    shape = ("sequences", "kv_heads", "max_pages")
    check_tensor("scores", scores, shape=shape, dtypes=(torch.float32,), contiguous=True)
    sequences, _, max_pages = scores.shape
    check_range("the number of pages of scores", max_pages, 0, MAX_PAGES)
    check_range("pages", pages, 1, MAX_PAGES)
    _check_table(page_table, lengths, sequences, page_tokens, scores)
    if page_table.shape[1] != max_pages:
        raise ValueError(f"page_table has {page_table.shape[1]} pages and scores {max_pages}")
    return _select_pages(scores, page_table, lengths, pages, page_tokens)


def cost(query: Tensor, bounds: Tensor, pages: int) -> Cost:
    """Return the work of scoring `pages` pages, the sum over sequences, and of choosing."""
    _, heads, head_dim = query.shape
    kv_heads = bounds.shape[1]
    moved = pages * kv_heads * (2 * head_dim * bounds.element_size() + 8)
    return Cost(moved + query.numel() * query.element_size(), 4 * pages * heads * head_dim)


def _check_table(
    page_table: Tensor, lengths: Tensor, sequences: int, page_tokens: int, like: Tensor
) -> None:
    shape = (sequences, "max_pages")
    check_tensor("page_table", page_table, shape=shape, dtypes=(torch.int32,), like=like)
    check_tensor("lengths", lengths, shape=(sequences,), dtypes=(torch.int32,), like=like)
    check_range("page_tokens", page_tokens, 1, 1024)


def _fake_update(*_: object) -> None:
    return None


def _fake_scores(query: Tensor, bounds: Tensor, page_table: Tensor, *_: object) -> Tensor:
    shape = (query.shape[0], bounds.shape[1], page_table.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=query.device)


def _fake_select(
    scores: Tensor, page_table: Tensor, lengths: Tensor, pages: int, page_tokens: int
) -> tuple[Tensor, Tensor]:
    del page_table, lengths, page_tokens
    rows = scores.shape[:2]
    return (
        torch.empty((*rows, pages), dtype=torch.int32, device=scores.device),
        torch.empty(rows, dtype=torch.int32, device=scores.device),
    )


_update_page_bounds = Operation(
    reference.update_page_bounds, fake=_fake_update, mutates=("bounds",)
)
_page_scores = Operation(reference.page_scores, fake=_fake_scores)
_select_pages = Operation(reference.select_pages, fake=_fake_select)
