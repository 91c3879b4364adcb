"""Low-rank adapters beside a product: a batch whose rows use different adapters, or none."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.lora import reference

MAX_PARTS = 3
MAX_RANK = 256
PROGRAMS = 264
"""The first product is split until so many programs share it: two for each multiprocessor."""

BLOCK_ROWS = (16, 64)
"""Rows that a program takes: where there are few, and where there are many."""


def lora_add(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor, widths: Sequence[int]
) -> None:
    """Add each row's low-rank product to what the base weight made of it.

    Rows without an adapter are left as they are, bit by bit. The shapes say nothing of which
    adapters the rows use, so a captured launch serves every mixture.

    Args:
        out: `[tokens, out_features]` fp16, bf16 or fp32, rows at any stride; changed in place.
        x: `[tokens, in_features]` in the same type, rows at any stride.
        a: `[adapters, parts, rank, in_features]` in the same type, contiguous. A fused projection
            has one part for each of its members: 3 for q, k and v.
        b: `[adapters, out_features, rank]` in the same type, contiguous; the scale is in it.
        adapters: `[tokens]` int32: the adapter of each row, negative for none.
        widths: Columns of `out` that each part makes, one after another.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("out", out, shape=("tokens", "out_features"), dtypes=FLOATS)
    tokens, columns = out.shape
    same = (out.dtype,)
    check_tensor("x", x, shape=(tokens, "in_features"), dtypes=same, like=out)
    parts = len(widths)
    check_range("the number of widths", parts, 1, MAX_PARTS)
    if sum(widths) != columns or min(widths) < 1:
        raise ValueError(
            f"widths are {list(widths)}; their sum must be the {columns} columns of out"
        )
    shape: tuple[int | str, ...] = ("adapters", parts, "rank", x.shape[1])
    check_tensor("a", a, shape=shape, dtypes=same, like=out, contiguous=True)
    rank = a.shape[2]
    check_range("the rank of a", rank, 1, MAX_RANK)
    shape = (a.shape[0], columns, rank)
    check_tensor("b", b, shape=shape, dtypes=same, like=out, contiguous=True)
    check_tensor(
        "adapters", adapters, shape=(tokens,), dtypes=(torch.int32,), like=out, contiguous=True
    )
    _lora_add(out, x, a, b, adapters, widths)


def cost(out: Tensor, x: Tensor, a: Tensor, used_adapters: int) -> Cost:
    """Return the work of one call in which so many adapters are used, and every row has one."""
    tokens, columns = out.shape
    _, parts, rank, in_features = a.shape
    weights = used_adapters * rank * (parts * in_features + columns)
    moved = (2 * out.numel() + x.numel() + weights) * out.element_size()
    return Cost(moved + 4 * tokens, 2 * tokens * rank * (parts * in_features + columns))


def workspace_bytes(tokens: int, parts: int, rank: int) -> int:
    """Return the most memory that a call on at most so many tokens takes while it runs."""
    return 4 * rank * max(parts * tokens, PROGRAMS * BLOCK_ROWS[1])


def _fake(
    _out: Tensor, _x: Tensor, _a: Tensor, _b: Tensor, _adapters: Tensor, _widths: Sequence[int]
) -> None:
    """Nothing is made."""


_lora_add = Operation(reference.lora_add, fake=_fake, mutates=("out",))
