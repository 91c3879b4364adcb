"""Integers of a few bits out of the words that hold them, and their groups of inputs."""

import torch
from torch import Tensor

from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.quantization.codes import GroupCodes
from deepseek_worker.quantization.schemes import GROUP_COLUMNS

WORD_BITS = 32


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """`[words, columns]` int32 to uint8 `[words * 32 / bits, columns]`, lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    codes: Tensor = (words[:, None] >> shifts[None, :, None]) & (2**bits - 1)
    return codes.to(torch.uint8).view(-1, words.shape[1])


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """`[rows, words]` int32 to uint8 `[rows, words * 32 / bits]`, lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    codes: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).view(len(words), -1)


def group_of_inputs(group_index: Tensor | None, columns: int, group_size: int) -> Tensor:
    """Which group each input belongs to, `[columns]` int64."""
    if group_index is not None:
        return group_index.to(torch.int64)
    return torch.arange(columns) // (group_size if group_size > 0 else columns)


def dequantize_groups(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, group: Tensor, bits: int
) -> Tensor:
    """The float32 matrix of codes with scales for any groups.

    Args:
        codes: `[out_features, in_features]` uint8.
        scale: `[out_features, groups]`.
        zero_point: uint8, shape of `scale`; half of the range where absent.
        group: `[in_features]` int64: of each input.
        bits: Of a code.
    """
    group = group.to(codes.device)
    zero = 2.0 ** (bits - 1) if zero_point is None else zero_point.float()[:, group]
    return (codes.float() - zero) * scale.float()[:, group]


def in_groups_of_128(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, group: Tensor, name: str
) -> GroupCodes:
    """Bring inputs into the order of their groups, with a scale for every 128 of them.

    Args:
        codes: `[out_features, in_features]` uint8, 0 to 15.
        scale: `[out_features, groups]`; of a group of any size.
        zero_point: uint8, shape of `scale`.
        group: `[in_features]` int64: of each input.
        name: Of the tensor that `group` comes from, for errors.

    Raises:
        BrokenCheckpoint: an input belongs to a group that has no scale.
    """
    group = group.to(codes.device)
    if int(group.min()) < 0 or int(group.max()) >= scale.shape[1]:
        raise BrokenCheckpoint(
            f"{name} names group {int(group.max())}, but there are scales for {scale.shape[1]}"
        )
    order = torch.argsort(group, stable=True)
    sizes = torch.bincount(group, minlength=scale.shape[1])
    used = sizes.nonzero()[:, 0]
    # A group that is no multiple of 128 is filled up with columns of value zero, but the last.
    filled = -(-sizes[used] // GROUP_COLUMNS) * GROUP_COLUMNS
    blocks = used.repeat_interleave(filled // GROUP_COLUMNS)
    in_order = bool((order == torch.arange(len(order), device=order.device)).all())
    columns = len(group)
    scale = scale[:, blocks]
    zero_point = None if zero_point is None else zero_point[:, blocks]
    if bool((filled[:-1] == sizes[used][:-1]).all()):
        if in_order:
            return GroupCodes(codes, scale, zero_point)
        return GroupCodes(codes[:, order], scale, zero_point, order)
    starts = filled.cumsum(0) - filled
    first_of_group = sizes[used].cumsum(0) - sizes[used]
    rank = torch.arange(columns, device=order.device)
    which = torch.searchsorted(sizes[used].cumsum(0), rank, right=True)
    places = starts[which] + rank - first_of_group[which]
    width = int(filled.sum())
    zeros = torch.full_like(scale, 8, dtype=torch.uint8) if zero_point is None else zero_point
    padded = zeros.repeat_interleave(GROUP_COLUMNS, 1)
    padded[:, places] = codes[:, order]
    inputs = torch.zeros(width, dtype=torch.int64, device=order.device)
    inputs[places] = order
    return GroupCodes(padded, scale, zero_point, inputs)
