"""Sampling without a sort: a few passes narrow each row's threshold down to a short list.

`bounds` finds each row's largest and smallest logit. Each `count` pass adds up how many logits,
or how much probability, lie above some pivots; that leaves an interval between two pivots for
the threshold, where the next pass takes closer ones, unless it holds few logits already. These
sums are fp32 and only bracket it. `collect` draws among what is certainly
kept, the logits above the interval, lists those inside it, and sums exactly. `finish` sorts the
list, finds the threshold by the exact sums, and draws. A row whose list overflows or misses the
threshold, or whose top-p applies inside a large top-k, is searched by bisection there: slow,
exact and rare. Every pass splits the vocabulary over programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._backend import multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels.sampling.reference import GREEDY_TEMPERATURE, MASS_SCALE

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_SCALE = tl.constexpr(MASS_SCALE)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_TINY = tl.constexpr(1e-30)
"""Stands for zero where it divides or has a logarithm."""

_COUNT_SHIFT = tl.constexpr(45)
"""Count and mass share 64 bits: fewer than 2^18 logits of mass up to 2^27 sum below 2^45."""

_MASS_MASK = tl.constexpr((1 << 45) - 1)

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)

MAX_SPLITS = 128
CAPACITY = 1024
COLLECTED_K = 512
"""Up to this k the list holds all of the top k, so that top-p can be decided in it."""

SHORT_ENOUGH = 192
"""A list of all of the top k that is no longer needs no further narrowing."""

SHORT_LIST = tl.constexpr(448)
"""So many logits at most inside an interval are listed without narrowing it further."""

_STEEP = tl.constexpr(2.0**30)
"""Slope of the ramp that stands for a step at a pivot."""

_MARGIN = tl.constexpr(1e-4)
"""How far fp32 sums of probability are trusted."""

_REACH = tl.constexpr(4294967296.0 * 1.0001)
"""2^32, which random bits are fractions of, and what rounding may add to a score."""

_FIRST_REACH = tl.constexpr(4294967296.0 * 1.0001 * 16.78)
"""The reach of the least score that is ever drawn: the largest logit with the noise of the largest
uniform variate, -2.82."""


@triton.jit
def _wait(PDL: tl.constexpr):
    """Wait for the kernel before, then let the next one start.

    What a kernel reads before it waits must be older than the kernel before it: `bounds` waits
    first of all, so the arguments of `sample` are that old for the kernels after it. What it
    reads after must not come from the first-level cache (`.cg`): the kernel before, on the same
    multiprocessor, may have left an older copy of the line there.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _inverse(temperature_ptr, i_row):
    """Return what to multiply logits by, and whether the row is greedy."""
    b_temperature = tl.load(temperature_ptr + i_row)
    is_greedy = b_temperature < _GREEDY
    b_safe = tl.where(is_greedy, 1.0, b_temperature)
    return tl.div_rn(1.0, b_safe), is_greedy


@triton.jit
def _scaled(b_logits, b_inverse):
    # The larger of NaN and a number is the number.
    b_logits = tl.minimum(tl.maximum(b_logits, float("-inf")), _LARGEST)
    return tl.minimum(b_logits * b_inverse, _LARGEST)


@triton.jit
def _load_scaled(p_row, o_tokens, m_tokens, b_inverse):
    b_logits = tl.load(p_row + o_tokens, mask=m_tokens, other=float("-inf")).to(tl.float32)
    return _scaled(b_logits, b_inverse)


@triton.jit
def _mass(b_share):
    """Return the mass of a share, a probability as a fraction of the largest."""
    return (b_share * _SCALE + 0.5).to(tl.int32)


@triton.jit
def _counted_mass(b_scaled, b_share):
    """Return mass and count in one integer: a sum of these holds both sums."""
    b_one = (b_scaled > float("-inf")).to(tl.int64) << _COUNT_SHIFT
    return _mass(b_share).to(tl.int64) + b_one


