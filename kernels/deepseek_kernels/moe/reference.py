"""A mixture of experts: which experts a token takes, and products with one weight per expert."""

import torch
from torch import Tensor

LOWEST = -3e38
"""Stands for choices that are not a number, so that they are taken last but can be taken."""


def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """Return weights `[tokens, top_k]` fp32 and experts `[tokens, top_k]` int32, best first.

    The bias changes which experts are taken and not their weights. Of several groups only the
    `top_groups` best are eligible; a group is as good as its best expert or, with a bias, as its
    best two together. Equal choices go to the lower index.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2; DeepSeek-V3, arXiv 2412.19437, 2.1.2.
    """
    values = logits.float()
    scores = values.softmax(-1) if scoring == "softmax" else values.sigmoid()
    choice = scores if bias is None else scores + bias
    choice = torch.where(choice.isnan(), LOWEST, choice).clamp_min(LOWEST)
    if groups > 1:
        grouped = choice.view(len(choice), groups, -1)
        quality = grouped.topk(1 if bias is None else 2, -1).values.sum(-1)
        best = quality.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
        kept = torch.zeros_like(quality, dtype=torch.bool).scatter(1, best, value=True)
        choice = torch.where(kept[..., None], grouped, -torch.inf).view(choice.shape)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, experts.int()


def moe_group(experts: Tensor, num_experts: int, block_rows: int) -> tuple[Tensor, Tensor]:
    """Sort rows `token * top_k + choice` by expert, each expert's padded to whole blocks.

    Returns:
        `order`, `[blocks * block_rows]` int32: a row, or the number of rows for padding; and
        `block_experts`, `[blocks]` int32: the expert of each block, or -1 for unused ones.
    """
    flat = experts.reshape(-1).long()
    rows = len(flat)
    blocks = num_blocks(rows, num_experts, block_rows)
    counts = torch.zeros(num_experts, dtype=torch.long, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    used = (counts + block_rows - 1) // block_rows
    last_block = used.cumsum(0)
    sorted_experts, by_expert = flat.sort(stable=True)
    rank = torch.arange(rows, device=flat.device) - (counts.cumsum(0) - counts)[sorted_experts]
    slot = (last_block - used)[sorted_experts] * block_rows + rank
    order = torch.full((blocks * block_rows,), rows, dtype=torch.int32, device=flat.device)
    order[slot] = by_expert.int()
    block = torch.arange(blocks, device=flat.device)
    expert = torch.searchsorted(last_block, block, right=True)
    return order, torch.where(expert < num_experts, expert, -1).int()


def num_blocks(rows: int, num_experts: int, block_rows: int) -> int:
    """Return the most blocks that some distribution over experts can need."""
    return min(rows, rows // block_rows + num_experts)


def moe_matmul(
    x: Tensor, weight: Tensor, order: Tensor, block_experts: Tensor, rows: int
) -> Tensor:
    """Return `[rows, out_features]`: each row times the weight of its expert, summed in fp32.

    Row `r` of the result reads row `r * len(x) // rows` of `x`: the token's, or its own.
    """
    out = torch.zeros(rows, weight.shape[1], dtype=x.dtype, device=x.device)
    by_block = order.view(len(block_experts), -1)
    for expert in range(len(weight)):
        mine = by_block[block_experts == expert].flatten().long()
        mine = mine[mine < rows]
        values = x[mine // (rows // max(len(x), 1))].float()
        out[mine] = (values @ weight[expert].float().t()).to(x.dtype)
    return out


def moe_combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, `[tokens, columns]`."""
    tokens, top_k = weights.shape
    values = rows.view(tokens, top_k, rows.shape[1]).float()
    return (values * weights[..., None]).sum(1).to(rows.dtype)
