"""Matrix products with fused weights: q, k and v are one matrix, gate and up another."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from deepseek_worker.layers.parameters import Slot


def packs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's blocked layout is used: on x86 it is two to three times MKL's speed.

    Measured on an EPYC 9005 core, `[3072, 576]` float32: 0.18 ms against 0.45 ms with one row,
    0.27 against 0.71 with eight.
    """
    return (
        device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and torch._C._has_mkldnn
    )


class Linear:
    """`x @ weight.T + bias` for `x` `[tokens, in_features]`."""

    def __init__(
        self,
        parts: Mapping[str, int],
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate; `parts` are checkpoint names (without `.weight`) and their output features."""
        self._parts = dict(parts)
        out_features = sum(parts.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._is_packed = False

    def __call__(self, x: Tensor) -> Tensor:
        """Project to `[tokens, out_features]`."""
        if self._is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return product
        return linear(x, self.weight, self.bias)

    def slots(self) -> Iterator[Slot]:
        """One weight, and one bias where there are biases, for each part."""
        first = 0
        for name, rows in self._parts.items():
            yield Slot(f"{name}.weight", self.weight[first : first + rows])
            if self.bias is not None:
                yield Slot(f"{name}.bias", self.bias[first : first + rows])
            first += rows

    def pack(self) -> None:
        """Reorder the weight for oneDNN where that pays; the plain copy goes."""
        if packs_on(self.weight.device, self.weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            self._is_packed = True

    def parameters(self) -> Iterator[Tensor]:
        """The weight and the bias."""
        yield self.weight
        if self.bias is not None:
            yield self.bias


class Embedding:
    """One row for each token of the vocabulary."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name = name
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up `[tokens]` int64 for `[tokens, hidden_size]`."""
        return self.weight.index_select(0, token_ids)

    def slots(self) -> Iterator[Slot]:
        """The table."""
        yield Slot(f"{self._name}.weight", self.weight)

    def pack(self) -> None:
        """A table of rows is its own best layout."""

    def parameters(self) -> Iterator[Tensor]:
        """The table."""
        yield self.weight


class TiedHead(Linear):
    """The output projection of a model whose embedding table is also its output matrix."""

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding
        self.weight = embedding.weight
        self.bias = None
        self._is_packed = False

    def slots(self) -> Iterator[Slot]:
        """Nothing: the table is loaded as the embedding."""
        yield from ()

    def parameters(self) -> Iterator[Tensor]:
        """Only what is not the embedding's own: the packed copy, where there is one."""
        if self._is_packed:
            yield self.weight
