"""RMSNorm with the residual addition in front of it."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

import deepseek_kernels
from deepseek_worker.layers.linear import Linear
from deepseek_worker.layers.parameters import Slot, copied


class RmsNorm:
    """Normalises `residual + x` and hands both on, so that the sum is formed once."""

    def __init__(
        self, name: str, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name = name
        self._eps = eps
        self._shape = (hidden_size,)
        self.weight = torch.empty(hidden_size, dtype=dtype, device=device)

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normalised sum and the sum, `[tokens, hidden_size]` both."""
        if x.is_cuda:
            normalised = deepseek_kernels.rms_norm(x, self.weight, residual=residual, eps=self._eps)
            return normalised, x if residual is None else residual
        if residual is not None:
            x = residual.add_(x)
        return rms_norm(x, self._shape, self.weight, self._eps), x

    def into(self, projection: Linear, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the projected normalised sum and the sum.

        Where the projection would quantize its input, the norm does, which saves a pass over it.
        """
        quantized = projection.taking_codes(len(x)) if x.is_cuda else None
        if quantized is None or quantized.input_format is None:
            normalised, residual = self(x, residual)
            return projection(normalised), residual
        codes, scale = deepseek_kernels.rms_norm_quantize(
            x,
            self.weight,
            residual=residual,
            eps=self._eps,
            dtype=quantized.input_format.dtype,
            group_columns=quantized.input_format.group_columns,
        )
        product = quantized.multiply_codes(codes, scale, x.dtype)
        return product, x if residual is None else residual

    def slots(self) -> Iterator[Slot]:
        """The gain."""
        yield copied(f"{self._name}.weight", self.weight)

    def pack(self) -> None:
        """A vector has one layout."""

    def randomize(self, generator: torch.Generator) -> None:  # noqa: ARG002 - as other layers
        """Ones: a random gain would only make the model's numbers odd."""
        self.weight.fill_(1.0)

    def parameters(self) -> Iterator[Tensor]:
        """The gain."""
        yield self.weight
