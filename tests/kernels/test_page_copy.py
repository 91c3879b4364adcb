import pytest
import torch

from deepseek_kernels import (
    copy_pages_from_host,
    copy_pages_to_host,
    gather_pages,
    scatter_pages,
)
from deepseek_kernels.page_copy import cost, reference

TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


def pool_of(lane, *shape, dtype=torch.int8, apart=1):
    """A pool whose pages lie `apart` times their size apart, full of random bytes."""
    size = torch.zeros((), dtype=dtype).element_size()
    wide = (shape[0], apart, *shape[1:-1], shape[-1] * size)
    content = torch.randint(0, 127, wide, dtype=torch.uint8, device=lane.device)
    return content.view(dtype)[:, 0]


def same(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(2, 16, 8), (3, 5), (1,), (4099,)], ids=str)
@pytest.mark.parametrize("apart", [1, 2], ids=["dense", "apart"])
def test_gather_and_scatter_equal_their_references(one_lane, shape, dtype, apart):
    pool = pool_of(one_lane, 6, *shape, dtype=dtype, apart=apart)
    target = pool_of(one_lane, 6, *shape, dtype=dtype, apart=apart)
    expected = target.clone()
    page_ids = torch.tensor([5, 0, 3], dtype=torch.int32, device=one_lane.device)

    pages = gather_pages(pool, page_ids)
    scatter_pages(pages, page_ids, target)

    assert same(pages, pool[page_ids.long()])
    assert same(pages, reference.gather_pages(pool, page_ids))
    reference.scatter_pages(pages, page_ids, expected)
    assert same(target, expected)


def test_page_numbers_outside_the_pool_gather_zeros_and_scatter_nothing(one_lane):
    pool = pool_of(one_lane, 4, 32)
    before = pool.clone()
    page_ids = torch.tensor([-1, 4, 2], dtype=torch.int32, device=one_lane.device)

    pages = gather_pages(pool, page_ids)
    scatter_pages(torch.ones_like(pages), page_ids, pool)

    assert not pages[:2].any()
    assert same(pages[2], before[2])
    before[2] = 1
    assert same(pool, before)


def test_no_pages(one_lane):
    none = torch.zeros(0, dtype=torch.int32, device=one_lane.device)

    assert gather_pages(pool_of(one_lane, 4, 2, 3), none).shape == (0, 2, 3)


def test_offsets_pass_31_bits(one_lane):
    stride = 2**31 // 2 + 64
    storage = torch.zeros(1, dtype=torch.float16, device=one_lane.device)
    storage.untyped_storage().resize_(2 * (2 * stride + 64))
    pool = storage.as_strided((3, 64), (stride, 1))
    pages = one_lane.randn(1, 64).half()
    last = torch.tensor([2], dtype=torch.int32, device=one_lane.device)

    scatter_pages(pages, last, pool)

    assert same(pool[2:], pages)
    assert same(gather_pages(pool, last), pages)


@pytest.mark.parametrize("staging_pages", [1, 3, 100])
def test_pages_survive_a_trip_to_the_host(one_lane, staging_pages):
    pool = pool_of(one_lane, 8, 2, 50, apart=2)
    kept = pool.clone()
    page_ids = torch.tensor([7, 1, 4, 2], dtype=torch.int32, device=one_lane.device)
    host = torch.zeros(4, 2, 50, dtype=pool.dtype)
    if one_lane.device == "cuda":
        host = host.pin_memory()

    copy_pages_to_host(pool, page_ids, host, staging_pages=staging_pages)
    if one_lane.device == "cuda":
        torch.cuda.synchronize()
    assert same(host, kept[page_ids.long()].cpu())

    pool.zero_()
    copy_pages_from_host(host, page_ids, pool, staging_pages=staging_pages)

    assert same(pool[page_ids.long()], kept[page_ids.long()])
    assert not pool[[0, 3, 5, 6]].any()


def test_operations_run_by_the_dispatcher_too(one_lane):
    pool = one_lane.randn(4, 8)
    page_ids = torch.tensor([1, 3], dtype=torch.int32, device=one_lane.device)

    torch.library.opcheck(torch.ops.deepseek.gather_pages, (pool, page_ids))
    torch.library.opcheck(torch.ops.deepseek.scatter_pages, (one_lane.randn(2, 8), page_ids, pool))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": torch.zeros(4)}, r"pool is \[4\]; required is a tensor \[pages, ...\]"),
        ({"pool": torch.zeros(4, 6, 8).transpose(1, 2)}, "inside a page they must be dense"),
        ({"page_ids": torch.zeros(2).long()}, "page_ids has dtype int64; allowed are int32"),
        ({"pages": torch.zeros(2, 7)}, r"pages has shape \[2, 7\]; required is \[2, 8\]"),
        ({"pages": torch.zeros(2, 8).half()}, "pages has dtype float16; allowed are float32"),
        ({"pages": torch.zeros(8, 2).t()}, "it must be contiguous"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {
        "pages": torch.zeros(2, 8),
        "page_ids": torch.zeros(2, dtype=torch.int32),
        "pool": torch.zeros(4, 8),
    }

    with pytest.raises(ValueError, match=message):
        scatter_pages(**(given | change))


def test_staging_needs_a_page():
    with pytest.raises(ValueError, match="staging_pages is 0; at least 1 is required"):
        copy_pages_to_host(
            torch.zeros(4, 8), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 8), staging_pages=0
        )


@pytest.mark.parametrize("launcher", ["gather", "scatter"])
def test_kernel_fits_hopper(compile_sm90, spec, launcher):
    pool, ids = spec((1000, 28, 2, 16, 4, 128)), spec((64,), "int32")
    pages = spec((64, 28, 2, 16, 4, 128))
    arguments = (pool, ids) if launcher == "gather" else (pages, ids, pool)

    (kernel,) = compile_sm90(f"page_copy.kernel:{launcher}_pages", *arguments)

    assert kernel.spill_bytes == 0
    assert kernel.registers <= 64
    assert kernel.wide_loads >= 2
    assert kernel.wide_stores >= 2


def test_cost_counts_read_and_write():
    assert cost(torch.empty(9, 4, 8, dtype=torch.bfloat16, device="meta"), 3).bytes == 2 * 3 * 64
