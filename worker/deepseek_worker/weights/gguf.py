"""A GGUF file of llama.cpp, brought to the names and layouts of transformers.

llama.cpp stores the rows of q and k of Llama models (not of Qwen2) in the order of its
interleaved rope; they are put back here, so the rest of the worker knows one order only.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from deepseek_worker.errors import BrokenCheckpoint, UnsupportedModel
from deepseek_worker.models.config import Architecture, ModelConfig, RopeConfig, RopeType
from deepseek_worker.weights.gguf_file import GgufFile, StoredTensor, open_gguf

ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2"}
FILE_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Factors on the rope frequencies that llama.cpp precomputes for Llama 3.
ROPE_FACTORS = "rope_freqs.weight"


PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
BLOCK_TYPES: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.Q4_0: quants.Q4_0,
    GGMLQuantizationType.Q4_1: quants.Q4_1,
    GGMLQuantizationType.Q5_0: quants.Q5_0,
    GGMLQuantizationType.Q5_1: quants.Q5_1,
    GGMLQuantizationType.Q8_0: quants.Q8_0,
    GGMLQuantizationType.Q4_K: quants.Q4_K,
    GGMLQuantizationType.Q5_K: quants.Q5_K,
    GGMLQuantizationType.Q6_K: quants.Q6_K,
}
# Dequantization makes several float32 copies; blocks at once, to bound them.
BLOCKS_AT_ONCE = 2**17


class GgufCheckpoint:
    """Dequantizes tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        self._tensors = {
            _transformers_name(name): tensor for name, tensor in self._file.tensors.items()
        }
        factors = self._tensors.pop(ROPE_FACTORS, None)
        self.config = self._read_config(
            None if factors is None else self._dequantize(factors).tolist()
        )
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, dequantized to float32 where it is quantized."""
        tensor = self._dequantize(self._tensors[name])
        if self.config.architecture == "llama":
            if ".q_proj." in name:
                return _half_split(tensor, self.config.num_heads)
            if ".k_proj." in name:
                return _half_split(tensor, self.config.num_kv_heads)
        return tensor

    def extent(self, name: str) -> None:
        """Nothing: tensors are decoded, or brought into another order."""

    def _dequantize(self, stored: StoredTensor) -> Tensor:
        data = self._file.data(stored)
        if stored.type in PLAIN_TYPES:
            plain = torch.from_numpy(data.copy()).view(PLAIN_TYPES[stored.type])
            return plain.reshape(stored.shape)
        if stored.type not in BLOCK_TYPES:
            served = ", ".join(kind.name for kind in (*PLAIN_TYPES, *BLOCK_TYPES))
            raise UnsupportedModel(
                f"{self._file.path}: tensor {stored.name} is stored as {stored.type.name}; "
                f"served are {served}"
            )
        quantization = BLOCK_TYPES[stored.type]
        blocks = data.reshape(-1, quantization.type_size)
        values = np.empty((len(blocks), quantization.block_size), np.float32)
        for first in range(0, len(blocks), BLOCKS_AT_ONCE):
            part = slice(first, first + BLOCKS_AT_ONCE)
            values[part] = quantization.dequantize_blocks(blocks[part])
        return torch.from_numpy(values.reshape(stored.shape))

    def _read_config(self, rope_factors: list[float] | None) -> ModelConfig:
        file = self._file
        name = file.text("general.architecture")
        if name not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{file.path}: architecture {name!r} is not served; served are "
                f"{', '.join(ARCHITECTURES)}"
            )
        heads = file.integer(f"{name}.attention.head_count")
        hidden_size = file.integer(f"{name}.embedding_length")
        table = self._tensors.get("model.embed_tokens.weight")
        if table is None:
            raise BrokenCheckpoint(f"{file.path} lacks tensor token_embd.weight")
        metadata = file.metadata
        end_tokens = (
            metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")
        )
        return ModelConfig(
            architecture=ARCHITECTURES[name],
            vocab_size=table.shape[0],
            hidden_size=hidden_size,
            intermediate_size=file.integer(f"{name}.feed_forward_length"),
            num_layers=file.integer(f"{name}.block_count"),
            num_heads=heads,
            num_kv_heads=metadata.get(f"{name}.attention.head_count_kv", heads),
            head_dim=metadata.get(f"{name}.attention.key_length", hidden_size // heads),
            rms_norm_eps=file.number(f"{name}.attention.layer_norm_rms_epsilon"),
            max_position_embeddings=file.integer(f"{name}.context_length"),
            rope=_rope(file, name, rope_factors),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            o_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.down_proj.bias" in self._tensors,
            dtype=FILE_TYPES.get(metadata.get("general.file_type", 0), "bfloat16"),
            eos_token_ids=frozenset(token for token in end_tokens if token is not None),
        )


def _rope(file: GgufFile, name: str, factors: list[float] | None) -> RopeConfig:
    metadata = file.metadata
    theta = metadata.get(f"{name}.rope.freq_base", 10000.0)
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    served: dict[str, RopeType] = {"none": "default", "linear": "linear", "yarn": "yarn"}
    if scaling not in served:
        raise UnsupportedModel(
            f"{file.path}: rope scaling {scaling!r} is not served in GGUF files; served are "
            f"{', '.join(served)}"
        )
    parameters: dict[str, Any] = {
        "original_max_position_embeddings": metadata.get(
            f"{name}.rope.scaling.original_context_length", file.integer(f"{name}.context_length")
        )
    }
    if scaling != "none":
        parameters["factor"] = file.number(f"{name}.rope.scaling.factor")
    if factors is not None:
        parameters["frequency_factors"] = tuple(factors)
    return RopeConfig(float(theta), served[scaling], parameters)


def _transformers_name(name: str) -> str:
    """Translate a tensor's name; unknown ones stay as they are and are refused by the loader."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return name


def _half_split(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo the interleaving of each head's rows (weight) or elements (bias)."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
