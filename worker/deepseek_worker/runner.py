"""Brings one batch to the device and through the model: the tensors of a step.

`prepare` turns counts and pages into tensors, `forward` computes. Neither changes a sequence,
and both may be called again for the same entries: keys and values land in the same rows.
`TorchRunner` runs everywhere and has its results at once; `graph_runner.py` is for GPUs.
"""

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepseek_worker.layers.attention import AttentionPlan, Span, TorchAttention
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.sampler import Sampled, sample, token_logprobs
from deepseek_worker.scheduler import Scheduled
from deepseek_worker.sequence import NO_ADAPTER, TokenLogprobs

# Prompt logprobs need logits of every position: as many rows at once as fit this.
LOGITS_CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, ready to compute."""

    entries: tuple[Scheduled, ...]
    """In the order of the rows: decoding ones first, longest first."""
    token_ids: Tensor
    attention: AttentionPlan
    last_rows: Tensor
    """Rows whose logits choose a token, one for each sampled entry."""
    adapters: Tensor | None
    """`[tokens]` int32: the rows' LoRA adapters; None where no row has one."""


class StepResult(Protocol):
    """What the forward pass gives for one entry."""

    @property
    def sampled(self) -> Sampled | None:
        """None where the entry yields no token."""

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that follow the entry's positions."""

    @property
    def is_finite(self) -> bool:
        """Whether all logits that were looked at are numbers."""


class Runner(Protocol):
    """The model, its pool, and how a step becomes tensors."""

    keeps_ahead: bool
    """Whether the next step may be launched before this one's results are looked at."""

    @property
    def workspace_bytes(self) -> int:
        """Memory kept between steps, weights and pages aside."""

    def seconds_left(self) -> float:
        """How long the device is busy at least with what was launched; 0 where unknown."""

    def prepare(self, entries: Many[Scheduled]) -> Any:
        """Lay the entries out as rows."""

    def forward(self, inputs: Any) -> Mapping[Scheduled, StepResult]:
        """Compute what `prepare` laid out, and sample."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A `StepResult` that is there."""

    sampled: Sampled | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def is_finite(self) -> bool:
        """See `StepResult`."""
        return are_finite(self.sampled, self.prompt_logprobs)


def are_finite(sampled: Sampled | None, prompt_logprobs: tuple[TokenLogprobs, ...]) -> bool:
    """Whether a row was sampled, if it should be, and every prompt token has a logprob."""
    has_token = sampled is None or sampled.token_id is not None
    return has_token and not any(math.isnan(row.logprob) for row in prompt_logprobs)


def prompt_rows_to_score(entry: Scheduled, chunk: int) -> Iterator[tuple[slice, list[int]]]:
    """Rows of an entry and the prompt tokens that follow them, at most `chunk` at once."""
    sequence = entry.sequence
    if not sequence.lacks_prompt_logprobs:
        return
    # Position p scores the token at p + 1.
    last = min(entry.end, sequence.num_prompt_tokens - 1)
    for first in range(entry.start, last, chunk):
        end = min(first + chunk, last)
        rows = slice(first - entry.start, end - entry.start)
        yield rows, sequence.tokens[first + 1 : end + 1]


class TorchRunner:
    """Computes with torch alone, step by step; see `Runner`."""

    keeps_ahead = False

    def __init__(self, decoder: Decoder, pool: KvPool, default_seed: int) -> None:
        self._decoder = decoder
        self._attention = TorchAttention(
            pool, decoder.config.num_heads, decoder.dtype, decoder.rope
        )
        self._default_seed = default_seed

    @property
    def workspace_bytes(self) -> int:
        """See `Runner`."""
        return self._attention.workspace_bytes

    def seconds_left(self) -> float:
        """See `Runner`; nothing is under way between steps."""
        return 0.0

    def prepare(self, entries: Many[Scheduled]) -> StepInputs:
        """See `Runner`."""
        ordered = tuple(sorted(entries, key=_row_order))
        token_ids: list[int] = []
        last_rows: list[int] = []
        for entry in ordered:
            token_ids += entry.sequence.tokens[entry.start : entry.end]
            if entry.is_sampled:
                last_rows.append(len(token_ids) - 1)
        spans = [Span(entry.sequence.pages, entry.start, entry.end) for entry in ordered]
        return StepInputs(
            entries=ordered,
            token_ids=self._tensor(token_ids),
            attention=self._attention.plan(spans),
            last_rows=self._tensor(last_rows),
            adapters=self._adapters(ordered),
        )

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> dict[Scheduled, StepResult]:
        """See `Runner`."""
        hidden = self._decoder.forward(
            inputs.token_ids, self._attention, inputs.attention, inputs.adapters
        )
        sampled_entries = [entry for entry in inputs.entries if entry.is_sampled]
        sampled: dict[Scheduled, Sampled] = {}
        if sampled_entries:
            logits = self._decoder.logits(hidden.index_select(0, inputs.last_rows))
            sequences = [entry.sequence for entry in sampled_entries]
            sampled = dict(
                zip(sampled_entries, sample(logits, sequences, self._default_seed), strict=True)
            )
        results: dict[Scheduled, StepResult] = {}
        first_row = 0
        for entry in inputs.entries:
            rows = hidden[first_row : first_row + entry.num_tokens]
            first_row += entry.num_tokens
            results[entry] = Computed(sampled.get(entry), self._prompt_logprobs(entry, rows))
        return results

    def _prompt_logprobs(self, entry: Scheduled, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        chunk = max(1, LOGITS_CHUNK_BYTES // (4 * self._decoder.config.vocab_size))
        scored: list[TokenLogprobs] = []
        for rows, token_ids in prompt_rows_to_score(entry, chunk):
            logits = self._decoder.logits(hidden[rows])
            scored += token_logprobs(logits, token_ids, entry.sequence, of_prompt=True)
        return tuple(scored)

    def _adapters(self, entries: Many[Scheduled]) -> Tensor | None:
        """The adapter of each row; None where no row has one, so that nothing is computed."""
        if all(entry.sequence.adapter == NO_ADAPTER for entry in entries):
            return None
        rows = [entry.sequence.adapter for entry in entries for _ in range(entry.num_tokens)]
        return torch.tensor(rows, dtype=torch.int32, device=self._decoder.device)

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._decoder.device)


def _row_order(entry: Scheduled) -> tuple[bool, int]:
    """Decoding rows first, longest first, so that those of similar length are neighbours."""
    is_chunk = entry.num_tokens > 1 or entry.start == 0
    return (is_chunk, 0 if is_chunk else -entry.end)
