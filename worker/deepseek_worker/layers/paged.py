"""Attention over pages by the Triton kernels: the form that runs on a GPU.

A plan holds tensors only, none of which the host looks at, so that a captured step stays right
when the next step's page tables and lengths are written into the same memory. The rows of
decoding sequences come first, then the prompts' chunks, one after another, then padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_kernels import paged_decode, paged_prefill, rope_kv_write
from deepseek_worker.layers.rope import Rope
from deepseek_worker.memory.pool import KvPool


@dataclass(frozen=True, slots=True)
class DecodingRows:
    """The first rows of a step, as many as there may be: one token of each sequence."""

    page_table: Tensor
    """`[rows, max_pages]` int32."""
    lengths: Tensor
    """`[rows]` int32, the new token included; 0 where the row belongs to nobody or a prompt."""
    is_used: Tensor
    """`[rows, 1, 1]` bool: where `lengths` is not 0."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The chunks of prompts in a step, as many as there may be."""

    page_table: Tensor
    """`[prompts, max_pages]` int32."""
    starts: Tensor
    """`[prompts + 1]` int32: the first row of each, and the end of the last."""
    lengths: Tensor
    """`[prompts]` int32: tokens up to the end of the chunk; 0 for those that are not there."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What all layers of one step share."""

    positions: Tensor
    """`[tokens]` int64."""
    slots: Tensor
    """`[tokens]` int64, `page * page_tokens + offset`; negative for padding."""
    decoding: DecodingRows | None
    prompts: PromptRows | None
    """There is one of the two at least."""


class PagedAttention:
    """Writes keys and values into the pool, and attends to them; see `Attention`."""

    def __init__(self, pool: KvPool, num_heads: int, rope: Rope, max_positions: int) -> None:
        self._num_heads = num_heads
        self._kv_heads = pool.kv_heads
        self._head_dim = pool.head_dim
        self._angles = rope.table(max_positions)
        self._layers = pool.layers

    @property
    def workspace_bytes(self) -> int:
        """Memory kept between steps: the table of angles."""
        return self._angles.nbytes

    def write(self, layer: int, qkv: Tensor, plan: PagedPlan) -> None:
        """See `Attention`."""
        query, key, value = self._heads(qkv)
        cache = self._layers[layer]
        rope_kv_write(
            query,
            key,
            value,
            plan.positions,
            self._angles,
            cache.keys,
            cache.values,
            plan.slots,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )

    def attend(self, layer: int, qkv: Tensor, plan: PagedPlan) -> Tensor:
        """See `Attention`."""
        query, _, _ = self._heads(qkv)
        cache, decoding, prompts = self._layers[layer], plan.decoding, plan.prompts
        if decoding is not None:
            decoded = paged_decode(
                query[: len(decoding.lengths)],
                cache.keys,
                cache.values,
                decoding.page_table,
                decoding.lengths,
                key_scale=cache.key_scale,
                value_scale=cache.value_scale,
            )
            if prompts is None:
                return decoded.flatten(1)
        assert prompts is not None  # noqa: S101
        attended = paged_prefill(
            query,
            cache.keys,
            cache.values,
            prompts.page_table,
            prompts.starts,
            prompts.lengths,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )
        if decoding is not None:
            first = attended[: len(decoded)]
            torch.where(decoding.is_used, decoded, first, out=first)
        return attended.flatten(1)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views `[tokens, heads, head_dim]` of queries, keys and values."""
        heads = qkv.view(len(qkv), -1, self._head_dim)
        num_rotated = self._num_heads + self._kv_heads
        return (
            heads[:, : self._num_heads],
            heads[:, self._num_heads : num_rotated],
            heads[:, num_rotated:],
        )
