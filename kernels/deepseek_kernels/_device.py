"""Device functions that several kernels share: the Triton side of `_quantize`."""

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(1e-12)

OVERLAPPED_TOKENS = 512
"""Up to here the start of a launch costs more than its work does."""


def overlaps(tokens: int) -> bool:
    """Tell whether a launch on so many tokens shall start while the one before it ends."""
    return tokens <= OVERLAPPED_TOKENS and not triton.knobs.runtime.interpret


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """Wait for the kernel before, and let the next one start.

    What was written by the kernel before is to be read past the first-level cache (`.cg`).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def quantization_scale(b_values, axis: tl.constexpr, MAXIMUM: tl.constexpr):
    """Return the scales of fp32 values reduced along `axis`, which is kept with size 1.

    As integers, the bits of magnitudes are ordered like them, with infinity and NaN on top: one
    maximum finds the largest magnitude and keeps what is not finite.
    """
    b_bits = b_values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    b_largest = tl.max(b_bits, axis, keep_dims=True).to(tl.float32, bitcast=True)
    # A NaN is no number to compare, and stays.
    return tl.where(b_largest / MAXIMUM < SMALLEST_SCALE, SMALLEST_SCALE, b_largest / MAXIMUM)


@triton.jit
def encode(b_scaled, INTEGER: tl.constexpr):
    """Round fp32 values that their scale bounds to int8 (halves to even) or to fp8 e4m3.

    The conversion to fp8 saturates and keeps NaN.
    """
    if INTEGER:
        # Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
        b_codes = (b_scaled + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        b_codes = b_scaled.to(tl.float8e4nv)
    return b_codes
