import pytest
import torch

from deepseek_kernels import mla_rope_kv_write, rope_kv_write
from deepseek_kernels.kv_write import cost, kernel, reference
from deepseek_kernels.testing import assert_close

TOKENS, PAGES, PAGE_TOKENS, POSITIONS = 5, 4, 16, 40
SLOTS = [0, 17, 63, -1, 31]


def table(rotary_dim, device):
    angles = torch.outer(
        torch.arange(POSITIONS), 1.0 / 100 ** torch.linspace(0, 1, rotary_dim // 2)
    )
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


def places(lane, rotary_dim):
    return {
        "positions": torch.tensor([0, 39, 7, 3, 12], device=lane.device),
        "cos_sin": table(rotary_dim, lane.device),
        "slots": torch.tensor(SLOTS, device=lane.device),
    }


def cache(lane, heads, dim, dtype):
    """A layer of a pool whose pages hold two layers, filled with something recognisable."""
    pool = torch.zeros(PAGES, 2, 2, PAGE_TOKENS, heads, dim, device=lane.device).to(dtype)
    return pool[:, 1, 0], pool[:, 1, 1]


def scales(lane, heads, dtype):
    if dtype == torch.int8:
        pool = torch.zeros(PAGES, 3, 2, PAGE_TOKENS, heads, device=lane.device)
        return {"key_scale": pool[:, 1, 0], "value_scale": pool[:, 1, 1]}
    if dtype == torch.float8_e4m3fn:
        two = torch.rand(2, heads, device=lane.device) / 16 + 0.01
        return {"key_scale": two[0], "value_scale": two[1]}
    return {}


def attention_inputs(lane, query_heads, kv_heads, dim):
    """Queries, keys and values as views of one projection's output."""
    projected = lane.randn(TOKENS, (query_heads + 2 * kv_heads) * dim)
    sizes = [query_heads * dim, kv_heads * dim, kv_heads * dim]
    return [part.unflatten(1, (-1, dim)) for part in projected.split(sizes, dim=1)]


def clones(*tensors):
    return [torch.clone(one, memory_format=torch.preserve_format) for one in tensors]


SHARES = {
    "apart": {"block_query": 8, "num_warps": 4, "apart": 1},
    "one program": {"block_query": 32, "num_warps": 4},
    "several programs": {"block_query": 2, "num_warps": 1},
}
"""How the heads of a token are shared out to programs."""

CACHES = {"same": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


@pytest.mark.parametrize("cache_type", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "dim", "rotary", "shares"),
    [
        (4, 2, 64, 64, "several programs"),
        (7, 1, 80, 64, "one program"),
        (3, 3, 96, 32, "several programs"),
        (12, 2, 128, 128, "apart"),
        (12, 2, 128, 128, "one program"),
    ],
    ids=["gqa", "mqa-partial", "mha-partial", "gqa-128-apart", "gqa-128"],
)
def test_equals_its_reference(
    lane, monkeypatch, query_heads, kv_heads, dim, rotary, shares, interleaved, cache_type
):
    monkeypatch.setattr(kernel, "pick", lambda *_, **__: SHARES[shares])
    dtype = cache_type or lane.dtype
    query, key, value = attention_inputs(lane, query_heads, kv_heads, dim)
    expected_query, kept_key = clones(query, key)
    key_cache, value_cache = cache(lane, kv_heads, dim, dtype)
    expected_key_cache, expected_value_cache = cache(lane, kv_heads, dim, dtype)
    scale, expected_scale = scales(lane, kv_heads, dtype), scales(lane, kv_heads, dtype)
    if dtype == torch.float8_e4m3fn:
        expected_scale = scale
    where = places(lane, rotary)

    rope_kv_write(
        query,
        key,
        value,
        key_cache=key_cache,
        value_cache=value_cache,
        interleaved=interleaved,
        **where,
        **scale,
    )

    reference.rope_kv_write(
        expected_query,
        key,
        value,
        key_cache=expected_key_cache,
        value_cache=expected_value_cache,
        interleaved=interleaved,
        **where,
        **({"key_scale": None, "value_scale": None} | expected_scale),
    )
    assert_close("query", query, expected_query)
    assert torch.equal(key, kept_key)
    assert_close("key_cache", key_cache, expected_key_cache)
    assert_close("value_cache", value_cache, expected_value_cache)
    for name in scale:
        assert_close(name, scale[name], expected_scale[name])


def test_only_named_slots_are_written(lane):
    query, key, value = attention_inputs(lane, 2, 1, 64)
    key_cache, value_cache = cache(lane, 1, 64, lane.dtype)

    rope_kv_write(
        query, key, value, key_cache=key_cache, value_cache=value_cache, **places(lane, 64)
    )

    for tensor in (key_cache, value_cache):
        written = tensor.flatten(0, 1).any(-1).squeeze(-1)
        assert written.nonzero().flatten().tolist() == sorted(s for s in SLOTS if s >= 0)


def test_position_outside_the_table_gives_nan_in_its_token(one_lane):
    query, key, value = attention_inputs(one_lane, 2, 1, 64)
    key_cache, value_cache = cache(one_lane, 1, 64, one_lane.dtype)
    where = places(one_lane, 64)
    where["positions"][1] = POSITIONS

    rope_kv_write(query, key, value, key_cache=key_cache, value_cache=value_cache, **where)

    assert query[1].isnan().all()
    assert query[[0, 2, 3, 4]].isfinite().all()


def test_no_tokens_write_nothing(lane):
    nothing = lane.randn(0, 2, 64)
    key_cache, value_cache = cache(lane, 2, 64, lane.dtype)
    empty = torch.zeros(0, dtype=torch.int64, device=lane.device)

    rope_kv_write(
        nothing, nothing, nothing, empty, table(64, lane.device), key_cache, value_cache, empty
    )

    assert not key_cache.any()


def test_offsets_pass_31_bits(one_lane):
    query, key, value = attention_inputs(one_lane, 2, 1, 64)
    stride = 2**31 // 3
    storage = torch.zeros(1, dtype=torch.float16, device=one_lane.device)
    storage.untyped_storage().resize_(2 * (3 * stride + 2 * PAGE_TOKENS * 64))
    layout = (PAGES, PAGE_TOKENS, 1, 64), (stride, 64, 64, 1)
    key_cache = storage.as_strided(*layout)
    value_cache = storage.as_strided(*layout, storage_offset=PAGE_TOKENS * 64)

    rope_kv_write(
        query, key, value, key_cache=key_cache, value_cache=value_cache, **places(one_lane, 64)
    )

    # Slot 63 is the last of page 3, past 2^31 elements.
    assert_close("value", value_cache[3, 15], value[2].half())


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("cache_type", [None, torch.float8_e4m3fn], ids=["same", "fp8"])
@pytest.mark.parametrize(("heads", "latent_dim"), [(5, 96), (16, 512)])
def test_mla_equals_its_reference(lane, heads, latent_dim, cache_type, interleaved):
    dtype = cache_type or lane.dtype
    query = lane.randn(TOKENS, heads, 192)[..., 128:]
    latent, key = lane.randn(TOKENS, latent_dim + 64).split([latent_dim, 64], dim=1)
    (expected_query,) = clones(query)
    row = latent_dim + 64
    rows = torch.zeros(PAGES, 2, PAGE_TOKENS, row, device=lane.device).to(dtype)[:, 1]
    expected = torch.zeros(PAGES, 2, PAGE_TOKENS, row, device=lane.device).to(dtype)[:, 1]
    scale = None if cache_type is None else torch.full((1,), 0.02, device=lane.device)
    where = places(lane, 64)

    mla_rope_kv_write(query, latent, key, cache=rows, scale=scale, interleaved=interleaved, **where)

    reference.mla_rope_kv_write(
        expected_query, latent, key, cache=expected, scale=scale, interleaved=interleaved, **where
    )
    assert_close("query", query, expected_query)
    assert_close("cache", rows, expected)


def test_operations_run_by_the_dispatcher_too(one_lane):
    where = places(one_lane, 64)
    query, key, value = (one_lane.randn(TOKENS, 2, 64) for _ in range(3))
    key_cache, value_cache = (one_lane.randn(PAGES, PAGE_TOKENS, 2, 64) for _ in range(2))

    torch.library.opcheck(
        torch.ops.deepseek.rope_kv_write,
        (
            query,
            key,
            value,
            where["positions"],
            where["cos_sin"],
            key_cache,
            value_cache,
            where["slots"],
            None,
            None,
            False,
        ),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5, 128)}, r"query has shape \[5, 128\]; required is \[tokens, q"),
        ({"key": torch.zeros(5, 2, 32)}, r"key has shape \[5, 2, 32\]; required is \[5, kv_heads"),
        ({"value": torch.zeros(5, 2, 64).half()}, "value has dtype float16; allowed are float32"),
        ({"positions": torch.zeros(5).int()}, "positions has dtype int32; allowed are int64"),
        ({"slots": torch.zeros(4).long()}, r"slots has shape \[4\]; required is \[5\]"),
        ({"cos_sin": torch.zeros(40, 63)}, "cos_sin has 63 columns; allowed are even numbers"),
        ({"cos_sin": torch.zeros(40, 48), "interleaved": True}, "interleaved needs a power of two"),
        ({"key_cache": torch.zeros(4, 16, 2, 64).byte()}, "key_cache has dtype uint8; allowed"),
        ({"value_cache": torch.zeros(3, 16, 2, 64)}, r"value_cache has shape \[3, 16, 2, 64\]"),
        (
            {"key_cache": torch.zeros(4, 16, 64, 2).transpose(2, 3)},
            "key_cache has stride 2 in its last dimension; required is 1",
        ),
        ({"key_scale": torch.ones(2)}, "key_scale is given; a cache of torch.float32 has no scale"),
        (
            {
                "key_cache": torch.zeros(4, 16, 2, 64).to(torch.int8),
                "value_cache": torch.zeros(4, 16, 2, 64).to(torch.int8),
            },
            r"key_scale is absent; an int8 cache needs one of \[4, 16, 2\] fp32",
        ),
        (
            {
                "key_cache": torch.zeros(4, 16, 2, 64).to(torch.float8_e4m3fn),
                "value_cache": torch.zeros(4, 16, 2, 64).to(torch.float8_e4m3fn),
                "value_scale": torch.ones(3),
            },
            r"value_scale is \[3\]; required is a tensor of \[2\]",
        ),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {
        "query": torch.zeros(5, 4, 64),
        "key": torch.zeros(5, 2, 64),
        "value": torch.zeros(5, 2, 64),
        "positions": torch.zeros(5, dtype=torch.int64),
        "cos_sin": torch.zeros(40, 64),
        "key_cache": torch.zeros(4, 16, 2, 64),
        "value_cache": torch.zeros(4, 16, 2, 64),
        "slots": torch.zeros(5, dtype=torch.int64),
    }

    with pytest.raises(ValueError, match=message):
        rope_kv_write(**(given | change))


