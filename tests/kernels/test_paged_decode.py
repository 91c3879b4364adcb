import pytest
import torch

from deepseek_kernels import paged_decode
from deepseek_kernels.paged_decode import cost, reference
from deepseek_kernels.testing import assert_close

FP8, INT8 = torch.float8_e4m3fn, torch.int8
CACHES = [None, FP8, INT8]
CACHE_IDS = ["float", "fp8", "int8"]


def expected(query, pool, window=None, table=None, lengths=None):
    return reference.paged_decode(
        query,
        pool.keys,
        pool.values,
        pool.table if table is None else table,
        pool.lengths if lengths is None else lengths,
        query.shape[2] ** -0.5,
        pool.key_scale,
        pool.value_scale,
        window,
    )


def run(query, pool, **options):
    return paged_decode(
        query, pool.keys, pool.values, pool.table, pool.lengths, **pool.scales, **options
    )


@pytest.mark.parametrize("dtype", CACHES, ids=CACHE_IDS)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim"),
    [
        pytest.param([1, 0, 63, 64, 65], 6, 2, 64, id="tile-edges"),
        pytest.param([500], 7, 1, 128, id="mqa-seven"),
        pytest.param([33, 7], 2, 2, 80, id="mha-80"),
    ],
)
def test_decode_equals_its_reference(lane, lengths, heads, kv_heads, head_dim, dtype, paged_cache):
    pool = paged_cache(lane, lengths, kv_heads, head_dim, dtype=dtype)
    query = lane.randn(len(lengths), heads, head_dim)

    out = run(query, pool)

    assert_close("out", out, expected(query, pool))


@pytest.mark.parametrize("head_dim", [96, 192, 256])
def test_head_dims_are_masked(one_lane, head_dim, paged_cache):
    pool = paged_cache(one_lane, [70], 1, head_dim)
    query = one_lane.randn(1, 3, head_dim)

    assert_close("out", run(query, pool), expected(query, pool))


@pytest.mark.parametrize("page_tokens", [1, 24, 128])
def test_pages_of_any_size(one_lane, page_tokens, paged_cache):
    pool = paged_cache(one_lane, [100, 5], 2, 64, page_tokens=page_tokens)
    query = one_lane.randn(2, 4, 64)

    assert_close("out", run(query, pool), expected(query, pool))


@pytest.mark.parametrize("window", [1, 40, 64, 1000])
def test_window_sees_the_last_tokens(one_lane, window, paged_cache):
    pool = paged_cache(one_lane, [130, 20], 2, 64)
    query = one_lane.randn(2, 4, 64)

    out = run(query, pool, window=window)

    assert_close("out", out, expected(query, pool, window))


def test_empty_sequences_give_zeros(one_lane, paged_cache):
    pool = paged_cache(one_lane, [0, 0], 2, 64)

    assert not run(one_lane.randn(2, 4, 64), pool).any()
    assert run(one_lane.randn(2, 4, 64)[:0], paged_cache(one_lane, [], 2, 64)).shape == (0, 4, 64)


@pytest.mark.parametrize("dtype", CACHES, ids=CACHE_IDS)
def test_each_head_may_have_its_own_pages(one_lane, dtype, paged_cache):
    pool = paged_cache(one_lane, [90, 40], 2, 64, dtype=dtype)
    query = one_lane.randn(2, 6, 64)
    # Pages 0 and 2 for one head, 1 and 2 for the other; the last page holds 8 tokens.
    table = torch.stack([pool.table[:, [0, 2]], pool.table[:, [1, 2]]], dim=1)
    lengths = torch.tensor([[24, 32], [24, 24]], dtype=torch.int32, device=one_lane.device)

    out = paged_decode(query, pool.keys, pool.values, table, lengths, **pool.scales)

    assert_close("out", out, expected(query, pool, table=table, lengths=lengths))


def test_every_run_gives_the_same_bits(one_lane, paged_cache):
    pool = paged_cache(one_lane, [300, 200], 2, 64)
    query = one_lane.randn(2, 4, 64)

    assert torch.equal(run(query, pool), run(query, pool))


def test_layers_of_one_pool_and_wide_queries_are_read_in_place(lane, paged_cache):
    pool = paged_cache(lane, [75], 2, 64)
    layers = torch.stack([pool.keys, pool.values], dim=1)[:, None].expand(-1, 3, -1, -1, -1, -1)
    layers = layers.clone().transpose(3, 4).contiguous().transpose(3, 4)
    pool.keys, pool.values = layers[:, 1, 0], layers[:, 1, 1]
    query = lane.randn(1, 8, 64)[:, 2:6]

    assert_close("out", run(query, pool), expected(query.contiguous(), pool))


