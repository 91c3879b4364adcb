"""What the `quantization_config` of a config.json says, and what of it is not served. No torch.

Formats: GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ, `gemm`), compressed-tensors (`pack-quantized`,
`int-quantized`, `float-quantized`, `naive-quantized`) and DeepSeek's FP8.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from deepseek_worker.errors import UnsupportedModel
from deepseek_worker.quantization.schemes import (
    GROUP_COLUMNS,
    PLAIN,
    Activations,
    Scheme,
)

Method = Literal["gptq", "awq", "packed", "rows", "blocks"]
WHOLE_COLUMN = -1
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How the matrices of a checkpoint are stored."""

    method: Method
    """`packed` is compressed-tensors' `pack-quantized`; `rows` and `blocks` are 8-bit codes with a
    scale for each row, or for each block of 128 by 128."""
    bits: int
    is_float: bool = False
    """FP8 instead of integers."""
    group_size: int = WHOLE_COLUMN
    """Inputs that share a scale, with 4 and 8 packed bits."""
    is_symmetric: bool = True
    is_sorted: bool = False
    """Whether inputs are in groups by importance (act-order), as `g_idx` says."""
    zeros_less_one: bool = False
    """Whether zero points are stored less one: GPTQ's first version."""
    scale_name: str = "weight_scale"
    has_one_scale: bool = False
    """With `rows`, one scale for the whole matrix."""
    activations: Activations = "16bit"
    targets: tuple[str, ...] = ("Linear",)
    """What is quantized: `Linear` for all, names, or `re:` and an expression."""
    ignored: tuple[str, ...] = (HEAD,)
    """What of it is not."""

    def covers(self, name: str) -> bool:
        """Whether the matrix of that name is stored quantized."""
        return _matches(name, self.targets) and not _matches(name, self.ignored)

    @property
    def native(self) -> Scheme:
        """The scheme that keeps the stored codes as they are; PLAIN where no kernel takes them."""
        if self.method == "blocks":
            return Scheme("fp8_block", "8bit")
        if self.method == "rows":
            return Scheme("fp8" if self.is_float else "int8", self.activations)
        is_whole = self.group_size == WHOLE_COLUMN
        if self.bits == 4 and (is_whole or self.group_size % GROUP_COLUMNS == 0):
            is_sorted = self.is_sorted and not is_whole
            return Scheme("int4", "16bit", not self.is_symmetric, is_sorted)
        if self.bits == 8 and is_whole and self.is_symmetric:
            return Scheme("int8", "16bit")
        return PLAIN

    def __str__(self) -> str:
        """For messages."""
        kind = "fp8" if self.is_float else f"{self.bits} bits"
        group = "" if self.group_size == WHOLE_COLUMN else f" in groups of {self.group_size}"
        return f"{self.method}, {kind}{group}"


