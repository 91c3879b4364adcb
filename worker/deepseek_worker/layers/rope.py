"""Rotary position embedding in the half-split form, with the scalings of transformers."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepseek_worker.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """The angle per position of each pair, and the factor on cosine and sine.

    Returns:
        `[head_dim / 2]` float32 and the attention factor (1.0 but for yarn and longrope).

    Source: transformers 5.24, modeling_rope_utils.py.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    parameters = rope.parameters
    if "frequency_factors" in parameters:
        plain = plain / torch.tensor(parameters["frequency_factors"], dtype=torch.float32)
    if rope.type == "linear":
        return plain / parameters["factor"], 1.0
    if rope.type == "llama3":
        return _llama3(plain, parameters), 1.0
    if rope.type == "yarn":
        return _yarn(rope, head_dim), _yarn_attention_factor(parameters)
    if rope.type == "longrope":
        factors = torch.tensor(parameters["short_factor"], dtype=torch.float32)
        return 1.0 / (factors * rope.theta**exponents), _longrope_attention_factor(parameters)
    return plain, 1.0


class Rope:
    """Cosines and signed sines for the positions of a step, or a table of all positions."""

    def __init__(
        self, inverse_frequency: Tensor, factor: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        # float32 on the device: positions times frequencies need its 24 bits.
        self._inverse_frequency = inverse_frequency.to(device)
        self._factor = factor
        self._dtype = dtype

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, `[tokens, 1, head_dim]` each, computed once a step."""
        angle = positions[:, None].float() * self._inverse_frequency
        cosine = angle.cos().mul_(self._factor)
        sine = angle.sin().mul_(self._factor)
        return (
            torch.cat((cosine, cosine), dim=-1).to(self._dtype)[:, None],
            torch.cat((-sine, sine), dim=-1).to(self._dtype)[:, None],
        )

    def table(self, num_positions: int) -> Tensor:
        """Cosines, then sines, of the first positions: `[num_positions, head_dim]` float32."""
        positions = torch.arange(num_positions, device=self._inverse_frequency.device)
        angle = positions[:, None].float() * self._inverse_frequency
        return torch.cat((angle.cos(), angle.sin()), dim=-1).mul_(self._factor)


def rotate(heads: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Turn `[tokens, heads, head_dim]` by the step's angles.

    Rolling by half a head swaps the halves; the sign of the swapped one is in the sine.
    """
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cosine).addcmul_(swapped, signed_sine)


def _llama3(plain: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    parameters = rope.parameters
    original = parameters["original_max_position_embeddings"]

    def dimension(num_rotations: float) -> float:
        wave = original / (num_rotations * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    extrapolated = 1 - ramp.clamp(0, 1)
    frequencies = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    factor = float(parameters["factor"])
    return (1 - extrapolated) / (factor * frequencies) + extrapolated / frequencies


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def scale(multiplier: float) -> float:
        factor = parameters["factor"]
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(parameters["mscale"]) / scale(parameters["mscale_all_dim"])
    return scale(1.0)


def _longrope_attention_factor(parameters: Mapping[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = parameters["factor"]
    original = parameters["original_max_position_embeddings"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
