"""What projections with quantized weights have in common; called as `PlainLinear` is.

Each keeps its weight in the layout that its kernel reads, and nothing else: what was read from
the file is decoded, packed and dropped, one projection at a time. On a CPU the same operations
run as their references, which decode the weight for every product: right, and slow.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.layers.linear import (
    RANDOM_STD,
    GatedProduct,
    InputFormat,
    Linear,
    PlainLinear,
    Projection,
    TakesCodes,
)
from deepseek_worker.layers.parameters import Slot, copied
from deepseek_worker.quantization.codes import Codes, dequantize
from deepseek_worker.quantization.readers import Reader
from deepseek_worker.quantization.rounding import Inputs
from deepseek_worker.quantization.schemes import Scheme

FEW_TOKENS = 8
"""Up to so many, a GPU multiplies 8-bit weights with the inputs as they are: reading the weights
is all that takes time, and quantizing would only add to it."""


class Stored:
    """The tensors of a projection between the file and its layout in memory."""

    def __init__(self, projection: Projection, reader: Reader, device: torch.device) -> None:
        self._projection = projection
        self._reader = reader
        self._device = device
        self._pieces: dict[str, dict[str, Tensor]] = {name: {} for name in projection.parts}

    def slots(self, bias: Tensor | None) -> Iterator[Slot]:
        """What the reader asks for, and one bias where there are biases, for each part."""
        first = 0
        for name, rows in self._projection.parts.items():
            for piece in self._reader.pieces(rows, self._projection.in_features):
                store = _Keep(self._pieces[name], piece.suffix, self._device)
                yield Slot(
                    f"{name}.{piece.suffix}",
                    piece.shape,
                    store,
                    piece.is_required,
                    piece.other_shapes,
                    piece.dtypes,
                )
            if bias is not None:
                yield copied(f"{name}.bias", bias[first : first + rows])
            elif self._reader.writes_zero_biases:
                yield Slot(f"{name}.bias", (rows,), partial(_refuse_bias, name), is_required=False)
            first += rows

    def take(self) -> list[Tensor | Codes]:
        """The decoded parts, which are then forgotten here; none where none were read."""
        if not any(self._pieces.values()):
            return []
        decoded = [
            self._reader.read(self._pieces[name], rows, self._projection.in_features)
            for name, rows in self._projection.parts.items()
        ]
        for pieces in self._pieces.values():
            pieces.clear()
        return decoded


def _refuse_bias(name: str, bias: Tensor) -> None:
    if bias.any():
        raise BrokenCheckpoint(f"tensor {name}.bias is not zero, but the architecture has no bias")


@dataclass(frozen=True, slots=True)
class _Keep:
    """Keeps a tensor on the device until its projection is packed."""

    pieces: dict[str, Tensor]
    suffix: str
    device: torch.device

    def __call__(self, tensor: Tensor) -> None:
        self.pieces[self.suffix] = tensor.to(self.device)


class QuantizedLinear(ABC):
    """A projection whose weight is codes and scales."""

    input_format: InputFormat | None = None
    """What `multiply_codes` takes; None where the input is multiplied as it is."""

    def __init__(
        self,
        projection: Projection,
        reader: Reader,
        scheme: Scheme,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.scheme = scheme
        self._projection = projection
        self._stored = Stored(projection, reader, device)
        self._inputs: Inputs | None = None
        self._dtype = dtype
        self._device = device
        self.bias = (
            torch.empty(projection.out_features, dtype=dtype, device=device)
            if projection.has_bias
            else None
        )

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Project `[tokens, in_features]` to `[tokens, out_features]`, in the type of `x`."""

    def multiply_codes(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Project an input that is in `input_format` already, as fused norms return it."""
        raise NotImplementedError("a projection with an input_format defines it")

    def taking_codes(self, num_tokens: int) -> TakesCodes | None:
        """Itself, if it would quantize an input of so many tokens on a GPU."""
        if self.input_format is None or num_tokens <= FEW_TOKENS:
            return None
        # Scales of a cut group are padded for, which fused norms do not do.
        columns = self.input_format.group_columns or 1
        return None if self._projection.in_features % columns else self

    def gated_product(self) -> GatedProduct | None:
        """None, where the layout of the weight has no kernel for it."""
        return None

    @abstractmethod
    def weights(self) -> Iterator[Tensor]:
        """Codes, scales and what else belongs to the weight."""

    @abstractmethod
    def _quantize(self, weight: Tensor, inputs: Inputs | None) -> None:
        """Keep a weight rounded, to the nearest codes or for inputs like these."""

    @abstractmethod
    def _keep(self, parts: Sequence[Codes]) -> None:
        """Keep the parts' codes as one weight."""

    @abstractmethod
    def _randomize_weight(self, generator: torch.Generator) -> None:
        """Keep random codes of a plausible size."""

    def slots(self) -> Iterator[Slot]:
        """The tensors of all parts."""
        return self._stored.slots(self.bias)

    def round_for(self, inputs: Inputs) -> None:
        """Have the next `pack` round an unquantized weight for inputs like these."""
        self._inputs = inputs

    def pack(self) -> None:
        """Decode and pack what was read."""
        parts = self._stored.take()
        plain = [part for part in parts if isinstance(part, Tensor)]
        inputs, self._inputs = self._inputs, None
        if plain:
            self._quantize(joined(plain), inputs)
        elif parts:
            self._keep([part for part in parts if not isinstance(part, Tensor)])

    def randomize(self, generator: torch.Generator) -> None:
        """Take random codes and biases."""
        self._randomize_weight(generator)
        if self.bias is not None:
            self.bias.normal_(0.0, RANDOM_STD, generator=generator)

    def parameters(self) -> Iterator[Tensor]:
        """The weight and the bias."""
        yield from self.weights()
        if self.bias is not None:
            yield self.bias


class DequantizedLinear(PlainLinear):
    """Read from a quantized checkpoint, kept in the precision of the activations."""

    def __init__(
        self, projection: Projection, reader: Reader, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(projection, dtype, device)
        self._projection = projection
        self._stored = Stored(projection, reader, device)

    def slots(self) -> Iterator[Slot]:
        """The tensors of all parts."""
        return self._stored.slots(self.bias)

    def pack(self) -> None:
        """Dequantize what was read."""
        first = 0
        for part in self._stored.take():
            weight = dequantize(part, self._projection.in_features)
            self.weight[first : first + len(weight)].copy_(weight)
            first += len(weight)
        super().pack()


class JoinedLinear:
    """Parts that are stored differently, multiplied one by one and put side by side."""

    def __init__(self, members: Sequence[Linear]) -> None:
        self._members = tuple(members)

    def __call__(self, x: Tensor) -> Tensor:
        """Project."""
        return torch.cat([member(x) for member in self._members], 1)

    def taking_codes(self, num_tokens: int) -> TakesCodes | None:  # noqa: ARG002 - as others
        """Nothing: the members may take different ones."""
        return None

    def gated_product(self) -> GatedProduct | None:
        """None: each member has a part of the product."""
        return None

    def slots(self) -> Iterator[Slot]:
        """Those of all members."""
        for member in self._members:
            yield from member.slots()

    def pack(self) -> None:
        """Pack all members."""
        for member in self._members:
            member.pack()

    def randomize(self, generator: torch.Generator) -> None:
        """Randomize all members."""
        for member in self._members:
            member.randomize(generator)

    def parameters(self) -> Iterator[Tensor]:
        """Those of all members."""
        for member in self._members:
            yield from member.parameters()


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all, contiguous."""
    if len(tensors) == 1:
        return tensors[0].contiguous()
    if tensors[0].dtype == torch.float8_e4m3fn:
        # Not every device joins FP8; all join its bytes.
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
    return torch.cat(list(tensors))
