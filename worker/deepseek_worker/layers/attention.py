"""Attention over pages: what a decoder needs of it, and the form in torch that runs everywhere.

`layers/paged.py` is the form for GPUs. `TorchAttention.plan` turns a step's sequences into groups
once; `write` and `attend` then run for every layer on what the plan holds. A group is either

- decoding sequences of similar length: their pages are gathered side by side, padded to the
  longest and masked; the query heads of one KV head are the rows of one small matrix, so that
  keys and values are read once, or
- one chunk of one prompt, against its own pages, or against itself when it is the first and pages
  hold exactly what is written.

All attend to keys and values as the pages hold them, a token's own included: where a prompt is cut
into chunks, and what of it is cached, changes no answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepseek_worker.layers.rope import Rope, rotate
from deepseek_worker.memory.pool import KV_TYPES, KvPool

# Pages of padding that cost less than computing one more group.
MAX_PADDING_PAGES = 16


Plan_contra = TypeVar("Plan_contra", contravariant=True)


class Attention(Protocol[Plan_contra]):
    """What the layers of a decoder do with their queries, keys and values in one step."""

    def write(self, layer: int, qkv: Tensor, plan: Plan_contra) -> None:
        """Rotate queries in place, and store rotated keys, and values, in the pages.

        Args:
            layer: Index of the decoder layer.
            qkv: `[tokens, (heads + 2 * kv_heads) * head_dim]`.
            plan: Of this step: positions, pages and which rows belong together.
        """

    def attend(self, layer: int, qkv: Tensor, plan: Plan_contra) -> Tensor:
        """Attend with the written step's queries; returns `[tokens, heads * head_dim]`."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens `[start, end)` of one sequence, whose pages hold everything before `end`."""

    pages: Sequence[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of the step that are attended together."""

    rows: slice
    num_sequences: int
    context: int
    """Keys to attend to, padding included; 0 for a first chunk that needs no pages."""
    pages: Tensor | None
    """The pages to gather, `[num_sequences * pages of the longest]`; None where none are needed."""
    mask: Tensor | None
    """0 or minus infinity, added to the scores; None for a first chunk, which is causal."""

    @property
    def is_decoding(self) -> bool:
        """Whether each sequence has one row, and pages behind it."""
        return self.context > 0 and self.num_sequences == self.rows.stop - self.rows.start


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one step share."""

    angles: tuple[Tensor, Tensor]
    """Of `Rope.angles`."""
    write_pages: Tensor
    """The page of each token's key and value."""
    write_offsets: Tensor
    """Their places in those pages."""
    groups: tuple[Group, ...]


class TorchAttention:
    """Writes keys and values into the pool, and attends to them."""

    def __init__(self, pool: KvPool, num_heads: int, dtype: torch.dtype, rope: Rope) -> None:
        self._pool = pool
        self._rope = rope
        self._num_heads = num_heads
        self._dtype = dtype
        self._rounds = any(KV_TYPES[kind] != dtype for kind in pool.formats)
        self._workspace = pool.data.new_empty(0)

    @property
    def workspace_bytes(self) -> int:
        """Memory kept between steps for gathered pages."""
        return self._workspace.nbytes

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """Group the step's spans; decoding ones come first, longest first."""
        page_tokens = self._pool.page_tokens
        self._clear_last_pages(spans)
        places = [(span, index) for span in spans for index in range(span.start, span.end)]
        num_decoding = sum(span.end - span.start == 1 and span.start > 0 for span in spans)
        groups = self._decode_groups(spans[:num_decoding])
        first_row = num_decoding
        for span in spans[num_decoding:]:
            groups.append(self._chunk_group(span, first_row))
            first_row += span.end - span.start
        return AttentionPlan(
            self._rope.angles(self._tensor([index for _, index in places])),
            self._tensor([span.pages[index // page_tokens] for span, index in places]),
            self._tensor([index % page_tokens for _, index in places]),
            tuple(groups),
        )

    def write(self, layer: int, qkv: Tensor, plan: AttentionPlan) -> None:
        """See `Attention`; keys are rotated in place too."""
        head_dim, kv_heads = self._pool.head_dim, self._pool.kv_heads
        num_rotated = self._num_heads + kv_heads
        heads = qkv[:, : num_rotated * head_dim].view(-1, num_rotated, head_dim)
        heads.copy_(rotate(heads, *plan.angles))
        keys_values = qkv[:, self._num_heads * head_dim :].view(-1, 2, kv_heads, head_dim)
        self._pool.layers[layer].write(plan.write_pages, plan.write_offsets, keys_values)

    def attend(self, layer: int, qkv: Tensor, plan: AttentionPlan) -> Tensor:
        """See `Attention`."""
        outputs = [
            self._attend_decoding(layer, qkv, group)
            if group.is_decoding
            else self._attend_chunk(layer, qkv, group)
            for group in plan.groups
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_decoding(self, layer: int, qkv: Tensor, group: Group) -> Tensor:
        head_dim, kv_heads = self._pool.head_dim, self._pool.kv_heads
        keys, values = self._gather(layer, group)
        queries = qkv[group.rows, : self._num_heads * head_dim]
        attended = scaled_dot_product_attention(
            queries.view(-1, kv_heads, self._num_heads // kv_heads, head_dim),
            keys,
            values,
            attn_mask=group.mask,
        )
        return attended.flatten(1)

    def _attend_chunk(self, layer: int, qkv: Tensor, group: Group) -> Tensor:
        head_dim, kv_heads = self._pool.head_dim, self._pool.kv_heads
        heads = qkv[group.rows].view(-1, self._num_heads + 2 * kv_heads, head_dim)
        heads = heads.transpose(0, 1)[None]
        queries = heads[:, : self._num_heads]
        if group.context:
            keys, values = self._gather(layer, group)
        else:
            keys = heads[:, self._num_heads : self._num_heads + kv_heads]
            values = heads[:, self._num_heads + kv_heads :]
        attended = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=group.mask,
            is_causal=group.mask is None,
            enable_gqa=kv_heads != self._num_heads,
        )
        return attended[0].transpose(0, 1).flatten(1)

    def _gather(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        """Keys and values `[sequences, kv_heads, context, head_dim]`, views of the workspace.

        The next group of the same layer overwrites them.
        """
        assert group.pages is not None  # noqa: S101 -- only groups with a context are gathered
        num_bytes = len(group.pages) * self._pool.largest_layer_bytes
        if num_bytes > len(self._workspace):
            self._workspace = self._workspace.new_empty(num_bytes)
        gathered = self._pool.layers[layer].read(group.pages, self._dtype, self._workspace)
        tokens = gathered.view(
            group.num_sequences, -1, 2, self._pool.kv_heads, self._pool.head_dim
        )[:, : group.context]
        return tokens[:, :, 0].transpose(1, 2), tokens[:, :, 1].transpose(1, 2)

    def _clear_last_pages(self, spans: Sequence[Span]) -> None:
        """Clear pages that this step begins and does not fill.

        The rest of such a page is read under a mask, which cannot hide the NaN that a broken
        sequence may have left there.
        """
        page_tokens = self._pool.page_tokens
        begun = [
            span.pages[span.end // page_tokens]
            for span in spans
            if span.end % page_tokens and span.end // page_tokens * page_tokens >= span.start
        ]
        if begun:
            self._pool.clear(begun)

    def _decode_groups(self, spans: Sequence[Span]) -> list[Group]:
        page_tokens = self._pool.page_tokens
        groups: list[Group] = []
        first = 0
        while first < len(spans):
            num_pages = -(-spans[first].end // page_tokens)
            last, padding = first + 1, 0
            while last < len(spans):
                padding += num_pages - -(-spans[last].end // page_tokens)
                if padding > max(MAX_PADDING_PAGES, (last - first) * num_pages // 4):
                    break
                last += 1
            groups.append(self._decode_group(spans[first:last], first, num_pages))
            first = last
        return groups

    def _decode_group(self, spans: Sequence[Span], first_row: int, num_pages: int) -> Group:
        longest = spans[0].end
        pages: list[int] = []
        for span in spans:
            # Padding repeats the first page, which holds finite numbers that the mask removes.
            used = list(span.pages[: -(-span.end // self._pool.page_tokens)])
            pages += used + used[:1] * (num_pages - len(used))
        mask = None
        if spans[-1].end != longest:
            lengths = self._tensor([span.end for span in spans])
            positions = torch.arange(longest, device=lengths.device)
            mask = self._additive(positions >= lengths[:, None])[:, None, None, :]
        return Group(
            rows=slice(first_row, first_row + len(spans)),
            num_sequences=len(spans),
            context=longest,
            pages=self._tensor(pages),
            mask=mask,
        )

    def _chunk_group(self, span: Span, first_row: int) -> Group:
        rows = slice(first_row, first_row + span.end - span.start)
        if span.start == 0 and not self._rounds:
            return Group(rows, 1, 0, None, None)
        pages = self._tensor(span.pages[: -(-span.end // self._pool.page_tokens)])
        if span.start == 0:
            return Group(rows, 1, span.end, pages, None)
        keys = torch.arange(span.end, device=pages.device)
        queries = torch.arange(span.start, span.end, device=pages.device)
        mask = self._additive(keys > queries[:, None])
        return Group(rows, 1, span.end, pages, mask)

    def _additive(self, is_hidden: Tensor) -> Tensor:
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=is_hidden.device)
        return mask.masked_fill_(is_hidden, float("-inf"))

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._pool.data.device)
