"""Grouped products of a mixture of experts: arithmetic in prefill, weight bytes in decode."""

from collections.abc import Callable

import torch
from kernel_bench import Result, Row, Workload
from torch import Tensor

from deepseek_kernels import moe_group, moe_matmul, moe_route
from deepseek_kernels.cost import Cost
from deepseek_kernels.moe import cost, reference
from deepseek_kernels.testing import assert_close

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768


def _workload(tokens: int) -> Workload:
    """Run both products of a layer; routing comes before and is the same for all sets."""
    rows = tokens * TOP_K
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(rows, INTERMEDIATE, device="cuda", dtype=torch.bfloat16)
    sets = [
        (
            torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device="cuda", dtype=torch.bfloat16),
            torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(2)
    ]
    _, chosen = moe_route(torch.randn(tokens, EXPERTS, device="cuda"), TOP_K)
    order, block_experts = moe_group(chosen, EXPERTS)
    touched = len(chosen.unique())

    def up(weight: Tensor) -> Tensor:
        return moe_matmul(x, weight, order, block_experts, top_k=TOP_K)

    def down(weight: Tensor) -> Tensor:
        return moe_matmul(hidden, weight, order, block_experts)

    def check() -> None:
        expected = reference.moe_matmul(x, sets[0][0], order, block_experts, rows)
        assert_close("up", up(sets[0][0]), expected)
        expected = reference.moe_matmul(hidden, sets[0][1], order, block_experts, rows)
        assert_close("down", down(sets[0][1]), expected)

    def call(gate_up: Tensor, back: Tensor) -> Callable[[], object]:
        return lambda: (up(gate_up), down(back))

    def looped(gate_up: Tensor, back: Tensor) -> Callable[[], object]:
        """Multiply one expert after another by cuBLAS, on equal shares of the rows."""
        shares = max(1, rows // EXPERTS)
        some, more = x[:shares], hidden[:shares]

        def run() -> None:
            for expert in range(touched):
                some @ gate_up[expert].t()
                more @ back[expert].t()

        return run

    one = cost(x, sets[0][0], rows=rows, touched_experts=touched)
    two = cost(hidden, sets[0][1], rows=rows, touched_experts=touched)
    return Workload(
        candidate=[call(*weights) for weights in sets],
        cost=Cost(one.bytes + two.bytes, one.flops + two.flops),
        check=check,
        baselines={"cuBLAS, expert by expert": [looped(*weights) for weights in sets]},
    )


def _tflop_per_s(result: Result) -> float:
    return result.tflop_per_s


def _of_copy(result: Result) -> float:
    return result.of_copy()


SHAPE = f"{EXPERTS} experts top {TOP_K}, {HIDDEN} and {INTERMEDIATE}"

ROWS = [
    *(
        Row(
            name=f"grouped matmul {SHAPE} M={tokens}",
            build=lambda tokens=tokens: _workload(tokens),
            value=_tflop_per_s,
            unit="TFLOP/s",
            bar=400,
            stretch=520,
        )
        for tokens in (8192, 32768)
    ),
    *(
        Row(
            name=f"grouped matmul {SHAPE} M={tokens}",
            build=lambda tokens=tokens: _workload(tokens),
            value=_of_copy,
            unit="of copy",
            bar=0.75,
            stretch=0.85,
            baseline="copy_ of 4 GiB; the weights of touched experts counted once",
        )
        for tokens in (8, 32, 128)
    ),
]
