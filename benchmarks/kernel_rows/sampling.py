"""Sampling: against a sort-based sampler, and in microseconds at batch 1."""

import torch
from kernel_bench import Result, Row, Workload, sets_for
from torch import Tensor

from deepseek_kernels import sampling as op

VOCABULARY = 128_256
GAUSSIAN_SCALE = 2.5
"""A spread of logits like a model's: top-p 0.95 keeps some thousands."""


def _arguments(rows: int, top_k: int, top_p: float) -> tuple[Tensor, ...]:
    def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    return (
        filled(0.8),
        filled(top_k, torch.int32),
        filled(top_p),
        filled(0.0),
        torch.randint(0, 2**62, (rows,), device="cuda"),
        torch.arange(rows, device="cuda"),
    )


def _sorted_sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sample as engines did before: sort, mask, undo the sort, draw."""
    scaled = logits.float() / temperature[:, None]
    ordered, order = scaled.sort(dim=-1)
    k = torch.where(top_k > 0, top_k, logits.shape[-1]).long()
    kth = ordered.gather(-1, (ordered.shape[-1] - k)[:, None])
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p[:, None]
    below[:, -1] = False
    ordered = ordered.masked_fill(below, -torch.inf)
    probability = torch.empty_like(ordered).scatter_(-1, order, ordered).softmax(dim=-1)
    return (probability / torch.empty_like(probability).exponential_()).argmax(dim=-1)


def workload(rows: int, top_k: int, top_p: float) -> Workload:
    sets = sets_for(rows * VOCABULARY * 2, most=16)
    logits = [
        (torch.randn(rows, VOCABULARY, device="cuda") * GAUSSIAN_SCALE).bfloat16()
        for _ in range(sets)
    ]
    arguments = _arguments(rows, top_k, top_p)

    def check() -> None:
        for one in logits[:4]:
            drawn, expected = op.sample(one, *arguments), op.reference.sample(one, *arguments)
            if not torch.equal(drawn, expected):
                raise AssertionError(f"{int((drawn != expected).sum())} of {rows} tokens differ")

    return Workload(
        candidate=[lambda one=one: op.sample(one, *arguments) for one in logits],
        cost=op.cost(logits[0]),
        check=check,
        baselines={"sort": [lambda one=one: _sorted_sample(one, *arguments[:3]) for one in logits]},
        eager=True,
    )


def _times(name: str, rows: int, top_k: int, top_p: float) -> Row:
    return Row(
        name,
        lambda: workload(rows, top_k, top_p),
        lambda result: result.times_faster("sort"),
        "times faster",
        10,
        20,
        "torch sort, softmax, cumsum, scatter, exponential_, argmax in a graph",
    )


def _microseconds(result: Result) -> float:
    return result.candidate.median_us


ROWS = [
    _times("sampling top-k 50, top-p 0.95, batch 64", 64, 50, 0.95),
    _times("sampling top-p 0.95, batch 64", 64, 0, 0.95),
    _times("sampling top-p 0.95, batch 256", 256, 0, 0.95),
    *(
        Row(
            f"sampling {name}, batch 1",
            lambda top_k=top_k, top_p=top_p: workload(1, top_k, top_p),
            _microseconds,
            "us",
            15,
            10,
            "absolute",
            "lower",
        )
        for name, top_k, top_p in (("top-k 50, top-p 0.95", 50, 0.95), ("top-p 0.95", 0, 0.95))
    ),
]
