import pytest
import torch

from deepseek_kernels import paged_prefill
from deepseek_kernels.paged_prefill import cost, reference
from deepseek_kernels.testing import assert_close

FP8, INT8 = torch.float8_e4m3fn, torch.int8
CACHES = [None, FP8, INT8]
CACHE_IDS = ["float", "fp8", "int8"]


def starts_of(lane, counts):
    starts = torch.tensor([0, *counts]).cumsum(0)
    return starts.to(device=lane.device, dtype=torch.int32)


def run(query, pool, starts, **options):
    tensors = (pool.keys, pool.values, pool.table, starts, pool.lengths)
    return paged_prefill(query, *tensors, **pool.scales, **options)


def expected(query, pool, starts, window=None):
    tensors = (pool.keys, pool.values, pool.table, starts, pool.lengths)
    scale = query.shape[2] ** -0.5
    return reference.paged_prefill(query, *tensors, scale, pool.key_scale, pool.value_scale, window)


@pytest.mark.parametrize("dtype", CACHES, ids=CACHE_IDS)
@pytest.mark.parametrize(
    ("counts", "lengths", "heads", "kv_heads", "head_dim"),
    [
        pytest.param([1, 63, 0, 33], [1, 100, 0, 33], 3, 1, 64, id="mixed"),
        pytest.param([20], [129], 2, 2, 128, id="after-a-prefix"),
        pytest.param([9], [40], 1, 1, 80, id="dim-80"),
    ],
)
def test_prefill_equals_its_reference(
    lane, counts, lengths, heads, kv_heads, head_dim, dtype, paged_cache
):
    pool = paged_cache(lane, lengths, kv_heads, head_dim, dtype=dtype)
    query, starts = lane.randn(sum(counts), heads, head_dim), starts_of(lane, counts)

    out = run(query, pool, starts)

    assert_close("out", out, expected(query, pool, starts))


@pytest.mark.parametrize("head_dim", [96, 192, 256])
def test_head_dims_are_masked(one_lane, head_dim, paged_cache):
    pool = paged_cache(one_lane, [30], 1, head_dim)
    query, starts = one_lane.randn(12, 1, head_dim), starts_of(one_lane, [12])

    assert_close("out", run(query, pool, starts), expected(query, pool, starts))


@pytest.mark.parametrize("tokens", [127, 128, 129, 500])
def test_blocks_of_queries_and_tiles_of_keys_meet(one_lane, tokens, paged_cache):
    pool = paged_cache(one_lane, [tokens + 40], 1, 128)
    query, starts = one_lane.randn(tokens, 1, 128), starts_of(one_lane, [tokens])

    assert_close("out", run(query, pool, starts), expected(query, pool, starts))


@pytest.mark.parametrize("page_tokens", [1, 24, 128])
def test_pages_of_any_size(one_lane, page_tokens, paged_cache):
    pool = paged_cache(one_lane, [70], 1, 64, page_tokens=page_tokens)
    query, starts = one_lane.randn(20, 1, 64), starts_of(one_lane, [20])

    assert_close("out", run(query, pool, starts), expected(query, pool, starts))


@pytest.mark.parametrize("window", [1, 17, 500])
def test_window_sees_the_last_tokens(one_lane, window, paged_cache):
    pool = paged_cache(one_lane, [90, 10], 1, 64)
    query, starts = one_lane.randn(60, 2, 64), starts_of(one_lane, [50, 10])

    out = run(query, pool, starts, window=window)

    assert_close("out", out, expected(query, pool, starts, window))


def test_padding_after_the_last_sequence_gives_zeros(one_lane, paged_cache):
    pool = paged_cache(one_lane, [20, 0], 1, 128)
    query, starts = one_lane.randn(40, 2, 128), starts_of(one_lane, [20, 0])

    out = run(query, pool, starts)

    assert not out[20:].any()
    assert_close("out", out, expected(query, pool, starts))


def test_no_tokens_give_none(one_lane, paged_cache):
    pool = paged_cache(one_lane, [20], 1, 64)

    assert run(one_lane.randn(0, 2, 64), pool, starts_of(one_lane, [0])).shape == (0, 2, 64)


