"""Copies of KV pages: between a pool and dense staging, and over the host link.

Pages of a pool lie apart; the host link wants large pieces. So pages are gathered by a kernel
into staging memory on the device and shipped by one copy of the DMA engine, or the reverse.
"""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.page_copy import reference


def gather_pages(pool: Tensor, page_ids: Tensor) -> Tensor:
    """Return the pages `page_ids` of a pool, dense.

    Args:
        pool: `[pages, ...]` of any type, each page contiguous, pages at any stride.
        page_ids: `[n]` int32; numbers outside the pool give zeros.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    _check(pool, page_ids)
    return _gather_pages(pool, page_ids)


def scatter_pages(pages: Tensor, page_ids: Tensor, pool: Tensor) -> None:
    """Write dense pages to the pages `page_ids` of a pool.

    Args:
        pages: `[n, ...]` in the type and with the pages' shape of `pool`, contiguous.
        page_ids: `[n]` int32, no number twice; numbers outside the pool are not written.
        pool: `[pages, ...]`, each page contiguous, pages at any stride.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    _check(pool, page_ids)
    shape = (page_ids.shape[0], *pool.shape[1:])
    check_tensor("pages", pages, shape=shape, dtypes=(pool.dtype,), like=pool, contiguous=True)
    _scatter_pages(pages, page_ids, pool)


def copy_pages_to_host(pool: Tensor, page_ids: Tensor, host: Tensor, *, staging_pages: int) -> None:
    """Copy pages of a pool to host memory, in the order of the current stream.

    The call does not wait: `host` holds the pages once the stream has come this far.

    Args:
        pool: As in `gather_pages`.
        page_ids: As in `gather_pages`, on the pool's device.
        host: `[n, ...]` in the pages' type and shape, contiguous; pinned, or the copy blocks.
        staging_pages: Pages that device memory is taken for at a time.

    Raises:
        ValueError: An argument of the wrong type, shape or stride.
    """
    _check(pool, page_ids)
    shape = (page_ids.shape[0], *pool.shape[1:])
    check_tensor("host", host, shape=shape, dtypes=(pool.dtype,), contiguous=True)
    for first in _chunks(page_ids, staging_pages):
        chunk = slice(first, first + staging_pages)
        host[chunk].copy_(_gather_pages(pool, page_ids[chunk]), non_blocking=True)


def copy_pages_from_host(
    host: Tensor, page_ids: Tensor, pool: Tensor, *, staging_pages: int
) -> None:
    """Copy pages in host memory to pages of a pool; arguments as `copy_pages_to_host`.

    `host` must not change until the current stream has come this far.
    """
    _check(pool, page_ids)
    shape = (page_ids.shape[0], *pool.shape[1:])
    check_tensor("host", host, shape=shape, dtypes=(pool.dtype,), contiguous=True)
    for first in _chunks(page_ids, staging_pages):
        chunk = slice(first, first + staging_pages)
        staged = host[chunk].to(pool.device, non_blocking=True)
        _scatter_pages(staged, page_ids[chunk], pool)


def cost(pool: Tensor, num_pages: int) -> Cost:
    """Return the work of copying so many pages on the device."""
    return Cost(2 * num_pages * (pool[0].numel() * pool.element_size()), 0)


def _chunks(page_ids: Tensor, staging_pages: int) -> range:
    if staging_pages < 1:
        raise ValueError(f"staging_pages is {staging_pages}; at least 1 is required")
    return range(0, page_ids.shape[0], staging_pages)


def _check(pool: Tensor, page_ids: Tensor) -> None:
    if not isinstance(pool, Tensor) or pool.dim() < 2:
        given = list(pool.shape) if isinstance(pool, Tensor) else type(pool).__name__
        raise ValueError(f"pool is {given}; required is a tensor [pages, ...]")
    if pool.numel() > 0 and not pool[0].is_contiguous():
        raise ValueError(
            f"pool has strides {list(pool.stride())}; inside a page they must be dense"
        )
    check_tensor(
        "page_ids", page_ids, shape=("n",), dtypes=(torch.int32,), like=pool, contiguous=True
    )


def _fake_gather(pool: Tensor, page_ids: Tensor) -> Tensor:
    shape = (page_ids.shape[0], *pool.shape[1:])
    return torch.empty(shape, dtype=pool.dtype, device=pool.device)


def _fake_scatter(*_: Tensor) -> None:
    return None


_gather_pages = Operation(reference.gather_pages, fake=_fake_gather)
_scatter_pages = Operation(reference.scatter_pages, fake=_fake_scatter, mutates=("pool",))
