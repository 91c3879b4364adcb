"""Sampling without a sort: a few passes narrow each row's threshold down to a short list.

`bounds` finds each row's largest and smallest logit. Each `count` pass adds up how many logits,
or how much probability, lie above some pivots; that leaves an interval between two pivots for
the threshold, where the next pass takes closer ones, unless it holds few logits already. These
sums are fp32 and only bracket it. `collect` draws among what is certainly kept, the logits above
the interval, lists those inside it, and sums exactly. `finish` sorts the list, finds the threshold
by the exact sums, and draws. A row whose list overflows or misses the threshold, or whose top-p
applies inside a large top-k, is searched by bisection there: slow, exact and rare. Every pass
splits the vocabulary over programs. `_row` has what they share, `_threshold` the search.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._backend import multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels.sampling._row import (
    COUNT_SHIFT,
    MASS_MASK,
    NO_TOKEN,
    best,
    better,
    filters,
    inverse,
    least_of_min_p,
    load_scaled,
    mass_of,
    noisy,
    random_bits,
    row_bounds,
    row_keys,
    scaled,
    scores,
    sum_neighbours,
    wait_for_pass,
)
from deepseek_kernels.sampling._threshold import (
    bisected,
    closer_pivots,
    final_interval,
    interval,
    mass_target,
    needs_narrowing,
    sum_from,
)

MAX_SPLITS = 128
CAPACITY = 1024
COLLECTED_K = 512
"""Up to this k the list holds all of the top k, so that top-p can be decided in it."""

SHORT_ENOUGH = 192
"""A list of all of the top k that is no longer needs no further narrowing."""

_STEEP = tl.constexpr(2.0**30)
"""Slope of the ramp that stands for a step at a pivot."""

_REACH = tl.constexpr(4294967296.0 * 1.0001)
"""2^32, which random bits are fractions of, and what rounding may add to a score."""

_FIRST_REACH = tl.constexpr(4294967296.0 * 1.0001 * 16.78)
"""The reach of the least score that is ever drawn: the largest logit with the noise of the largest
uniform variate, -2.82."""


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
    wait_for_pass(PDL)
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if i_split == 0:
        o_sums = tl.arange(0, BLOCK_SUMS)
        p_sums = sums_ptr + i_row * SUMS + o_sums
        tl.store(p_sums, tl.zeros([BLOCK_SUMS], tl.float32), mask=o_sums < SUMS)
        tl.store(lengths_ptr + i_row, 0)
    b_inverse, _ = inverse(temperature_ptr, i_row)
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
    b_lowest = tl.where(b_lowest == float("inf"), b_lowest, scaled(b_lowest, b_inverse))
    p_bounds = bounds_ptr + i_row * (2 * MAX_SPLITS) + i_split
    tl.store(p_bounds, scaled(tl.max(b_largest, 0), b_inverse))
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
    b_inverse, is_greedy = inverse(temperature_ptr, i_row)
    b_k, b_p, is_k, is_p = filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy)
    wait_for_pass(PDL)
    b_largest, b_smallest = row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS)
    o_pivots = tl.arange(0, PIVOTS)
    if (is_k | is_p) & (b_largest > float("-inf")):
        is_needed = True
        if LEVEL == 0:
            b_part = (o_pivots + 1).to(tl.float32) * (1.0 / PIVOTS)
            # Closer together near the largest, where thresholds usually are.
            b_lowest = b_smallest - (tl.abs(b_smallest) * 2.0**-22 + 2.0**-28)
            b_pivots = b_largest - (b_largest - b_smallest) * (b_part * b_part)
        else:
            b_low, b_high, b_next, b_reached, b_beyond, b_farther, b_target = interval(
                sums_ptr, pivots_ptr, i_row, b_k, b_p, is_k, LEVEL, LEVELS, PIVOTS
            )
            b_lowest = b_low
            b_pivots = closer_pivots(
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
            is_needed = needs_narrowing(
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
                b_scaled = load_scaled(p_row, o_tokens, o_tokens < i_end, b_inverse)
                b_unit = tl.where(is_k, 1.0, tl.exp(b_scaled - b_largest))
                # 1 above the pivot, 0 below: a saturating multiply-add is twice as fast as a
                # comparison and a selection.
                b_above = tl.clamp(tl.fma(b_scaled[None, :], _STEEP, b_steep), 0.0, 1.0)
                b_sums = tl.fma(b_above, b_unit[None, :], b_sums)
            tl.atomic_add(sums_ptr + o_level, tl.sum(b_sums, 1), sem="relaxed")


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
    b_token = tl.full([], NO_TOKEN, tl.int32)
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
        b_bits = random_bits(o_tokens, b_first, b_second)
        # The leading bits as a number from 1 to 2, which takes no conversion: rounding lets too
        # many pass and none too few.
        b_uniform = ((b_bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
        # What is not a number passes, and is looked at below.
        m_drawn = ~(b_uniform > tl.fma(b_share, b_reach, 1.0))
        # Most tiles have nothing more to do.
        if tl.max(m_drawn.to(tl.int32), 0) > 0:
            b_scaled = scaled(b_logits, b_inverse)
            m_drawn &= (b_scaled > float("-inf")) & (b_scaled - b_largest >= b_least)
            b_tile = tl.where(m_drawn, noisy(b_scaled, b_bits), float("-inf"))
            b_tile_score, b_tile_token = best(b_tile, o_tokens)
            b_score, b_token = better(b_score, b_token, b_tile_score, b_tile_token)
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
    b_inverse, is_greedy = inverse(temperature_ptr, i_row)
    b_k, b_p, is_k, is_p = filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy)
    wait_for_pass(PDL)
    b_largest, _ = row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS)
    b_score = tl.full([], float("-inf"), tl.float32)
    b_token = tl.full([], NO_TOKEN, tl.int32)
    b_total = tl.zeros([BLOCK // 8], tl.int64)
    b_certain = tl.zeros([BLOCK // 8], tl.int64)
    if b_largest > float("-inf"):
        b_low, b_high = final_interval(
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
        b_least = least_of_min_p(min_p_ptr, i_row, is_greedy)
        i_seed = tl.load(seeds_ptr + i_row)
        i_position = tl.load(positions_ptr + i_row)
        b_first, b_second = row_keys(i_seed, i_position)
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
            b_scaled = load_scaled(p_row, o_tokens, o_tokens < i_end, b_inverse)
            m_finite = b_scaled > float("-inf")
            m_certain = m_finite & (b_scaled >= b_high)
            m_listed = m_finite & (b_scaled >= b_low) & (b_scaled < b_high)
            b_share = tl.exp(b_scaled - b_largest)
            if is_summed:
                b_mass = mass_of(b_share)
                b_total += sum_neighbours(b_mass)
                b_certain += sum_neighbours(tl.where(m_certain, b_mass, 0))
            if is_counted:
                b_total += sum_neighbours(m_finite.to(tl.int32)) << COUNT_SHIFT
                b_certain += sum_neighbours(m_certain.to(tl.int32)) << COUNT_SHIFT
            b_flags = m_listed.to(tl.int32) << 16
            if b_high <= b_largest:
                b_bits = random_bits(o_tokens, b_first, b_second)
                m_drawn = m_certain & (b_scaled - b_largest >= b_least)
                m_drawn &= b_bits.to(tl.float32) <= b_share * b_reach
                b_flags += m_drawn.to(tl.int32)
            # Most tiles have nothing more to do.
            b_found = tl.sum(b_flags, 0)
            if (b_found & 0xFFFF) != 0:
                b_bits = random_bits(o_tokens, b_first, b_second)
                b_tile = tl.where(is_greedy, b_scaled, noisy(b_scaled, b_bits))
                b_tile = tl.where((b_flags & 1) != 0, b_tile, float("-inf"))
                b_tile_score, b_tile_token = best(b_tile, o_tokens)
                b_score, b_token = better(b_score, b_token, b_tile_score, b_tile_token)
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
    o_tokens = tl.load(p_tokens + o_list, mask=m_list, other=NO_TOKEN, cache_modifier=".cg")
    b_sorted = tl.sort(b_values, descending=True)
    b_masses = mass_of(tl.exp(b_sorted - b_largest)).to(tl.int64)
    b_mass = b_certain & MASS_MASK
    b_threshold = float("-inf")
    is_found = True
    if is_k:
        # A row of fewer than k finite logits keeps them all, and then lists them all.
        b_above = b_certain >> COUNT_SHIFT
        i_last = tl.minimum(b_k, tl.maximum(b_total >> COUNT_SHIFT, num_listed)) - 1 - b_above
        is_found = (i_last >= 0) & (i_last < num_listed)
        b_threshold = tl.max(tl.where(o_list == i_last, b_sorted, float("-inf")), 0)
        b_total = b_mass + tl.sum(tl.where(b_sorted >= b_threshold, b_masses, 0), 0)
    if is_p:
        b_target = mass_target(b_p, b_total & MASS_MASK)
        m_short = b_mass + tl.cumsum(b_masses, 0) < b_target
        i_last = tl.sum(m_short.to(tl.int32), 0)
        is_found = is_found & (b_mass < b_target) & (i_last < num_listed)
        b_last = tl.max(tl.where(o_list == i_last, b_sorted, float("-inf")), 0)
        b_threshold = tl.maximum(b_threshold, b_last)
    m_kept = m_list & (b_values >= b_threshold) & (b_values - b_largest >= b_least)
    b_scores = scores(b_values, o_tokens, i_seed, i_position, is_greedy)
    b_score, b_token = best(tl.where(m_kept, b_scores, float("-inf")), o_tokens)
    return b_score, b_token, is_found


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
        b_threshold = bisected(
            p_row, vocabulary, b_inverse, b_largest, b_smallest, b_k, True, BLOCK
        )
    if is_p:
        b_sum = sum_from(p_row, vocabulary, b_inverse, b_largest, b_threshold, BLOCK)
        b_target = mass_target(b_p, b_sum & MASS_MASK)
        b_last = bisected(
            p_row, vocabulary, b_inverse, b_largest, b_smallest, b_target, False, BLOCK
        )
        b_threshold = tl.maximum(b_threshold, b_last)
    b_scores = tl.full([BLOCK], float("-inf"), tl.float32)
    b_tokens = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for i_token in tl.range(0, vocabulary, BLOCK, num_stages=3):
        o_tokens = i_token + tl.arange(0, BLOCK)
        b_scaled = load_scaled(p_row, o_tokens, o_tokens < vocabulary, b_inverse)
        b_tile = scores(b_scaled, o_tokens, i_seed, i_position, is_greedy)
        m_better = (b_scaled > float("-inf")) & (b_scaled >= b_threshold) & (b_tile > b_scores)
        m_better &= b_scaled - b_largest >= b_least
        b_scores = tl.where(m_better, b_tile, b_scores)
        b_tokens = tl.where(m_better, o_tokens, b_tokens)
    _, b_token = best(b_scores, b_tokens)
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
    b_inverse, is_greedy = inverse(temperature_ptr, i_row)
    b_k, b_p, is_k, is_p = filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy)
    wait_for_pass(PDL)
    b_largest, b_smallest = row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS)
    b_token = tl.full([], 0, tl.int32)
    if b_largest > float("-inf"):
        b_least = least_of_min_p(min_p_ptr, i_row, is_greedy)
        i_seed = tl.load(seeds_ptr + i_row)
        i_position = tl.load(positions_ptr + i_row)
        o_splits = tl.arange(0, MAX_SPLITS)
        m_splits = o_splits < num_splits
        o_best = i_row * MAX_SPLITS + o_splits
        p_scores = best_scores_ptr + o_best
        p_best = best_tokens_ptr + o_best
        b_scores = tl.load(p_scores, mask=m_splits, other=float("-inf"), cache_modifier=".cg")
        b_tokens = tl.load(p_best, mask=m_splits, other=NO_TOKEN, cache_modifier=".cg")
        b_score, b_token = best(b_scores, b_tokens)
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
                b_score, b_token = better(b_score, b_token, b_list_score, b_list_token)
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
                b_score, b_token = better(b_score, b_token, b_list_score, b_list_token)
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
                b_score, b_token = better(b_score, b_token, b_list_score, b_list_token)
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
    tl.store(out_ptr + i_row, tl.where(b_token == NO_TOKEN, 0, b_token))


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
