"""The product with a weight of 4 bits in groups of 128 columns, and how such a weight is stored.

A weight `[out_features, in_features]` of codes 0 to 15 is cut into tiles of 64 rows by 256
columns, the last ones padded. A tile is 8192 bytes in one piece: a byte holds the codes of one
row in column `p` (low half) and in column `p + 128` (high half), `0 <= p < 128`, so that each
half of a tile is one group. Within the tile, bytes lie in the order in which the threads of
Hopper's matrix unit hold the left operand: with the bits of the row `r5..r0` and of the column
`p6..p0`, a byte is at

    p6 p5 r5 r4 r2 r1 r0 p2 p1 p4 p3 r3 p0

and of every four bytes the middle two are swapped, which lets one instruction take the codes of
two columns out of a word as the halves of two 16-bit numbers.
"""

import torch
from torch import Tensor

GROUP_COLUMNS = 128
TILE_ROWS = 64
TILE_COLUMNS = 256
TILE_BYTES = TILE_ROWS * TILE_COLUMNS // 2

SYMMETRIC_ZERO = 8
"""The code that means zero where there are no zero points."""


def matmul_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    out_features: int,
) -> Tensor:
    """Return `x @ ((code - zero_point) * scale).T + bias`, `[tokens, out_features]`."""
    values = dequantize(weight, scale, zero_point)[:out_features, : x.shape[1]]
    product = x.float() @ values.t()
    return (product if bias is None else product + bias.float()).to(x.dtype)


def gated_matmul_w4a16(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, out_features: int
) -> Tensor:
    """Return `silu(x @ gate.T) * (x @ up.T)`, `[tokens, out_features]`, rounded once."""
    product = matmul_w4a16(x.float(), weight, scale, zero_point, None, 2 * out_features)
    gate, up = product.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def pack_codes(codes: Tensor) -> Tensor:
    """Store codes `[out_features, in_features]` as tiles `[row tiles, column tiles, bytes]`."""
    rows, columns = codes.shape
    padding = (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS)
    padded = torch.nn.functional.pad(codes.to(torch.uint8), padding, value=SYMMETRIC_ZERO)
    row_tiles, column_tiles = padded.shape[0] // TILE_ROWS, padded.shape[1] // TILE_COLUMNS
    halves = padded.view(row_tiles, TILE_ROWS, column_tiles, 2, GROUP_COLUMNS)
    together = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)
    # [row tile, r54, r3, r210, column tile, p65, p43, p21, p0]
    bits = together.view(row_tiles, 4, 2, 8, column_tiles, 4, 4, 4, 2)
    ordered = bits.permute(0, 4, 5, 1, 3, 7, 6, 2, 8)
    return _swap(ordered.reshape(row_tiles, column_tiles, TILE_BYTES))


def unpack_codes(weight: Tensor) -> Tensor:
    """Return the codes of all tiles, padding included, `[rows, columns]` uint8."""
    row_tiles, column_tiles, _ = weight.shape
    bits = _swap(weight).view(row_tiles, column_tiles, 4, 4, 8, 4, 4, 2, 2)
    # The inverse of the order above: [row tile, r54, r3, r210, column tile, p65, p43, p21, p0].
    together = bits.permute(0, 3, 7, 4, 1, 2, 6, 5, 8)
    together = together.reshape(row_tiles, TILE_ROWS, column_tiles, GROUP_COLUMNS)
    halves = torch.stack((together & 15, together >> 4), 3)
    return halves.view(row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)


def pack_groups(values: Tensor, row_padding: float) -> Tensor:
    """Store one value per row and group, `[out_features, groups]`, as tiles read them.

    Returns:
        `[column tiles, padded rows, 2]`: the two groups of a tile side by side.
    """
    rows, groups = values.shape
    padding = (0, groups % 2, 0, -rows % TILE_ROWS)
    padded = torch.nn.functional.pad(values, padding, value=row_padding)
    return padded.view(padded.shape[0], padded.shape[1] // 2, 2).transpose(0, 1).contiguous()


def unpack_groups(values: Tensor) -> Tensor:
    """Return the values that `pack_groups` stored, padding included, `[rows, groups]`."""
    column_tiles, rows, _ = values.shape
    return values.transpose(0, 1).reshape(rows, 2 * column_tiles)


def dequantize(weight: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return the fp32 values of all tiles, padding included, `[rows, columns]`."""
    codes = unpack_codes(weight)
    zeros = (
        torch.full_like(unpack_groups(scale), SYMMETRIC_ZERO)
        if zero_point is None
        else unpack_groups(zero_point)
    )
    grouped = codes.view(codes.shape[0], -1, GROUP_COLUMNS).float() - zeros.float()[..., None]
    return (grouped * unpack_groups(scale).float()[..., None]).view(codes.shape)


def quantize_weight(
    weight: Tensor, dtype: torch.dtype, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round a weight to codes: `[out, in]` uint8, scales and zero points `[out, groups]`.

    Scales are rounded to `dtype` before the codes are chosen, so that the codes fit them.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % GROUP_COLUMNS))
    grouped = padded.view(rows, -1, GROUP_COLUMNS)
    smallest = torch.finfo(dtype).tiny
    if symmetric:
        scale = (grouped.abs().amax(-1) / 7).clamp_min(smallest).to(dtype)
        zero = torch.full_like(scale, SYMMETRIC_ZERO, dtype=torch.float32)
    else:
        low = grouped.amin(-1).clamp_max(0.0)
        span = grouped.amax(-1).clamp_min(0.0) - low
        scale = (span / 15).clamp_min(smallest).to(dtype)
        zero = torch.round(-low / scale.float()).clamp(0, 15)
    codes = torch.round(grouped / scale.float()[..., None]) + zero[..., None]
    codes = codes.clamp(0, 15).to(torch.uint8).view(padded.shape)[:, :columns]
    return codes, scale, None if symmetric else zero.to(torch.uint8)


def _swap(tiles: Tensor) -> Tensor:
    words = tiles.view(*tiles.shape[:-1], TILE_BYTES // 4, 4)
    return words[..., [0, 2, 1, 3]].reshape(tiles.shape)
