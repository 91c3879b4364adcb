"""Matrix products with fused weights: q, k and v are one matrix, gate and up another."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

import deepseek_kernels
from deepseek_worker.layers.parameters import Layer, Slot, copied

# Of random weights: small enough that the sums of many layers stay finite in 16 bits.
RANDOM_STD = 0.02


# MKL multiplies so few rows slowly, and several blocks of the matrix at once well.
FEW_ROWS = range(4, 16)
BLOCK_FEATURES = 64


def packs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's blocked layout is used: it is, but for float32 on Intel's processors.

    For bfloat16 oneDNN has none on processors without AVX-512, AVX-NE-CONVERT or the like.

    MKL takes its fast kernels on those alone. One core, float32, milliseconds for 1 and 8 rows:

    - EPYC 9005, `[3072, 576]`: packed 0.18 and 0.27, MKL 0.45 and 0.71.
    - Xeon (Emerald Rapids), all matrices of SmolLM2-135M: packed 57 and 86, MKL 39 and 134, and 74
      for 8 rows in blocks.
    """
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and not _suits_mkl()


@cache
def _suits_mkl() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    is_intel = cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text()
    return is_intel and torch._C.has_mkl


def linear_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` as one small product for each `BLOCK_FEATURES` output features, which divide all."""
    blocks = weight.view(-1, BLOCK_FEATURES, weight.shape[1]).transpose(1, 2)
    product = torch.bmm(x.expand(len(blocks), *x.shape), blocks)
    product = product.transpose(0, 1).reshape(len(x), len(weight))
    return product if bias is None else product.add_(bias)


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix product of the model: what it is made of, not how it is stored."""

    parts: Mapping[str, int]
    """Checkpoint names, without `.weight`, and output features of what is computed together."""
    in_features: int
    has_bias: bool

    @property
    def out_features(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class InputFormat:
    """What a projection quantizes its input to before it multiplies."""

    dtype: torch.dtype
    group_columns: int | None
    """None for one scale a token."""


class TakesCodes(Protocol):
    """A projection whose input may come quantized, as fused norms return it."""

    input_format: InputFormat | None

    def multiply_codes(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Project an input that is in `input_format` already."""


class Linear(Layer, Protocol):
    """`x @ weight.T + bias`, whatever the weight is stored as."""

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[tokens, in_features]` to `[tokens, out_features]`, in the type of `x`."""

    def taking_codes(self, num_tokens: int) -> TakesCodes | None:
        """Itself, if it would quantize an input of so many tokens on a GPU."""

    def gated_product(self) -> "GatedProduct | None":
        """Gate the first half of the product into the second on a GPU, if that saves a pass."""


GatedProduct = Callable[[Tensor], Tensor]
"""`silu(gate) * up` of a projection's halves: `[tokens, in_features]` to `[tokens, out / 2]`."""


class PlainLinear:
    """A weight in the precision of the activations."""

    def __init__(self, projection: Projection, dtype: torch.dtype, device: torch.device) -> None:
        self._parts = dict(projection.parts)
        shape = (projection.out_features, projection.in_features)
        self.weight = torch.empty(shape, dtype=dtype, device=device)
        self.bias = (
            torch.empty(projection.out_features, dtype=dtype, device=device)
            if projection.has_bias
            else None
        )
        self._is_packed = False

    def __call__(self, x: Tensor) -> Tensor:
        """Project to `[tokens, out_features]`."""
        if self._is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return product
        if x.is_cuda:
            return deepseek_kernels.matmul(x, self.weight, self.bias)
        if (
            len(x) in FEW_ROWS
            and x.dtype == torch.float32
            and len(self.weight) % BLOCK_FEATURES == 0
        ):
            return linear_in_blocks(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)

    def taking_codes(self, num_tokens: int) -> TakesCodes | None:  # noqa: ARG002 - as others
        """Nothing: the input is multiplied as it is."""
        return None

    def gated_product(self) -> GatedProduct | None:
        """Without a bias."""
        if self.bias is not None:
            return None
        return partial(deepseek_kernels.gated_matmul, weight=self.weight)

    def slots(self) -> Iterator[Slot]:
        """One weight, and one bias where there are biases, for each part."""
        first = 0
        for name, rows in self._parts.items():
            yield copied(f"{name}.weight", self.weight[first : first + rows])
            if self.bias is not None:
                yield copied(f"{name}.bias", self.bias[first : first + rows])
            first += rows

    def pack(self) -> None:
        """Reorder the weight for oneDNN where that pays; the plain copy goes."""
        if packs_on(self.weight.device, self.weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            self._is_packed = True

    def randomize(self, generator: torch.Generator) -> None:
        """Normally distributed weights and biases."""
        for parameter in self.parameters():
            parameter.normal_(0.0, RANDOM_STD, generator=generator)

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
        yield copied(f"{self._name}.weight", self.weight)

    def pack(self) -> None:
        """A table of rows is its own best layout."""

    def randomize(self, generator: torch.Generator) -> None:
        """A normally distributed table."""
        self.weight.normal_(0.0, RANDOM_STD, generator=generator)

    def parameters(self) -> Iterator[Tensor]:
        """The table."""
        yield self.weight


class TiedHead(PlainLinear):
    """The output projection of a model whose embedding table is also its output matrix."""

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding
        self.weight = embedding.weight
        self.bias = None
        self._is_packed = False

    def slots(self) -> Iterator[Slot]:
        """Nothing: the table is loaded as the embedding."""
        yield from ()

    def randomize(self, generator: torch.Generator) -> None:
        """Nothing: the table is random already."""

    def parameters(self) -> Iterator[Tensor]:
        """Only what is not the embedding's own: the packed copy, where there is one."""
        if self._is_packed:
            yield self.weight
