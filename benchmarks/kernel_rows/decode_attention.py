"""Decode attention over pages: GQA in three precisions, page-sparse, and MLA.

Pages lie in a pool of several layers in random order, head after head. The calls of a row are
the layers of a step: each reads a pool of its own, all by the same page table and lengths.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from kernel_bench import Result, Row, Workload, sets_for
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepseek_kernels.mla_decode import cost as mla_cost
from deepseek_kernels.mla_decode import mla_decode
from deepseek_kernels.mla_decode import reference as mla_reference
from deepseek_kernels.page_scoring import cost as scoring_cost
from deepseek_kernels.page_scoring import page_scores, select_pages
from deepseek_kernels.page_scoring import reference as scoring_reference
from deepseek_kernels.paged_decode import cost as decode_cost
from deepseek_kernels.paged_decode import paged_decode
from deepseek_kernels.paged_decode import reference as decode_reference
from deepseek_kernels.testing import assert_close

PAGE_TOKENS = 16
HEAD_DIM = 128
LAYERS = 2


@dataclass
class Batch:
    """The inputs of one decode call."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    lengths: Tensor
    scales: dict[str, Tensor]


def batches(
    count: int,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Batch]:
    """Fill fresh pools with random pages; one layer of each is attended to."""
    table, pages = _page_table(lengths)
    return [_batch(table, pages, _int32(lengths), heads, kv_heads, dtype) for _ in range(count)]


