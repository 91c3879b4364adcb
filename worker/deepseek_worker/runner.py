"""Brings one batch to the device and through the model: the tensors of a step.

`prepare` turns counts and pages into tensors, `forward` computes. Neither changes a sequence,
and both may be called again for the same entries: keys and values land in the same rows.
"""

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_worker.layers.attention import AttentionPlan, Span, TorchAttention
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.sampler import Sampled, sample, token_logprobs
from deepseek_worker.scheduler import Scheduled
from deepseek_worker.sequence import TokenLogprobs

# Prompt logprobs need logits of every position: as many rows at once as fit this.
LOGITS_CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, ready to compute."""

    entries: tuple[Scheduled, ...]
    """In the order of the rows: decoding ones first, longest first."""
    token_ids: Tensor
    positions: Tensor
    attention: AttentionPlan
    last_rows: Tensor
    """Rows whose logits choose a token, one for each sampled entry."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the forward pass gives for one entry."""

    sampled: Sampled | None
    """None where the entry yields no token."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens that follow the entry's positions."""

    @property
    def is_finite(self) -> bool:
        """Whether all logits that were looked at are numbers."""
        has_token = self.sampled is None or self.sampled.token_id is not None
        return has_token and not any(math.isnan(row.logprob) for row in self.prompt_logprobs)


class Runner:
    """The model, its pool, and how a step becomes tensors."""

    def __init__(self, decoder: Decoder, pool: KvPool, default_seed: int) -> None:
        self._decoder = decoder
        self._attention = TorchAttention(pool, decoder.config.num_heads, decoder.dtype)
        self._default_seed = default_seed

    @property
    def workspace_bytes(self) -> int:
        """Memory kept between steps, weights and pages aside."""
        return self._attention.workspace_bytes

    def prepare(self, entries: Many[Scheduled]) -> StepInputs:
        """Lay the entries out as rows."""
        ordered = tuple(sorted(entries, key=_row_order))
        token_ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for entry in ordered:
            token_ids += entry.sequence.tokens[entry.start : entry.end]
            positions += range(entry.start, entry.end)
            if entry.is_sampled:
                last_rows.append(len(token_ids) - 1)
        spans = [Span(entry.sequence.pages, entry.start, entry.end) for entry in ordered]
        return StepInputs(
            entries=ordered,
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            attention=self._attention.plan(spans),
            last_rows=self._tensor(last_rows),
        )

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> dict[Scheduled, StepResult]:
        """Compute the step and sample."""
        hidden = self._decoder.forward(
            inputs.token_ids, inputs.positions, self._attention, inputs.attention
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
            results[entry] = StepResult(sampled.get(entry), self._prompt_logprobs(entry, rows))
        return results

    def _prompt_logprobs(self, entry: Scheduled, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        sequence = entry.sequence
        num_prompt = sequence.num_prompt_tokens
        if (
            sequence.request.sampling.prompt_logprobs is None
            or len(sequence.prompt_logprobs) == num_prompt
        ):
            return ()
        # Position p scores the token at p + 1.
        last = min(entry.end, num_prompt - 1)
        chunk = max(1, LOGITS_CHUNK_BYTES // (4 * self._decoder.config.vocab_size))
        scored: list[TokenLogprobs] = []
        for first in range(entry.start, last, chunk):
            end = min(first + chunk, last)
            logits = self._decoder.logits(hidden[first - entry.start : end - entry.start])
            next_tokens = sequence.tokens[first + 1 : end + 1]
            scored += token_logprobs(logits, next_tokens, sequence, of_prompt=True)
        return tuple(scored)

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._decoder.device)


def _row_order(entry: Scheduled) -> tuple[bool, int]:
    """Decoding rows first, longest first, so that those of similar length are neighbours."""
    is_chunk = entry.num_tokens > 1 or entry.start == 0
    return (is_chunk, 0 if is_chunk else -entry.end)
