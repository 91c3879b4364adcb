"""The decoder that Llama and Qwen2 share: the forward pass is written out once, here.

The two differ in which projections have biases, which `ModelConfig` says.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from deepseek_worker.layers.activation import silu_and_mul
from deepseek_worker.layers.attention import AttentionPlan, TorchAttention
from deepseek_worker.layers.linear import Embedding, Linear, TiedHead
from deepseek_worker.layers.norm import RmsNorm
from deepseek_worker.layers.parameters import Layer
from deepseek_worker.layers.rope import Rope, inverse_frequencies
from deepseek_worker.models.config import ModelConfig


class DecoderLayer:
    """The weights of one block, in the order of their use."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        hidden, intermediate, eps = (
            config.hidden_size,
            config.intermediate_size,
            config.rms_norm_eps,
        )
        self.input_norm = RmsNorm(f"{prefix}.input_layernorm", hidden, eps, dtype, device)
        self.qkv = Linear(
            {
                f"{attention}.q_proj": q_size,
                f"{attention}.k_proj": kv_size,
                f"{attention}.v_proj": kv_size,
            },
            hidden,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.output = Linear(
            {f"{attention}.o_proj": hidden}, q_size, bias=config.o_bias, dtype=dtype, device=device
        )
        self.mlp_norm = RmsNorm(f"{prefix}.post_attention_layernorm", hidden, eps, dtype, device)
        self.gate_up = Linear(
            {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate},
            hidden,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.down = Linear(
            {f"{mlp}.down_proj": hidden},
            intermediate,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )

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
    """Token ids to hidden states to logits; keys and values go through `TorchAttention`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, dtype, device
        )
        self.blocks = [
            DecoderLayer(config, index, dtype, device) for index in range(config.num_layers)
        ]
        self.final_norm = RmsNorm(
            "model.norm", config.hidden_size, config.rms_norm_eps, dtype, device
        )
        self.head: Linear = (
            TiedHead(self.embedding)
            if config.tie_word_embeddings
            else Linear(
                {"lm_head": config.vocab_size},
                config.hidden_size,
                bias=False,
                dtype=dtype,
                device=device,
            )
        )
        self.rope = Rope(*inverse_frequencies(config.rope, config.head_dim), dtype, device)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: TorchAttention, plan: AttentionPlan
    ) -> Tensor:
        """Compute a step; `[tokens]` int64 twice to `[tokens, hidden_size]`, normalised."""
        cosine, signed_sine = self.rope.angles(positions)
        x = self.embedding(token_ids)
        residual: Tensor | None = None
        for index, block in enumerate(self.blocks):
            x, residual = block.input_norm(x, residual)
            qkv = block.qkv(x)
            attention.write(index, qkv, cosine, signed_sine, plan)
            x = block.output(attention.attend(index, qkv, plan))
            x, residual = block.mlp_norm(x, residual)
            x = block.down(silu_and_mul(block.gate_up(x)))
        x, _ = self.final_norm(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary: `[rows, hidden_size]` to `[rows, vocab_size]` float32."""
        return self.head(hidden).float()

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
