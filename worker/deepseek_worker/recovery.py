"""Computes as much of a batch as can be computed: level 1 of the recovery ladder.

An exception in the forward pass is no reason for every request to end. The batch is halved and
each half tried again, so that whoever runs into the error alone is found; after as many halvings
as `--retries-per-batch` allows the rest is tried one by one. A chunk that memory does not suffice
for alone is read in smaller ones, halved as often at most.

An error after which the device computes nothing any more is not for this level: it ends the
engine, and `GET /state` says so until the pod is replaced.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deepseek_worker.errors import DeviceFault
from deepseek_worker.memory.exhaustion import is_out_of_memory
from deepseek_worker.memory.faults import is_device_fault
from deepseek_worker.runner import Computed, StepResult
from deepseek_worker.scheduler import Scheduled

FAILURES_TO_EXHAUSTION = 3
"""So many requests in a row that fail alone, with none in between that can be computed, say that
the device has less memory than was planned with."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failed:
    """An entry that cannot be computed even alone."""

    reason: str
    message: str


Outcome = StepResult | Failed
Compute = Callable[[Sequence[Scheduled]], Mapping[Scheduled, StepResult]]
OnExhaustion = Callable[[int], None]


def compute_what_fits(
    entries: Sequence[Scheduled],
    compute: Compute,
    on_exhaustion: OnExhaustion,
    max_halvings: int,
    num_halvings: int = 0,
) -> Mapping[Scheduled, Outcome]:
    """Compute all entries, in parts if need be.

    Args:
        entries: The batch, or a part of it.
        compute: The forward pass; it may be repeated for the same entries.
        on_exhaustion: Called with the number of tokens that memory did not suffice for.
        max_halvings: How often a batch, or a chunk, is halved.
        num_halvings: How often the batch was halved to get here.

    Raises:
        DeviceFault: The device computes nothing any more.
    """
    if not entries:
        return {}
    try:
        return compute(entries)
    except Exception as error:
        if is_device_fault(error):
            raise DeviceFault(f"the device failed: {error}") from error
        is_exhausted = is_out_of_memory(error)
        logger.warning("Forward pass of %d sequences failed: %s", len(entries), error)
        failure = _failure(error, is_exhausted)
    if is_exhausted:
        on_exhaustion(sum(entry.num_tokens for entry in entries))
    if len(entries) > 1:
        return _each_part(entries, compute, on_exhaustion, max_halvings, num_halvings)
    (entry,) = entries
    if not is_exhausted or entry.num_tokens == 1 or num_halvings >= max_halvings:
        return {entry: failure}
    return {entry: _chunk_by_chunk(entry, compute, on_exhaustion, max_halvings, num_halvings + 1)}


@dataclass(slots=True)
class Exhaustion:
    """How often memory did not suffice even for one request alone."""

    num_failures: int = 0
    _num_in_a_row: int = 0

    @property
    def is_used_up(self) -> bool:
        """Whether there is no point in going on with this device."""
        return self._num_in_a_row >= FAILURES_TO_EXHAUSTION

    def note(self, outcomes: Mapping[Scheduled, Outcome]) -> None:
        """Take in what became of a batch."""
        failed = sum(
            isinstance(outcome, Failed) and outcome.reason == "OutOfMemory"
            for outcome in outcomes.values()
        )
        self.num_failures += failed
        if failed == len(outcomes):
            self._num_in_a_row += failed
        else:
            self._num_in_a_row = 0


def _each_part(
    entries: Sequence[Scheduled],
    compute: Compute,
    on_exhaustion: OnExhaustion,
    max_halvings: int,
    num_halvings: int,
) -> Mapping[Scheduled, Outcome]:
    size = -(-len(entries) // 2) if num_halvings < max_halvings else 1
    outcomes: dict[Scheduled, Outcome] = {}
    for first in range(0, len(entries), size):
        part = entries[first : first + size]
        # Alone, an entry starts anew: from there on its chunk is halved.
        num_halvings_of_part = num_halvings + 1 if len(part) > 1 else 0
        outcomes |= compute_what_fits(
            part, compute, on_exhaustion, max_halvings, num_halvings_of_part
        )
    return outcomes


def _chunk_by_chunk(
    entry: Scheduled,
    compute: Compute,
    on_exhaustion: OnExhaustion,
    max_halvings: int,
    num_halvings: int,
) -> Outcome:
    half = entry.num_tokens // 2
    parts = (
        Scheduled(entry.sequence, entry.start, half),
        Scheduled(entry.sequence, entry.start + half, entry.num_tokens - half),
    )
    outcomes = []
    for part in parts:
        found = compute_what_fits([part], compute, on_exhaustion, max_halvings, num_halvings)
        outcome = found[part]
        if isinstance(outcome, Failed):
            return outcome
        outcomes.append(outcome)
    return Computed(outcomes[1].sampled, outcomes[0].prompt_logprobs + outcomes[1].prompt_logprobs)


def _failure(error: Exception, is_exhausted: bool) -> Failed:
    if is_exhausted:
        return Failed(
            "OutOfMemory",
            "memory ran out even with this request alone; send a shorter prompt or try later",
        )
    return Failed("InternalError", f"the forward pass failed: {type(error).__name__}: {error}")
