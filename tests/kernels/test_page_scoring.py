import pytest
import torch

from deepseek_kernels import page_scores, paged_decode, select_pages, update_page_bounds
from deepseek_kernels.page_scoring import cost, reference
from deepseek_kernels.paged_decode import reference as decode_reference
from deepseek_kernels.testing import assert_close

PAGE = 16

FP8, INT8 = torch.float8_e4m3fn, torch.int8
CACHES = [None, FP8, INT8]
CACHE_IDS = ["float", "fp8", "int8"]


def slots_of(pool):
    """Slots of all tokens of all sequences, then one of graph padding."""
    slots = [
        row.long()[torch.arange(length) // PAGE] * PAGE + torch.arange(length) % PAGE
        for row, length in zip(pool.table.cpu(), pool.lengths.tolist(), strict=True)
    ]
    return torch.cat([*slots, torch.tensor([-1])]).to(pool.keys.device)


def bounds_of(pool, dtype):
    pages, _, kv_heads, head_dim = pool.keys.shape
    bounds = torch.zeros(pages, kv_heads, 2, head_dim, dtype=dtype, device=pool.keys.device)
    reference.update_page_bounds(pool.keys, bounds, slots_of(pool), pool.key_scale)
    return bounds


@pytest.mark.parametrize("dtype", CACHES, ids=CACHE_IDS)
def test_bounds_equal_their_reference(lane, dtype, paged_cache):
    pool = paged_cache(lane, [1, 0, 20], 2, 80, dtype=dtype)
    bounds = lane.randn(pool.keys.shape[0], 2, 2, 80)
    again, slots = bounds.clone(), slots_of(pool)

    update_page_bounds(pool.keys, bounds, slots, key_scale=pool.key_scale)

    reference.update_page_bounds(pool.keys, again, slots, pool.key_scale)
    assert_close("bounds", bounds, again)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(7, 1, 64), (6, 2, 80)])
