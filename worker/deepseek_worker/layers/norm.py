"""RMSNorm with the residual addition in front of it."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from deepseek_worker.layers.parameters import Slot


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
        if residual is not None:
            x = residual.add_(x)
        return rms_norm(x, self._shape, self.weight, self._eps), x

    def slots(self) -> Iterator[Slot]:
        """The gain."""
        yield Slot(f"{self._name}.weight", self.weight)

    def pack(self) -> None:
        """A vector has one layout."""

    def parameters(self) -> Iterator[Tensor]:
        """The gain."""
        yield self.weight