@pytest.mark.parametrize("cache_type", ["bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("tokens", [1, 8192])
def test_kernel_fits_hopper(compile_sm90, spec, tokens, cache_type):
    longs = spec((tokens,), "int64")
    row = (28 + 8) * 128
    page = spec((1000, 16, 4, 128), cache_type, (28 * 2 * 16 * 512, 512, 128, 1))
    scale = None
    if cache_type == "int8":
        scale = spec((1000, 16, 4), "float32", (28 * 2 * 64, 4, 1))

    (kernel,) = compile_sm90(
        "kv_write.kernel:rope_kv_write",
        spec((tokens, 28, 128), strides=(row, 128, 1)),
        spec((tokens, 4, 128), strides=(row, 128, 1)),
        spec((tokens, 4, 128), strides=(row, 128, 1)),
        longs,
        spec((32768, 128), "float32"),
        page,
        page,
        longs,
        scale,
        scale,
        False,
    )

    assert kernel.spill_bytes == 0
    assert kernel.registers <= 128
    if tokens > 1:
        assert kernel.wide_loads >= 3


@pytest.mark.parametrize("cache_type", ["bfloat16", "float8_e4m3fn"])
def test_mla_kernel_fits_hopper(compile_sm90, spec, cache_type):
    longs = spec((64,), "int64")

    (kernel,) = compile_sm90(
        "kv_write.kernel:mla_rope_kv_write",
        spec((64, 128, 64), strides=(128 * 192, 192, 1)),
        spec((64, 512), strides=(576, 1)),
        spec((64, 64), strides=(576, 1)),
        longs,
        spec((32768, 64), "float32"),
        spec((1000, 64, 576), cache_type),
        longs,
        None,
        True,
    )

    assert kernel.spill_bytes == 0
    assert kernel.registers <= 128


def test_cost_counts_each_tensor_once():
    query = torch.empty(10, 4, 64, dtype=torch.bfloat16, device="meta")

    moved = 2 * 10 * 256 * 2 + 10 * 256 * (2 + 1) + 10 * (4 * 64 + 16)
    assert cost(query, 256, 64, torch.int8).bytes == moved
