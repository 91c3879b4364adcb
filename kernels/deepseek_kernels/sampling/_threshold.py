"""Where the threshold of a row lies: between two pivots, or found bit by bit."""

import triton
import triton.language as tl

from deepseek_kernels.sampling._row import COUNT_SHIFT, MASS_MASK, counted_mass, load_scaled

SHORT_LIST = tl.constexpr(448)
"""So many logits at most inside an interval are listed without narrowing it further."""

_TINY = tl.constexpr(1e-30)
"""Stands for zero where it divides or has a logarithm."""

_MARGIN = tl.constexpr(1e-4)
"""How far fp32 sums of probability are trusted."""


@triton.jit
def mass_target(b_p, b_total):
    """Return the least mass of what top-p keeps."""
    return tl.maximum(tl.ceil(b_total.to(tl.float64) * b_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _pivot(b_pivots, b_sums, m_one):
    """Return one pivot and its sum."""
    return (
        tl.max(tl.where(m_one, b_pivots, float("-inf")), 0),
        tl.max(tl.where(m_one, b_sums, 0.0), 0),
    )


@triton.jit
def interval(
    sums_ptr,
    pivots_ptr,
    i_row,
    b_k,
    b_p,
    is_k,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Return the interval `[low, high)` that the passes before LEVEL leave for the threshold.

    `high` is infinite until a pivot lies above the threshold. Also returned are the sums from
    `low` and from `high` on, the pivot after `high` and the sum from there on, or `high` again
    where it is not known, and the sum that is looked for.
    """
    o_pivots = tl.arange(0, PIVOTS)
    b_low = float("-inf")
    b_high = float("inf")
    b_next = float("inf")
    b_reached = float("inf")
    b_beyond = 0.0
    b_farther = 0.0
    b_target = b_k.to(tl.float32)
    b_least = b_target
    b_most = b_target
    for i_level in tl.static_range(LEVEL):
        o_level = (i_row * LEVELS + i_level) * PIVOTS + o_pivots
        b_sums = tl.load(sums_ptr + o_level, cache_modifier=".cg")
        b_pivots = tl.load(pivots_ptr + o_level, cache_modifier=".cg")
        if i_level == 0:
            if not is_k:
                b_target = tl.max(b_sums, 0) * b_p
                b_least = b_target * (1.0 - _MARGIN)
                b_most = b_target * (1.0 + _MARGIN)
        # A pass that was not needed has left its sums zero, and the interval stays.
        if tl.sum((b_sums > 0).to(tl.int32), 0) > 0:
            # Sums grow along the pivots, which fall.
            i_low = tl.minimum(tl.sum((b_sums < b_most).to(tl.int32), 0), PIVOTS - 1)
            i_high = tl.sum((b_sums < b_least).to(tl.int32), 0) - 1
            b_low, b_reached = _pivot(b_pivots, b_sums, o_pivots == i_low)
            if i_high >= 0:
                b_high, b_beyond = _pivot(b_pivots, b_sums, o_pivots == i_high)
                i_next = tl.maximum(i_high - 1, 0)
                b_next, b_farther = _pivot(b_pivots, b_sums, o_pivots == i_next)
    return b_low, b_high, b_next, b_reached, b_beyond, b_farther, b_target


@triton.jit
def closer_pivots(
    o_pivots,
    b_low,
    b_high,
    b_next,
    b_reached,
    b_beyond,
    b_farther,
    b_target,
    b_largest,
    PIVOTS: tl.constexpr,
):
    """Return pivots below `high`, closest together where the threshold should be.

    That is where the sum is reached if the density falls exponentially, at the rate from the
    interval to the one above it.
    """
    b_top = tl.minimum(b_high, b_largest)
    b_width = b_top - b_low
    b_above = tl.where(b_high < float("inf"), b_next - b_high, 0.0)
    b_inside = tl.maximum(b_reached - b_beyond, _TINY)
    b_part = tl.minimum(tl.maximum(tl.div_rn(b_target - b_beyond, b_inside), 0.0), 1.0)
    b_area = tl.maximum(b_inside * b_above, _TINY)
    b_ratio = tl.div_rn((b_beyond - b_farther) * b_width, b_area)
    b_distance = tl.maximum(b_width + b_above, _TINY) * 0.5
    b_slope = tl.log(tl.maximum(b_ratio, _TINY)) * tl.div_rn(b_width, b_distance)
    is_known = (b_above > 0) & (b_ratio > 0) & (tl.abs(b_slope) > 1e-3)
    b_slope = tl.minimum(tl.maximum(tl.where(is_known, b_slope, 1.0), -8.0), 8.0)
    b_bent = tl.div_rn(-tl.log(1.0 - b_part * (1.0 - tl.exp(-b_slope))), b_slope)
    b_depth = tl.where(is_known, b_bent, b_part)
    b_offset = (2 * o_pivots - (PIVOTS - 2)).to(tl.float32) * (1.0 / (PIVOTS - 2))
    b_square = b_offset * b_offset
    b_offset *= 0.06 + 0.5 * b_square * b_square * b_square
    # Not at the top itself, which may be the largest logit and then is no certain one to keep.
    return b_top - b_width * tl.maximum(b_depth + b_offset, 1.0 / 64)


@triton.jit
def needs_narrowing(
    b_low,
    b_reached,
    b_beyond,
    b_largest,
    b_k,
    is_k,
    COLLECTED_K: tl.constexpr,
    SHORT_ENOUGH: tl.constexpr,
):
    """Tell whether the list of an interval could be too long.

    Where sums are of probability, every logit of the interval has at least that of its low end.
    """
    if is_k:
        b_listed = tl.where(b_k <= COLLECTED_K, b_reached, b_reached - b_beyond)
        is_long = b_listed > SHORT_ENOUGH
    else:
        b_listed = b_reached * (1.0 + 2.0 * _MARGIN) - b_beyond
        is_long = ~(b_listed <= SHORT_LIST * tl.exp(b_low - b_largest))
    return is_long


@triton.jit
def final_interval(
    sums_ptr,
    pivots_ptr,
    i_row,
    b_k,
    b_p,
    is_k,
    is_p,
    b_largest,
    is_greedy,
    COLLECTED_K: tl.constexpr,
    LEVELS: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Return the interval whose logits are listed; those from its end on are certainly kept."""
    b_low, b_high, _, _, _, _, _ = interval(
        sums_ptr, pivots_ptr, i_row, b_k, b_p, is_k, LEVELS, LEVELS, PIVOTS
    )
    if is_k & (b_k <= COLLECTED_K):
        b_high = float("inf")
    if is_greedy:
        b_low = b_largest
        b_high = b_largest
    elif (~is_k) & (~is_p):
        b_low = float("-inf")
        b_high = float("-inf")
    return b_low, b_high


@triton.jit
def sum_from(p_row, vocabulary, b_inverse, b_largest, b_threshold, BLOCK: tl.constexpr):
    """Return count and mass of a row's logits from a threshold on, in one integer."""
    b_sums = tl.zeros([BLOCK], tl.int64)
    for i_token in tl.range(0, vocabulary, BLOCK, num_stages=3):
        o_tokens = i_token + tl.arange(0, BLOCK)
        b_scaled = load_scaled(p_row, o_tokens, o_tokens < vocabulary, b_inverse)
        b_share = tl.exp(b_scaled - b_largest)
        b_sums += tl.where(b_scaled >= b_threshold, counted_mass(b_scaled, b_share), 0)
    return tl.sum(b_sums, 0)


@triton.jit
def _flip(b_bits):
    """Map the bits of floats to integers in the same order, and back."""
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def bisected(
    p_row,
    vocabulary,
    b_inverse,
    b_largest,
    b_smallest,
    b_target,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest threshold whose count or mass reaches the target, or the smallest."""
    i_low = _flip(b_smallest.to(tl.int32, bitcast=True)).to(tl.int64)
    i_high = _flip(b_largest.to(tl.int32, bitcast=True)).to(tl.int64) + 1
    while i_high - i_low > 1:
        i_middle = (i_low + i_high) >> 1
        b_threshold = _flip(i_middle.to(tl.int32)).to(tl.float32, bitcast=True)
        b_sum = sum_from(p_row, vocabulary, b_inverse, b_largest, b_threshold, BLOCK)
        if BY_COUNT:
            is_reached = (b_sum >> COUNT_SHIFT) >= b_target
        else:
            is_reached = (b_sum & MASS_MASK) >= b_target
        i_low = tl.where(is_reached, i_middle, i_low)
        i_high = tl.where(is_reached, i_high, i_middle)
    return _flip(i_low.to(tl.int32)).to(tl.float32, bitcast=True)
