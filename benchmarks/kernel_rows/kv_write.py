"""RoPE with KV write: against the copy ceiling, and against separate kernels in a graph.

Shape: 28 query and 4 KV heads of 128, views of one projection's output; pages of 16 tokens
that hold the KV of 28 layers.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from kernel_bench import Result, Row, Workload, sets_for
from torch import Tensor

from deepseek_kernels import kv_write as op
from deepseek_kernels.testing import assert_close

QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS, POOL_LAYERS = 28, 4, 128, 16, 28


class Inputs(NamedTuple):
    """Arguments of `rope_kv_write` in their order."""

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    cos_sin: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor


def _cos_sin() -> Tensor:
    inverse = 10_000 ** -torch.linspace(0, 1, HEAD_DIM // 2, device="cuda")
    angles = torch.outer(torch.arange(32768, device="cuda"), inverse)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _inputs(tokens: int, pool: Tensor, layer: int, cos_sin: Tensor) -> Inputs:
    heads = QUERY_HEADS + 2 * KV_HEADS
    projected = torch.randn(tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    query, key, value = projected.split([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)
    return Inputs(
        query,
        key,
        value,
        torch.randint(0, 32768, (tokens,), device="cuda"),
        cos_sin,
        pool[:, layer, 0],
        pool[:, layer, 1],
        torch.randperm(pool.shape[0] * PAGE_TOKENS, device="cuda")[:tokens],
    )


@triton.jit
def _rope_kernel(
    x_ptr,
    positions_ptr,
    cos_sin_ptr,
    stride_token,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_half = tl.arange(0, HALF)
    p_angles = cos_sin_ptr + tl.load(positions_ptr + i_token) * 2 * HALF + o_half
    b_cos, b_sin = tl.load(p_angles)[None, :], tl.load(p_angles + HALF)[None, :]
    p_first = x_ptr + i_token * stride_token + o_heads[:, None] * 2 * HALF + o_half[None, :]
    m_heads = (o_heads < HEADS)[:, None]
    b_first = tl.load(p_first, mask=m_heads, other=0.0).to(tl.float32)
    b_second = tl.load(p_first + HALF, mask=m_heads, other=0.0).to(tl.float32)
    tl.store(p_first, (b_first * b_cos - b_second * b_sin).to(tl.bfloat16), mask=m_heads)
    tl.store(p_first + HALF, (b_second * b_cos + b_first * b_sin).to(tl.bfloat16), mask=m_heads)


@triton.jit
def _write_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    stride_token,
    stride_page,
    stride_slot,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_row = tl.arange(0, BLOCK)
    i_slot = tl.load(slots_ptr + i_token)
    o_out = (i_slot // PAGE) * stride_page + (i_slot % PAGE) * stride_slot + o_row
    b_key = tl.load(key_ptr + i_token * stride_token + o_row)
    b_value = tl.load(value_ptr + i_token * stride_token + o_row)
    tl.store(key_cache_ptr + o_out, b_key)
    tl.store(value_cache_ptr + o_out, b_value)


def _separate(inputs: Inputs) -> None:
    """Rotate queries and keys in one kernel, write keys and values in another."""
    tokens = inputs.query.shape[0]
    heads = QUERY_HEADS + KV_HEADS
    _rope_kernel[(tokens, triton.cdiv(heads, 8))](
        inputs.query,
        inputs.positions,
        inputs.cos_sin,
        inputs.query.stride(0),
        HEADS=heads,
        BLOCK=8,
        HALF=HEAD_DIM // 2,
        num_warps=2,
    )
    _write_kernel[(tokens,)](
        inputs.key,
        inputs.value,
        inputs.key_cache,
        inputs.value_cache,
        inputs.slots,
        inputs.key.stride(0),
        *inputs.key_cache.stride()[:2],
        PAGE=PAGE_TOKENS,
        BLOCK=KV_HEADS * HEAD_DIM,
        num_warps=2,
    )


def workload(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Workload:
    pages = max(64, 2 * tokens // PAGE_TOKENS)
    shape = (pages, POOL_LAYERS, 2, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
    pool = torch.zeros(shape, dtype=dtype, device="cuda")
    scale: dict[str, Tensor] = {}
    if dtype == torch.int8:
        scales = torch.zeros(pages, 2, PAGE_TOKENS, KV_HEADS, device="cuda")
        scale = {"key_scale": scales[:, 0], "value_scale": scales[:, 1]}
    moved = tokens * (QUERY_HEADS * 4 + 2 * KV_HEADS * (2 + dtype.itemsize)) * HEAD_DIM
    cos_sin = _cos_sin()
    inputs = [
        _inputs(tokens, pool, index % POOL_LAYERS, cos_sin) for index in range(sets_for(moved))
    ]

    def check() -> None:
        one = _inputs(tokens, pool, 0, cos_sin)
        query = one.query.clone()
        expected = op.reference.rotate(one.query, one.positions, cos_sin, interleaved=False)
        op.rope_kv_write(*one, **scale)
        assert_close("query", one.query, expected.to(query.dtype))
        if dtype == torch.bfloat16:
            page, offset = one.slots // PAGE_TOKENS, one.slots % PAGE_TOKENS
            key = op.reference.rotate(one.key, one.positions, cos_sin, interleaved=False)
            assert_close("key", one.key_cache[page, offset], key.to(dtype))
            assert_close("value", one.value_cache[page, offset], one.value)

    baselines = {}
    if dtype == torch.bfloat16:
        baselines["rope; write"] = [lambda one=one: _separate(one) for one in inputs]
    return Workload(
        candidate=[lambda one=one: op.rope_kv_write(*one, **scale) for one in inputs],
        cost=op.cost(inputs[0].query, 2 * KV_HEADS * HEAD_DIM, HEAD_DIM, dtype),
        check=check,
        baselines=baselines,
        eager=tokens <= 64,
    )


def _of_copy(name: str, build: Callable[[], Workload]) -> Row:
    return Row(name, build, Result.of_copy, "of copy", 0.80, 0.88, "copy_ of 4 GiB")


ROWS = [
    _of_copy("RoPE+KV write bf16, 8192 tokens", lambda: workload(8192)),
    _of_copy("RoPE+KV write bf16, 32768 tokens", lambda: workload(32768)),
    _of_copy("RoPE+KV write fp8, 32768 tokens", lambda: workload(32768, torch.float8_e4m3fn)),
    _of_copy("RoPE+KV write int8, 32768 tokens", lambda: workload(32768, torch.int8)),
    *(
        Row(
            f"RoPE+KV write bf16, {tokens} tokens",
            lambda tokens=tokens: workload(tokens),
            lambda result: result.times_faster("rope; write"),
            "times faster",
            1.5,
            1.7,
            "two Triton kernels in a graph: rope of queries and keys; write of keys and values",
        )
        for tokens in (1, 64)
    ),
]
