"""How many bytes a model needs, from its configuration alone.

Pure: the worker predicts with it before it loads a model and compares afterwards; the operator
shows what the worker predicted. Shapes come from a `config.json` of Hugging Face or from the
metadata of a GGUF file.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepseek_contract.state import MemoryKind

WeightFormat = Literal[
    "float32", "float16", "bf16", "fp8", "fp8_block", "int8", "int4", "int4_zero_points"
]
KvFormat = Literal["float32", "float16", "bf16", "fp8", "int8"]

_BYTES = {"float32": 4, "float16": 2, "bf16": 2, "fp8": 1, "int8": 1}
_SCALE_BYTES = 4
_FP8_BLOCK = 128
# Weights of 4 bits are kept as tiles of 64 x 256, the last ones filled up, with a 16-bit scale,
# and perhaps an 8-bit zero point, for each 128 columns of a row.
_TILE_ROWS, _TILE_COLUMNS, _INT4_GROUP = 64, 256, 128
# Where the KV of a layer begins in its page, so that vectors can be read from there.
_KV_ALIGNMENT = 16

MIB = 2**20
# What a process holds on a device before any tensor: the CUDA context, kernels and libraries.
CUDA_CONTEXT_BYTES = 600 * MIB
# The interpreter with torch, the tokenizer and the server, on a CPU.
CPU_PROCESS_BYTES = 500 * MIB

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
LATENT_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
GGUF_ARCHITECTURES = ("llama", "qwen2")


class UnknownShapeError(ValueError):
    """The configuration lacks what sizing needs, or is of an architecture not known here."""


@dataclass(frozen=True)
class LatentAttention:
    """Attention over one compressed latent a token, shared by all heads (MLA)."""

    query_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Experts:
    """The routed feed-forward layers of a mixture of experts."""

    num_routed: int
    num_shared: int
    intermediate_size: int
    num_dense_layers: int
    has_score_bias: bool


@dataclass(frozen=True)
class ModelShape:
    """The sizes that bytes follow from. Layers are counted without draft (MTP) layers."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    latent: LatentAttention | None = None
    experts: Experts | None = None

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the token embedding and, when it is a matrix of its own, of the head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        layers = sum(
            rows * columns + small
            for layer in range(self.num_layers)
            for rows, columns, small in self._layer(layer)
        )
        return self.num_embedding_parameters + layers + self.hidden_size

    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of each linear layer that may be quantized, in order of the layers."""
        return [
            (rows, columns)
            for layer in range(self.num_layers)
            for rows, columns, _ in self._layer(layer)
            if rows
        ]

    def products(self) -> list[tuple[int, int]]:
        """Rows and columns of `matrices` as they are kept: those with the same input are one."""
        if self.latent is not None or self.experts is not None:
            return self.matrices()
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = [
            (queries + 2 * keys, self.hidden_size),
            (self.hidden_size, queries),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        ]
        return layer * self.num_layers

    def _layer(self, layer: int) -> list[tuple[int, int, int]]:
        """Rows, columns and vector parameters of each part of one layer."""
        norms = (0, 0, 2 * self.hidden_size)
        attention = self._latent_attention() if self.latent else self._attention()
        return [norms, *attention, *self._feed_forward(layer)]

    def _attention(self) -> list[tuple[int, int, int]]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        bias = int(self.qkv_bias)
        return [
            (queries, self.hidden_size, bias * queries),
            (keys, self.hidden_size, bias * keys),
            (keys, self.hidden_size, bias * keys),
            (self.hidden_size, queries, int(self.output_bias) * self.hidden_size),
        ]

    def _latent_attention(self) -> list[tuple[int, int, int]]:
        latent = self.latent
        assert latent is not None  # noqa: S101 -- callers ask first
        queries = self.num_heads * (latent.nope_dim + latent.rope_dim)
        parts = (
            [(queries, self.hidden_size, 0)]
            if latent.query_rank is None
            else [
                (latent.query_rank, self.hidden_size, latent.query_rank),
                (queries, latent.query_rank, 0),
            ]
        )
        return [
            *parts,
            (latent.kv_rank + latent.rope_dim, self.hidden_size, latent.kv_rank),
            (self.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank, 0),
            (self.hidden_size, self.num_heads * latent.value_dim, 0),
        ]

    def _feed_forward(self, layer: int) -> list[tuple[int, int, int]]:
        experts = self.experts
        if experts is None or layer < experts.num_dense_layers:
            return self._gated(self.intermediate_size)
        router = experts.num_routed * self.hidden_size
        if experts.has_score_bias:
            router += experts.num_routed
        routed = self._gated(experts.intermediate_size) * experts.num_routed
        shared = (
            self._gated(experts.intermediate_size * experts.num_shared)
            if experts.num_shared
            else []
        )
        return [(0, 0, router), *routed, *shared]

    def _gated(self, width: int) -> list[tuple[int, int, int]]:
        bias = int(self.mlp_bias)
        return [
            (width, self.hidden_size, bias * width),
            (width, self.hidden_size, bias * width),
            (self.hidden_size, width, bias * self.hidden_size),
        ]


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a `config.json` of Hugging Face.

    Raises:
        UnknownShapeError: The architecture is not known, or a size is missing.
    """
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture not in (*DENSE_ARCHITECTURES, *LATENT_ARCHITECTURES):
        known = ", ".join((*DENSE_ARCHITECTURES, *LATENT_ARCHITECTURES))
        raise UnknownShapeError(f"architecture is {architecture!r}; sizes are known for {known}")
    is_latent = architecture in LATENT_ARCHITECTURES
    has_bias = bool(config.get("attention_bias", False))
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    head_dim = config.get("head_dim")
    return ModelShape(
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=hidden_size // num_heads if head_dim is None else int(head_dim),
        intermediate_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or (has_bias and not is_latent),
        output_bias=architecture == "LlamaForCausalLM" and has_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        latent=_latent_of(config) if is_latent else None,
        experts=_experts_of(config, architecture) if is_latent else None,
    )


