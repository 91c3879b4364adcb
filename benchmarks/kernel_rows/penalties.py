"""Penalties on rows of logits, against the copy ceiling."""

import torch
from kernel_bench import Result, Row, Workload, sets_for
from torch import Tensor

from deepseek_kernels import penalties as op

VOCABULARY = 151_936
NUM_BIASES = 1024


def _arguments(rows: int, num_biases: int) -> tuple[Tensor, ...]:
    def filled(value: float, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    places = torch.arange(rows, device="cuda")
    seen = torch.randint(-60, 3, (rows, VOCABULARY), device="cuda", dtype=torch.int32)
    biased = torch.randint(0, VOCABULARY // NUM_BIASES, (rows, NUM_BIASES), device="cuda")
    biased = biased * NUM_BIASES + torch.arange(NUM_BIASES, device="cuda")
    return (
        torch.randint(0, VOCABULARY, (rows,), device="cuda"),
        places,
        places,
        filled(-1),
        filled(1),
        filled(num_biases),
        filled(1.2, torch.float32),
        filled(0.5, torch.float32),
        filled(0.25, torch.float32),
        seen.clamp_min_(0),
        biased.int(),
        torch.randn(rows, NUM_BIASES, device="cuda"),
    )


def workload(rows: int, num_biases: int) -> Workload:
    logits = [
        torch.randn(rows, VOCABULARY, device="cuda").bfloat16()
        for _ in range(sets_for(rows * VOCABULARY * 8))
    ]
    arguments = _arguments(rows, num_biases)

    def check() -> None:
        found, expected = (
            op.penalize(logits[0], *arguments),
            op.reference.penalize(logits[0], *arguments),
        )
        # The last bit may round otherwise where a bias is added to it.
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)

    return Workload(
        candidate=[lambda one=one: op.penalize(one, *arguments) for one in logits],
        cost=op.cost(logits[0], rows),
        check=check,
    )


ROWS = [
    Row(
        f"penalties of {rows} rows, {num_biases} biases",
        lambda rows=rows, num_biases=num_biases: workload(rows, num_biases),
        Result.of_copy,
        "of copy",
        bar,
        0.9,
        "copy_ of 4 GiB",
    )
    for rows, num_biases, bar in ((256, 0, 0.8), (64, 300, 0.6))
]
