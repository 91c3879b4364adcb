import pytest
import torch

from deepseek_kernels import mla_decode
from deepseek_kernels.mla_decode import cost, kernel, reference
from deepseek_kernels.testing import assert_close

SCALE = 192**-0.5

FP8 = torch.float8_e4m3fn


def inputs(paged_cache, lane, lengths, heads, dtype=None):
    pool = paged_cache(lane, lengths, 1, 576, dtype=dtype)
    query = lane.randn(len(lengths), heads, 576)
    scale = None if dtype is None else pool.key_scale
    return query, pool.keys[:, :, 0], pool.table, pool.lengths, scale


def run(query, rows, table, lengths, cache_scale):
    return mla_decode(query, rows, table, lengths, scale=SCALE, cache_scale=cache_scale)


@pytest.mark.parametrize("dtype", [None, FP8], ids=["float", "fp8"])
@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        pytest.param([1, 0, 64, 65], 3, id="tile-edges"),
        pytest.param([500], 16, id="500"),
        pytest.param([63], 20, id="more-heads-than-a-block"),
    ],
)
def test_decode_equals_its_reference(lane, lengths, heads, dtype, paged_cache):
    query, rows, table, lengths, scale = inputs(paged_cache, lane, lengths, heads, dtype)

    out = run(query, rows, table, lengths, scale)

    expected = reference.mla_decode(query, rows, table, lengths, SCALE, scale)
    assert_close("out", out, expected)


def test_many_heads_share_their_tiles(lane, paged_cache):
    query, rows, table, lengths, _ = inputs(paged_cache, lane, [70, 0], 65)

    out = run(query, rows, table, lengths, None)

    assert_close("out", out, reference.mla_decode(query, rows, table, lengths, SCALE, None))


@pytest.mark.parametrize(
    ("lengths", "heads", "page_tokens"),
    [
        pytest.param([1, 0, 31, 32, 33, 63, 64, 65, 96, 127, 129, 500], 128, 16, id="tile-edges"),
        pytest.param([4096, 4095, 2000, 1] * 16, 128, 16, id="as-many-as-programs"),
        pytest.param([700] * 150, 128, 16, id="more-than-programs"),
        pytest.param([9000], 128, 16, id="one"),
        pytest.param([300, 0, 5000, 17], 33, 64, id="part-of-a-block"),
        pytest.param([300, 0, 5000, 17], 100, 48, id="pages-of-48"),
    ],
)
def test_specialized_warps_equal_the_reference(gpu_lane, lengths, heads, page_tokens, paged_cache):
    pool = paged_cache(gpu_lane, lengths, 1, 576, page_tokens=page_tokens)
    query, rows = gpu_lane.randn(len(lengths), heads, 576), pool.keys[:, :, 0]
    assert kernel.fits_specialized(query, rows)

    out = run(query, rows, pool.table, pool.lengths, None)

    expected = reference.mla_decode(query, rows, pool.table, pool.lengths, SCALE, None)
    assert_close("out", out, expected)
    for _ in range(4):
        assert torch.equal(out, run(query, rows, pool.table, pool.lengths, None))


@pytest.mark.parametrize("heads", [2, 64])
def test_layers_of_one_pool_are_read_in_place(one_lane, heads, paged_cache):
    query, rows, table, lengths, _ = inputs(paged_cache, one_lane, [40], heads)
    pool = torch.stack([rows, rows * 0 + 1, rows], dim=1)

    out = run(query, pool[:, 2], table, lengths, None)

    assert_close("out", out, reference.mla_decode(query, rows, table, lengths, SCALE, None))


@pytest.mark.parametrize("heads", [1, 64])
def test_offsets_pass_31_bits(one_lane, heads, paged_cache):
    query, rows, table, lengths, _ = inputs(paged_cache, one_lane, [40], heads)
    stride = 2**31 // 2 + 576
    storage = torch.zeros(1, dtype=one_lane.dtype, device=one_lane.device)
    size = storage.element_size()
    storage.untyped_storage().resize_(size * ((rows.shape[0] - 1) * stride + 16 * 576))
    far = storage.as_strided(rows.shape, (stride, 576, 1))
    far.copy_(rows)

    out = run(query, far, table, lengths, None)

    assert_close("out", out, reference.mla_decode(query, rows, table, lengths, SCALE, None))


