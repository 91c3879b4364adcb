"""Decides which tokens of which sequences the next step computes. Knows counts, no tensors.

`Engine.step` calls `schedule` for a `Batch` and `advance` for what it launched; once results are
there, which may be a step later, `register`, `resolve` and `finish`. The rules, in this order:

1. Decoding sequences get one token each, then prompts that are half read, then new ones: a long
   prompt is read in chunks beside the others' decoding and never stops it. A step with decoding
   sequences is short, unless so many prompts wait that reading them fast matters more. A short
   one is somewhat longer where that ends a prompt: a small rest would wait for a whole step.
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
from deepseek_worker.sequence import UNKNOWN_TOKEN, FinishReason, Sequence

MAX_TIMES_PASSED = 32
MAX_WAITING_LOOKED_AT = 128
LEAST_PROMPT_TOKENS = 256
"""Prompts go on at this pace at least, however many sequences decode."""
BACKLOG_PART = 8
"""A step that decoding sequences wait for reads this part of all unread prompts, so that pauses
are long only where much is to be read, and a long step costs less for each token."""

MORE_PART = 8
"""A short step may be longer by this part where that ends a prompt."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How much one step computes."""

    tokens: int
    """At most."""
    short_tokens: int
    """Where others' decoding waits for the step and few prompts wait."""
    chunks: int
    """Prompts, or parts of one, of more than one token."""

    @classmethod
    def plain(cls, tokens: int) -> "StepLimits":
        """One limit for all steps."""
        return cls(tokens, tokens, tokens)


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
        limits: StepLimits,
        prefix_cache: bool,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.page_tokens = page_tokens
        self.max_running_requests = max_running_requests
        self.limits = limits
        self.max_batch_tokens = limits.tokens
        """Most tokens of any step; lowered for a while when memory ran out."""
        self.prefix_cache = prefix_cache
        self.waiting: list[Sequence] = []
        self.running: dict[Sequence, None] = {}
        """A set that keeps the order of admission."""
        self.num_preemptions = 0
        self.num_waiting_pages = 0
        """Pages that the waiting sequences' known tokens need."""
        self._free_slots = list(range(max_running_requests - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the pool when alone."""
        assert self.pages_for(sequence.max_total_tokens) <= self.pool.num_pages  # noqa: S101
        self._enqueue(sequence)

    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_tokens)

    def schedule(self) -> Batch:
        """Choose the next step's work; empty when there is none, or only results to wait for."""
        entries: dict[Sequence, Scheduled] = {}
        room = _Room(self.max_batch_tokens, self.limits.chunks)
        num_preemptions_before = self.num_preemptions
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        reading = [sequence for sequence in self.running if not sequence.is_decoding]
        self._continue(decoding, entries, room)
        if entries:
            self._limit(room, len(entries), reading)
        self._continue(reading, entries, room)
        if self.num_preemptions == num_preemptions_before:
            for sequence in self._admit(room):
                _compute(sequence, entries, room)
        return Batch(tuple(entries.values()))

    def advance(self, entry: Scheduled) -> bool:
        """Record that the entry is being computed; returns whether that yields a token.

        `UNKNOWN_TOKEN` stands for that token until `resolve`.
        """
        is_sampled = entry.is_sampled
        entry.sequence.num_computed_tokens = entry.end
        if is_sampled:
            entry.sequence.tokens.append(UNKNOWN_TOKEN)
        return is_sampled

    def register(self, entry: Scheduled) -> None:
        """Offer the pages that a computed entry filled to later prompts."""
        if not self.prefix_cache:
            return
        sequence = entry.sequence
        num_full = entry.end // self.page_tokens
        digests = self._digests(sequence, num_full)
        for index in range(sequence.num_registered_pages, num_full):
            self.pool.register(sequence.pages[index], digests[index])
        sequence.num_registered_pages = max(sequence.num_registered_pages, num_full)

    def resolve(self, entry: Scheduled, token_id: int) -> FinishReason | None:
        """Fill in the token that the entry yielded; a reason means that the sequence is over."""
        sequence = entry.sequence
        sequence.tokens[entry.end] = token_id
        if token_id in sequence.stop_token_ids:
            return "stop"
        if (guide := sequence.request.guide) is not None:
            guide.advance(token_id)
            if guide.is_finished:
                return "stop"
        return "length" if entry.end + 1 >= sequence.max_total_tokens else None

    def finish(self, sequence: Sequence) -> None:
        """End a sequence; its full pages stay cached until they are needed."""
        if sequence in self.running:
            self._stop(sequence)
        else:
            self._dequeue(sequence)

    def distrust(self, sequence: Sequence) -> None:
        """Let nobody find the sequence's prefix any more: its KV is wrong.

        That includes pages that it held before a preemption, and those of others with its tokens.
        """
        self.pool.forget(sequence.page_digests)

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
        slots = [sequence.slot for sequence in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_running_requests))  # noqa: S101
        for sequence in self.running:
            assert 0 <= sequence.num_computed_tokens <= len(sequence.tokens)  # noqa: S101
            assert len(sequence.tokens) <= sequence.max_total_tokens  # noqa: S101
            assert self.pages_for(sequence.num_computed_tokens) <= len(sequence.pages)  # noqa: S101
            assert len(sequence.pages) <= self.pages_for(sequence.max_total_tokens)  # noqa: S101

    def _continue(
        self, sequences: list[Sequence], entries: dict[Sequence, Scheduled], room: "_Room"
    ) -> None:
        """Compute more of running sequences, as far as there is room; some may be preempted."""
        for sequence in sequences:
            if not room.is_left:
                return
            if sequence not in self.running or sequence.is_computed:
                continue
            num_tokens = room.part_of(sequence)
            for victim in self._make_room(sequence, sequence.num_computed_tokens + num_tokens):
                freed = entries.pop(victim, None)
                room.tokens += freed.num_tokens if freed else 0
            if sequence in self.running:
                _compute(sequence, entries, room)

    def _limit(self, room: "_Room", num_decoding: int, reading: list[Sequence]) -> None:
        """Limit what a step that decoding sequences wait for reads of prompts."""
        unread = sum(sequence.num_uncomputed_tokens for sequence in reading)
        backlog = unread + self.num_waiting_pages * self.page_tokens
        # Large steps are captured in multiples of 256.
        tokens = max(self.limits.short_tokens, -(-backlog // BACKLOG_PART // 256) * 256)
        most = room.tokens
        room.tokens = min(most, max(tokens - num_decoding, LEAST_PROMPT_TOKENS))
        if tokens == self.limits.short_tokens:
            room.more_tokens = min(room.tokens // MORE_PART, most - room.tokens)

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

    def _stop(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self._free_slots.append(sequence.slot)
        self.pool.release(sequence.pages)
        sequence.pages.clear()

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_registered_pages = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    def _admit(self, room: "_Room") -> Iterator[Sequence]:
        """Start waiting sequences that fit, oldest first, as long as there is room."""
        passed: list[Sequence] = []
        for sequence in self.waiting[:MAX_WAITING_LOOKED_AT]:
            if not room.is_left or len(self.running) >= self.max_running_requests:
                return
            if self._try_to_start(sequence):
                for other in passed:
                    other.num_times_passed += 1
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
        if sequence.lacks_prompt_logprobs:
            # Its prompt is read from the start.
            sequence.prompt_logprobs.clear()
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.slot = self._free_slots.pop()
        self.running[sequence] = None
        return True

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Pages to share. The newest token is always computed: its logits are wanted."""
        if not self.prefix_cache:
            return []
        if sequence.lacks_prompt_logprobs:
            return []
        return self.pool.match(
            self._digests(sequence, (len(sequence.tokens) - 1) // self.page_tokens)
        )

    def _digests(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        digests = sequence.page_digests
        for index in range(len(digests), num_pages):
            request = sequence.request
            parent = digests[-1] if digests else root_digest(request.cache_salt, request.adapter)
            first = index * self.page_tokens
            digests.append(page_digest(parent, sequence.tokens[first : first + self.page_tokens]))
        return digests[:num_pages]


@dataclass(slots=True)
class _Room:
    """What a step can still take."""

    tokens: int
    chunks: int
    more_tokens: int = 0
    """Besides, where they end a prompt."""

    @property
    def is_left(self) -> bool:
        return self.tokens > 0 and self.chunks > 0

    def part_of(self, sequence: Sequence) -> int:
        """How many of the sequence's tokens to compute."""
        num_tokens = sequence.num_uncomputed_tokens
        return num_tokens if num_tokens <= self.tokens + self.more_tokens else self.tokens


def _compute(sequence: Sequence, entries: dict[Sequence, Scheduled], room: _Room) -> None:
    num_tokens = room.part_of(sequence)
    entries[sequence] = Scheduled(sequence, sequence.num_computed_tokens, num_tokens)
    room.tokens -= num_tokens
    room.chunks -= num_tokens > 1


def _order(sequence: Sequence) -> int:
    return sequence.order
