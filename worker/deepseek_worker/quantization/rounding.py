"""Rounds a weight so that its products stay right, not its numbers: GPTQ.

Rounding to nearest treats all columns alike. Inputs are not alike: some channels are large, and
most are correlated, so what rounding one column changes in the output can be taken back by
changing others. Column by column, the one with the largest inputs first, a column is rounded and
its error spread over the columns that are still to be rounded, in the least-squares sense that
the inputs' second moments `X.T @ X` define (Frantar et al. 2022, arXiv 2210.17323).

Scales are chosen first, by the error that rounding to nearest has with each. What is stored has
the form that rounding to nearest gives too, and is multiplied alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import cholesky, vector_norm
from torch.nn.functional import pad

BLOCK_COLUMNS = 64
"""Columns whose errors are spread over the rest of the matrix by one product."""
DAMPING = 0.01
"""Of the mean of the diagonal, added to it: directions that the inputs hardly have are guessed."""

MAX_SMOOTHING = 2.0**6
"""Outliers among the inputs are divided by so much at most, and small ones multiplied."""

ToGrid = Callable[[Tensor], Tensor]
"""Rounds weights that are divided by their scales to values that codes stand for, as float32."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a projection is given while a text runs through the model."""

    rows: Tensor
    """`[tokens, in_features]`."""
    gain: Tensor | None
    """Of the norm whose output they are, `[in_features]`; None where they come from elsewhere."""


def smooth(inputs: Inputs, weight: Tensor) -> Tensor:
    """Move outliers from the inputs into the weight: SmoothQuant (arXiv 2211.10438).

    The norm's gain and `inputs.rows` are divided in place, channel by channel, by powers of two,
    so that nothing is rounded; the weight that is returned is multiplied by them. Inputs that no
    norm has made stay as they are.
    """
    if inputs.gain is None:
        return weight
    # A token's scale is that of its largest channel, so a channel counts by its share of that.
    rows = inputs.rows.float()
    share = rows / rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    ratio = share.square().mean(0).sqrt() / weight.float().square().mean(0).sqrt()
    exponent = ratio.clamp(1e-20, 1e20).log2() / 2
    exponent -= exponent.median()
    limit = math.log2(MAX_SMOOTHING)
    factor = torch.exp2(exponent.round().clamp(-limit, limit))
    inputs.gain.div_(factor)
    inputs.rows.div_(factor)
    return weight.float() * factor


def relative_error(rounded: Tensor, exact: Tensor, parts: Sequence[int]) -> float:
    """Of the outputs `[tokens, out_features]`: RMS over tokens, of the worst of the parts."""
    sizes = list(parts)
    errors = torch.split_with_sizes(rounded.float() - exact.float(), sizes, 1)
    wholes = torch.split_with_sizes(exact.float(), sizes, 1)
    relative = [
        (vector_norm(error, dim=1) / vector_norm(whole, dim=1)).square().mean().sqrt()
        for error, whole in zip(errors, wholes, strict=True)
    ]
    return float(torch.stack(relative).max())


def second_moments(inputs: Tensor) -> Tensor:
    """`X.T @ X` of inputs `[tokens, columns]`, `[columns, columns]` float32.

    Every token counts alike: some have inputs a thousand times as large as others, and would
    otherwise be the only ones that are seen.
    """
    length: Tensor = vector_norm(inputs.float(), dim=1, keepdim=True)
    rows: Tensor = inputs.float() / length.clamp_min(torch.finfo(torch.float32).tiny)
    return rows.t() @ rows


def best_scale(
    weight: Tensor,
    moments: Tensor,
    scale: Tensor,
    group_columns: int,
    to_grid: ToGrid,
    *,
    factors: Sequence[float],
) -> Tensor:
    """Multiply each scale by that one of the factors whose rounding distorts products least.

    Args:
        weight: `[rows, columns]`.
        moments: Of `second_moments`; the diagonal counts.
        scale: `[rows, groups]` float32, those of the largest weights.
        group_columns: Columns of a group; the last one may be cut.
        to_grid: See `ToGrid`.
        factors: The first one wins where others are no better.

    Returns:
        `[rows, groups]` float32.
    """
    rows, columns = weight.shape
    padding = (0, -columns % group_columns)
    grouped = pad(weight.float(), padding).view(rows, -1, group_columns)
    importance = pad(moments.diagonal(), padding).view(-1, group_columns)
    best = scale
    least = torch.full_like(scale, torch.inf)
    for factor in factors:
        tried = scale * factor
        spread = tried[..., None]
        error = to_grid(grouped / spread) * spread - grouped
        distortion = (error.square() * importance).sum(-1)
        best = torch.where(distortion < least, tried, best)
        least = torch.minimum(distortion, least)
    return best


def compensated(
    weight: Tensor, moments: Tensor, scale: Tensor, group_columns: int, to_grid: ToGrid
) -> Tensor:
    """Round `weight` and make up for the errors.

    Args:
        weight: `[rows, columns]`, of any floating-point type.
        moments: Of `second_moments`.
        scale: `[rows, groups]` float32, one for `group_columns` neighbours each.
        group_columns: Columns of a group; the last one may be cut.
        to_grid: See `ToGrid`.

    Returns:
        `[rows, columns]` float32: values on the grid; times their scales they are the weight.
    """
    order = moments.diagonal().argsort(descending=True, stable=True)
    factor = _spreading(moments[order][:, order])
    # Columns are rows here: one is then contiguous.
    left = weight.t()[order].float()
    scales = scale.t()[order // group_columns]
    rounded = torch.empty_like(left)
    for first in range(0, len(left), BLOCK_COLUMNS):
        last = min(first + BLOCK_COLUMNS, len(left))
        errors = torch.empty_like(left[first:last])
        for column in range(first, last):
            rounded[column] = to_grid(left[column] / scales[column])
            error = left[column] - rounded[column] * scales[column]
            error /= factor[column, column]
            errors[column - first] = error
            left[column + 1 : last].addr_(factor[column, column + 1 : last], error, alpha=-1)
        left[last:].addmm_(factor[first:last, last:].t(), errors, alpha=-1)
    result = torch.empty_like(rounded)
    result[order] = rounded
    return result.t().contiguous()


def _spreading(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse: row `i` says what column `i` costs those after."""
    damped = moments.clone()
    diagonal = damped.diagonal()
    # An input that is always zero has no error to spread, and may not make the matrix singular.
    diagonal += (DAMPING * diagonal.mean()).clamp_min(torch.finfo(torch.float32).tiny)
    inverse = torch.cholesky_inverse(cholesky(damped))
    factor: Tensor = cholesky(inverse, upper=True)
    return factor