def test_wide_queries_are_read_in_place(lane, paged_cache):
    pool = paged_cache(lane, [40], 2, 128)
    wide, starts = lane.randn(40, 8, 128), starts_of(lane, [40])

    out = run(wide[:, 2:6], pool, starts)

    assert_close("out", out, expected(wide[:, 2:6].contiguous(), pool, starts))


def test_offsets_pass_31_bits(one_lane, paged_cache):
    pool = paged_cache(one_lane, [40], 1, 128)
    stride = 2**31 // 2 + 128
    storage = torch.zeros(1, dtype=one_lane.dtype, device=one_lane.device)
    pages = pool.values.shape[0]
    size = storage.element_size()
    storage.untyped_storage().resize_(size * ((pages - 1) * stride + 16 * 128))
    far = storage.as_strided(pool.values.shape, (stride, 128, 128, 1))
    far.copy_(pool.values)
    pool.values = far
    query, starts = one_lane.randn(20, 1, 128), starts_of(one_lane, [20])

    assert_close("out", run(query, pool, starts), expected(query, pool, starts))


def test_non_finite_keys_stay_with_their_sequence(one_lane, paged_cache):
    pool = paged_cache(one_lane, [30, 30], 1, 128)
    pool.keys[pool.table[0, 1], 3, 0, 5] = torch.nan
    query, starts = one_lane.randn(60, 1, 128), starts_of(one_lane, [30, 30])

    out = run(query, pool, starts)

    # Key 19 is the bad one: tokens before it do not see it.
    assert out[19:30].isnan().any()
    assert_close("out", out[:19], expected(query, pool, starts)[:19])
    assert_close("out", out[30:], expected(query, pool, starts)[30:])


def test_operation_runs_by_the_dispatcher_too(one_lane, paged_cache):
    pool = paged_cache(one_lane, [9], 1, 64)
    tensors = (pool.keys, pool.values, pool.table, starts_of(one_lane, [9]), pool.lengths)

    torch.library.opcheck(
        torch.ops.deepseek.paged_prefill,
        (one_lane.randn(9, 1, 64), *tensors, 0.125, None, None, None),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(9, 3, 64)}, "query has 3 heads and key_cache 2; required is a mult"),
        (
            {"query_starts": torch.zeros(2).int()},
            r"query_starts has shape \[2\]; required is \[3\]",
        ),
        ({"query_starts": torch.zeros(3)}, "query_starts has dtype float32; allowed are int32"),
        ({"lengths": torch.zeros(1).int()}, r"lengths has shape \[1\]; required is \[2\]"),
        ({"window": -1}, "window is -1; allowed is 1 to"),
        ({"value_scale": torch.ones(2)}, "value_scale is given; a cache of torch.float32 has no"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "query": torch.zeros(9, 4, 64),
        "key_cache": torch.zeros(4, 16, 2, 64),
        "value_cache": torch.zeros(4, 16, 2, 64),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "query_starts": torch.zeros(3, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
    } | change

    with pytest.raises(ValueError, match=message):
        paged_prefill(**arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_kernel_fits_hopper(compile_sm90, spec, dtype):
    pool = spec((4096, 16, 8, 128), dtype)
    (kernel,) = compile_sm90(
        "paged_prefill.kernel:paged_prefill",
        spec((8192, 32, 128)),
        pool,
        pool,
        spec((1, 512), "int32"),
        spec((2,), "int32"),
        spec((1,), "int32"),
        0.1,
        None,
        None,
        None,
    )

    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= 170 * 1024
    assert kernel.wgmma_instructions >= 24
    assert kernel.wide_loads >= 16


def test_cost_counts_pairs():
    query = torch.empty(8, 4, 64, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(8, 16, 2, 64, dtype=torch.bfloat16, device="meta")

    assert cost(query, keys, 8, 36).flops == 4 * 36 * 4 * 64
    assert cost(query, keys, 8, 36).bytes == 2 * 8 * 2 * 64 * 2 + 2 * 8 * 4 * 64 * 2