def stored_quantization(config: Mapping[str, Any]) -> StoredQuantization | None:
    """Read a config.json; None for an unquantized checkpoint.

    Raises:
        UnsupportedModel: a format or a variant of it that is not served; names the field.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return None
    method = quantization.get("quant_method")
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
    }
    if method not in readers:
        raise UnsupportedModel(
            f"quantization_config.quant_method {method!r} is not served; served are "
            f"{', '.join(readers)}, unquantized checkpoints and GGUF files"
        )
    return readers[method](quantization)


def _gptq(quantization: Mapping[str, Any]) -> StoredQuantization:
    if quantization.get("dynamic"):
        raise _not_served("dynamic", quantization["dynamic"], "one precision for all layers")
    checkpoint_format = quantization.get("checkpoint_format", "gptq")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise _not_served("checkpoint_format", checkpoint_format, "gptq and gptq_v2")
    blocks = quantization.get("modules_in_block_to_quantize")
    targets = tuple(name for block in blocks for name in block) if blocks else ("Linear",)
    return StoredQuantization(
        "gptq",
        _bits(quantization.get("bits"), (4, 8)),
        group_size=_group_size(quantization.get("group_size", WHOLE_COLUMN)),
        is_symmetric=bool(quantization.get("sym", True)),
        is_sorted=bool(quantization.get("desc_act", False)),
        zeros_less_one=checkpoint_format == "gptq",
        targets=targets,
        ignored=() if quantization.get("lm_head") else (HEAD,),
    )


def _awq(quantization: Mapping[str, Any]) -> StoredQuantization:
    version = str(quantization.get("version", "gemm")).lower()
    if version != "gemm":
        raise _not_served("version", version, "gemm")
    return StoredQuantization(
        "awq",
        _bits(quantization.get("bits", quantization.get("w_bit")), (4,)),
        group_size=_group_size(
            quantization.get("group_size", quantization.get("q_group_size", WHOLE_COLUMN))
        ),
        is_symmetric=not quantization.get("zero_point", True),
        ignored=(HEAD, *(quantization.get("modules_to_not_convert") or ())),
    )


def _fp8(quantization: Mapping[str, Any]) -> StoredQuantization:
    kind = quantization.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise _not_served("fmt", kind, "e4m3")
    scheme = quantization.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _not_served("activation_scheme", scheme, "dynamic and static")
    ignored = (
        HEAD,
        *(quantization.get("modules_to_not_convert") or ()),
        *(quantization.get("ignored_layers") or ()),
    )
    block = quantization.get("weight_block_size")
    if block is None:
        return StoredQuantization(
            "rows", 8, is_float=True, has_one_scale=True, activations="8bit", ignored=ignored
        )
    _check_block("weight_block_size", block)
    return StoredQuantization(
        "blocks",
        8,
        is_float=True,
        scale_name="weight_scale_inv",
        activations="8bit",
        ignored=ignored,
    )


def _compressed_tensors(quantization: Mapping[str, Any]) -> StoredQuantization:
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _not_served("sparsity_config.format", sparsity, "dense")
    groups = quantization.get("config_groups") or {}
    if len(groups) != 1:
        raise _not_served("config_groups", sorted(groups), "one group for all layers")
    (group,) = groups.values()
    storage = group.get("format") or quantization.get("format")
    if storage not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
        raise _not_served(
            "format", storage, "pack-quantized, int-quantized, float-quantized and naive-quantized"
        )
    read = _packed if storage == "pack-quantized" else _eight_bits
    return replace(
        read(group.get("weights") or {}, group.get("input_activations")),
        targets=tuple(group.get("targets") or ("Linear",)),
        ignored=tuple(quantization.get("ignore") or ()),
    )


def _packed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> StoredQuantization:
    if inputs:
        raise _not_served("input_activations", inputs, "none beside pack-quantized")
    if weights.get("type", "int") != "int":
        raise _not_served("weights.type", weights["type"], "int beside pack-quantized")
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise _not_served("weights.strategy", strategy, "group and channel")
    group_size = weights.get("group_size") if strategy == "group" else WHOLE_COLUMN
    return StoredQuantization(
        "packed",
        _bits(weights.get("num_bits"), (4, 8)),
        group_size=_group_size(group_size),
        is_symmetric=bool(weights.get("symmetric", True)),
        is_sorted=weights.get("actorder") in ("group", "dynamic", True),
    )


def _eight_bits(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> StoredQuantization:
    _bits(weights.get("num_bits"), (8,))
    kind = weights.get("type", "int")
    if not weights.get("symmetric", True):
        raise _not_served("weights.symmetric", False, "true with 8 bits")
    if inputs:
        if (inputs.get("num_bits"), inputs.get("type", "int")) != (8, kind):
            raise _not_served("input_activations", inputs, f"8 bits of type {kind}")
        if not inputs.get("symmetric", True):
            raise _not_served("input_activations.symmetric", False, "true")
    strategy = weights.get("strategy", "tensor")
    is_block = strategy == "block" and kind == "float"
    if is_block:
        _check_block("weights.block_structure", weights.get("block_structure"))
    elif strategy not in ("channel", "tensor"):
        raise _not_served("weights.strategy", strategy, "channel, tensor, and block with float")
    return StoredQuantization(
        "blocks" if is_block else "rows",
        8,
        is_float=kind == "float",
        has_one_scale=strategy == "tensor",
        activations="8bit" if inputs else "16bit",
    )


def _check_block(field: str, block: Any) -> None:
    if isinstance(block, str):  # An old spelling: "128x128".
        block = [int(side) for side in block.split("x")]
    if list(block or ()) != [GROUP_COLUMNS, GROUP_COLUMNS]:
        raise _not_served(field, block, f"[{GROUP_COLUMNS}, {GROUP_COLUMNS}]")


def _bits(given: Any, served: tuple[int, ...]) -> int:
    if given not in served:
        raise _not_served("bits", given, " and ".join(map(str, served)))
    return int(given)


def _group_size(given: Any) -> int:
    if given is None or given == WHOLE_COLUMN:
        return WHOLE_COLUMN
    if not isinstance(given, int) or given < 1:
        raise _not_served("group_size", given, "-1 and positive numbers")
    return given


def _not_served(field: str, value: Any, served: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"quantization_config: {field} {value!r} is not served; served: {served}"
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(_match(name, pattern) for pattern in patterns)


def _match(name: str, pattern: str) -> bool:
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    # A whole name, or one of its parts, such as `lm_head`, `self_attn` or `mlp.down_proj`.
    return re.search(rf"(^|\.){re.escape(pattern)}($|\.)", name) is not None