def test_offsets_pass_31_bits(one_lane, paged_cache):
    pool = paged_cache(one_lane, [40], 1, 64)
    stride = 2**31 // 2 + 64
    storage = torch.zeros(1, dtype=one_lane.dtype, device=one_lane.device)
    pages = pool.keys.shape[0]
    size = storage.element_size()
    storage.untyped_storage().resize_(size * ((pages - 1) * stride + 16 * 64))
    far = storage.as_strided(pool.keys.shape, (stride, 64, 64, 1))
    far.copy_(pool.keys)
    pool.keys = far
    query = one_lane.randn(1, 2, 64)

    assert_close("out", run(query, pool), expected(query, pool))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_non_finite_keys_stay_with_their_sequence(one_lane, bad, paged_cache):
    pool = paged_cache(one_lane, [70, 70], 1, 64)
    query = one_lane.randn(2, 2, 64)
    pool.keys[pool.table[0, 1], 3, 0, 5] = bad

    out = run(query, pool)

    assert out[0].isnan().any()
    assert_close("out", out[1], expected(query, pool)[1])


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_scores_saturate(one_lane, size, paged_cache):
    pool = paged_cache(one_lane, [50], 1, 64)
    query = one_lane.randn(1, 2, 64) * size

    assert_close("out", run(query, pool), expected(query, pool))


def test_operation_runs_by_the_dispatcher_too(one_lane, paged_cache):
    pool = paged_cache(one_lane, [20], 1, 64)
    arguments = (one_lane.randn(1, 2, 64), pool.keys, pool.values, pool.table, pool.lengths)

    torch.library.opcheck(torch.ops.deepseek.paged_decode, (*arguments, 0.125, None, None, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 64)}, "query has 3 heads and key_cache 2; required is a mult"),
        ({"query": torch.zeros(2, 4, 512)}, "head dimension of query is 512; allowed is 1 to 256"),
        ({"key_cache": torch.zeros(4, 16, 2, 64).half()}, "key_cache has dtype float16"),
        ({"value_cache": torch.zeros(4, 8, 2, 64)}, r"value_cache has shape \[4, 8, 2, 64\]"),
        ({"page_table": torch.zeros(2, 3).long()}, "page_table has dtype int64; allowed are int32"),
        ({"page_table": torch.zeros(1, 3).int()}, r"page_table has shape \[1, 3\]; required is"),
        ({"lengths": torch.zeros(3).int()}, r"lengths has shape \[3\]; required is \[2\]"),
        ({"lengths": torch.zeros(2).int().to("meta")}, "lengths is on meta; the other tensors"),
        ({"key_scale": torch.ones(2)}, "key_scale is given; a cache of torch.float32 has no scale"),
        ({"window": 0}, "window is 0; allowed is 1 to"),
        ({"scale": 0.0}, "scale is 0.0; allowed is"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "query": torch.zeros(2, 4, 64),
        "key_cache": torch.zeros(4, 16, 2, 64),
        "value_cache": torch.zeros(4, 16, 2, 64),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
    } | change

    with pytest.raises(ValueError, match=message):
        paged_decode(**arguments)


def test_8_bit_caches_need_their_scales_and_pairs():
    query, codes = torch.zeros(1, 2, 64), torch.zeros(4, 16, 2, 64, dtype=torch.int8)
    table, lengths = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    with pytest.raises(ValueError, match=r"key_scale is absent; an int8 cache needs one of"):
        paged_decode(query, codes, codes, table, lengths)
    uneven = torch.zeros(4, 16, 2, 65, dtype=torch.int8)[..., 1:]
    with pytest.raises(ValueError, match="8-bit caches need an even head dimension, even strides"):
        paged_decode(query, uneven, uneven, table, lengths)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads"),
    [("bfloat16", 28, 4), ("bfloat16", 32, 8), ("float8_e4m3fn", 28, 4), ("int8", 28, 4)],
)
def test_kernel_fits_hopper(compile_sm90, spec, dtype, heads, kv_heads):
    pool = spec((4096, 16, kv_heads, 128), dtype)
    scale = spec((4096, 16, kv_heads), "float32") if dtype == "int8" else None
    kernels = compile_sm90(
        "paged_decode.kernel:paged_decode",
        spec((32, heads, 128)),
        pool,
        pool,
        spec((32, 128), "int32"),
        spec((32,), "int32"),
        0.1,
        scale,
        scale,
        None,
    )

    assert kernels[0].spill_bytes <= 96
    assert kernels[0].shared_bytes <= 76 * 1024
    assert kernels[0].wide_loads >= 8
    assert kernels[0].matrix_instructions >= 16


def test_cost_counts_keys_and_values_once():
    query = torch.empty(2, 4, 64, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(8, 16, 2, 64, dtype=FP8, device="meta")

    assert cost(query, keys, 100).bytes == 2 * 100 * 2 * 64 + 2 * 2 * 4 * 64 * 2 + 8
    assert cost(query, keys.to(INT8), 100).flops == 4 * 100 * 4 * 64
