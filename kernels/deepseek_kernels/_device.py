"""Device functions that several kernels share: the Triton side of `_quantize`."""

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(1e-12)


@triton.jit
def quantization_scale(b_values, axis: tl.constexpr, MAXIMUM: tl.constexpr):
    """Return the scales of fp32 values reduced along `axis`, which is kept with size 1."""
    b_magnitude = tl.where(b_values != b_values, float("inf"), tl.abs(b_values))
    return tl.maximum(tl.max(b_magnitude, axis, keep_dims=True) / MAXIMUM, SMALLEST_SCALE)


@triton.jit
def encode(b_scaled, INTEGER: tl.constexpr):
    """Round scaled fp32 values to int8 (halves up) or to fp8 e4m3, saturating."""
    if INTEGER:
        b_finite = tl.where(b_scaled != b_scaled, 0.0, b_scaled)
        b_codes = tl.clamp(tl.floor(b_finite + 0.5), -127.0, 127.0).to(tl.int8)
    else:
        b_clamped = tl.clamp(b_scaled, -448.0, 448.0)
        b_codes = tl.where(b_scaled != b_scaled, b_scaled, b_clamped).to(tl.float8e4nv)
    return b_codes
