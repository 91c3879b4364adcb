"""A mixture of experts: route, group the rows by expert, multiply, combine.

    weights, experts = moe_route(logits, top_k)
    order, block_experts = moe_group(experts, num_experts)
    hidden = silu_mul(moe_matmul(x, gate_up, order, block_experts, top_k=top_k))
    out = moe_combine(moe_matmul(hidden, down, order, block_experts), weights)

Nothing waits for the host: all shapes follow from the number of tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_choice, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.moe import reference

Scoring = Literal["softmax", "sigmoid"]

MAX_EXPERTS = 1024
MAX_TOP_K = 64


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose experts for every token.

    Args:
        logits: `[tokens, experts]` fp16, bf16 or fp32, rows at any stride.
        top_k: Experts for each token.
        bias: `[experts]` fp32, added where experts are chosen and not to their weights.
        scoring: How logits become weights.
        renormalize: Whether the weights of a token are made to sum to one.
        scale: Factor of all weights.
        groups: Experts are this many groups of neighbours; only those of the best `top_groups`
            can be chosen.
        top_groups: See `groups`.

    Returns:
        Weights fp32 and experts int32, both `[tokens, top_k]`, best first; equal choices go to
        the lower index.

    Raises:
        ValueError: An argument of the wrong type, shape or device, or out of range.
    """
    check_tensor("logits", logits, shape=("tokens", "experts"), dtypes=FLOATS)
    experts = logits.shape[1]
    check_range("the number of experts of logits", experts, 1, MAX_EXPERTS)
    if bias is not None:
        check_tensor("bias", bias, shape=(experts,), dtypes=(torch.float32,), like=logits)
    check_choice("scoring", scoring, ("softmax", "sigmoid"))
    check_range("groups", groups, 1, experts)
    if experts % groups:
        raise ValueError(f"groups is {groups}; it must divide the {experts} experts")
    check_range("top_groups", top_groups, 1, groups)
    check_range("top_k", top_k, 1, min(MAX_TOP_K, experts // groups * top_groups))
    if bias is not None and groups > 1 and experts // groups < 2:
        raise ValueError(f"groups is {groups}; with a bias each needs two of the experts")
    return _moe_route(logits, bias, top_k, scoring, renormalize, scale, groups, top_groups)


def moe_group(
    experts: Tensor, num_experts: int, *, block_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sort the rows `token * top_k + choice` by expert, each expert's in blocks of its own.

    Args:
        experts: `[tokens, top_k]` int32, contiguous, values below `num_experts`.
        num_experts: Experts there are.
        block_rows: Rows of a block: 16, 32, 64 or 128; None takes what suits the average number
            of rows of an expert.

    Returns:
        `order`, `[blocks * block_rows]` int32, and `block_experts`, `[blocks]` int32, as
        `moe_matmul` takes them. Padding holds the number of rows, unused blocks the expert -1.

    Raises:
        ValueError: An argument of the wrong type or shape, or out of range.
    """
    check_tensor(
        "experts", experts, shape=("tokens", "top_k"), dtypes=(torch.int32,), contiguous=True
    )
    check_range("num_experts", num_experts, 1, MAX_EXPERTS)
    if block_rows is None:
        block_rows = suitable_block_rows(experts.numel(), num_experts)
    check_choice("block_rows", block_rows, (16, 32, 64, 128))
    return _moe_group(experts, num_experts, block_rows)


def suitable_block_rows(rows: int, num_experts: int) -> int:
    """Return the rows of a block that suit the average number of rows of an expert."""
    average = rows / num_experts
    return next((size for size in (16, 32, 64) if average <= size), 128)


def moe_matmul(
    x: Tensor, weight: Tensor, order: Tensor, block_experts: Tensor, *, top_k: int = 1
) -> Tensor:
    """Multiply each row with the weight of its expert.

    Args:
        x: `[rows / top_k, in_features]` fp16, bf16 or fp32, rows at any stride. With `top_k`
            each token's row is read for all its experts; with 1 every row is its own.
        weight: `[experts, out_features, in_features]` of the same type, last stride 1.
        order: int32, contiguous, of `moe_group`; likewise `block_experts`.
        block_experts: int32, contiguous.
        top_k: Rows of the result for each row of `x`.

    Returns:
        `[rows, out_features]` in the type of `x`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("x", x, shape=("rows", "in_features"), dtypes=FLOATS)
    shape = ("experts", "out_features", x.shape[1])
    check_tensor("weight", weight, shape=shape, dtypes=(x.dtype,), like=x)
    integers = (torch.int32,)
    check_tensor("order", order, shape=("slots",), dtypes=integers, like=x, contiguous=True)
    check_tensor(
        "block_experts",
        block_experts,
        shape=("blocks",),
        dtypes=integers,
        like=x,
        contiguous=True,
    )
    check_range("top_k", top_k, 1, MAX_TOP_K)
    blocks = len(block_experts)
    sizes = tuple(size * blocks for size in (16, 32, 64, 128))
    if blocks and len(order) not in sizes:
        raise ValueError(f"order has {len(order)} slots; allowed for {blocks} blocks are {sizes}")
    return _moe_matmul(x, weight, order, block_experts, len(x) * top_k)


def moe_combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum the rows of each token with their weights.

    Args:
        rows: `[tokens * top_k, columns]` fp16, bf16 or fp32, rows at any stride.
        weights: `[tokens, top_k]` fp32, contiguous.

    Returns:
        `[tokens, columns]` in the type of `rows`, contiguous.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor(
        "weights", weights, shape=("tokens", "top_k"), dtypes=(torch.float32,), contiguous=True
    )
    check_range("the number of columns of weights", weights.shape[1], 1, MAX_TOP_K)
    shape = (weights.numel(), "columns")
    check_tensor("rows", rows, shape=shape, dtypes=FLOATS, like=weights)
    return _moe_combine(rows, weights)


def cost(x: Tensor, weight: Tensor, *, rows: int, touched_experts: int) -> Cost:
    """Return the work of one `moe_matmul`: each touched expert's weight is read once."""
    _, out_features, in_features = weight.shape
    elements = x.numel() + touched_experts * out_features * in_features + rows * out_features
    return Cost(elements * x.element_size(), 2 * rows * out_features * in_features)


def _fake_route(
    logits: Tensor, _bias: Tensor | None, top_k: int, *_: object
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )


def _fake_group(experts: Tensor, num_experts: int, block_rows: int) -> tuple[Tensor, Tensor]:
    blocks = reference.num_blocks(experts.numel(), num_experts, block_rows)
    return (
        torch.empty(blocks * block_rows, dtype=torch.int32, device=experts.device),
        torch.empty(blocks, dtype=torch.int32, device=experts.device),
    )


def _fake_matmul(
    x: Tensor, weight: Tensor, _order: Tensor, _block_experts: Tensor, rows: int
) -> Tensor:
    return torch.empty((rows, weight.shape[1]), dtype=x.dtype, device=x.device)


def _fake_combine(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.empty((weights.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)


_moe_route = Operation(reference.moe_route, fake=_fake_route)
_moe_group = Operation(reference.moe_group, fake=_fake_group)
_moe_matmul = Operation(reference.moe_matmul, fake=_fake_matmul)
_moe_combine = Operation(reference.moe_combine, fake=_fake_combine)
