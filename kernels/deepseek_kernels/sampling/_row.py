"""What every pass knows of a row: its scaled logits, their masses and their noise."""

import triton
import triton.language as tl

from deepseek_kernels.sampling.reference import GREEDY_TEMPERATURE, MASS_SCALE

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_SCALE = tl.constexpr(MASS_SCALE)
_LARGEST = tl.constexpr(3.4028234663852886e38)

COUNT_SHIFT = tl.constexpr(45)
"""Count and mass share 64 bits: fewer than 2^18 logits of mass up to 2^27 sum below 2^45."""

MASS_MASK = tl.constexpr((1 << 45) - 1)

NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def wait_for_pass(PDL: tl.constexpr):
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
def inverse(temperature_ptr, i_row):
    """Return what to multiply logits by, and whether the row is greedy."""
    b_temperature = tl.load(temperature_ptr + i_row)
    is_greedy = b_temperature < _GREEDY
    b_safe = tl.where(is_greedy, 1.0, b_temperature)
    return tl.div_rn(1.0, b_safe), is_greedy


@triton.jit
def scaled(b_logits, b_inverse):
    """Return logits over the temperature, finite or minus infinity."""
    # The larger of NaN and a number is the number.
    b_logits = tl.minimum(tl.maximum(b_logits, float("-inf")), _LARGEST)
    return tl.minimum(b_logits * b_inverse, _LARGEST)


@triton.jit
def load_scaled(p_row, o_tokens, m_tokens, b_inverse):
    """Load logits of a row, scaled; those that are masked out are minus infinity."""
    b_logits = tl.load(p_row + o_tokens, mask=m_tokens, other=float("-inf")).to(tl.float32)
    return scaled(b_logits, b_inverse)


@triton.jit
def mass_of(b_share):
    """Return the mass of a share, a probability as a fraction of the largest."""
    return (b_share * _SCALE + 0.5).to(tl.int32)


@triton.jit
def counted_mass(b_scaled, b_share):
    """Return mass and count in one integer: a sum of these holds both sums."""
    b_one = (b_scaled > float("-inf")).to(tl.int64) << COUNT_SHIFT
    return mass_of(b_share).to(tl.int64) + b_one


@triton.jit
def sum_neighbours(b_values):
    """Add up neighbours, 8 at a time, which one thread has: eight masses fit 32 bits."""
    return tl.sum(tl.reshape(b_values, [b_values.shape[0] // 8, 8]), 1).to(tl.int64)


@triton.jit
def least_of_min_p(min_p_ptr, i_row, is_greedy):
    """Return the least difference to the largest logit that min-p keeps."""
    return tl.where(is_greedy, float("-inf"), tl.log(tl.load(min_p_ptr + i_row)))


@triton.jit
def row_keys(i_seed, i_position):
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
def random_bits(o_tokens, b_first, b_second):
    """Return 32 bits for each token from the two keys of its row."""
    return _mixed(_mixed(o_tokens.to(tl.uint32, bitcast=True) ^ b_first) ^ b_second)


@triton.jit
def noisy(b_scaled, b_bits):
    """Return scaled logits with Gumbel noise: minus the log of an exponential variate."""
    b_uniform = (b_bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_uniform = tl.minimum(b_uniform, 1.0 - 5.9604644775390625e-08)
    b_small = b_uniform + b_uniform * b_uniform * 0.5
    b_exponential = tl.where(b_uniform < 0.0009765625, b_small, -tl.log(1.0 - b_uniform))
    return b_scaled - tl.log(b_exponential)


@triton.jit
def scores(b_scaled, o_tokens, i_seed, i_position, is_greedy):
    """Return scaled logits, with Gumbel noise unless the row is greedy."""
    if is_greedy:
        b_scores = b_scaled
    else:
        b_first, b_second = row_keys(i_seed, i_position)
        b_scores = noisy(b_scaled, random_bits(o_tokens, b_first, b_second))
    return b_scores


@triton.jit
def best(b_scores, o_tokens):
    """Return the largest score and the lowest token that has it."""
    b_score = tl.max(b_scores, 0)
    return b_score, tl.min(tl.where(b_scores == b_score, o_tokens, NO_TOKEN), 0)


@triton.jit
def better(b_score, b_token, b_other_score, b_other_token):
    """Return the better of two scored tokens."""
    is_other = (b_other_score > b_score) | ((b_other_score == b_score) & (b_other_token < b_token))
    return tl.where(is_other, b_other_score, b_score), tl.where(is_other, b_other_token, b_token)


@triton.jit
def row_bounds(bounds_ptr, i_row, num_splits, MAX_SPLITS: tl.constexpr):
    """Return the largest and the smallest finite logit of a row from its splits'."""
    o_splits = tl.arange(0, MAX_SPLITS)
    p_bounds = bounds_ptr + i_row * (2 * MAX_SPLITS) + o_splits
    m_splits = o_splits < num_splits
    b_largest = tl.load(p_bounds, mask=m_splits, other=float("-inf"), cache_modifier=".cg")
    p_smallest = p_bounds + MAX_SPLITS
    b_smallest = tl.load(p_smallest, mask=m_splits, other=float("inf"), cache_modifier=".cg")
    return tl.max(b_largest, 0), tl.min(b_smallest, 0)


@triton.jit
def filters(top_k_ptr, top_p_ptr, i_row, vocabulary, is_greedy):
    """Return k, p, and whether each filters."""
    b_k = tl.load(top_k_ptr + i_row).to(tl.int64)
    b_p = tl.load(top_p_ptr + i_row)
    return b_k, b_p, (b_k > 0) & (b_k < vocabulary) & (~is_greedy), (b_p < 1.0) & (~is_greedy)
