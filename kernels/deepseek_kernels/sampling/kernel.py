"""Sampling without a sort: a few passes narrow each row's threshold down to a short list.

`bounds` finds each row's largest and smallest logit. Each `count` pass adds up how many logits,
and how much probability, lie above some pivots, which leaves one interval between two pivots
for the threshold. `collect` draws among what is certainly kept, the logits above the interval,
and lists those inside it. `finish` sorts the list, finds the threshold, and draws. A row whose
list overflows, or whose top-p applies inside a large top-k, is searched by bisection there:
slow, exact and rare. Every pass splits the vocabulary over programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_kernels._backend import multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels.sampling.reference import GREEDY_TEMPERATURE, MASS_SCALE, ROUNDS

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_SCALE = tl.constexpr(MASS_SCALE)
_ROUNDS = tl.constexpr(ROUNDS)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_COUNT_SHIFT = tl.constexpr(45)
"""Count and mass share 64 bits: fewer than 2^18 logits of mass up to 2^27 sum below 2^45."""

_MASS_MASK = tl.constexpr((1 << 45) - 1)

MAX_SPLITS = 128
CAPACITY = 1024
SHORT_CAPACITY = 128
COLLECTED_K = 512
"""Up to this k the list holds all of the top k, so that top-p can be decided in it."""


@triton.jit
def _inverse(temperature_ptr, i_row):
    """Return what to multiply logits by, and whether the row is greedy."""
    b_temperature = tl.load(temperature_ptr + i_row)
    is_greedy = b_temperature < _GREEDY
    b_safe = tl.where(is_greedy, 1.0, b_temperature)
    return tl.div_rn(1.0, b_safe), is_greedy


@triton.jit
def _load_scaled(p_row, o_tokens, m_tokens, b_inverse):
    b_logits = tl.load(p_row + o_tokens, mask=m_tokens, other=float("-inf")).to(tl.float32)
    b_logits = tl.where(b_logits != b_logits, float("-inf"), tl.minimum(b_logits, _LARGEST))
    return tl.minimum(b_logits * b_inverse, _LARGEST)


@triton.jit
def _mass(b_scaled, b_largest):
    b_share = tl.where(b_scaled > float("-inf"), tl.exp(b_scaled - b_largest), 0.0)
    return (b_share * _SCALE).to(tl.int64)


@triton.jit
def _gumbel(i_seed, i_position, o_tokens):
    o_zero = o_tokens * 0
    o_position = o_zero + (i_position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    b_bits, _, _, _ = tl.philox(i_seed, o_tokens, o_position, o_zero, o_zero, _ROUNDS)
    b_uniform = (b_bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_uniform = tl.minimum(b_uniform, 1.0 - 5.9604644775390625e-08)
    b_small = b_uniform + b_uniform * b_uniform * 0.5
    b_exponential = tl.where(b_uniform < 0.0009765625, b_small, -tl.log(1.0 - b_uniform))
    return -tl.log(b_exponential)


@triton.jit
def _scores(b_scaled, o_tokens, i_seed, i_position, is_greedy):
    if is_greedy:
        b_scores = b_scaled
    else:
        b_scores = b_scaled + _gumbel(i_seed, i_position, o_tokens)
    return b_scores


@triton.jit
def _best(b_scores, o_tokens):
    """Return the largest score and the lowest token that has it."""
    b_score = tl.max(b_scores, 0)
    return b_score, tl.min(tl.where(b_scores == b_score, o_tokens, 0x7FFFFFFF), 0)


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
    b_largest = tl.load(p_bounds, mask=o_splits < num_splits, other=float("-inf"))
    b_smallest = tl.load(p_bounds + MAX_SPLITS, mask=o_splits < num_splits, other=float("inf"))
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
    """Return the interval that the passes before LEVEL leave for the threshold.

    The threshold lies in `[low, high)`; `high` is infinite until a pivot lies above it. Also
    returned: count and mass of the logits from `high` on, and the mass of the row.
    """
    o_pivots = tl.arange(0, PIVOTS)
    b_low = float("-inf")
    b_high = float("inf")
    b_above = tl.full([], 0, tl.int64)
    b_total = tl.full([], 0, tl.int64)
    for i_level in tl.static_range(LEVEL):
        o_level = (i_row * LEVELS + i_level) * PIVOTS + o_pivots
        b_sums = tl.load(sums_ptr + o_level)
        b_pivots = tl.load(pivots_ptr + o_level)
        if i_level == 0:
            b_total = tl.max(b_sums, 0) & _MASS_MASK
        if is_k:
            m_short = (b_sums >> _COUNT_SHIFT) < b_k
        else:
            m_short = (b_sums & _MASS_MASK) < _mass_target(b_p, b_total)
        # Sums grow along the pivots, which fall.
        i_low = tl.minimum(tl.sum(m_short.to(tl.int32), 0), PIVOTS - 1)
        b_low = tl.max(tl.where(o_pivots == i_low, b_pivots, float("-inf")), 0)
        if i_low > 0:
            b_high = tl.max(tl.where(o_pivots == i_low - 1, b_pivots, float("-inf")), 0)
            b_above = tl.max(tl.where(o_pivots == i_low - 1, b_sums, 0), 0)
    return b_low, b_high, b_above >> _COUNT_SHIFT, b_above & _MASS_MASK, b_total


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
):
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if i_split == 0:
        o_sums = tl.arange(0, BLOCK_SUMS)
        p_sums = sums_ptr + i_row * SUMS + o_sums
        tl.store(p_sums, tl.zeros([BLOCK_SUMS], tl.int64), mask=o_sums < SUMS)
        tl.store(lengths_ptr + i_row, 0)
    b_inverse, _ = _inverse(temperature_ptr, i_row)
    p_row = logits_ptr + i_row * stride_logits
    i_first = i_split * split_tokens
    i_end = tl.minimum(i_first + split_tokens, vocabulary)
    b_largest = tl.full([BLOCK], float("-inf"), tl.float32)
    b_smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for i_token in tl.range(i_first, i_end, BLOCK, num_stages=3):
        o_tokens = i_token + tl.arange(0, BLOCK)
        b_scaled = _load_scaled(p_row, o_tokens, o_tokens < i_end, b_inverse)
        b_largest = tl.maximum(b_largest, b_scaled)
        b_smallest = tl.minimum(
            b_smallest, tl.where(b_scaled > float("-inf"), b_scaled, float("inf"))
        )
    p_bounds = bounds_ptr + i_row * (2 * MAX_SPLITS) + i_split
    tl.store(p_bounds, tl.max(b_largest, 0))
    tl.store(p_bounds + MAX_SPLITS, tl.min(b_smallest, 0))


@triton.jit
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
    BLOCK: tl.constexpr,
):
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_inverse, is_greedy = _inverse(temperature_ptr, i_row)
    b_k, b_p, is_k, is_p = _filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy)
    b_largest, b_smallest = _row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS)
    o_pivots = tl.arange(0, PIVOTS)
    if (is_k | is_p) & (b_largest > float("-inf")):
        if LEVEL == 0:
            # Closer together near the largest, where thresholds usually are.
            b_part = (o_pivots + 1).to(tl.float32) * (1.0 / PIVOTS)
            b_pivots = b_largest - (b_largest - b_smallest) * (b_part * b_part)
            b_lowest = b_smallest
        else:
            b_low, b_high, b_count, b_mass, b_total = _interval(
                sums_ptr, pivots_ptr, i_row, b_k, b_p, is_k, LEVEL, LEVELS, PIVOTS
            )
            b_part = (o_pivots + 1).to(tl.float32) * (1.0 / PIVOTS)
            b_top = tl.minimum(b_high, b_largest)
            b_pivots = b_top - (b_top - b_low) * b_part
            b_lowest = b_low
        b_pivots = tl.maximum(tl.where(o_pivots == PIVOTS - 1, b_lowest, b_pivots), b_lowest)
        o_level = (i_row * LEVELS + LEVEL) * PIVOTS + o_pivots
        if i_split == 0:
            tl.store(pivots_ptr + o_level, b_pivots)

        p_row = logits_ptr + i_row * stride_logits
        i_first = i_split * split_tokens
        i_end = tl.minimum(i_first + split_tokens, vocabulary)
        b_sums = tl.zeros([PIVOTS, BLOCK], tl.int64)
        for i_token in tl.range(i_first, i_end, BLOCK, num_stages=3):
            o_tokens = i_token + tl.arange(0, BLOCK)
            b_scaled = _load_scaled(p_row, o_tokens, o_tokens < i_end, b_inverse)
            b_unit = _mass(b_scaled, b_largest) + (tl.full([], 1, tl.int64) << _COUNT_SHIFT)
            b_sums += tl.where(b_scaled[None, :] >= b_pivots[:, None], b_unit[None, :], 0)
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
    """Return the interval whose logits are listed; those from `high` on are certainly kept."""
    b_low, b_high, b_count, b_mass, b_total = _interval(
        sums_ptr, pivots_ptr, i_row, b_k, b_p, is_k, LEVELS, LEVELS, PIVOTS
    )
    if is_k & (b_k <= COLLECTED_K):
        b_high = float("inf")
        b_count = b_count * 0
        b_mass = b_mass * 0
    if is_greedy:
        b_low = b_largest
        b_high = b_largest
    elif (~is_k) & (~is_p):
        b_low = float("-inf")
        b_high = float("-inf")
    return b_low, b_high, b_count, b_mass, b_total


@triton.jit
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
):
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_inverse, is_greedy = _inverse(temperature_ptr, i_row)
    b_k, b_p, is_k, is_p = _filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy)
    b_largest, _ = _row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS)
    b_score = float("-inf")
    b_token = 0x7FFFFFFF
    if b_largest > float("-inf"):
        b_low, b_high, b_count, b_mass, b_total = _final_interval(
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
        b_least = tl.log(tl.load(min_p_ptr + i_row))
        if is_greedy:
            b_least = float("-inf")
        i_seed = tl.load(seeds_ptr + i_row)
        i_position = tl.load(positions_ptr + i_row)
        p_row = logits_ptr + i_row * stride_logits
        i_first = i_split * split_tokens
        i_end = tl.minimum(i_first + split_tokens, vocabulary)
        for i_token in tl.range(i_first, i_end, BLOCK, num_stages=3):
            o_tokens = i_token + tl.arange(0, BLOCK)
            b_scaled = _load_scaled(p_row, o_tokens, o_tokens < i_end, b_inverse)
            m_finite = b_scaled > float("-inf")
            m_certain = m_finite & (b_scaled >= b_high) & (b_scaled - b_largest >= b_least)
            if tl.max(m_certain.to(tl.int32), 0) > 0:
                b_scores = _scores(b_scaled, o_tokens, i_seed, i_position, is_greedy)
                b_scores = tl.where(m_certain, b_scores, float("-inf"))
                b_tile_score, b_tile_token = _best(b_scores, o_tokens)
                b_score, b_token = _better(b_score, b_token, b_tile_score, b_tile_token)
            m_listed = m_finite & (b_scaled >= b_low) & (b_scaled < b_high)
            b_listed = tl.sum(m_listed.to(tl.int32), 0)
            if b_listed > 0:
                i_start = tl.atomic_add(lengths_ptr + i_row, b_listed, sem="relaxed")
                o_list = i_start + tl.cumsum(m_listed.to(tl.int32), 0) - 1
                m_list = m_listed & (o_list < CAPACITY)
                tl.store(values_ptr + i_row * CAPACITY + o_list, b_scaled, mask=m_list)
                tl.store(tokens_ptr + i_row * CAPACITY + o_list, o_tokens, mask=m_list)
    tl.store(best_scores_ptr + i_row * MAX_SPLITS + i_split, b_score)
    tl.store(best_tokens_ptr + i_row * MAX_SPLITS + i_split, b_token)


@triton.jit
def _drawn_from_list(
    p_values,
    p_tokens,
    num_listed,
    b_k,
    b_p,
    is_k,
    is_p,
    b_count,
    b_mass,
    b_total,
    b_largest,
    b_least,
    i_seed,
    i_position,
    is_greedy,
    CAPACITY: tl.constexpr,
):
    """Find the threshold in the sorted list and draw among what the list keeps."""
    o_list = tl.arange(0, CAPACITY)
    m_list = o_list < num_listed
    b_values = tl.load(p_values + o_list, mask=m_list, other=float("-inf"))
    o_tokens = tl.load(p_tokens + o_list, mask=m_list, other=0x7FFFFFFF)
    b_sorted = tl.sort(b_values, descending=True)
    b_masses = _mass(b_sorted, b_largest)
    b_threshold = float("-inf")
    if is_k:
        i_last = tl.minimum(b_k - 1 - b_count, num_listed - 1)
        b_threshold = tl.max(tl.where(o_list == i_last, b_sorted, float("-inf")), 0)
        b_total = b_mass + tl.sum(tl.where(b_sorted >= b_threshold, b_masses, 0), 0)
    if is_p:
        m_short = b_mass + tl.cumsum(b_masses, 0) < _mass_target(b_p, b_total)
        i_last = tl.minimum(tl.sum(m_short.to(tl.int32), 0), num_listed - 1)
        b_last = tl.max(tl.where(o_list == i_last, b_sorted, float("-inf")), 0)
        b_threshold = tl.maximum(b_threshold, b_last)
    m_kept = m_list & (b_values >= b_threshold) & (b_values - b_largest >= b_least)
    b_scores = _scores(b_values, o_tokens, i_seed, i_position, is_greedy)
    return _best(tl.where(m_kept, b_scores, float("-inf")), o_tokens)


@triton.jit
def _sum_from(p_row, vocabulary, b_inverse, b_largest, b_threshold, BLOCK: tl.constexpr):
    """Return count and mass of a row's logits from a threshold on."""
    b_sums = tl.zeros([BLOCK], tl.int64)
    for i_token in tl.range(0, vocabulary, BLOCK, num_stages=3):
        o_tokens = i_token + tl.arange(0, BLOCK)
        b_scaled = _load_scaled(p_row, o_tokens, o_tokens < vocabulary, b_inverse)
        b_unit = _mass(b_scaled, b_largest) + (tl.full([], 1, tl.int64) << _COUNT_SHIFT)
        b_sums += tl.where((b_scaled >= b_threshold) & (b_scaled > float("-inf")), b_unit, 0)
    b_sum = tl.sum(b_sums, 0)
    return b_sum >> _COUNT_SHIFT, b_sum & _MASS_MASK


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
        b_count, b_mass = _sum_from(p_row, vocabulary, b_inverse, b_largest, b_threshold, BLOCK)
        b_reached = b_count if BY_COUNT else b_mass
        i_low = tl.where(b_reached >= b_target, i_middle, i_low)
        i_high = tl.where(b_reached >= b_target, i_high, i_middle)
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
    b_threshold = b_smallest
    if is_k:
        b_threshold = _bisected(
            p_row, vocabulary, b_inverse, b_largest, b_smallest, b_k, True, BLOCK
        )
    if is_p:
        _, b_total = _sum_from(p_row, vocabulary, b_inverse, b_largest, b_threshold, BLOCK)
        b_last = _bisected(
            p_row,
            vocabulary,
            b_inverse,
            b_largest,
            b_smallest,
            _mass_target(b_p, b_total),
            False,
            BLOCK,
        )
        b_threshold = tl.maximum(b_threshold, b_last)
    b_score = float("-inf")
    b_token = 0x7FFFFFFF
    for i_token in tl.range(0, vocabulary, BLOCK, num_stages=3):
        o_tokens = i_token + tl.arange(0, BLOCK)
        b_scaled = _load_scaled(p_row, o_tokens, o_tokens < vocabulary, b_inverse)
        m_kept = (b_scaled >= b_threshold) & (b_scaled - b_largest >= b_least)
        m_kept &= b_scaled > float("-inf")
        b_scores = _scores(b_scaled, o_tokens, i_seed, i_position, is_greedy)
        b_tile_score, b_tile_token = _best(tl.where(m_kept, b_scores, float("-inf")), o_tokens)
        b_score, b_token = _better(b_score, b_token, b_tile_score, b_tile_token)
    return b_score, b_token