def _batch(
    table: Tensor, pages: int, lengths: Tensor, heads: int, kv_heads: int, dtype: torch.dtype
) -> Batch:
    shape = (pages, LAYERS, 2, kv_heads, PAGE_TOKENS, HEAD_DIM)
    scales: dict[str, Tensor] = {}
    if dtype == torch.int8:
        pool = torch.randint(-127, 128, shape, dtype=dtype, device="cuda")
        scale = torch.rand(2, pages, PAGE_TOKENS, kv_heads, device="cuda") / 50 + 0.001
        scales = {"key_scale": scale[0], "value_scale": scale[1]}
    else:
        pool = torch.empty(shape, dtype=dtype, device="cuda")
        for part in pool.split(4096):
            part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
        if dtype == torch.float8_e4m3fn:
            scale = torch.rand(2, kv_heads, device="cuda") + 0.5
            scales = {"key_scale": scale[0], "value_scale": scale[1]}
    query = torch.randn(len(lengths), heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    keys, values = pool[:, 1, 0].transpose(1, 2), pool[:, 1, 1].transpose(1, 2)
    return Batch(query, keys, values, table, lengths, scales)


def decode(
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    allocations: int = 1,
    own_bf16: bool = False,
    contiguous: bool = False,
) -> Workload:
    """Attend over pages.

    Args:
        lengths: Of the sequences, in tokens.
        heads: Query heads.
        kv_heads: KV heads.
        dtype: Of the cache.
        allocations: Fresh pools; those after the first are timed as baselines.
        own_bf16: Whether to time the same kernel on a bf16 cache as a baseline.
        contiguous: Whether to time cuDNN and flash attention on contiguous keys and values.
    """
    size = 2 * sum(lengths) * kv_heads * HEAD_DIM * dtype.itemsize
    sets = sets_for(size)

    def calls(kind: torch.dtype) -> tuple[list[Callable[[], object]], Batch]:
        inputs = batches(sets, lengths, heads, kv_heads, kind)
        return [lambda one=one: run(one) for one in inputs], inputs[0]

    def run(one: Batch) -> Tensor:
        return paged_decode(
            one.query,
            one.key_cache,
            one.value_cache,
            one.page_table,
            one.lengths,
            **one.scales,
        )

    candidate, first = calls(dtype)

    def check() -> None:
        expected = decode_reference.paged_decode(
            first.query,
            first.key_cache,
            first.value_cache,
            first.page_table,
            first.lengths,
            HEAD_DIM**-0.5,
            first.scales.get("key_scale"),
            first.scales.get("value_scale"),
            None,
        )
        assert_close("out", run(first), expected)

    baselines: dict[str, Sequence[Callable[[], object]]] = {
        f"allocation {index}": calls(dtype)[0] for index in range(2, allocations + 1)
    }
    if own_bf16:
        baselines["own bf16"] = calls(torch.bfloat16)[0]
    if contiguous:
        baselines |= sdpa(
            [
                (
                    torch.randn(len(lengths), heads, 1, HEAD_DIM, device="cuda").bfloat16(),
                    *_contiguous(len(lengths), kv_heads, max(lengths)),
                )
                for _ in range(sets)
            ],
            causal=False,
        )
    return Workload(
        candidate=candidate,
        cost=decode_cost(first.query, first.key_cache, sum(lengths)),
        check=check,
        baselines=baselines,
    )


def sparse(lengths: Sequence[int], heads: int, kv_heads: int, kept: int) -> Workload:
    """Score pages, choose one in `kept`, attend to those; the baseline attends to all."""
    pages = max(lengths) // PAGE_TOKENS // kept
    inputs = batches(2, lengths, heads, kv_heads)
    bounds = []
    for one in inputs:
        keys = one.key_cache
        bounds.append(torch.stack([keys.amin(1), keys.amax(1)], dim=2))

    def select(one: Batch, its_bounds: Tensor) -> tuple[Tensor, Tensor]:
        scores = page_scores(
            one.query, its_bounds, one.page_table, one.lengths, page_tokens=PAGE_TOKENS
        )
        return select_pages(
            scores, one.page_table, one.lengths, pages=pages, page_tokens=PAGE_TOKENS
        )

    def attend(one: Batch, table: Tensor, kept_lengths: Tensor) -> Tensor:
        return paged_decode(one.query, one.key_cache, one.value_cache, table, kept_lengths)

    def check() -> None:
        one = inputs[0]
        scores = page_scores(
            one.query, bounds[0], one.page_table, one.lengths, page_tokens=PAGE_TOKENS
        )
        expected = scoring_reference.page_scores(
            one.query, bounds[0], one.page_table, one.lengths, PAGE_TOKENS
        )
        assert_close("scores", scores, expected)
        table, kept_lengths = select(one, bounds[0])
        selected = scoring_reference.select_pages(
            scores, one.page_table, one.lengths, pages, PAGE_TOKENS
        )
        assert_close("table", table, selected[0])
        assert_close("kept lengths", kept_lengths, selected[1])
        again = decode_reference.paged_decode(
            one.query,
            one.key_cache,
            one.value_cache,
            table,
            kept_lengths,
            HEAD_DIM**-0.5,
            None,
            None,
            None,
        )
        assert_close("out", attend(one, table, kept_lengths), again)

    read = decode_cost(inputs[0].query, inputs[0].key_cache, sum(lengths) // kept)
    scored = scoring_cost(inputs[0].query, bounds[0], sum(lengths) // PAGE_TOKENS)
    return Workload(
        candidate=[
            lambda one=one, its=its: attend(one, *select(one, its))
            for one, its in zip(inputs, bounds, strict=True)
        ],
        cost=type(read)(read.bytes + scored.bytes, read.flops + scored.flops),
        check=check,
        baselines={
            "dense": [lambda one=one: attend(one, one.page_table, one.lengths) for one in inputs]
        },
    )


def mla(lengths: Sequence[int], heads: int) -> Workload:
    """Absorbed MLA decode."""
    table, pages = _page_table(lengths)
    device_lengths = _int32(lengths)
    inputs = []
    for _ in range(sets_for(sum(lengths) * 1152)):
        pool = torch.randn(pages, LAYERS, PAGE_TOKENS, 576, device="cuda", dtype=torch.bfloat16)
        query = torch.randn(len(lengths), heads, 576, device="cuda", dtype=torch.bfloat16)
        inputs.append((query, pool[:, 1], table, device_lengths))
    scale = 192**-0.5

    def run(one: tuple[Tensor, ...]) -> Tensor:
        return mla_decode(*one, scale=scale)

    def check() -> None:
        expected = mla_reference.mla_decode(*inputs[0], scale, None)
        assert_close("out", run(inputs[0]), expected)

    return Workload(
        candidate=[lambda one=one: run(one) for one in inputs],
        cost=mla_cost(inputs[0][0], inputs[0][1], sum(lengths)),
        check=check,
    )


def sdpa(
    inputs: Sequence[tuple[Tensor, Tensor, Tensor]], *, causal: bool
) -> Mapping[str, Sequence[Callable[[], object]]]:
    """Return torch's attention by its two fast backends on contiguous keys and values."""

    def call(backend: SDPBackend, one: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*one, is_causal=causal, enable_gqa=True)

    return {
        name: [lambda one=one, backend=backend: call(backend, one) for one in inputs]
        for name, backend in (
            ("cuDNN contiguous", SDPBackend.CUDNN_ATTENTION),
            ("flash contiguous", SDPBackend.FLASH_ATTENTION),
        )
    }


def _page_table(lengths: Sequence[int]) -> tuple[Tensor, int]:
    width = max(-(-length // PAGE_TOKENS) for length in lengths)
    pages = sum(-(-length // PAGE_TOKENS) for length in lengths)
    order = torch.randperm(pages, device="cuda").int()
    table = torch.zeros(len(lengths), width, dtype=torch.int32, device="cuda")
    begin = 0
    for index, length in enumerate(lengths):
        count = -(-length // PAGE_TOKENS)
        table[index, :count] = order[begin : begin + count]
        begin += count
    return table, pages


def _int32(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device="cuda")


def _contiguous(sequences: int, kv_heads: int, length: int) -> tuple[Tensor, Tensor]:
    shape = (sequences, kv_heads, length, HEAD_DIM)
    key = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return key, torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _worst_of_copy(result: Result) -> float:
    times = [
        timing.median_us
        for name, timing in result.baselines.items()
        if name.startswith("allocation")
    ]
    worst = max(result.candidate.median_us, *times)
    return result.cost.bytes / worst / 1e3 / result.ceilings.copy_gb_per_s


ROWS = [
    *(
        Row(
            name=f"paged decode bf16 {name}",
            build=lambda lengths=lengths, heads=heads, kv_heads=kv_heads: decode(
                lengths,
                heads,
                kv_heads,
                allocations=3,
                contiguous=len(set(lengths)) == 1,
            ),
            value=_worst_of_copy,
            unit="of copy",
            bar=0.93,
            stretch=0.98,
            baseline="copy_ of 4 GiB; worst of three fresh allocations",
        )
        for name, lengths, heads, kv_heads in (
            ("256 x 1.2k, 28/4 heads", [1200] * 256, 28, 4),
            ("8 x 16k, 28/4 heads", [16384] * 8, 28, 4),
            ("32 x 4k, 32/8 heads", [4096] * 32, 32, 8),
            ("1 x 128k + 31 x 4k, 32/8 heads", [131072] + [4096] * 31, 32, 8),
        )
    ),
    Row(
        name="paged decode bf16 32 x 1.2k, 28/4 heads",
        build=lambda: decode([1200] * 32, 28, 4, contiguous=True),
        value=lambda result: result.of_copy(),
        unit="of copy",
        bar=0.75,
        stretch=0.85,
        baseline="copy_ of 4 GiB",
    ),
    Row(
        name="paged decode bf16 1 x 32k, 32/8 heads",
        build=lambda: decode([32768], 32, 8, contiguous=True),
        value=lambda result: result.of_copy(),
        unit="of copy",
        bar=0.62,
        stretch=0.70,
        baseline="copy_ of 4 GiB",
    ),
    Row(
        name="paged decode fp8 8 x 32k, 28/4 heads",
        build=lambda: decode([32768] * 8, 28, 4, dtype=torch.float8_e4m3fn, own_bf16=True),
        value=lambda result: 1 / result.times_faster("own bf16"),
        unit="of own bf16 time",
        bar=0.60,
        stretch=0.55,
        baseline="the same kernel on a bf16 cache",
        better="lower",
    ),
    Row(
        name="page-sparse decode 8 x 32k, 32/8 heads, 1/8 of the pages",
        build=lambda: sparse([32768] * 8, 32, 8, 8),
        value=lambda result: result.times_faster("dense"),
        unit="times dense, selection included",
        bar=3,
        stretch=4.5,
        baseline="the same kernel on all pages",
    ),
    Row(
        name="MLA decode bf16 64 x 8k, 16 heads",
        build=lambda: mla([8192] * 64, 16),
        value=lambda result: result.of_copy(),
        unit="of copy",
        bar=0.78,
        stretch=0.88,
        baseline="copy_ of 4 GiB",
    ),
    Row(
        name="MLA decode bf16 64 x 4k, 128 heads",
        build=lambda: mla([4096] * 64, 128),
        value=lambda result: result.tflop_per_s,
        unit="TFLOP/s",
        bar=330,
        stretch=470,
    ),
]
