"""Weights of 8 bits: FP8 or INT8 with a scale for each row, and FP8 in blocks of 128 by 128."""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepseek_kernels import (
    matmul_w8a8,
    matmul_w8a16,
    quantize,
    quantize_weight,
    quantize_weight_blocks,
)
from deepseek_worker.layers.linear import RANDOM_STD, InputFormat, Projection
from deepseek_worker.quantization.codes import BlockCodes, Codes, RowCodes
from deepseek_worker.quantization.linears import FEW_TOKENS, QuantizedLinear, joined
from deepseek_worker.quantization.readers import Reader
from deepseek_worker.quantization.rounding import (
    Inputs,
    best_scale,
    compensated,
    relative_error,
    second_moments,
    smooth,
)
from deepseek_worker.quantization.schemes import GROUP_COLUMNS, Scheme

ROW_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Random codes are made of so many float32 numbers at once.
RANDOM_AT_ONCE = 2**26
FP8_FACTORS = tuple(2 ** (step / 8) for step in range(8))
"""The steps of FP8 double at every power of two: which weights lie where they have just doubled is
up to the scale. Those of INT8 are even, and its errors are least with the smallest steps."""
MAX_INPUT_ERROR = 0.02
"""Of the output, relative. Where INT8 inputs would cost more, they stay in 16 bits."""
SAMPLED_ROWS = 512

logger = logging.getLogger(__name__)


class RowScaledLinear(QuantizedLinear):
    """One scale for each row; the input in 16 bits, or in 8 with one scale for each token."""

    weight: Tensor
    """`[out_features, in_features]` codes."""
    scale: Tensor
    """`[out_features]` float32."""

    def __init__(
        self,
        projection: Projection,
        reader: Reader,
        scheme: Scheme,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(projection, reader, scheme, dtype, device)
        self._codes = ROW_CODES[scheme.weights]
        if scheme.activations == "8bit":
            self.input_format = InputFormat(self._codes, None)

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[tokens, in_features]` to `[tokens, out_features]`."""
        if self.input_format is None or (x.is_cuda and len(x) <= FEW_TOKENS):
            return matmul_w8a16(x, self.weight, self.scale, self.bias)
        return self.multiply_codes(*quantize(x, dtype=self._codes), x.dtype)

    def multiply_codes(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Project an input that is in `input_format` already, as fused norms return it."""
        return matmul_w8a8(codes, scale, self.weight, self.scale, self.bias, dtype=dtype)

    def weights(self) -> Iterator[Tensor]:
        """Codes and scales."""
        yield from (self.weight, self.scale)

    def _quantize(self, weight: Tensor, inputs: Inputs | None) -> None:
        if inputs is None:
            self.weight, self.scale = quantize_weight(weight, self._codes)
            return
        chooses_inputs = self.input_format is not None and self._codes == torch.int8
        if chooses_inputs:
            weight = smooth(inputs, weight)
        moments = second_moments(inputs.rows)
        columns = weight.shape[1]
        scale = quantize_weight(weight, self._codes)[1][:, None]
        if self._codes == torch.float8_e4m3fn:
            scale = best_scale(weight, moments, scale, columns, self._to_grid, factors=FP8_FACTORS)
        rounded = compensated(weight, moments, scale, columns, self._to_grid)
        self.weight, self.scale = rounded.to(self._codes), scale.view(-1)
        if chooses_inputs:
            self._choose_inputs(inputs.rows)

    def _to_grid(self, values: Tensor) -> Tensor:
        if self._codes == torch.int8:
            return values.round().clamp(-127.0, 127.0)
        return values.clamp(-448.0, 448.0).to(self._codes).float()

    def _choose_inputs(self, rows: Tensor) -> None:
        """Multiply inputs as they are where 8 bits would distort the output."""
        some = rows[:: -(-len(rows) // SAMPLED_ROWS)]
        exact = matmul_w8a16(some, self.weight, self.scale, self.bias)
        rounded = self.multiply_codes(*quantize(some, dtype=self._codes), some.dtype)
        error = relative_error(rounded, exact, list(self._projection.parts.values()))
        # Also where it is not a number.
        if not error <= MAX_INPUT_ERROR:
            self.input_format = None
            name = next(iter(self._projection.parts))
            logger.info("%s takes inputs in 16 bits: 8 would cost %.1f %%", name, 100 * error)

    def _keep(self, parts: Sequence[Codes]) -> None:
        rows = [part for part in parts if isinstance(part, RowCodes)]
        self.weight = joined([part.codes for part in rows])
        self.scale = joined([part.scale for part in rows])

    def _randomize_weight(self, generator: torch.Generator) -> None:
        shape = (self._projection.out_features, self._projection.in_features)
        self.weight, std = _random_codes(shape, self._codes, self._device, generator)
        self.scale = torch.full(shape[:1], RANDOM_STD / std, device=self._device)


class BlockScaledLinear(QuantizedLinear):
    """FP8, one scale for each block of 128 by 128; the input one for 128 columns of a token.

    All parts but the last have a multiple of 128 rows, so that no block holds rows of two.
    """

    weight: Tensor
    """`[out_features, in_features]` float8_e4m3fn."""
    scale: Tensor
    """`[ceil(out / 128), ceil(in / 128)]` float32."""
    input_format = InputFormat(torch.float8_e4m3fn, GROUP_COLUMNS)

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[tokens, in_features]` to `[tokens, out_features]`."""
        columns = x.shape[1]
        missing = -columns % GROUP_COLUMNS
        codes, scale = quantize(pad(x, (0, missing)) if missing else x, group_columns=GROUP_COLUMNS)
        return self.multiply_codes(codes[:, :columns], scale, x.dtype)

    def multiply_codes(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Project an input that is in `input_format` already, as fused norms return it."""
        return matmul_w8a8(codes, scale, self.weight, self.scale, self.bias, dtype=dtype)

    def weights(self) -> Iterator[Tensor]:
        """Codes and scales."""
        yield from (self.weight, self.scale)

    def _quantize(self, weight: Tensor, inputs: Inputs | None) -> None:
        assert inputs is None  # noqa: S101 -- blocks are read from files, which are not rounded again
        self.weight, self.scale = quantize_weight_blocks(weight)

    def _keep(self, parts: Sequence[Codes]) -> None:
        blocks = [part for part in parts if isinstance(part, BlockCodes)]
        self.weight = joined([part.codes for part in blocks])
        self.scale = joined([part.scale for part in blocks])

    def _randomize_weight(self, generator: torch.Generator) -> None:
        rows, columns = self._projection.out_features, self._projection.in_features
        self.weight, std = _random_codes(
            (rows, columns), torch.float8_e4m3fn, self._device, generator
        )
        shape = (-(-rows // GROUP_COLUMNS), -(-columns // GROUP_COLUMNS))
        self.scale = torch.full(shape, RANDOM_STD / std, device=self._device)


def _random_codes(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Codes and their standard deviation."""
    codes = torch.empty(shape, dtype=dtype, device=device)
    if dtype == torch.int8:
        return codes.random_(-127, 128, generator=generator), 73.3
    std = 64.0
    rows_at_once = max(1, RANDOM_AT_ONCE // shape[1])
    for first in range(0, shape[0], rows_at_once):
        part = codes[first : first + rows_at_once]
        values = torch.empty(part.shape, device=device).normal_(0.0, std, generator=generator)
        part.copy_(values.clamp_(-448.0, 448.0))
    return codes, std
