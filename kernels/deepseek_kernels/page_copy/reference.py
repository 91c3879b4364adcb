"""Pages picked out of a pool into one dense tensor, and back.

Page numbers outside the pool gather zeros and scatter nothing.
"""

import torch
from torch import Tensor


def gather_pages(pool: Tensor, page_ids: Tensor) -> Tensor:
    """Return `pool[page_ids]`, dense."""
    known = _known(pool, page_ids)
    pages = torch.zeros((page_ids.shape[0], *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    _bytes(pages)[known] = _bytes(pool)[page_ids[known].long()]
    return pages


def scatter_pages(pages: Tensor, page_ids: Tensor, pool: Tensor) -> None:
    """Set `pool[page_ids] = pages`; the numbers must differ."""
    known = _known(pool, page_ids)
    _bytes(pool)[page_ids[known].long()] = _bytes(pages)[known]


def _known(pool: Tensor, page_ids: Tensor) -> Tensor:
    return (page_ids >= 0) & (page_ids < pool.shape[0])


def _bytes(pages: Tensor) -> Tensor:
    """View pages as rows of bytes: indexing does not know every type."""
    return pages.flatten(1).view(torch.uint8)