@triton.jit
def finish_kernel(
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
    best_scores_ptr,
    best_tokens_ptr,
    out_ptr,
    vocabulary,
    stride_logits,
    num_splits,
    LEVELS: tl.constexpr,
    PIVOTS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHORT_CAPACITY: tl.constexpr,
    COLLECTED_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    b_inverse, is_greedy = _inverse(temperature_ptr, i_row)
    b_k, b_p, is_k, is_p = _filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy)
    b_largest, b_smallest = _row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS)
    b_token = tl.full([], 0, tl.int32)
    if b_largest > float("-inf"):
        b_low, b_high, b_count, b_mass, b_total = _final_interval(
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
        b_least = tl.log(tl.load(min_p_ptr + i_row))
        if is_greedy:
            b_least = float("-inf")
        i_seed = tl.load(seeds_ptr + i_row)
        i_position = tl.load(positions_ptr + i_row)
        num_listed = tl.load(lengths_ptr + i_row)
        is_nested = is_k & is_p & (b_k > COLLECTED_K)
        if is_nested | (num_listed > CAPACITY):
            _, b_token = _drawn_by_bisection(
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
        else:
            o_splits = tl.arange(0, MAX_SPLITS)
            m_splits = o_splits < num_splits
            p_best = i_row * MAX_SPLITS + o_splits
            b_scores = tl.load(best_scores_ptr + p_best, mask=m_splits, other=float("-inf"))
            b_tokens = tl.load(best_tokens_ptr + p_best, mask=m_splits, other=0x7FFFFFFF)
            b_score, b_token = _best(b_scores, b_tokens)
            p_values = values_ptr + i_row * CAPACITY
            p_tokens = tokens_ptr + i_row * CAPACITY
            if num_listed > SHORT_CAPACITY:
                b_list_score, b_list_token = _drawn_from_list(
                    p_values,
                    p_tokens,
                    num_listed,
                    b_k,
                    b_p,
                    is_k,
                    is_p,
                    b_count,
                    b_mass,
                    b_total,
                    b_largest,
                    b_least,
                    i_seed,
                    i_position,
                    is_greedy,
                    CAPACITY,
                )
                b_score, b_token = _better(b_score, b_token, b_list_score, b_list_token)
            elif num_listed > 0:
                b_list_score, b_list_token = _drawn_from_list(
                    p_values,
                    p_tokens,
                    num_listed,
                    b_k,
                    b_p,
                    is_k,
                    is_p,
                    b_count,
                    b_mass,
                    b_total,
                    b_largest,
                    b_least,
                    i_seed,
                    i_position,
                    is_greedy,
                    SHORT_CAPACITY,
                )
                b_score, b_token = _better(b_score, b_token, b_list_score, b_list_token)
    tl.store(out_ptr + i_row, b_token)


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
    split_tokens = triton.cdiv(triton.cdiv(vocabulary, splits), block) * block
    splits = triton.cdiv(vocabulary, split_tokens)

    bounds = torch.empty((rows, 2, MAX_SPLITS), dtype=torch.float32, device=device)
    sums = torch.empty((rows, levels, pivots), dtype=torch.int64, device=device)
    pivot_values = torch.empty((rows, levels, pivots), dtype=torch.float32, device=device)
    lengths = torch.empty(rows, dtype=torch.int32, device=device)
    values = torch.empty((rows, CAPACITY), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, CAPACITY), dtype=torch.int32, device=device)
    best_scores = torch.empty((rows, MAX_SPLITS), dtype=torch.float32, device=device)
    best_tokens = torch.empty((rows, MAX_SPLITS), dtype=torch.int32, device=device)

    # No fused multiply-add: every kernel must round a scaled logit alike.
    options = {"num_warps": 4, "enable_fp_fusion": False}
    grid = (rows, splits)
    bounds_kernel[grid](
        logits,
        temperature,
        bounds,
        sums,
        lengths,
        vocabulary,
        logits.stride(0),
        split_tokens,
        MAX_SPLITS=MAX_SPLITS,
        SUMS=levels * pivots,
        BLOCK_SUMS=triton.next_power_of_2(levels * pivots),
        BLOCK=4 * block,
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
            logits.stride(0),
            split_tokens,
            splits,
            LEVEL=level,
            LEVELS=levels,
            PIVOTS=pivots,
            MAX_SPLITS=MAX_SPLITS,
            BLOCK=block,
            **options,
        )
    shared = (temperature, top_k, top_p, min_p, seeds, positions, bounds, sums, pivot_values)
    lists = (lengths, values, tokens, best_scores, best_tokens)
    sizes = {
        "LEVELS": levels,
        "PIVOTS": pivots,
        "MAX_SPLITS": MAX_SPLITS,
        "CAPACITY": CAPACITY,
        "COLLECTED_K": COLLECTED_K,
    }
    collect_kernel[grid](
        logits,
        *shared,
        *lists,
        vocabulary,
        logits.stride(0),
        split_tokens,
        splits,
        BLOCK=4 * block,
        **sizes,
        **options,
    )
    finish_kernel[(rows,)](
        logits,
        *shared,
        *lists,
        out,
        vocabulary,
        logits.stride(0),
        splits,
        SHORT_CAPACITY=SHORT_CAPACITY,
        BLOCK=2048,
        **sizes,
        **options,
    )
    return out
