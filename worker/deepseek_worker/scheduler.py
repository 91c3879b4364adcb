"""Decides which tokens of which sequences the next step computes. Knows counts, no tensors.

`Engine.step` calls `schedule` for a `Batch`, and after the forward pass `advance`, `append` and
`finish`. The rules, in this order:

1. Decoding sequences get one token each, then prompts that are half read, then new ones: a long
   prompt is read in chunks beside the others' decoding and never stops it.
2. A request is admitted only when the pages of its whole prompt are available, and one page for
   every running sequence besides, so that admission does not cause preemption at once.
3. A request that does not fit yet may be passed by smaller ones behind it, `MAX_TIMES_PASSED`
   times; then nothing overtakes it.
4. A decoding sequence that finds no page preempts the one that is cheapest to recompute, but
   never the oldest: the oldest always runs to its end, so every request does.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from deepseek_worker.blocks import PagePool, page_digest, root_digest
from deepseek_worker.sequence import FinishReason, Sequence

MAX_TIMES_PASSED = 32
MAX_WAITING_LOOKED_AT = 128


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Compute `tokens[start : start + num_tokens]` of one sequence in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """First position after the computed ones."""
        return self.start + self.num_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether the step yields the sequence's next token."""
        num_known = len(self.sequence.tokens)
        return self.end == num_known < self.sequence.max_total_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: decoding sequences first."""

    entries: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(entry.num_tokens for entry in self.entries)


class Scheduler:
    """The waiting and the running sequences, and the pages they hold."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_tokens: int,
        max_running_requests: int,
        max_batch_tokens: int,
        prefix_cache: bool,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.page_tokens = page_tokens
        self.max_running_requests = max_running_requests
        self.max_batch_tokens = max_batch_tokens
        self.prefix_cache = prefix_cache
        self.waiting: list[Sequence] = []
        self.running: dict[Sequence, None] = {}
        """A set that keeps the order of admission."""
        self.num_preemptions = 0
        self.num_waiting_pages = 0
        """Pages that the waiting sequences' known tokens need."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the pool when alone."""
        assert self.pages_for(sequence.max_total_tokens) <= self.pool.num_pages  # noqa: S101
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its pages are free at once."""
        if sequence in self.running:
            self.finish(sequence)
        else:
            self._dequeue(sequence)

    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_tokens)

    def schedule(self) -> Batch:
        """Choose the next step's work; empty only when there is none at all."""
        entries: dict[Sequence, Scheduled] = {}
        budget = self.max_batch_tokens
        num_preemptions_before = self.num_preemptions
        for sequence in sorted(self.running, key=lambda s: not s.is_decoding):
            if budget == 0:
                break
            if sequence not in self.running:
                continue
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            for victim in self._make_room(sequence, sequence.num_computed_tokens + num_tokens):
                freed = entries.pop(victim, None)
                budget += freed.num_tokens if freed else 0
            if sequence in self.running:
                entries[sequence] = Scheduled(sequence, sequence.num_computed_tokens, num_tokens)
                budget -= num_tokens
        if self.num_preemptions == num_preemptions_before:
            for sequence in self._admit(budget):
                num_tokens = min(sequence.num_uncomputed_tokens, budget)
                entries[sequence] = Scheduled(sequence, sequence.num_computed_tokens, num_tokens)
                budget -= num_tokens
        return Batch(tuple(entries.values()))

    def advance(self, entry: Scheduled) -> None:
        """Record that the entry's KV is in its pages, and offer full pages to later prompts."""
        sequence = entry.sequence
        sequence.num_computed_tokens = entry.end
        if not self.prefix_cache:
            return
        num_full = entry.end // self.page_tokens
        digests = self._digests(sequence, num_full)
        for index in range(sequence.num_registered_pages, num_full):
            self.pool.register(sequence.pages[index], digests[index])
        sequence.num_registered_pages = max(sequence.num_registered_pages, num_full)

    def append(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Add the sampled token; a reason means that the sequence has to be finished."""
        sequence.tokens.append(token_id)
        if token_id in sequence.stop_token_ids:
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.max_total_tokens else None

    def finish(self, sequence: Sequence) -> None:
        """End a running sequence; its full pages stay cached until they are needed."""
        del self.running[sequence]
        self.pool.release(sequence.pages)
        sequence.pages.clear()

    def finish_broken(self, sequence: Sequence) -> None:
        """End a running sequence whose KV is not to be trusted: nobody will find it."""
        self.pool.forget(sequence.pages)
        self.finish(sequence)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken; for tests, after every step."""
        self.pool.check(sequence.pages for sequence in self.running)
        assert len(self.running) <= self.max_running_requests  # noqa: S101
        assert self.waiting == sorted(self.waiting, key=_order)  # noqa: S101
        assert not set(self.waiting) & set(self.running)  # noqa: S101
        assert self.num_waiting_pages == sum(  # noqa: S101
            self.pages_for(len(sequence.tokens)) for sequence in self.waiting
        )
        for sequence in self.waiting:
            assert not sequence.pages  # noqa: S101
            assert sequence.num_computed_tokens == 0  # noqa: S101
        for sequence in self.running:
            assert 0 <= sequence.num_computed_tokens < len(sequence.tokens)  # noqa: S101
            assert len(sequence.tokens) <= sequence.max_total_tokens  # noqa: S101
            assert self.pages_for(sequence.num_computed_tokens) <= len(sequence.pages)  # noqa: S101
            assert len(sequence.pages) <= self.pages_for(sequence.max_total_tokens)  # noqa: S101

    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_order)
        self.num_waiting_pages += self.pages_for(len(sequence.tokens))

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.num_waiting_pages -= self.pages_for(len(sequence.tokens))

    def _make_room(self, sequence: Sequence, num_tokens: int) -> list[Sequence]:
        """Give the sequence pages for `num_tokens`; returns whom that preempted, itself maybe."""
        num_missing = self.pages_for(num_tokens) - len(sequence.pages)
        preempted = []
        while num_missing > self.pool.num_available:
            victim = self._cheapest_victim()
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return preempted
        if num_missing > 0:
            sequence.pages.extend(self.pool.allocate(num_missing))
        return preempted

    def _cheapest_victim(self) -> Sequence:
        oldest = min(self.running, key=_order)
        others = [sequence for sequence in self.running if sequence is not oldest]
        # Among equals the newest, which has waited least.
        return min(others, key=lambda s: (s.num_computed_tokens, -s.order))

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self.pool.release(sequence.pages)
        sequence.pages.clear()
        sequence.num_computed_tokens = 0
        sequence.num_registered_pages = 0
        sequence.num_preemptions += 1
        if len(sequence.prompt_logprobs) < sequence.num_prompt_tokens:
            sequence.prompt_logprobs.clear()
        self.num_preemptions += 1
        self._enqueue(sequence)

    def _admit(self, budget: int) -> Iterator[Sequence]:
        """Start waiting sequences that fit, oldest first, as long as the budget lasts."""
        passed: list[Sequence] = []
        for sequence in self.waiting[:MAX_WAITING_LOOKED_AT]:
            if budget <= 0 or len(self.running) >= self.max_running_requests:
                return
            if self._try_to_start(sequence):
                for other in passed:
                    other.num_times_passed += 1
                budget -= sequence.num_uncomputed_tokens
                yield sequence
            elif sequence.num_times_passed >= MAX_TIMES_PASSED:
                return
            else:
                passed.append(sequence)

    def _try_to_start(self, sequence: Sequence) -> bool:
        cached = self._cached_prefix(sequence)
        num_missing = self.pages_for(len(sequence.tokens)) - len(cached)
        num_taken = num_missing + self.pool.num_cached_of(cached)
        if num_taken + len(self.running) > self.pool.num_available:
            return False
        self._dequeue(sequence)
        self.pool.hold(cached)
        sequence.pages = cached + self.pool.allocate(num_missing)
        sequence.num_computed_tokens = len(cached) * self.page_tokens
        sequence.num_registered_pages = len(cached)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self.running[sequence] = None
        return True

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Pages to share. The newest token is always computed: its logits are wanted."""
        if not self.prefix_cache:
            return []
        if sequence.request.sampling.prompt_logprobs is not None and not sequence.prompt_logprobs:
            return []
        return self.pool.match(
            self._digests(sequence, (len(sequence.tokens) - 1) // self.page_tokens)
        )

    def _digests(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        digests = sequence.page_digests
        for index in range(len(digests), num_pages):
            parent = digests[-1] if digests else root_digest(sequence.request.cache_salt)
            first = index * self.page_tokens
            digests.append(page_digest(parent, sequence.tokens[first : first + self.page_tokens]))
        return digests[:num_pages]


def _order(sequence: Sequence) -> int:
    return sequence.order
