"""Causal prefill attention over pages, beside torch's on contiguous keys and values."""

from collections.abc import Sequence

import torch
from kernel_bench import Result, Row, Workload
from kernel_rows.decode_attention import HEAD_DIM, batches, sdpa
from torch import Tensor

from deepseek_kernels.paged_prefill import cost, paged_prefill, reference
from deepseek_kernels.testing import assert_close

HEADS, KV_HEADS = 32, 8
CHECKED = 256


def prefill(new: int, prefix: int, sequences: int, *, contiguous: bool = False) -> Workload:
    """Attend from `new` tokens after `prefix` cached ones, in each of `sequences`."""
    length = prefix + new
    inputs = []
    for one in batches(2, [length] * sequences, HEADS, KV_HEADS):
        query = torch.randn(sequences * new, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * new
        inputs.append((query, one.key_cache, one.value_cache, one.page_table, starts, one.lengths))
    scale = HEAD_DIM**-0.5

    def check() -> None:
        query, keys, values, table, _, lengths = inputs[0]
        out = paged_prefill(*inputs[0])
        # The last tokens of the last sequence, then the first of the first.
        starts = torch.tensor([0, CHECKED], dtype=torch.int32, device="cuda")
        for tokens, row, seen in (
            (slice(-CHECKED, None), slice(-1, None), lengths[-1:]),
            (slice(0, CHECKED), slice(0, 1), lengths[:1] - new + CHECKED),
        ):
            expected = reference.paged_prefill(
                query[tokens], keys, values, table[row], starts, seen, scale, None, None, None
            )
            assert_close("out", out[tokens], expected)

    def sdpa_inputs() -> Sequence[tuple[Tensor, Tensor, Tensor]]:
        def heads(count: int) -> Tensor:
            shape = (sequences, count, new, HEAD_DIM)
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        return [(heads(HEADS), heads(KV_HEADS), heads(KV_HEADS)) for _ in range(2)]

    pairs = sequences * (new * prefix + new * (new + 1) // 2)
    return Workload(
        candidate=[lambda one=one: paged_prefill(*one) for one in inputs],
        cost=cost(inputs[0][0], inputs[0][1], sequences * length, pairs),
        check=check,
        baselines=sdpa(sdpa_inputs(), causal=True) if contiguous else {},
    )


def _of_best_sdpa(result: Result) -> float:
    return min(result.times_faster(name) for name in result.baselines)


ROWS = [
    *(
        Row(
            name=f"paged prefill causal d128 {sequences} x {new // 1024}k",
            build=lambda new=new, sequences=sequences: prefill(new, 0, sequences),
            value=lambda result: result.tflop_per_s,
            unit="TFLOP/s",
            bar=400,
            stretch=550,
        )
        for new, sequences in ((8192, 1), (8192, 4), (16384, 1))
    ),
    Row(
        name="paged prefill d128 1 x 4k after 28k",
        build=lambda: prefill(4096, 28672, 1),
        value=lambda result: result.tflop_per_s,
        unit="TFLOP/s",
        bar=400,
        stretch=550,
    ),
    *(
        Row(
            name=f"paged prefill causal d128 1 x {new // 1024}k beside SDPA",
            build=lambda new=new: prefill(new, 0, 1, contiguous=True),
            value=_of_best_sdpa,
            unit="of the best SDPA",
            bar=0.70,
            stretch=1.0,
            baseline="cuDNN or flash on contiguous keys and values",
        )
        for new in (8192, 16384)
    ),
]