def test_empty_batch_gives_an_empty_output(one_lane, paged_cache):
    query, rows, table, lengths, _ = inputs(paged_cache, one_lane, [0], 2)

    assert not run(query, rows, table, lengths, None).any()
    assert run(query[:0], rows, table[:0], lengths[:0], None).shape == (0, 2, 512)


@pytest.mark.parametrize("heads", [1, 64])
def test_non_finite_rows_stay_with_their_sequence(one_lane, heads, paged_cache):
    query, rows, table, lengths, _ = inputs(paged_cache, one_lane, [20, 20], heads)
    rows[table[0, 1], 2, 7] = torch.nan

    out = run(query, rows, table, lengths, None)

    assert out[0].isnan().any()
    assert_close("out", out[1], reference.mla_decode(query, rows, table, lengths, SCALE, None)[1])


def test_operation_runs_by_the_dispatcher_too(one_lane, paged_cache):
    query, rows, table, lengths, _ = inputs(paged_cache, one_lane, [9], 1)

    torch.library.opcheck(torch.ops.deepseek.mla_decode, (query, rows, table, lengths, SCALE, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 512)}, r"query has shape \[2, 4, 512\]; required is"),
        ({"cache": torch.zeros(4, 16, 576).half()}, "cache has dtype float16; allowed are float32"),
        ({"cache": torch.zeros(4, 16, 512)}, r"cache has shape \[4, 16, 512\]; required is"),
        ({"page_table": torch.zeros(2, 3)}, "page_table has dtype float32; allowed are int32"),
        ({"lengths": torch.zeros(1).int()}, r"lengths has shape \[1\]; required is \[2\]"),
        ({"cache_scale": torch.ones(1)}, "cache_scale is given; a cache of torch.float32 has no"),
        ({"scale": -1.0}, "scale is -1.0; allowed is"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "query": torch.zeros(2, 4, 576),
        "cache": torch.zeros(4, 16, 576),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "scale": SCALE,
    } | change

    with pytest.raises(ValueError, match=message):
        mla_decode(**arguments)


def test_kernel_fits_hopper(compile_sm90, spec):
    kernels = compile_sm90(
        "mla_decode.kernel:mla_decode",
        spec((64, 16, 576)),
        spec((4096, 16, 576)),
        spec((64, 256), "int32"),
        spec((64,), "int32"),
        SCALE,
        None,
    )

    assert kernels[0].spill_bytes == 0
    assert kernels[0].shared_bytes <= 227 * 1024
    assert kernels[0].matrix_instructions >= 60


@pytest.mark.parametrize("heads", [64, 128])
def test_specialized_kernel_fits_hopper(compile_sm90, spec, heads):
    kernels = compile_sm90(
        "mla_decode.kernel:mla_decode",
        spec((64, heads, 576)),
        spec((4096, 16, 576)),
        spec((64, 256), "int32"),
        spec((64,), "int32"),
        SCALE,
        None,
    )

    # A few numbers of the loading warps, which have 48 registers.
    assert kernels[0].spill_bytes <= 64
    assert kernels[0].shared_bytes <= 227 * 1024
    assert kernels[0].wgmma_instructions >= 52
    assert kernels[0].wide_loads >= 72


@pytest.mark.parametrize(
    ("programs", "sequences", "expected"),
    [
        pytest.param(66, 64, 64, id="one-each"),
        pytest.param(66, 16, 64, id="four-programs-each"),
        pytest.param(66, 192, 64, id="three-sequences-each"),
        pytest.param(132, 100, 132, id="none-is-near"),
        pytest.param(66, 1, 66, id="one-sequence"),
    ],
)
def test_programs_split_equal_sequences_evenly(programs, sequences, expected):
    assert kernel.whole_programs(programs, sequences) == expected


def test_cost_counts_a_row_once_for_all_heads():
    query = torch.empty(2, 16, 576, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(8, 16, 576, dtype=torch.bfloat16, device="meta")

    assert cost(query, rows, 100).flops == 2 * 100 * 16 * (576 + 512)
    assert cost(query, rows, 100).bytes == 100 * 1152 + 2 * 16 * (576 + 512) * 2
