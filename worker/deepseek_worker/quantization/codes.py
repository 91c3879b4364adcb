"""A matrix between file and memory: its codes and scales, whatever the file's format was.

Everything is `[out_features, in_features]`, as torch multiplies it.
"""

from dataclasses import dataclass

from torch import Tensor

from deepseek_worker.quantization.schemes import GROUP_COLUMNS


@dataclass(frozen=True, slots=True)
class RowCodes:
    """8 bits with one scale for each row: `value = code * scale`."""

    codes: Tensor
    """float8_e4m3fn or int8."""
    scale: Tensor
    """`[out_features]` float32."""

    def dequantize(self) -> Tensor:
        """The float32 matrix."""
        return self.codes.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """FP8 with one scale for each block of 128 by 128; the last blocks may be cut."""

    codes: Tensor
    scale: Tensor
    """`[ceil(out / 128), ceil(in / 128)]` float32."""

    def dequantize(self) -> Tensor:
        """The float32 matrix."""
        rows, columns = self.codes.shape
        spread = self.scale.repeat_interleave(GROUP_COLUMNS, 0)[:rows]
        return self.codes.float() * spread.repeat_interleave(GROUP_COLUMNS, 1)[:, :columns]


@dataclass(frozen=True, slots=True)
class GroupCodes:
    """4 bits with a scale, and perhaps a zero point, for each 128 columns of a row."""

    codes: Tensor
    """uint8, 0 to 15, `[out_features, columns]`."""
    scale: Tensor
    """`[out_features, ceil(columns / 128)]` bf16 or fp16."""
    zero_point: Tensor | None
    """uint8, shape of `scale`; 8 everywhere where absent."""
    order: Tensor | None = None
    """`[columns]` int64: which input each column multiplies, where they are not in order. Columns
    of padding name any input; their codes mean zero."""

    def dequantize(self, in_features: int) -> Tensor:
        """The float32 matrix in the order of the inputs."""
        columns = self.codes.shape[1]
        zero = 8.0 if self.zero_point is None else _spread(self.zero_point.float(), columns)
        values = (self.codes.float() - zero) * _spread(self.scale.float(), columns)
        if self.order is None:
            return values
        matrix = values.new_zeros(values.shape[0], in_features)
        return matrix.index_add_(1, self.order, values)


def _spread(groups: Tensor, columns: int) -> Tensor:
    return groups.repeat_interleave(GROUP_COLUMNS, 1)[:, :columns]


Codes = RowCodes | BlockCodes | GroupCodes


def dequantize(codes: Tensor | Codes, in_features: int) -> Tensor:
    """The matrix as float32, or as it is where it is not quantized."""
    if isinstance(codes, Tensor):
        return codes
    if isinstance(codes, GroupCodes):
        return codes.dequantize(in_features)
    return codes.dequantize()
