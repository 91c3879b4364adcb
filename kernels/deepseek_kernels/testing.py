"""The one comparison and the one table of tolerances: tests, benchmarks and self-checks."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """How far an output of some type may be from its reference."""

    relative_rms: float
    """‖output − reference‖ / ‖reference‖."""

    max_ulps: float
    """Largest error of one element, in units in the last place of that element or of the
    reference's root mean square, whichever is larger."""


TOLERANCES = {
    torch.float64: Tolerance(1e-12, 64),
    torch.float32: Tolerance(4e-6, 128),
    torch.float16: Tolerance(6e-4, 4),
    torch.bfloat16: Tolerance(4e-3, 4),
    # Codes: rounding before and after the last bit moves few of them, each by one step.
    torch.float8_e4m3fn: Tolerance(1.5e-2, 1),
    torch.int8: Tolerance(1.5e-2, 1),
}
"""By the type of the output. Integers other than codes must be equal."""


def assert_close(name: str, output: Tensor, reference: Tensor) -> None:
    """Compare an output with its reference under the tolerance of the output's type.

    NaN and infinity must stand where the reference has them.

    Raises:
        AssertionError: Names the output, the error and what is allowed.
    """
    error = difference(output, reference)
    if error is not None:
        raise AssertionError(f"{name}: {error}")


def difference(output: Tensor, reference: Tensor) -> str | None:
    """Say how an output breaks the tolerance of its type, or return None."""
    if output.shape != reference.shape or output.dtype != reference.dtype:
        return (
            f"is {output.dtype} {list(output.shape)}; "
            f"the reference is {reference.dtype} {list(reference.shape)}"
        )
    if output.numel() == 0:
        return None
    tolerance = TOLERANCES.get(output.dtype)
    if tolerance is None:
        wrong = int((output != reference).sum())
        return f"{wrong} of {output.numel()} elements differ" if wrong else None
    return _float_difference(output, reference, tolerance)


def _float_difference(output: Tensor, reference: Tensor, tolerance: Tolerance) -> str | None:
    out, ref = output.detach().double(), reference.detach().double()
    special = ~ref.isfinite()
    if not torch.equal(out[special].nan_to_num(), ref[special].nan_to_num()) or not torch.equal(
        out.isfinite(), ~special
    ):
        return (
            f"{int((~out.isfinite()).sum())} elements are not finite where the reference has "
            f"{int(special.sum())}, or not the same ones"
        )
    out, ref = out[~special], ref[~special]
    if ref.numel() == 0:
        return None
    error = (out - ref).abs()
    norm = ref.norm()
    rms = norm / ref.numel() ** 0.5
    relative = float(error.norm() / norm) if norm > 0 else float(error.norm())
    ulps = float((error / _unit(output.dtype, ref, float(rms))).max())
    if relative > tolerance.relative_rms:
        return f"relative RMS error {relative:.2e}; allowed is {tolerance.relative_rms:.2e}"
    if ulps > tolerance.max_ulps:
        return f"largest error {ulps:.1f} ulp; allowed is {tolerance.max_ulps:g}"
    return None


def _unit(dtype: torch.dtype, reference: Tensor, rms: float) -> Tensor:
    """Return the unit in the last place at each element, or at the root mean square."""
    if dtype == torch.int8:
        return torch.ones_like(reference)
    magnitude = reference.abs().clamp_min(max(rms, torch.finfo(torch.float32).tiny))
    # Not by log2, which GPUs round down at powers of two.
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.ones_like(magnitude), exponent - 1) * torch.finfo(dtype).eps