@triton.jit
def _sum_neighbours(b_values):
    """Add up neighbours, 8 at a time, which one thread has: eight masses fit 32 bits."""
    return tl.sum(tl.reshape(b_values, [b_values.shape[0] // 8, 8]), 1).to(tl.int64)


@triton.jit
def _least(min_p_ptr, i_row, is_greedy):
    """Return the least difference to the largest logit that min-p keeps."""
    return tl.where(is_greedy, float("-inf"), tl.log(tl.load(min_p_ptr + i_row)))


@triton.jit
def _row_keys(i_seed, i_position):
    """Return two 32-bit keys of a row from Philox4x32."""
    b_zero = (i_position * 0).to(tl.uint32)
    b_low = (i_position & 0xFFFFFFFF).to(tl.uint32)
    b_high = ((i_position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    b_first, b_second, _, _ = tl.philox(i_seed, b_low, b_high, b_zero, b_zero)
    return b_first, b_second


@triton.jit
def _mixed(b_bits):
    """Mix 32 bits: the finaliser of MurmurHash3, a bijection."""
    b_bits ^= b_bits >> 16
    b_bits = tl.mul(b_bits, 0x85EBCA6B, sanitize_overflow=False)
    b_bits ^= b_bits >> 13
    b_bits = tl.mul(b_bits, 0xC2B2AE35, sanitize_overflow=False)
    return b_bits ^ (b_bits >> 16)


@triton.jit
def _random_bits(o_tokens, b_first, b_second):
    """Return 32 bits for each token from the two keys of its row."""
    return _mixed(_mixed(o_tokens.to(tl.uint32, bitcast=True) ^ b_first) ^ b_second)


@triton.jit
def _noisy(b_scaled, b_bits):
    """Return scaled logits with Gumbel noise: minus the log of an exponential variate."""
    b_uniform = (b_bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_uniform = tl.minimum(b_uniform, 1.0 - 5.9604644775390625e-08)
    b_small = b_uniform + b_uniform * b_uniform * 0.5
    b_exponential = tl.where(b_uniform < 0.0009765625, b_small, -tl.log(1.0 - b_uniform))
    return b_scaled - tl.log(b_exponential)


@triton.jit
def _scores(b_scaled, o_tokens, i_seed, i_position, is_greedy):
    """Return scaled logits, with Gumbel noise unless the row is greedy."""
    if is_greedy:
        b_scores = b_scaled
    else:
        b_first, b_second = _row_keys(i_seed, i_position)
        b_scores = _noisy(b_scaled, _random_bits(o_tokens, b_first, b_second))
    return b_scores


@triton.jit
def _best(b_scores, o_tokens):
    """Return the largest score and the lowest token that has it."""
    b_score = tl.max(b_scores, 0)
    return b_score, tl.min(tl.where(b_scores == b_score, o_tokens, _NO_TOKEN), 0)


@triton.jit
def _better(b_score, b_token, b_other_score, b_other_token):
    """Return the better of two scored tokens."""
    is_other = (b_other_score > b_score) | ((b_other_score == b_score) & (b_other_token < b_token))
    return tl.where(is_other, b_other_score, b_score), tl.where(is_other, b_other_token, b_token)


@triton.jit
def _row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS: tl.constexpr):
    """Return the largest and the smallest finite logit of a row from its splits'."""
    o_splits = tl.arange(0, MAX_SPLITS)
    p_bounds = bounds_ptr + i_row * (2 * MAX_SPLITS) + o_splits
    m_splits = o_splits < num_splits
    b_largest = tl.load(p_bounds, mask=m_splits, other=float("-inf"), cache_modifier=".cg")
    p_smallest = p_bounds + MAX_SPLITS
    b_smallest = tl.load(p_smallest, mask=m_splits, other=float("inf"), cache_modifier=".cg")
    return tl.max(b_largest, 0), tl.min(b_smallest, 0)


@triton.jit
def _filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy):
    """Return k, p, and whether each filters."""
    b_k = tl.load(top_k_ptr + i_row).to(tl.int64)
    b_p = tl.load(top_p_ptr + i_row)
    return b_k, b_p, (b_k > 0) & (b_k < vocabulary) & (~is_greedy), (b_p < 1.0) & (~is_greedy)


@triton.jit
def _mass_target(b_p, b_total):
    return tl.maximum(tl.ceil(b_total.to(tl.float64) * b_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _pivot(b_pivots, b_sums, m_one):
    """Return one pivot and its sum."""
    return (
        tl.max(tl.where(m_one, b_pivots, float("-inf")), 0),
        tl.max(tl.where(m_one, b_sums, 0.0), 0),
    )


@triton.jit
def _interval(
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
def _closer_pivots(
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
def _is_long(
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
def bounds_kernel(
    logits_ptr,
    temperature_ptr,
    bounds_ptr,
    sums_ptr,
    lengths_ptr,
    vocabulary,
    stride_logits,
    split_tokens,
    MAX_SPLITS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    _wait(PDL)
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if i_split == 0:
        o_sums = tl.arange(0, BLOCK_SUMS)
        p_sums = sums_ptr + i_row * SUMS + o_sums
        tl.store(p_sums, tl.zeros([BLOCK_SUMS], tl.float32), mask=o_sums < SUMS)
        tl.store(lengths_ptr + i_row, 0)
    b_inverse, _ = _inverse(temperature_ptr, i_row)
    p_row = logits_ptr + i_row * stride_logits
    i_first = i_split * split_tokens
    i_end = tl.minimum(i_first + split_tokens, vocabulary)
    b_largest = tl.full([BLOCK], float("-inf"), tl.float32)
    b_smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for i_token in tl.range(i_first, i_end, BLOCK, num_stages=3):
        o_tokens = i_token + tl.arange(0, BLOCK)
        b_logits = tl.load(p_row + o_tokens, mask=o_tokens < i_end, other=float("-inf"))
        b_logits = b_logits.to(tl.float32)
        b_largest = tl.maximum(b_largest, b_logits)
        b_smallest = tl.minimum(
            b_smallest, tl.where(b_logits > float("-inf"), b_logits, float("inf"))
        )
    # Scaling keeps the order, so it can wait. No finite logit leaves the smallest infinite.
    b_lowest = tl.min(b_smallest, 0)
    b_lowest = tl.where(b_lowest == float("inf"), b_lowest, _scaled(b_lowest, b_inverse))
    p_bounds = bounds_ptr + i_row * (2 * MAX_SPLITS) + i_split
    tl.store(p_bounds, _scaled(tl.max(b_largest, 0), b_inverse))
    tl.store(p_bounds + MAX_SPLITS, b_lowest)


@triton.jit(do_not_specialize=["num_splits"])
def count_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    bounds_ptr,
    sums_ptr,
    pivots_ptr,
    vocabulary,
    stride_logits,
    split_tokens,
    num_splits,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    PIVOTS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COLLECTED_K: tl.constexpr,
    SHORT_ENOUGH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_inverse, is_greedy = _inverse(temperature_ptr, i_row)
    b_k, b_p, is_k, is_p = _filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy)
    _wait(PDL)
    b_largest, b_smallest = _row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS)
    o_pivots = tl.arange(0, PIVOTS)
    if (is_k | is_p) & (b_largest > float("-inf")):
        is_needed = True
        if LEVEL == 0:
            b_part = (o_pivots + 1).to(tl.float32) * (1.0 / PIVOTS)
            # Closer together near the largest, where thresholds usually are.
            b_lowest = b_smallest - (tl.abs(b_smallest) * 2.0**-22 + 2.0**-28)
            b_pivots = b_largest - (b_largest - b_smallest) * (b_part * b_part)
        else:
            b_low, b_high, b_next, b_reached, b_beyond, b_farther, b_target = _interval(
                sums_ptr, pivots_ptr, i_row, b_k, b_p, is_k, LEVEL, LEVELS, PIVOTS
            )
            b_lowest = b_low
            b_pivots = _closer_pivots(
                o_pivots,
                b_low,
                b_high,
                b_next,
                b_reached,
                b_beyond,
                b_farther,
                b_target,
                b_largest,
                PIVOTS,
            )
            is_needed = _is_long(
                b_low, b_reached, b_beyond, b_largest, b_k, is_k, COLLECTED_K, SHORT_ENOUGH
            )
        b_pivots = tl.maximum(tl.where(o_pivots == PIVOTS - 1, b_lowest, b_pivots), b_lowest)
        o_level = (i_row * LEVELS + LEVEL) * PIVOTS + o_pivots
        if i_split == 0:
            tl.store(pivots_ptr + o_level, b_pivots)

        if is_needed:
            p_row = logits_ptr + i_row * stride_logits
            i_first = i_split * split_tokens
            i_end = tl.minimum(i_first + split_tokens, vocabulary)
            b_sums = tl.zeros([PIVOTS, BLOCK], tl.float32)
            b_steep = -b_pivots[:, None] * _STEEP
            for i_token in tl.range(i_first, i_end, BLOCK, num_stages=4):
                o_tokens = i_token + tl.arange(0, BLOCK)
                b_scaled = _load_scaled(p_row, o_tokens, o_tokens < i_end, b_inverse)
                b_unit = tl.where(is_k, 1.0, tl.exp(b_scaled - b_largest))
                # 1 above the pivot, 0 below: a saturating multiply-add is twice as fast as a
                # comparison and a selection.
                b_above = tl.clamp(tl.fma(b_scaled[None, :], _STEEP, b_steep), 0.0, 1.0)
                b_sums = tl.fma(b_above, b_unit[None, :], b_sums)
            tl.atomic_add(sums_ptr + o_level, tl.sum(b_sums, 1), sem="relaxed")


@triton.jit
def _final_interval(
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
    b_low, b_high, _, _, _, _, _ = _interval(
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
def _drawn_from_all(
    p_row,
    i_first,
    i_end,
    b_inverse,
    b_largest,
    b_least,
    b_first,
    b_second,
    BLOCK: tl.constexpr,
):
    """Draw among the tokens of a part of a row that neither top-k nor top-p filters."""
    b_score = tl.full([], float("-inf"), tl.float32)
    b_token = tl.full([], _NO_TOKEN, tl.int32)
    # Shares are rough here, too large by more than the rounding of large logits makes too small.
    b_slack = tl.exp(1e-4 + tl.abs(b_largest) * 2.0**-21)
    b_reach = _FIRST_REACH * 2.3283064365386963e-10 * b_slack
    b_slope = b_inverse * 1.4426950408889634
    b_offset = -b_largest * 1.4426950408889634
    for i_token in tl.range(i_first, i_end, BLOCK, num_stages=3):
        o_tokens = i_token + tl.arange(0, BLOCK)
        b_logits = tl.load(p_row + o_tokens, mask=o_tokens < i_end, other=float("-inf"))
        b_logits = b_logits.to(tl.float32)
        b_share = tl.exp2(tl.fma(b_logits, b_slope, b_offset))
        b_bits = _random_bits(o_tokens, b_first, b_second)
        # The leading bits as a number from 1 to 2, which takes no conversion: rounding lets too
        # many pass and none too few.
        b_uniform = ((b_bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
        # What is not a number passes, and is looked at below.
        m_drawn = ~(b_uniform > tl.fma(b_share, b_reach, 1.0))
        # Most tiles have nothing more to do.
        if tl.max(m_drawn.to(tl.int32), 0) > 0:
            b_scaled = _scaled(b_logits, b_inverse)
            m_drawn &= (b_scaled > float("-inf")) & (b_scaled - b_largest >= b_least)
            b_tile = tl.where(m_drawn, _noisy(b_scaled, b_bits), float("-inf"))
            b_tile_score, b_tile_token = _best(b_tile, o_tokens)
            b_score, b_token = _better(b_score, b_token, b_tile_score, b_tile_token)
            b_reach = tl.minimum(b_reach, 1.0001 * b_slack * tl.exp(b_largest - b_score))
    return b_score, b_token


@triton.jit(do_not_specialize=["num_splits"])
def collect_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    bounds_ptr,
    sums_ptr,
    pivots_ptr,
    lengths_ptr,
    values_ptr,
    tokens_ptr,
    exact_ptr,
    best_scores_ptr,
    best_tokens_ptr,
    vocabulary,
    stride_logits,
    split_tokens,
    num_splits,
    LEVELS: tl.constexpr,
    PIVOTS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    COLLECTED_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_inverse, is_greedy = _inverse(temperature_ptr, i_row)
    b_k, b_p, is_k, is_p = _filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy)
    _wait(PDL)
    b_largest, _ = _row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS)
    b_score = tl.full([], float("-inf"), tl.float32)
    b_token = tl.full([], _NO_TOKEN, tl.int32)
    b_total = tl.zeros([BLOCK // 8], tl.int64)
    b_certain = tl.zeros([BLOCK // 8], tl.int64)
    if b_largest > float("-inf"):
        b_low, b_high = _final_interval(
            sums_ptr,
            pivots_ptr,
            i_row,
            b_k,
            b_p,
            is_k,
            is_p,
            b_largest,
            is_greedy,
            COLLECTED_K,
            LEVELS,
            PIVOTS,
        )
        b_least = _least(min_p_ptr, i_row, is_greedy)
        i_seed = tl.load(seeds_ptr + i_row)
        i_position = tl.load(positions_ptr + i_row)
        b_first, b_second = _row_keys(i_seed, i_position)
        # A token's score passes the best so far only if its uniform variate, which is never
        # larger than its exponential one, is below its share times this.
        b_reach = tl.where(is_greedy, float("inf"), _FIRST_REACH)
        # A list of all of the top k needs no sums of what is not in it.
        is_counted = is_k & (b_k > COLLECTED_K)
        is_summed = is_counted | (is_p & (~is_k))
        p_row = logits_ptr + i_row * stride_logits
        i_first = i_split * split_tokens
        i_end = tl.minimum(i_first + split_tokens, vocabulary)
        is_whole = (~is_k) & (~is_p) & (~is_greedy)
        if is_whole:
            b_score, b_token = _drawn_from_all(
                p_row,
                i_first,
                i_end,
                b_inverse,
                b_largest,
                b_least,
                b_first,
                b_second,
                BLOCK,
            )
        # Nothing is left of a row that is drawn from as a whole.
        i_first = tl.where(is_whole, i_end, i_first)
        for i_token in tl.range(i_first, i_end, BLOCK, num_stages=3):
            o_tokens = i_token + tl.arange(0, BLOCK)
            b_scaled = _load_scaled(p_row, o_tokens, o_tokens < i_end, b_inverse)
            m_finite = b_scaled > float("-inf")
            m_certain = m_finite & (b_scaled >= b_high)
            m_listed = m_finite & (b_scaled >= b_low) & (b_scaled < b_high)
            b_share = tl.exp(b_scaled - b_largest)
            if is_summed:
                b_mass = _mass(b_share)
                b_total += _sum_neighbours(b_mass)
                b_certain += _sum_neighbours(tl.where(m_certain, b_mass, 0))
            if is_counted:
                b_total += _sum_neighbours(m_finite.to(tl.int32)) << _COUNT_SHIFT
                b_certain += _sum_neighbours(m_certain.to(tl.int32)) << _COUNT_SHIFT
            b_flags = m_listed.to(tl.int32) << 16
            if b_high <= b_largest:
                b_bits = _random_bits(o_tokens, b_first, b_second)
                m_drawn = m_certain & (b_scaled - b_largest >= b_least)
                m_drawn &= b_bits.to(tl.float32) <= b_share * b_reach
                b_flags += m_drawn.to(tl.int32)
            # Most tiles have nothing more to do.
            b_found = tl.sum(b_flags, 0)
            if (b_found & 0xFFFF) != 0:
                b_bits = _random_bits(o_tokens, b_first, b_second)
                b_tile = tl.where(is_greedy, b_scaled, _noisy(b_scaled, b_bits))
                b_tile = tl.where((b_flags & 1) != 0, b_tile, float("-inf"))
                b_tile_score, b_tile_token = _best(b_tile, o_tokens)
                b_score, b_token = _better(b_score, b_token, b_tile_score, b_tile_token)
                b_reach = tl.minimum(b_reach, _REACH * tl.exp(b_largest - b_score))
            if (b_found >> 16) != 0:
                p_length = lengths_ptr + i_row + o_tokens * 0
                o_list = tl.atomic_add(p_length, 1, mask=m_listed, sem="relaxed")
                m_list = m_listed & (o_list < CAPACITY)
                tl.store(values_ptr + i_row * CAPACITY + o_list, b_scaled, mask=m_list)
                tl.store(tokens_ptr + i_row * CAPACITY + o_list, o_tokens, mask=m_list)
    tl.store(best_scores_ptr + i_row * MAX_SPLITS + i_split, b_score)
    tl.store(best_tokens_ptr + i_row * MAX_SPLITS + i_split, b_token)
    p_exact = exact_ptr + i_row * (2 * MAX_SPLITS) + i_split
    tl.store(p_exact, tl.sum(b_total, 0))
    tl.store(p_exact + MAX_SPLITS, tl.sum(b_certain, 0))


@triton.jit
def _drawn_from_list(
    p_values,
    p_tokens,
    num_listed,
    b_k,
    b_p,
    is_k,
    is_p,
    b_total,
    b_certain,
    b_largest,
    b_least,
    i_seed,
    i_position,
    is_greedy,
    CAPACITY: tl.constexpr,
):
    """Find the threshold in the sorted list and draw among what the list keeps.

    Also returned is whether the threshold is in the list at all.
    """
    o_list = tl.arange(0, CAPACITY)
    m_list = o_list < num_listed
    b_values = tl.load(p_values + o_list, mask=m_list, other=float("-inf"), cache_modifier=".cg")
    o_tokens = tl.load(p_tokens + o_list, mask=m_list, other=_NO_TOKEN, cache_modifier=".cg")
    b_sorted = tl.sort(b_values, descending=True)
    b_masses = _mass(tl.exp(b_sorted - b_largest)).to(tl.int64)
    b_mass = b_certain & _MASS_MASK
    b_threshold = float("-inf")
    is_found = True
    if is_k:
        # A row of fewer than k finite logits keeps them all, and then lists them all.
        b_above = b_certain >> _COUNT_SHIFT
        i_last = tl.minimum(b_k, tl.maximum(b_total >> _COUNT_SHIFT, num_listed)) - 1 - b_above
        is_found = (i_last >= 0) & (i_last < num_listed)
        b_threshold = tl.max(tl.where(o_list == i_last, b_sorted, float("-inf")), 0)
        b_total = b_mass + tl.sum(tl.where(b_sorted >= b_threshold, b_masses, 0), 0)
    if is_p:
        b_target = _mass_target(b_p, b_total & _MASS_MASK)
        m_short = b_mass + tl.cumsum(b_masses, 0) < b_target
        i_last = tl.sum(m_short.to(tl.int32), 0)
        is_found = is_found & (b_mass < b_target) & (i_last < num_listed)
        b_last = tl.max(tl.where(o_list == i_last, b_sorted, float("-inf")), 0)
        b_threshold = tl.maximum(b_threshold, b_last)
    m_kept = m_list & (b_values >= b_threshold) & (b_values - b_largest >= b_least)
    b_scores = _scores(b_values, o_tokens, i_seed, i_position, is_greedy)
    b_score, b_token = _best(tl.where(m_kept, b_scores, float("-inf")), o_tokens)
    return b_score, b_token, is_found


@triton.jit
def _sum_from(p_row, vocabulary, b_inverse, b_largest, b_threshold, BLOCK: tl.constexpr):
    """Return count and mass of a row's logits from a threshold on, in one integer."""
    b_sums = tl.zeros([BLOCK], tl.int64)
    for i_token in tl.range(0, vocabulary, BLOCK, num_stages=3):
        o_tokens = i_token + tl.arange(0, BLOCK)
        b_scaled = _load_scaled(p_row, o_tokens, o_tokens < vocabulary, b_inverse)
        b_share = tl.exp(b_scaled - b_largest)
        b_sums += tl.where(b_scaled >= b_threshold, _counted_mass(b_scaled, b_share), 0)
    return tl.sum(b_sums, 0)


@triton.jit
def _flip(b_bits):
    """Map the bits of floats to integers in the same order, and back."""
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def _bisected(
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
        b_sum = _sum_from(p_row, vocabulary, b_inverse, b_largest, b_threshold, BLOCK)
        if BY_COUNT:
            is_reached = (b_sum >> _COUNT_SHIFT) >= b_target
        else:
            is_reached = (b_sum & _MASS_MASK) >= b_target
        i_low = tl.where(is_reached, i_middle, i_low)
        i_high = tl.where(is_reached, i_high, i_middle)
    return _flip(i_low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _drawn_by_bisection(
    p_row,
    vocabulary,
    b_inverse,
    b_k,
    b_p,
    is_k,
    is_p,
    b_largest,
    b_smallest,
    b_least,
    i_seed,
    i_position,
    is_greedy,
    BLOCK: tl.constexpr,
):
    """Find a row's threshold by passes over all of it, and draw."""
    b_threshold = b_smallest
    if is_k:
        b_threshold = _bisected(
            p_row, vocabulary, b_inverse, b_largest, b_smallest, b_k, True, BLOCK
        )
    if is_p:
        b_sum = _sum_from(p_row, vocabulary, b_inverse, b_largest, b_threshold, BLOCK)
        b_target = _mass_target(b_p, b_sum & _MASS_MASK)
        b_last = _bisected(
            p_row, vocabulary, b_inverse, b_largest, b_smallest, b_target, False, BLOCK
        )
        b_threshold = tl.maximum(b_threshold, b_last)
    b_scores = tl.full([BLOCK], float("-inf"), tl.float32)
    b_tokens = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    for i_token in tl.range(0, vocabulary, BLOCK, num_stages=3):
        o_tokens = i_token + tl.arange(0, BLOCK)
        b_scaled = _load_scaled(p_row, o_tokens, o_tokens < vocabulary, b_inverse)
        b_tile = _scores(b_scaled, o_tokens, i_seed, i_position, is_greedy)
        m_better = (b_scaled > float("-inf")) & (b_scaled >= b_threshold) & (b_tile > b_scores)
        m_better &= b_scaled - b_largest >= b_least
        b_scores = tl.where(m_better, b_tile, b_scores)
        b_tokens = tl.where(m_better, o_tokens, b_tokens)
    _, b_token = _best(b_scores, b_tokens)
    return b_token


@triton.jit(do_not_specialize=["vocabulary", "stride_logits", "num_splits"])
def finish_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    bounds_ptr,
    lengths_ptr,
    values_ptr,
    tokens_ptr,
    exact_ptr,
    best_scores_ptr,
    best_tokens_ptr,
    out_ptr,
    vocabulary,
    stride_logits,
    num_splits,
    MAX_SPLITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    COLLECTED_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    b_inverse, is_greedy = _inverse(temperature_ptr, i_row)
    b_k, b_p, is_k, is_p = _filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy)
    _wait(PDL)
    b_largest, b_smallest = _row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS)
    b_token = tl.full([], 0, tl.int32)
    if b_largest > float("-inf"):
        b_least = _least(min_p_ptr, i_row, is_greedy)
        i_seed = tl.load(seeds_ptr + i_row)
        i_position = tl.load(positions_ptr + i_row)
        o_splits = tl.arange(0, MAX_SPLITS)
        m_splits = o_splits < num_splits
        o_best = i_row * MAX_SPLITS + o_splits
        p_scores = best_scores_ptr + o_best
        p_best = best_tokens_ptr + o_best
        b_scores = tl.load(p_scores, mask=m_splits, other=float("-inf"), cache_modifier=".cg")
        b_tokens = tl.load(p_best, mask=m_splits, other=_NO_TOKEN, cache_modifier=".cg")
        b_score, b_token = _best(b_scores, b_tokens)
        is_found = True
        if is_k | is_p:
            num_listed = tl.load(lengths_ptr + i_row, cache_modifier=".cg")
            p_total = exact_ptr + i_row * (2 * MAX_SPLITS) + o_splits
            p_certain = p_total + MAX_SPLITS
            b_total = tl.load(p_total, mask=m_splits, other=0, cache_modifier=".cg")
            b_certain = tl.load(p_certain, mask=m_splits, other=0, cache_modifier=".cg")
            b_total = tl.sum(b_total, 0)
            b_certain = tl.sum(b_certain, 0)
            p_values = values_ptr + i_row * CAPACITY
            p_tokens = tokens_ptr + i_row * CAPACITY
            is_nested = is_k & is_p & (b_k > COLLECTED_K)
            if is_nested | (num_listed > CAPACITY):
                is_found = False
            elif num_listed > CAPACITY // 2:
                b_list_score, b_list_token, is_found = _drawn_from_list(
                    p_values,
                    p_tokens,
                    num_listed,
                    b_k,
                    b_p,
                    is_k,
                    is_p,
                    b_total,
                    b_certain,
                    b_largest,
                    b_least,
                    i_seed,
                    i_position,
                    is_greedy,
                    CAPACITY,
                )
                b_score, b_token = _better(b_score, b_token, b_list_score, b_list_token)
            elif num_listed > CAPACITY // 4:
                b_list_score, b_list_token, is_found = _drawn_from_list(
                    p_values,
                    p_tokens,
                    num_listed,
                    b_k,
                    b_p,
                    is_k,
                    is_p,
                    b_total,
                    b_certain,
                    b_largest,
                    b_least,
                    i_seed,
                    i_position,
                    is_greedy,
                    CAPACITY // 2,
                )
                b_score, b_token = _better(b_score, b_token, b_list_score, b_list_token)
            else:
                b_list_score, b_list_token, is_found = _drawn_from_list(
                    p_values,
                    p_tokens,
                    num_listed,
                    b_k,
                    b_p,
                    is_k,
                    is_p,
                    b_total,
                    b_certain,
                    b_largest,
                    b_least,
                    i_seed,
                    i_position,
                    is_greedy,
                    CAPACITY // 4,
                )
                b_score, b_token = _better(b_score, b_token, b_list_score, b_list_token)
        if not is_found:
            b_token = _drawn_by_bisection(
                logits_ptr + i_row * stride_logits,
                vocabulary,
                b_inverse,
                b_k,
                b_p,
                is_k,
                is_p,
                b_largest,
                b_smallest,
                b_least,
                i_seed,
                i_position,
                is_greedy,
                BLOCK,
            )
    tl.store(out_ptr + i_row, tl.where(b_token == _NO_TOKEN, 0, b_token))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Launch the kernels for `reference.sample`."""
    rows, vocabulary = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    config = pick("sampling", rows=rows)
    levels, pivots, block = config["levels"], config["pivots"], config["block"]
    splits = min(MAX_SPLITS, max(1, config["programs"] * multiprocessors(device) // rows))
    wide = 4 * block
    split_tokens = triton.cdiv(triton.cdiv(vocabulary, splits), wide) * wide
    splits = triton.cdiv(vocabulary, split_tokens)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=device)

    bounds = scratch(2, MAX_SPLITS)
    sums, pivot_values = scratch(levels, pivots), scratch(levels, pivots)
    lengths = scratch(dtype=torch.int32)
    values, tokens = scratch(CAPACITY), scratch(CAPACITY, dtype=torch.int32)
    exact = scratch(2, MAX_SPLITS, dtype=torch.int64)
    best_scores, best_tokens = scratch(MAX_SPLITS), scratch(MAX_SPLITS, dtype=torch.int32)

    pdl = not triton.knobs.runtime.interpret
    # No fused multiply-add: every kernel must round a scaled logit alike.
    options = {"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": pdl, "PDL": pdl}
    options["MAX_SPLITS"] = MAX_SPLITS
    grid = (rows, splits)
    stride = logits.stride(0)
    bounds_kernel[grid](
        logits,
        temperature,
        bounds,
        sums,
        lengths,
        vocabulary,
        stride,
        split_tokens,
        SUMS=levels * pivots,
        BLOCK_SUMS=triton.next_power_of_2(levels * pivots),
        BLOCK=wide,
        **options,
    )
    for level in range(levels):
        count_kernel[grid](
            logits,
            temperature,
            top_k,
            top_p,
            bounds,
            sums,
            pivot_values,
            vocabulary,
            stride,
            split_tokens,
            splits,
            LEVEL=level,
            LEVELS=levels,
            PIVOTS=pivots,
            COLLECTED_K=COLLECTED_K,
            SHORT_ENOUGH=SHORT_ENOUGH,
            BLOCK=block,
            **options,
        )
    row_arguments = (temperature, top_k, top_p, min_p, seeds, positions, bounds)
    found = (lengths, values, tokens, exact, best_scores, best_tokens)
    collect_kernel[grid](
        logits,
        *row_arguments,
        sums,
        pivot_values,
        *found,
        vocabulary,
        stride,
        split_tokens,
        splits,
        LEVELS=levels,
        PIVOTS=pivots,
        CAPACITY=CAPACITY,
        COLLECTED_K=COLLECTED_K,
        BLOCK=min(wide, 1024),
        **options,
    )
    finish_kernel[(rows,)](
        logits,
        *row_arguments,
        *found,
        out,
        vocabulary,
        stride,
        splits,
        CAPACITY=CAPACITY,
        COLLECTED_K=COLLECTED_K,
        BLOCK=2048,
        **options,
    )
    return out
