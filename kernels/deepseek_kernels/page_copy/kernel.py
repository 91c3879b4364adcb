"""One program copies one chunk of one page, 16 bytes a thread and load."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._configs import pick


@triton.jit(do_not_specialize=["num_pages"])
def page_copy_kernel(
    pool_ptr,
    pages_ptr,
    page_ids_ptr,
    num_pages,
    stride_pool,
    stride_pages,
    num_words,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
):
    num_blocks = tl.cdiv(num_words, BLOCK)
    i_page = (tl.program_id(0) // num_blocks).to(tl.int64)
    o_words = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    m_words = o_words < num_words
    i_pool = tl.load(page_ids_ptr + i_page).to(tl.int64)
    m_known = (i_pool >= 0) & (i_pool < num_pages)
    p_pool = pool_ptr + i_pool * stride_pool + o_words
    p_pages = pages_ptr + i_page * stride_pages + o_words
    if GATHER:
        tl.store(p_pages, tl.load(p_pool, mask=m_words & m_known, other=0), mask=m_words)
    else:
        tl.store(p_pool, tl.load(p_pages, mask=m_words, other=0), mask=m_words & m_known)


def gather_pages(pool: Tensor, page_ids: Tensor) -> Tensor:
    """Launch the kernel for `reference.gather_pages`."""
    shape = (page_ids.shape[0], *pool.shape[1:])
    pages = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    _launch(pool, pages, page_ids, gather=True)
    return pages


def scatter_pages(pages: Tensor, page_ids: Tensor, pool: Tensor) -> None:
    """Launch the kernel for `reference.scatter_pages`."""
    _launch(pool, pages, page_ids, gather=False)


def _launch(pool: Tensor, pages: Tensor, page_ids: Tensor, *, gather: bool) -> None:
    if pages.numel() == 0:
        return
    pool, pages = _words(pool, pages)
    num_words = pages.shape[1]
    config = pick("page_copy", words=num_words)
    block = config["block"]
    page_copy_kernel[(pages.shape[0] * triton.cdiv(num_words, block),)](
        pool,
        pages,
        page_ids,
        pool.shape[0],
        pool.stride(0),
        pages.stride(0),
        num_words,
        BLOCK=block,
        GATHER=gather,
        num_warps=config["num_warps"],
    )


def _words(pool: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """View both as rows of the widest integers that divide page, stride and start."""
    size = pool.element_size()
    bytes_apart = (pool.stride(0) * size, pool.storage_offset() * size, pages[0].numel() * size)
    whole = all(number % 4 == 0 for number in bytes_apart)
    word = torch.int32 if whole and pages.storage_offset() * size % 4 == 0 else torch.uint8
    return pool.flatten(1).view(word), pages.flatten(1).view(word)
