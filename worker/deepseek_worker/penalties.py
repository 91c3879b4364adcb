"""What changes the logits of running sequences before a token is chosen, kept on the device.

A sequence with penalties, biases or banned end tokens has a row of state there: how often it
generated each token, which are in its prompt, which end it. The row is written when its first
token is chosen; from then on the device counts by itself, so a step can be launched before the
host knows the token of the one before. Sequences without take no memory and no time.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepseek_kernels import penalize
from deepseek_kernels.penalties import IN_PROMPT, IS_END
from deepseek_worker.sampler import is_penalized, to_device
from deepseek_worker.sequence import MAX_LOGIT_BIASES, Sequence

LEAST_ROWS = 8
NOBODY = -1


@dataclass(slots=True)
class _State:
    """The row of a slot: whose it is, and what is in it."""

    sequence: Sequence
    num_preemptions: int
    """Of the sequence when the row was written: after a preemption it is written again."""
    num_counted: int
    """Generated tokens that are in the counts."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A row of logits from which a token is chosen."""

    row: int
    sequence: Sequence
    input_row: int | None
    """Where in the step's tokens the sequence's newest one is; None for a chunk of a prompt."""


class Penalties:
    """The states of all slots."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, int] = {}
        """By slot; one that had a row keeps it."""
        self._states: dict[int, _State] = {}
        """By slot."""
        self._seen = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._bias_tokens = torch.zeros(0, MAX_LOGIT_BIASES, dtype=torch.int32, device=device)
        self._bias_values = torch.zeros(0, MAX_LOGIT_BIASES, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Of the states that there is room for."""
        return self._seen.nbytes + self._bias_tokens.nbytes + self._bias_values.nbytes

    def apply(
        self, logits: Tensor, token_ids: Tensor, chosen: Many[Chosen]
    ) -> tuple[Tensor, Tensor]:
        """Change the rows that tokens are chosen from; nothing here waits for the device.

        It may be called again for the same step: a token is counted once.

        Args:
            logits: `[sampled, vocab_size]`; stays as it is.
            token_ids: `[tokens]` int64, the step's input.
            chosen: Rows of `logits`, at most one for each sequence.

        Returns:
            `[chosen, vocab_size]` in the type of `logits`, and `[chosen]` int64: the rows.
        """
        sequences = [one.sequence for one in chosen]
        states = [self._row_of(sequence) for sequence in sequences]
        uncounted = [self._uncounted(one) for one in chosen]
        sampling = [sequence.request.sampling for sequence in sequences]
        integers = (
            [one.row for one in chosen],
            states,
            uncounted,
            [s.num_generated_tokens < s.request.sampling.min_tokens for s in sequences],
            [len(one.logit_bias) for one in sampling],
        )
        numbers = (
            [one.repetition_penalty for one in sampling],
            [one.frequency_penalty for one in sampling],
            [one.presence_penalty for one in sampling],
        )
        rows, state_rows, previous, is_banning, num_biases = self._columns(integers, torch.int64)
        repetition, frequency, presence = self._columns(numbers, torch.float32)
        changed = penalize(
            logits,
            token_ids,
            rows,
            state_rows,
            previous,
            is_banning,
            num_biases,
            repetition,
            frequency,
            presence,
            self._seen,
            self._bias_tokens,
            self._bias_values,
        )
        for sequence, place in zip(sequences, uncounted, strict=True):
            if place != NOBODY:
                self._states[sequence.slot].num_counted += 1
        return changed, rows

    def compile(self, logits: Tensor) -> None:
        """Have the kernel compiled for logits of this type and shape."""
        number = torch.zeros(1, dtype=torch.int64, device=self._device)
        penalty = torch.ones(1, device=self._device)
        penalize(
            logits,
            number,
            number,
            number,
            number,
            number,
            number,
            penalty,
            penalty,
            penalty,
            self._seen.new_zeros(1, self._vocab_size),
            self._bias_tokens.new_zeros(1, MAX_LOGIT_BIASES),
            self._bias_values.new_zeros(1, MAX_LOGIT_BIASES),
        )

    def _row_of(self, sequence: Sequence) -> int:
        """The sequence's row, written if it is new; `NOBODY` where nothing changes its logits."""
        if not is_penalized(sequence):
            return NOBODY
        slot = sequence.slot
        row = self._rows.get(slot)
        if row is None:
            row = len(self._rows)
            self._make_room(row + 1)
            self._rows[slot] = row
        state = self._states.get(slot)
        if (
            state is None
            or state.sequence is not sequence
            or state.num_preemptions != sequence.num_preemptions
        ):
            self._write(row, sequence)
            self._states[slot] = _State(
                sequence, sequence.num_preemptions, sequence.num_generated_tokens
            )
        return row

    def _uncounted(self, chosen: Chosen) -> int:
        """Where the token is that the counts lack; `NOBODY` where they have all."""
        sequence = chosen.sequence
        if not is_penalized(sequence):
            return NOBODY
        num_missing = sequence.num_generated_tokens - self._states[sequence.slot].num_counted
        if num_missing == 0:
            return NOBODY
        # Tokens are counted in the step after the one that chose them, which all have this as
        # their only input.
        assert num_missing == 1  # noqa: S101 - as said
        assert chosen.input_row is not None  # noqa: S101 - as said
        return chosen.input_row

    def _write(self, row: int, sequence: Sequence) -> None:
        """Bring what the host knows to the device: then it knows all of the sequence's tokens."""
        prompt = sequence.request.prompt_token_ids
        generated = sequence.tokens[len(prompt) :]
        seen = np.bincount(np.array(generated, dtype=np.int64), minlength=self._vocab_size)
        seen = seen.astype(np.int32)
        seen[np.array(prompt, dtype=np.int64)] |= IN_PROMPT
        ends = [token for token in sequence.stop_token_ids if token < self._vocab_size]
        seen[np.array(ends, dtype=np.int64)] |= IS_END
        self._seen[row].copy_(to_device(torch.from_numpy(seen), self._device))
        biases = sequence.request.sampling.logit_bias
        if biases:
            tokens, values = zip(*biases, strict=True)
            for table, column in ((self._bias_tokens, tokens), (self._bias_values, values)):
                numbers = torch.tensor(column, dtype=table.dtype)
                table[row, : len(biases)].copy_(to_device(numbers, self._device))

    def _make_room(self, num_rows: int) -> None:
        """Have at least so many rows; what is in those that there are stays."""
        before = len(self._seen)
        if num_rows <= before:
            return
        room = min(self._num_slots, max(LEAST_ROWS, 2 * before))
        tables = (self._seen, self._bias_tokens, self._bias_values)
        larger = [table.new_zeros(room, table.shape[1]) for table in tables]
        for old, new in zip(tables, larger, strict=True):
            new[:before].copy_(old)
        self._seen, self._bias_tokens, self._bias_values = larger

    def _columns(self, columns: Many[Many[float]], dtype: torch.dtype) -> list[Tensor]:
        """Columns as tensors on the device, by one copy; each begins at a multiple of 16 bytes."""
        num = len(columns[0])
        packed = torch.zeros(len(columns), -(-num // 4) * 4, dtype=dtype)
        packed[:, :num] = torch.tensor(columns, dtype=dtype)
        return [column[:num] for column in to_device(packed, self._device)]
