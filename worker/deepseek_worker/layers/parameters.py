"""How a layer tells the loader which checkpoint tensors it is made of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the checkpoint and what is done with it."""

    name: str
    shape: tuple[int, ...]
    store: Callable[[Tensor], object]
    """Takes the tensor as it was read."""
    is_required: bool = True
    """Whether a checkpoint without it is broken."""
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """That mean the same as `shape`."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """What it may be stored as; None where any floating-point type is converted."""


def copied(name: str, target: Tensor) -> Slot:
    """A tensor that is copied as it is to its place in a, perhaps fused, parameter."""
    return Slot(name, tuple(target.shape), target.copy_)


class Layer(Protocol):
    """Something with weights."""

    def slots(self) -> Iterator[Slot]:
        """Every tensor to load, in the checkpoint's names."""

    def pack(self) -> None:
        """Bring loaded weights into the layout that computes fastest; called once."""

    def randomize(self, generator: torch.Generator) -> None:
        """Take weights of a plausible size instead of loaded ones; `pack` follows."""

    def parameters(self) -> Iterator[Tensor]:
        """What the layer keeps in memory now."""
