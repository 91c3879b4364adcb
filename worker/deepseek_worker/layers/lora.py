"""Matrix products to which each row adds the low-rank product of its own adapter."""

from collections.abc import Iterator

import torch
from torch import Tensor

import deepseek_kernels
from deepseek_worker.layers.linear import GatedProduct, Linear, TakesCodes
from deepseek_worker.layers.parameters import Slot


class AdapterRows:
    """Which adapter each row of the step in progress uses; all projections look here."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        """`[tokens]` int32, -1 for none; None where no row has one."""


class AdaptedLinear:
    """A projection, whatever its weight is stored as, and what adapters add to its output."""

    def __init__(
        self, base: Linear, a: Tensor, b: Tensor, widths: tuple[int, ...], rows: AdapterRows
    ) -> None:
        """Wrap a projection.

        Args:
            base: The loaded projection.
            a: `[adapters, parts, rank, in_features]`.
            b: `[adapters, out_features, rank]`, scaled.
            widths: Output features of each part.
            rows: What says which adapter a row uses.
        """
        self.base = base
        self._a = a
        self._b = b
        self._widths = widths
        self._rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[tokens, in_features]` to `[tokens, out_features]`, in the type of `x`."""
        product = self.base(x)
        if self._rows.value is not None:
            deepseek_kernels.lora_add(product, x, self._a, self._b, self._rows.value, self._widths)
        return product

    def taking_codes(self, num_tokens: int) -> TakesCodes | None:  # noqa: ARG002 - as others
        """Nothing: adapters multiply the input as it is."""
        return None

    def gated_product(self) -> GatedProduct | None:
        """None: adapters add to the product."""
        return None

    def slots(self) -> Iterator[Slot]:
        """Those of the projection."""
        return self.base.slots()

    def pack(self) -> None:
        """Pack the projection."""
        self.base.pack()

    def randomize(self, generator: torch.Generator) -> None:
        """Randomize the projection."""
        self.base.randomize(generator)

    def parameters(self) -> Iterator[Tensor]:
        """Those of the projection and of all adapters."""
        yield from self.base.parameters()
        yield self._a
        yield self._b
