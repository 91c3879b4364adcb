"""What a projection's weight is kept as in memory. No torch.

`startup.py` asks for one `Scheme` for the model from the flags and from what the checkpoint is;
single projections may stay plain, where the checkpoint says so.
"""

from dataclasses import dataclass, replace
from typing import Literal

from deepseek_contract.sizing import WeightFormat as SizedFormat
from deepseek_worker.config import ActivationFormat, WeightFormat
from deepseek_worker.errors import UnsupportedModel

KeptWeights = Literal["plain", "fp8", "fp8_block", "int8", "int4"]
Activations = Literal["16bit", "8bit"]

GROUP_COLUMNS = 128
"""Columns that share a scale, in 4-bit weights and in block-scaled FP8."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are kept, and what they are multiplied with."""

    weights: KeptWeights = "plain"
    """`plain`: the type of the activations; `fp8`, `int8`: 8 bits, one scale for each row;
    `fp8_block`: one for each block of 128 by 128; `int4`: one for 128 columns of a row."""
    activations: Activations = "16bit"
    """`8bit` quantizes every input, one scale for each token, or with `fp8_block` for 128 columns
    of it."""
    zero_points: bool = False
    """With `int4`, whether a group's code for zero is its own; otherwise it is 8."""
    is_sorted: bool = False
    """With `int4`, whether inputs are brought into the order of their groups (act-order)."""


PLAIN = Scheme()

# What inputs are multiplied as, where neither flag nor checkpoint says. INT8 inputs of language
# models have outliers that one scale for a token cannot hold; those of FP8 have a range.
USUAL_ACTIVATIONS: dict[KeptWeights, Activations] = {"fp8": "8bit", "int8": "16bit"}


def choose_scheme(
    weights: WeightFormat, activations: ActivationFormat, native: Scheme | None = None
) -> Scheme:
    """What the projections are kept as.

    Args:
        weights: The flag.
        activations: The flag.
        native: What a quantized checkpoint's codes can be kept as without a change; None for an
            unquantized one.

    Raises:
        UnsupportedModel: the two flags contradict each other.
    """
    if native is not None and weights != "bf16":
        return _as_stored(native, weights, activations)
    if weights in ("auto", "bf16"):
        if activations == "8bit":
            raise UnsupportedModel(
                f"activations is '8bit' and weights is {weights!r}, which are not quantized here; "
                "set weights to 'fp8' or 'int8', or leave activations at 'auto'"
            )
        return PLAIN
    if weights == "int4":
        if activations == "8bit":
            raise UnsupportedModel(
                "activations is '8bit', but 4-bit weights are multiplied with 16 bits only; leave "
                "it at 'auto'"
            )
        return Scheme("int4", "16bit")
    kept: KeptWeights = "fp8" if weights == "fp8" else "int8"
    return Scheme(kept, USUAL_ACTIVATIONS[kept] if activations == "auto" else activations)


def _as_stored(native: Scheme, weights: WeightFormat, activations: ActivationFormat) -> Scheme:
    is_kept = native.weights.startswith(weights)
    if weights != "auto" and not is_kept:
        kept = "no format of ours" if native == PLAIN else native.weights
        raise UnsupportedModel(
            f"weights is {weights!r}, but the checkpoint is quantized, as {kept}; set weights to "
            "'auto', or to 'bf16' to have it dequantized"
        )
    if activations == "auto" or activations == native.activations:  # noqa: PLR1714 - narrows
        return native
    if native.weights not in USUAL_ACTIVATIONS:
        raise UnsupportedModel(
            f"activations is {activations!r}, but weights that are kept as {native.weights} are "
            f"multiplied with {native.activations} only; leave it at 'auto'"
        )
    return replace(native, activations=activations)


def sized_as(scheme: Scheme, plain: SizedFormat) -> SizedFormat:
    """The contract's name for what a scheme keeps; `plain` is what unquantized weights are."""
    if scheme.weights == "plain":
        return plain
    if scheme.weights == "int4" and scheme.zero_points:
        return "int4_zero_points"
    return scheme.weights