def shape_of_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelShape:
    """The shape in a GGUF file.

    Args:
        metadata: Its key-value pairs.
        tensor_names: Names of its tensors, which tell tied embeddings and biases.

    Raises:
        UnknownShapeError: The architecture is not known, or a size is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnknownShapeError(f"architecture is {architecture!r}; sizes are known for {known}")

    def size(key: str) -> int:
        return _size(metadata, f"{architecture}.{key}")

    num_heads = size("attention.head_count")
    hidden_size = size("embedding_length")
    key_length = metadata.get(f"{architecture}.attention.key_length")
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    return ModelShape(
        num_layers=size("block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=int(metadata.get(f"{architecture}.attention.head_count_kv") or num_heads),
        head_dim=hidden_size // num_heads if key_length is None else int(key_length),
        intermediate_size=size("feed_forward_length"),
        vocab_size=int(metadata.get(f"{architecture}.vocab_size") or len(tokens)),
        tied_embeddings="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
    )


def weight_bytes(shape: ModelShape, weights: WeightFormat, *, plain_bytes: int = 2) -> int:
    """Bytes of the weights in memory.

    Quantization is of the linear layers; embeddings, head, norms, biases and routers are kept as
    they are computed with.

    Args:
        shape: The model.
        weights: What the linear layers are kept as.
        plain_bytes: Bytes of one parameter that is not quantized.
    """
    if weights in {"float32", "float16", "bf16"}:
        return shape.num_parameters * _BYTES[weights]
    num_plain = shape.num_parameters - sum(rows * columns for rows, columns in shape.matrices())
    products = shape.products()
    return num_plain * plain_bytes + sum(
        product_bytes(rows, columns, weights) for rows, columns in products
    )


def product_bytes(rows: int, columns: int, weights: WeightFormat) -> int:
    """Bytes of one matrix `[rows, columns]`, its scales and zero points among them."""
    if weights in {"int4", "int4_zero_points"}:
        row_tiles, column_tiles = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
        num_codes = row_tiles * _TILE_ROWS * column_tiles * _TILE_COLUMNS
        group_bytes = 3 if weights == "int4_zero_points" else 2
        return num_codes // 2 + num_codes // _INT4_GROUP * group_bytes
    if weights == "fp8_block":
        blocks = -(-rows // _FP8_BLOCK) * -(-columns // _FP8_BLOCK)
        return rows * columns + _SCALE_BYTES * blocks
    scales = _SCALE_BYTES * rows if weights in {"fp8", "int8"} else 0
    return rows * columns * _BYTES[weights] + scales


def kv_bytes_per_token(shape: ModelShape, kv_cache: KvFormat) -> int:
    """Bytes of the KV of one token in all layers."""
    return shape.num_layers * _kv_token_bytes(shape, kv_cache)


def kv_layer_bytes(shape: ModelShape, kv_cache: KvFormat, page_tokens: int) -> int:
    """Bytes of one layer's KV in one page of `page_tokens` tokens."""
    size = page_tokens * _kv_token_bytes(shape, kv_cache)
    return -(-size // _KV_ALIGNMENT) * _KV_ALIGNMENT


def kv_page_bytes(shape: ModelShape, kv_cache: Sequence[KvFormat], page_tokens: int) -> int:
    """Bytes of one page; `kv_cache` has one entry for each layer."""
    return sum(kv_layer_bytes(shape, kind, page_tokens) for kind in kv_cache)


def _kv_token_bytes(shape: ModelShape, kv_cache: KvFormat) -> int:
    if shape.latent is not None:
        return (shape.latent.kv_rank + shape.latent.rope_dim) * _BYTES[kv_cache]
    num_heads = 2 * shape.num_kv_heads
    # int8 has a scale for each head of each token.
    scales = _SCALE_BYTES * num_heads if kv_cache == "int8" else 0
    return num_heads * shape.head_dim * _BYTES[kv_cache] + scales


def workspace_bytes(
    shape: ModelShape, *, num_tokens: int, num_logit_rows: int, activation_bytes: int
) -> int:
    """Bytes of the largest tensors that live at once in one forward pass: an upper estimate.

    Args:
        shape: The model.
        num_tokens: Tokens computed in one pass.
        num_logit_rows: Requests that want a token from it; each needs a row of logits in float32,
            and sampling sorts a copy of it together with its indices.
        activation_bytes: Bytes of one activation.
    """
    heads = shape.num_heads + 2 * shape.num_kv_heads
    attention = 2 * heads * shape.head_dim
    if shape.latent is not None:
        latent = shape.latent
        attention = shape.num_heads * 2 * (2 * latent.nope_dim + latent.rope_dim)
    feed_forward = 3 * shape.intermediate_size
    per_token = 3 * shape.hidden_size + max(attention, feed_forward)
    return num_tokens * per_token * activation_bytes + num_logit_rows * shape.vocab_size * (
        4 + 4 + 8
    )


@dataclass(frozen=True)
class Prediction:
    """Bytes by kind before anything is loaded.

    Attributes:
        limit_bytes: What the worker may use.
        weight_bytes: The weights.
        workspace_bytes: The largest tensors of a forward pass.
        context_bytes: What the process holds before any tensor.
        page_bytes: One page of KV, of all layers.
    """

    limit_bytes: int
    weight_bytes: int
    workspace_bytes: int
    context_bytes: int
    page_bytes: int

    @property
    def num_pages(self) -> int:
        """KV pages that what is left has room for; 0 when there is not even one."""
        left = self.limit_bytes - self.weight_bytes - self.workspace_bytes - self.context_bytes
        return max(0, left // self.page_bytes)

    @property
    def missing_bytes(self) -> int:
        """How much is missing for a single page; 0 when it fits."""
        wanted = self.weight_bytes + self.workspace_bytes + self.context_bytes + self.page_bytes
        return max(0, wanted - self.limit_bytes)

    @property
    def bytes_by_kind(self) -> dict[MemoryKind, int]:
        """As in `GET /state`."""
        return {
            "weights": self.weight_bytes,
            "kv_cache": self.num_pages * self.page_bytes,
            "workspace": self.workspace_bytes,
            "context": self.context_bytes,
        }


def _size(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnknownShapeError(f"{key} is {value!r}; it must be a whole number above zero")
    return value


def _latent_of(config: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        query_rank=config.get("q_lora_rank"),
        kv_rank=_size(config, "kv_lora_rank"),
        rope_dim=_size(config, "qk_rope_head_dim"),
        nope_dim=_size(config, "qk_nope_head_dim"),
        value_dim=_size(config, "v_head_dim"),
    )


def _experts_of(config: Mapping[str, Any], architecture: str) -> Experts | None:
    if config.get("n_routed_experts") is None:
        return None
    return Experts(
        num_routed=_size(config, "n_routed_experts"),
        num_shared=int(config.get("n_shared_experts") or 0),
        intermediate_size=_size(config, "moe_intermediate_size"),
        num_dense_layers=int(config.get("first_k_dense_replace") or 0),
        has_score_bias=architecture == "DeepseekV3ForCausalLM",
    )
