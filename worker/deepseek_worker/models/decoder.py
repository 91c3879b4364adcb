"""The decoder that Llama and Qwen2 share: the forward pass is written out once, here.

The two differ in which projections have biases, which `ModelConfig` says.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_worker.layers.attention import Attention, Plan_contra
from deepseek_worker.layers.feed_forward import feed_forward
from deepseek_worker.layers.linear import Embedding, Linear, Projection, TiedHead
from deepseek_worker.layers.lora import AdapterRows
from deepseek_worker.layers.norm import RmsNorm
from deepseek_worker.layers.parameters import Layer
from deepseek_worker.layers.rope import Rope, inverse_frequencies
from deepseek_worker.models.config import ModelConfig
from deepseek_worker.quantization.build import StorageOf, build_linear, everything_plain
from deepseek_worker.quantization.stored import HEAD


@dataclass(frozen=True, slots=True)
class BlockProjections:
    """The four matrix products of one block."""

    qkv: Projection
    output: Projection
    gate_up: Projection
    down: Projection

    @classmethod
    def of(cls, config: ModelConfig, index: int) -> "BlockProjections":
        """Those of block `index`, in the checkpoint's names."""
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        hidden, intermediate = config.hidden_size, config.intermediate_size
        heads = {
            f"{attention}.q_proj": q_size,
            f"{attention}.k_proj": kv_size,
            f"{attention}.v_proj": kv_size,
        }
        gates = {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate}
        return cls(
            Projection(heads, hidden, config.qkv_bias),
            Projection({f"{attention}.o_proj": hidden}, q_size, config.o_bias),
            Projection(gates, hidden, config.mlp_bias),
            Projection({f"{mlp}.down_proj": hidden}, intermediate, config.mlp_bias),
        )


def projections(config: ModelConfig) -> Iterator[Projection]:
    """All matrix products, the head too where it is a matrix of its own."""
    for index in range(config.num_layers):
        block = BlockProjections.of(config, index)
        yield from (block.qkv, block.output, block.gate_up, block.down)
    if not config.tie_word_embeddings:
        yield head_projection(config)


def head_projection(config: ModelConfig) -> Projection:
    """The output matrix of a model that does not share it with the embedding."""
    return Projection({HEAD: config.vocab_size}, config.hidden_size, has_bias=False)


class DecoderLayer:
    """The weights of one block, in the order of their use."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        storage_of: StorageOf,
    ) -> None:
        prefix = f"model.layers.{index}"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        projections = BlockProjections.of(config, index)
        self.input_norm = RmsNorm(f"{prefix}.input_layernorm", hidden, eps, dtype, device)
        self.qkv: Linear = build_linear(projections.qkv, storage_of, dtype, device)
        self.output: Linear = build_linear(projections.output, storage_of, dtype, device)
        self.mlp_norm = RmsNorm(f"{prefix}.post_attention_layernorm", hidden, eps, dtype, device)
        self.gate_up: Linear = build_linear(projections.gate_up, storage_of, dtype, device)
        self.down: Linear = build_linear(projections.down, storage_of, dtype, device)

    def layers(self) -> tuple[Layer, ...]:
        """All that has weights."""
        return (
            self.input_norm,
            self.qkv,
            self.output,
            self.mlp_norm,
            self.gate_up,
            self.down,
        )


class Decoder:
    """Token ids to hidden states to logits; keys and values go through an `Attention`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        storage_of: StorageOf = everything_plain,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, dtype, device
        )
        self.blocks = [
            DecoderLayer(config, index, dtype, device, storage_of)
            for index in range(config.num_layers)
        ]
        self.final_norm = RmsNorm(
            "model.norm", config.hidden_size, config.rms_norm_eps, dtype, device
        )
        self.head: Linear = (
            TiedHead(self.embedding)
            if config.tie_word_embeddings
            else build_linear(head_projection(config), storage_of, dtype, device)
        )
        self.rope = Rope(*inverse_frequencies(config.rope, config.head_dim), dtype, device)
        self.adapter_rows: AdapterRows | None = None
        """None without LoRA adapters; `weights/adapters.py` adds them."""
        self.num_adapters = 0

    def forward(
        self,
        token_ids: Tensor,
        attention: Attention[Plan_contra],
        plan: Plan_contra,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Compute a step; `[tokens]` int64 to `[tokens, hidden_size]`, normalised.

        `adapters` is `[tokens]` int32: which LoRA adapter each row uses, -1 for none.
        """
        self.choose_adapters(adapters)
        x = self.embedding(token_ids)
        residual: Tensor | None = None
        for index in range(len(self.blocks)):
            x, residual = self.block(index, x, residual, attention, plan)
        x, _ = self.final_norm(x, residual)
        return x

    def block(
        self,
        index: int,
        x: Tensor,
        residual: Tensor | None,
        attention: Attention[Plan_contra],
        plan: Plan_contra,
    ) -> tuple[Tensor, Tensor]:
        """Compute one block of a step.

        Args:
            index: Which block.
            x: `[tokens, hidden_size]`, what the block before adds to the residual stream; of the
                first block the embeddings.
            residual: `[tokens, hidden_size]`, the stream before `x`, which may be written to; None
                in the first block.
            attention: Keeps the keys and values.
            plan: Where they are.

        Returns:
            What this block's MLP adds, and the stream before it.
        """
        block = self.blocks[index]
        qkv, residual = block.input_norm.into(block.qkv, x, residual)
        attention.write(index, qkv, plan)
        x = block.output(attention.attend(index, qkv, plan))
        return feed_forward(block.mlp_norm, block.gate_up, block.down, x, residual)

    def choose_adapters(self, adapters: Tensor | None) -> None:
        """Say which LoRA adapter each row of what follows uses: `[tokens]` int32, -1 for none."""
        if self.adapter_rows is not None:
            self.adapter_rows.value = adapters

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary: `[rows, hidden_size]` to `[rows, vocab_size]` of the same type."""
        return self.head(hidden)

    def layers(self) -> Iterator[Layer]:
        """All that has weights, in the order of their use."""
        yield self.embedding
        for block in self.blocks:
            yield from block.layers()
        yield self.final_norm
        yield self.head

    def weight_bytes(self) -> int:
        """Bytes of all parameters; a packed copy of a tied head is not among them."""
        return sum(
            _num_bytes(parameter)
            for layer in self.layers()
            if not isinstance(layer, TiedHead)
            for parameter in layer.parameters()
        )

    def packed_head_bytes(self) -> int:
        """Bytes of the packed copy of a tied head, 0 where there is none."""
        if not isinstance(self.head, TiedHead):
            return 0
        return sum(_num_bytes(parameter) for parameter in self.head.parameters())


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