def test_scores_equal_their_reference_and_bound_every_score(
    lane, heads, kv_heads, head_dim, paged_cache
):
    pool = paged_cache(lane, [1, 0, 500], kv_heads, head_dim)
    query, bounds = lane.randn(3, heads, head_dim), bounds_of(pool, lane.dtype)

    scores = page_scores(query, bounds, pool.table, pool.lengths, page_tokens=PAGE)

    expected = reference.page_scores(query, bounds, pool.table, pool.lengths, PAGE)
    assert_close("scores", scores, expected)
    keys = decode_reference.gather(pool.keys, None, pool.table[2], 500)
    grouped = query[2].float().view(kv_heads, -1, head_dim)
    largest = torch.einsum("hgd,thd->hgt", grouped, keys).amax(1)
    for page in range(-(-500 // PAGE)):
        inside = largest[:, page * PAGE : (page + 1) * PAGE].amax(-1)
        assert (inside <= scores[2, :, page] + 1e-3).all()


@pytest.mark.parametrize("keep", [1, 3, 40])
def test_selection_equals_its_reference(one_lane, keep, paged_cache):
    pool = paged_cache(one_lane, [1, 0, 63, 500], 2, 64)
    scores = one_lane.randn(4, 2, pool.table.shape[1], dtype=torch.float32)
    scores[3, 0] = torch.tensor([1.0, -1.0], device=scores.device).repeat(16)

    table, lengths = select_pages(scores, pool.table, pool.lengths, pages=keep, page_tokens=PAGE)

    expected = reference.select_pages(scores, pool.table, pool.lengths, keep, PAGE)
    assert torch.equal(table, expected[0])
    assert torch.equal(lengths, expected[1])


def test_all_pages_kept_give_dense_attention(one_lane, paged_cache):
    pool = paged_cache(one_lane, [70, 33], 2, 64)
    query, bounds = one_lane.randn(2, 4, 64), bounds_of(pool, one_lane.dtype)
    scores = page_scores(query, bounds, pool.table, pool.lengths, page_tokens=PAGE)
    table, lengths = select_pages(scores, pool.table, pool.lengths, pages=5, page_tokens=PAGE)

    sparse = paged_decode(query, pool.keys, pool.values, table, lengths)

    dense = paged_decode(query, pool.keys, pool.values, pool.table, pool.lengths)
    assert_close("out", sparse, dense)


def test_page_with_a_bad_key_is_kept(one_lane, paged_cache):
    pool = paged_cache(one_lane, [100], 1, 64)
    pool.keys[pool.table[0, 2], 3, 0, 5] = torch.nan
    bounds = bounds_of(pool, one_lane.dtype)
    again = bounds.clone().zero_()
    update_page_bounds(pool.keys, again, slots_of(pool))

    query = one_lane.randn(1, 2, 64)
    scores = page_scores(query, again, pool.table, pool.lengths, page_tokens=PAGE)

    assert scores[0, 0, 2] == torch.inf
    assert scores[0, 0, [0, 1, 3]].isfinite().all()
    assert torch.equal(again.isnan(), bounds.isnan())


def test_empty_batch_selects_nothing(one_lane, paged_cache):
    pool = paged_cache(one_lane, [10], 1, 64)
    scores = page_scores(
        one_lane.randn(0, 2, 64),
        bounds_of(pool, one_lane.dtype),
        pool.table[:0],
        pool.lengths[:0],
        page_tokens=PAGE,
    )
    table, lengths = select_pages(
        scores, pool.table[:0], pool.lengths[:0], pages=2, page_tokens=PAGE
    )

    assert table.shape == (0, 1, 2)
    assert lengths.shape == (0, 1)


def test_operations_run_by_the_dispatcher_too(one_lane, paged_cache):
    pool = paged_cache(one_lane, [20], 1, 64)
    bounds = bounds_of(pool, one_lane.dtype)
    query = one_lane.randn(1, 2, 64)
    scores = page_scores(query, bounds, pool.table, pool.lengths, page_tokens=PAGE)

    operations = torch.ops.deepseek
    torch.library.opcheck(operations.page_scores, (query, bounds, pool.table, pool.lengths, PAGE))
    torch.library.opcheck(operations.select_pages, (scores, pool.table, pool.lengths, 1, PAGE))
    torch.library.opcheck(
        operations.update_page_bounds, (pool.keys, bounds, slots_of(pool)[:3], None)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 64)}, "query has 3 heads and bounds 2; required is a multip"),
        ({"bounds": torch.zeros(4, 2, 64)}, r"bounds has shape \[4, 2, 64\]; required is"),
        ({"bounds": torch.zeros(4, 2, 2, 64).half()}, "bounds has dtype float16; allowed are"),
        ({"page_table": torch.zeros(2, 3).long()}, "page_table has dtype int64; allowed are"),
        ({"page_tokens": 0}, "page_tokens is 0; allowed is 1 to 1024"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "query": torch.zeros(2, 4, 64),
        "bounds": torch.zeros(4, 2, 2, 64),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "page_tokens": PAGE,
    } | change

    with pytest.raises(ValueError, match=message):
        page_scores(**arguments)


def test_selection_names_wrong_arguments():
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    with pytest.raises(ValueError, match="page_table has 3 pages and scores 4"):
        select_pages(torch.zeros(2, 1, 4), table, lengths, pages=2, page_tokens=PAGE)
    with pytest.raises(ValueError, match="pages is 0; allowed is 1 to"):
        select_pages(torch.zeros(2, 1, 3), table, lengths, pages=0, page_tokens=PAGE)
    with pytest.raises(ValueError, match="slots has dtype int32; allowed are int64"):
        update_page_bounds(torch.zeros(4, 16, 2, 64), torch.zeros(4, 2, 2, 64), lengths)


@pytest.mark.parametrize("pages", [2048, 8192])
def test_kernels_fit_hopper(compile_sm90, spec, pages):
    table, lengths = spec((8, pages), "int32"), spec((8,), "int32")
    (scoring,) = compile_sm90(
        "page_scoring.kernel:page_scores",
        spec((8, 32, 128)),
        spec((4096, 8, 2, 128)),
        table,
        lengths,
        PAGE,
    )
    (choosing,) = compile_sm90(
        "page_scoring.kernel:select_pages",
        spec((8, 8, pages), "float32"),
        table,
        lengths,
        pages // 8,
        PAGE,
    )

    assert scoring.spill_bytes == choosing.spill_bytes == 0
    assert scoring.matrix_instructions >= 16
    assert scoring.wide_loads >= 8


def test_cost_counts_both_bounds():
    query = torch.empty(2, 4, 64, dtype=torch.bfloat16, device="meta")
    bounds = torch.empty(8, 2, 2, 64, dtype=torch.bfloat16, device="meta")

    assert cost(query, bounds, 10).bytes == 10 * 2 * (2 * 64 * 2 + 8) + 2 * 4 * 64 * 2
