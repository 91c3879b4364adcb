"""Choice of the pages that matter to a query, by bounds of their keys (Quest, arXiv 2406.10774).

A page keeps the least and the largest value of each key column. Their products with a query
bound every score in the page from above, so the pages of the largest bounds are kept. All
arithmetic is fp32. A page that holds a key that is not a number scores infinity: it is kept.
"""

import torch
from torch import Tensor

from deepseek_kernels.paged_decode.reference import gather


def update_page_bounds(
    key_cache: Tensor, bounds: Tensor, slots: Tensor, key_scale: Tensor | None
) -> None:
    """Bound anew each page that was just written to, from its first token to the last written."""
    page_tokens = key_cache.shape[1]
    following = torch.cat([slots[1:], slots.new_full((1,), -1)])
    last = (slots >= 0) & ((following < 0) | (following // page_tokens != slots // page_tokens))
    for slot in slots[last].tolist():
        page = torch.tensor([slot // page_tokens], device=slots.device)
        keys = gather(key_cache, key_scale, page, slot % page_tokens + 1)
        bounds[page, :, 0] = keys.amin(0).to(bounds.dtype)
        bounds[page, :, 1] = keys.amax(0).to(bounds.dtype)


def page_scores(
    query: Tensor, bounds: Tensor, page_table: Tensor, lengths: Tensor, page_tokens: int
) -> Tensor:
    """Return `[sequences, kv_heads, max_pages]` fp32: the largest bound of a group's heads.

    Pages past a sequence's length score minus infinity.
    """
    sequences, heads, head_dim = query.shape
    kv_heads = bounds.shape[1]
    grouped = query.float().view(sequences, kv_heads, heads // kv_heads, head_dim)
    shape = (sequences, kv_heads, page_table.shape[1])
    scores = torch.full(shape, -torch.inf, device=query.device)
    for sequence, length in enumerate(lengths.tolist()):
        pages = -(-length // page_tokens)
        page_bounds = bounds[page_table[sequence, :pages].long()].float()
        positive, negative = grouped[sequence].clamp_min(0), grouped[sequence].clamp_max(0)
        of_heads = torch.einsum("hgd,phd->hgp", positive, page_bounds[:, :, 1])
        of_heads += torch.einsum("hgd,phd->hgp", negative, page_bounds[:, :, 0])
        scores[sequence, :, :pages] = of_heads.nan_to_num(torch.inf, torch.inf).amax(1)
    return scores


def select_pages(
    scores: Tensor, page_table: Tensor, lengths: Tensor, pages: int, page_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return page table and lengths of the `pages` best pages for each KV head.

    The last page, where the sequence grows, is always kept. Pages keep their order; of equal
    ones the earlier is kept. Entries past a length are 0.
    """
    sequences, kv_heads, _ = scores.shape
    table = torch.zeros((sequences, kv_heads, pages), dtype=torch.int32, device=scores.device)
    kept_lengths = torch.zeros((sequences, kv_heads), dtype=torch.int32, device=scores.device)
    for sequence, length in enumerate(lengths.tolist()):
        count = -(-length // page_tokens)
        if count == 0:
            continue
        kept = min(count, pages)
        others = scores[sequence, :, : count - 1].sort(dim=-1, descending=True, stable=True)
        last = torch.full((kv_heads, 1), count - 1, device=scores.device)
        chosen = torch.cat([others.indices[:, : kept - 1], last], dim=-1).sort(dim=-1).values
        table[sequence, :, :kept] = page_table[sequence][chosen]
        kept_lengths[sequence] = length - (count - kept) * page_tokens
    return table, kept_lengths
