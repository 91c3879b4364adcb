"""How a layer tells the loader which checkpoint tensors it is made of."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the checkpoint and the place in memory that it is copied to."""

    name: str
    target: Tensor
    """A view of the layer's own, perhaps fused, parameter."""


class Layer(Protocol):
    """Something with weights."""

    def slots(self) -> Iterator[Slot]:
        """Every tensor to load, in the checkpoint's names."""

    def pack(self) -> None:
        """Bring loaded weights into the layout that computes fastest; called once."""

    def parameters(self) -> Iterator[Tensor]:
        """What the layer keeps in memory now."""
