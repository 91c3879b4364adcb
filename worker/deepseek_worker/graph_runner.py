"""Steps as CUDA graphs: the runner for GPUs.

Every step has one of a few shapes (`step_arrays.py`), each captured once at the start. A step is
one copy of its numbers to the device and one replay; which sequences it is about, how long they
are and where their pages lie is in those numbers. The device keeps the token that it last chose
for each sequence, so the next step can be prepared and launched before the host has seen it.

Rows with penalties, biases, bans or a guide, and logprobs, are computed after the replay from its
logits: what they need to know of earlier tokens is on the device too (`penalties.py`), but for
guides. Without a GPU nothing is captured and the same functions are called, which is how the tests
run them.
"""

import bisect
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepseek_kernels import sample
from deepseek_worker.layers.paged import DecodingRows, PagedAttention, PagedPlan, PromptRows
from deepseek_worker.memory.exhaustion import is_out_of_memory
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.penalties import Chosen, Penalties
from deepseek_worker.runner import (
    LOGITS_CHUNK_BYTES,
    StepResult,
    are_finite,
    prompt_rows_to_score,
)
from deepseek_worker.sampler import (
    Sampled,
    Scores,
    is_adjusted,
    mask_guided,
    score,
    seed_of,
    to_host,
)
from deepseek_worker.scheduler import Scheduled
from deepseek_worker.self_check import check_kernels
from deepseek_worker.sequence import NO_ADAPTER, Sequence, TokenLogprobs
from deepseek_worker.step_arrays import Numbers, StepArrays, StepLayout, StepShape
from deepseek_worker.step_clock import StepClock

logger = logging.getLogger(__name__)

MAX_CHUNKS = 63
"""Most prompts read in one step; with the padding after them they fill a block of 64."""

WIDTHS = (64, 256, 1024)
"""Decoding rows that steps with prompts have room for; the last has room for all."""

DRIVER_BYTES = 52 * 1024
"""What the driver keeps of a captured step, for each layer: 50 and 51 KiB on an H200, driver 580,
with 28 and 32 layers."""

NUM_BLOCKS = 3
"""Steps whose numbers may wait on the host at once: one runs, one is launched, one is prepared."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a step leaves on the device, until the next one runs."""

    hidden: Tensor
    """`[tokens, hidden_size]`."""
    scored: Tensor
    """`[sampled, hidden_size]`: the rows that were scored."""
    logits: Tensor
    """`[sampled, vocab_size]`."""
    tokens: Tensor
    """`[sampled]` int64; -1 where the row is not finite."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, ready to launch."""

    entries: tuple[Scheduled, ...]
    """In the order of the rows: those of one token first."""
    step: "Step"
    block: "Block"
    sampled: tuple[tuple[int, Scheduled], ...]
    """Scored rows that yield a token, and the entries that they are of."""
    num_decoding: int


class GraphRunner:
    """Prepares steps in pinned memory and replays them; see `Runner`."""

    keeps_ahead = True

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        *,
        max_running_requests: int,
        max_batch_tokens: int,
        max_context_tokens: int,
        default_seed: int,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._default_seed = default_seed
        self._attention = PagedAttention(
            pool, decoder.config.num_heads, decoder.rope, max_context_tokens
        )
        self._max_pages = -(-max_context_tokens // pool.page_tokens)
        self._has_adapters = decoder.adapter_rows is not None
        # Each slot keeps its last two tokens, so that a step that is repeated finds its input.
        self._nobody = 2 * max_running_requests
        device = decoder.device
        self._last_tokens = torch.zeros(self._nobody + 1, dtype=torch.int64, device=device)
        self._penalties = Penalties(max_running_requests, decoder.config.vocab_size, device)
        self._slots = _SlotNumbers(max_running_requests, self._max_pages)
        ladders = step_shapes(max_running_requests, max_batch_tokens)
        layouts = {
            shape: StepLayout(shape, self._max_pages, has_adapters=self._has_adapters)
            for ladder in ladders
            for shape in ladder
        }
        num_bytes = max(layout.num_bytes for layout in layouts.values())
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._blocks = [Block(num_bytes, device) for _ in range(NUM_BLOCKS)]
        self._next_block = 0
        self._ladders = [
            [
                Step(shape, layouts[shape], layouts[shape].tensors(self._memory), self._compute)
                for shape in ladder
            ]
            for ladder in ladders
        ]
        self._kept = self._room_for_outputs([shape for ladder in ladders for shape in ladder])
        self._fitting: list[Step] = []
        """Those for which memory sufficed when they were called, the largest first."""
        self._graph_bytes = 0
        self._clock = StepClock()

    @property
    def workspace_bytes(self) -> int:
        """See `Runner`."""
        kept = (self._kept.hidden, self._kept.scored, self._kept.logits, self._kept.tokens)
        return (
            self._attention.workspace_bytes
            + self._memory.nbytes
            + sum(tensor.nbytes for tensor in kept)
            + self._graph_bytes
            + self._penalties.num_bytes
        )

    def check(self) -> float:
        """Compare the kernels with torch; see `check_kernels`."""
        return check_kernels(self._decoder, self._pool, self._attention)

    @torch.inference_mode()
    def compile(self, report: Callable[[float], None]) -> None:
        """Compile every kernel, by calling every shape; `report` is told the fraction done.

        All are called before any is captured: the memory of a call beside that of the graphs would
        be more than a step ever takes.
        """
        if self._decoder.device.type != "cuda":
            return
        # The largest first: the others fit into its memory.
        steps = [step for ladder in self._ladders for step in ladder]
        steps.sort(key=lambda step: step.shape, reverse=True)
        for index, step in enumerate(steps):
            if _fits(step, partial(self._call_empty, step)):
                self._fitting.append(step)
            report((index + 1) / len(steps))
        self._penalties.compile(self._kept.logits)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def capture(self, report: Callable[[float], None]) -> None:
        """Capture every shape that was called; `report` is told the fraction done.

        What memory does not suffice for is called instead, with a warning.
        """
        before = torch.cuda.memory_reserved() if self._fitting else 0
        pool = torch.cuda.graph_pool_handle() if self._fitting else None
        num_captured = 0
        for index, step in enumerate(self._fitting):
            if _fits(step, partial(step.capture, pool)):
                num_captured += 1
            elif not num_captured:
                # torch does not take a pool again whose only graph was given up.
                pool = torch.cuda.graph_pool_handle()
            report((index + 1) / len(self._fitting))
        if num_captured:
            torch.cuda.synchronize()
            held = _driver_bytes(num_captured, len(self._decoder.blocks))
            self._graph_bytes = torch.cuda.memory_reserved() - before + held

    def _call_empty(self, step: "Step") -> None:
        self._launch(self._lay_out(step, (), ()))

    def seconds_left(self) -> float:
        """See `Runner`."""
        return self._clock.seconds_left(time.perf_counter())

    def prepare(self, entries: Many[Scheduled]) -> StepInputs:
        """See `Runner`."""
        decoding = tuple(entry for entry in entries if entry.num_tokens == 1)
        chunks = tuple(entry for entry in entries if entry.num_tokens > 1)
        num_tokens = sum(entry.num_tokens for entry in entries)
        step = self._smallest_step(num_tokens, len(decoding), bool(chunks))
        return self._lay_out(step, decoding, chunks)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> dict[Scheduled, StepResult]:
        """See `Runner`; nothing here waits for the device."""
        outputs = self._launch(inputs)
        tokens = outputs.tokens
        adjusted = [(row, entry) for row, entry in inputs.sampled if is_adjusted(entry.sequence)]
        if adjusted:
            self._choose_adjusted(outputs, inputs, adjusted)
        # A row that is not finite has no token; a GPU would not go on after looking for it.
        scores = {
            entry: score(
                outputs.logits[row : row + 1], tokens[row : row + 1].clamp_min(0), num_top
            ).to_host()
            for row, entry in inputs.sampled
            if (num_top := entry.sequence.request.sampling.logprobs) is not None
        }
        prompt_scores = self._score_prompts(inputs, outputs)
        number = self._clock.launched(inputs.step.shape, time.perf_counter())
        chosen = ChosenTokens(tokens, partial(self._clock.ended, number))
        results: dict[Scheduled, StepResult] = {
            entry: Pending(chosen, None, None, prompt_scores.get(entry, ()))
            for entry in inputs.entries
        }
        for row, entry in inputs.sampled:
            results[entry] = Pending(chosen, row, scores.get(entry), prompt_scores.get(entry, ()))
        return results

    def _smallest_step(self, num_tokens: int, num_decoding: int, has_chunks: bool) -> "Step":
        ladders = self._ladders[1:] if has_chunks else self._ladders[:1]
        ladder = next(steps for steps in ladders if steps[-1].shape.decoding >= num_decoding)
        index = bisect.bisect_left(ladder, num_tokens, key=lambda step: step.shape.tokens)
        return ladder[index]

    def _launch(self, inputs: StepInputs) -> Outputs:
        num_bytes = inputs.step.layout.used_bytes(inputs.num_decoding)
        self._memory[:num_bytes].copy_(inputs.block.memory[:num_bytes], non_blocking=True)
        inputs.block.mark_copied()
        return inputs.step.run()

    def _compute(self, shape: StepShape, arrays: StepArrays[Tensor]) -> Outputs:
        """The whole step, on the device alone."""
        decoding = None
        if shape.decoding:
            first = arrays.token_ids[: shape.decoding]
            last = self._last_tokens.index_select(0, (-1 - first).clamp_min_(0))
            torch.where(first < 0, last, first, out=first)
            lengths = arrays.decoding_lengths
            is_used = (lengths > 0)[:, None, None]
            decoding = DecodingRows(arrays.decoding_pages, lengths, is_used)
        plan = PagedPlan(
            arrays.positions,
            arrays.slots,
            decoding,
            PromptRows(arrays.prompt_pages, arrays.prompt_starts, arrays.prompt_lengths)
            if shape.prompts
            else None,
        )
        hidden = self._decoder.forward(
            arrays.token_ids,
            self._attention,
            plan,
            arrays.adapters if self._has_adapters else None,
        )
        scored = hidden.index_select(0, arrays.sampled_rows) if shape.prompts else hidden
        logits = self._decoder.logits(scored)
        tokens = self._choose(logits, scored, arrays)
        # Copies at one place: otherwise every captured step would keep memory of its own for them.
        kept_hidden = self._kept.hidden[: len(hidden)].copy_(hidden)
        return Outputs(
            kept_hidden,
            self._kept.scored[: len(scored)].copy_(scored) if shape.prompts else kept_hidden,
            self._kept.logits[: len(logits)].copy_(logits),
            self._kept.tokens[: len(tokens)].copy_(tokens),
        )

    def _room_for_outputs(self, shapes: list[StepShape]) -> Outputs:
        """Of the largest steps."""
        config, dtype, device = self._decoder.config, self._decoder.dtype, self._decoder.device
        num_tokens = max(shape.tokens for shape in shapes)
        num_sampled = max(shape.sampled for shape in shapes)
        return Outputs(
            torch.empty(num_tokens, config.hidden_size, dtype=dtype, device=device),
            torch.empty(num_sampled, config.hidden_size, dtype=dtype, device=device),
            torch.empty(num_sampled, config.vocab_size, dtype=dtype, device=device),
            torch.empty(num_sampled, dtype=torch.int64, device=device),
        )

    def _choose(self, logits: Tensor, scored: Tensor, arrays: StepArrays[Tensor]) -> Tensor:
        """Choose and keep the next token of every row."""
        num_rows = len(logits)
        tokens = sample(
            logits,
            arrays.temperature[:num_rows],
            arrays.top_k[:num_rows],
            arrays.top_p[:num_rows],
            arrays.min_p[:num_rows],
            arrays.seeds[:num_rows],
            arrays.indices[:num_rows],
        )
        self._last_tokens.index_copy_(0, arrays.sampled_slots[:num_rows], tokens)
        return _unless_broken(tokens, scored)

    def _choose_adjusted(
        self, outputs: Outputs, inputs: StepInputs, adjusted: list[tuple[int, Scheduled]]
    ) -> None:
        """Choose again in rows whose logits something changes; `outputs.tokens` gets theirs."""
        arrays = inputs.step.arrays
        input_rows = {entry: row for row, entry in enumerate(inputs.entries[: inputs.num_decoding])}
        chosen = [Chosen(row, entry.sequence, input_rows.get(entry)) for row, entry in adjusted]
        logits, rows = self._penalties.apply(outputs.logits, arrays.token_ids, chosen)
        mask_guided(logits, [one.sequence for one in chosen])
        tokens = sample(
            logits,
            arrays.temperature.index_select(0, rows),
            arrays.top_k.index_select(0, rows),
            arrays.top_p.index_select(0, rows),
            arrays.min_p.index_select(0, rows),
            arrays.seeds.index_select(0, rows),
            arrays.indices.index_select(0, rows),
        )
        self._last_tokens.index_copy_(0, arrays.sampled_slots.index_select(0, rows), tokens)
        scored = outputs.scored.index_select(0, rows)
        outputs.tokens.index_copy_(0, rows, _unless_broken(tokens, scored))

    def _score_prompts(
        self, inputs: StepInputs, outputs: Outputs
    ) -> dict[Scheduled, tuple[Scores, ...]]:
        chunk = max(1, LOGITS_CHUNK_BYTES // (4 * self._decoder.config.vocab_size))
        scores = {}
        first = 0
        for entry in inputs.entries:
            hidden = outputs.hidden[first : first + entry.num_tokens]
            first += entry.num_tokens
            num_top = entry.sequence.request.sampling.prompt_logprobs
            if num_top is None:
                continue
            scores[entry] = tuple(
                score(
                    self._decoder.logits(hidden[rows]),
                    torch.tensor(token_ids, device=hidden.device),
                    num_top,
                ).to_host()
                for rows, token_ids in prompt_rows_to_score(entry, chunk)
            )
        return scores

    def _lay_out(
        self, step: "Step", decoding: tuple[Scheduled, ...], chunks: tuple[Scheduled, ...]
    ) -> StepInputs:
        block = self._blocks[self._next_block]
        self._next_block = (self._next_block + 1) % NUM_BLOCKS
        block.wait_until_copied()
        arrays = block.numbers(step.layout)
        shape, entries = step.shape, decoding + chunks
        slots = [self._slots.update(entry.sequence, self._default_seed) for entry in entries]
        self._fill_decoding(arrays, decoding, slots)
        if shape.prompts:
            self._fill_chunks(arrays, len(decoding), chunks, slots[len(decoding) :])
        else:
            arrays.token_ids[len(decoding) :] = 0
            arrays.positions[len(decoding) :] = 0
            arrays.slots[len(decoding) :] = -1
        if self._has_adapters:
            rows = [entry.sequence.adapter for entry in entries for _ in range(entry.num_tokens)]
            arrays.adapters[: len(rows)] = rows
            arrays.adapters[len(rows) :] = NO_ADAPTER
        # Where all rows decode, all of them are scored; otherwise those that yield a token.
        first_rows = np.cumsum([entry.num_tokens for entry in entries]) - 1
        scored = [
            index for index, entry in enumerate(entries) if not shape.prompts or entry.is_sampled
        ]
        self._fill_scored(arrays, entries, scored, slots)
        if shape.prompts:
            arrays.sampled_rows[: len(scored)] = first_rows[scored] if scored else 0
            arrays.sampled_rows[len(scored) :] = 0
        return StepInputs(
            entries=entries,
            step=step,
            block=block,
            sampled=tuple(
                (row, entries[index])
                for row, index in enumerate(scored)
                if entries[index].is_sampled
            ),
            num_decoding=len(decoding),
        )

    def _fill_decoding(
        self, arrays: StepArrays[Numbers], decoding: tuple[Scheduled, ...], slots: list[int]
    ) -> None:
        count = len(decoding)
        arrays.decoding_lengths[count:] = 0
        if not count:
            return
        own = slots[:count]
        tokens = [entry.sequence.tokens[entry.start] for entry in decoding]
        arrays.token_ids[:count] = [
            token if token >= 0 else -1 - _kept_at(slot, entry.sequence.num_generated_tokens - 1)
            for token, slot, entry in zip(tokens, own, decoding, strict=True)
        ]
        positions = np.array([entry.start for entry in decoding])
        arrays.positions[:count] = positions
        arrays.decoding_lengths[:count] = positions + 1
        page_tokens = self._pool.page_tokens
        pages = self._slots.pages[own, positions // page_tokens]
        arrays.slots[:count] = pages.astype(np.int64) * page_tokens + positions % page_tokens
        width = int(positions.max()) // page_tokens + 1
        arrays.decoding_pages[:count, :width] = self._slots.pages[own, :width]

    def _fill_chunks(
        self,
        arrays: StepArrays[Numbers],
        row: int,
        chunks: tuple[Scheduled, ...],
        slots: list[int],
    ) -> None:
        page_tokens = self._pool.page_tokens
        for index, (entry, slot) in enumerate(zip(chunks, slots, strict=True)):
            end = row + entry.num_tokens
            arrays.token_ids[row:end] = entry.sequence.tokens[entry.start : entry.end]
            positions = np.arange(entry.start, entry.end)
            arrays.positions[row:end] = positions
            pages = self._slots.pages[slot]
            arrays.slots[row:end] = (
                pages[positions // page_tokens].astype(np.int64) * page_tokens
                + positions % page_tokens
            )
            width = -(-entry.end // page_tokens)
            arrays.prompt_pages[index, :width] = pages[:width]
            arrays.prompt_starts[index] = row
            arrays.prompt_lengths[index] = entry.end
            row = end
        arrays.prompt_starts[len(chunks) :] = row
        arrays.prompt_lengths[len(chunks) :] = 0
        arrays.token_ids[row:] = 0
        arrays.positions[row:] = 0
        arrays.slots[row:] = -1

    def _fill_scored(
        self,
        arrays: StepArrays[Numbers],
        entries: tuple[Scheduled, ...],
        scored: list[int],
        slots: list[int],
    ) -> None:
        count = len(scored)
        own = [slots[index] for index in scored]
        arrays.sampled_slots[:count] = [
            _kept_at(slot, entries[index].sequence.num_generated_tokens)
            if entries[index].is_sampled
            else self._nobody
            for index, slot in zip(scored, own, strict=True)
        ]
        arrays.sampled_slots[count:] = self._nobody
        arrays.indices[:count] = [entries[index].sequence.num_generated_tokens for index in scored]
        arrays.indices[count:] = 0
        self._slots.copy_sampling(arrays, own)


class Step:
    """One shape, captured or called."""

    def __init__(
        self,
        shape: StepShape,
        layout: StepLayout,
        arrays: StepArrays[Tensor],
        compute: Callable[[StepShape, StepArrays[Tensor]], Outputs],
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.arrays = arrays
        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Outputs | None = None

    def capture(self, pool: Any) -> None:
        """Record the step; it has to have run before, so that nothing is compiled here."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._outputs = self._compute(self.shape, self.arrays)
        self._graph = graph

    def run(self) -> Outputs:
        """Compute what is in the device's arrays."""
        if self._graph is None or self._outputs is None:
            return self._compute(self.shape, self.arrays)
        self._graph.replay()
        return self._outputs


class Block:
    """Memory of the host that one step's numbers are written to, pinned where there is a GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._numbers: dict[StepLayout, StepArrays[Numbers]] = {}
        self._copied = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    def numbers(self, layout: StepLayout) -> StepArrays[Numbers]:
        """The arrays of a layout, in this memory."""
        arrays = self._numbers.get(layout)
        if arrays is None:
            arrays = self._numbers[layout] = layout.numbers(self.memory)
        return arrays

    def mark_copied(self) -> None:
        """Remember that the copies so far are those of this memory."""
        if self._copied is not None:
            self._copied.record()

    def wait_until_copied(self) -> None:
        """Until the memory may be written again."""
        if self._copied is not None:
            self._copied.synchronize()


class ChosenTokens:
    """The tokens of one step, on their way to the host."""

    def __init__(self, tokens: Tensor, on_end: Callable[..., None]) -> None:
        self._on_end = on_end
        self._on_host = to_host(tokens)
        self._arrived = torch.cuda.Event() if tokens.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()
        self._values: list[int] | None = None

    def wait(self) -> list[int]:
        """All of them, once the step has ended."""
        if self._values is None:
            has_to_wait = False
            if self._arrived is not None:
                has_to_wait = not self._arrived.query()  # type: ignore[no-untyped-call]
                self._arrived.synchronize()
            self._on_end(time.perf_counter(), is_exact=has_to_wait)
            self._values = self._on_host.tolist()
        return self._values


class Pending:
    """A `StepResult` that waits for its step when it is looked at."""

    __slots__ = ("_chosen", "_prompt_scores", "_row", "_scores")

    def __init__(
        self,
        chosen: ChosenTokens,
        row: int | None,
        scores: Scores | None,
        prompt_scores: tuple[Scores, ...],
    ) -> None:
        self._chosen = chosen
        self._row = row
        self._scores = scores
        self._prompt_scores = prompt_scores

    @property
    def sampled(self) -> Sampled | None:
        """See `StepResult`."""
        if self._row is None:
            return None
        token_id = self._chosen.wait()[self._row]
        if token_id < 0:
            return Sampled(None)
        return Sampled(token_id, self._scores.described()[0] if self._scores else None)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """See `StepResult`."""
        if not self._prompt_scores:
            return ()
        self._chosen.wait()
        return tuple(row for scores in self._prompt_scores for row in scores.described())

    @property
    def is_finite(self) -> bool:
        """See `StepResult`."""
        return are_finite(self.sampled, self.prompt_logprobs)


class _SlotNumbers:
    """What steps copy for a sequence, kept by its slot as long as it runs."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.pages = np.zeros((num_slots, max_pages), dtype=np.int32)
        self._num_pages = [0] * num_slots
        self._owners: list[list[int] | None] = [None] * num_slots
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int32)
        self._seeds = np.zeros(num_slots, dtype=np.int64)

    def update(self, sequence: Sequence, default_seed: int) -> int:
        """Take over what is new about a running sequence; returns its slot."""
        slot, pages = sequence.slot, sequence.pages
        # Every admission makes a new list of pages.
        if self._owners[slot] is not pages:
            self._owners[slot] = pages
            self._num_pages[slot] = 0
            sampling = sequence.request.sampling
            self._temperature[slot] = sampling.temperature
            self._top_p[slot] = sampling.top_p
            self._min_p[slot] = sampling.min_p
            self._top_k[slot] = sampling.top_k
            self._seeds[slot] = _signed(seed_of(sequence, default_seed))
        known = self._num_pages[slot]
        if known < len(pages):
            self.pages[slot, known : len(pages)] = pages[known:]
            self._num_pages[slot] = len(pages)
        return slot

    def copy_sampling(self, arrays: StepArrays[Numbers], slots: list[int]) -> None:
        """Fill the sampling arrays; rows that nobody looks at are greedy."""
        count = len(slots)
        for target, source, unused in (
            (arrays.temperature, self._temperature, 0),
            (arrays.top_p, self._top_p, 1),
            (arrays.min_p, self._min_p, 0),
            (arrays.top_k, self._top_k, 0),
            (arrays.seeds, self._seeds, 0),
        ):
            target[:count] = source[slots] if slots else 0
            target[count:] = unused


def _unless_broken(tokens: Tensor, scored: Tensor) -> Tensor:
    """The tokens, but -1 where the row that they were chosen from is not finite."""
    # Finite minus itself is zero, anything else is not a number.
    total = scored.sum(dim=-1, dtype=torch.float32)
    return torch.where(total - total == 0, tokens, -1)


def _kept_at(slot: int, index: int) -> int:
    """Where a slot keeps the token of this index of its answer: beside the one before."""
    return 2 * slot + index % 2


def step_shapes(max_running_requests: int, max_batch_tokens: int) -> list[list[StepShape]]:
    """The shapes to capture: ladders of growing steps, first those that only decode.

    Padding costs at most an eighth of a large step; small ones cost the same up to the next size.
    Room for decoding rows that are not there costs too, so steps with prompts come in some widths,
    the narrowest first; without any decoding rows too.
    """
    decoding = _up_to(max_running_requests, (1, 2, 4, *range(8, 64, 8), *_sizes(64, 8192)))
    ladders = [[StepShape(size, size, 0, size) for size in decoding]]
    for width in (0, *_up_to(max_running_requests, WIDTHS)):
        ladder = []
        for tokens in _up_to(max_batch_tokens, _sizes(16, 2**20)):
            chunks = min(max(1, tokens // 2), MAX_CHUNKS)
            rows = min(width, tokens)
            if rows <= width // 4 and width > 0:
                continue  # A narrower one holds as many.
            sampled = min(rows + chunks, tokens, max_running_requests)
            ladder.append(StepShape(tokens, rows, chunks, sampled))
        ladders.append(ladder)
    return ladders


def graph_bytes(max_running_requests: int, max_batch_tokens: int, num_layers: int) -> int:
    """What the driver keeps of all captured steps, beside what torch allocates for them."""
    num_steps = sum(map(len, step_shapes(max_running_requests, max_batch_tokens)))
    return _driver_bytes(num_steps, num_layers)


def _driver_bytes(num_steps: int, num_layers: int) -> int:
    return num_steps * num_layers * DRIVER_BYTES


def _fits(step: Step, action: Callable[[], None]) -> bool:
    """Whether memory sufficed for an action on the step; a warning says if not."""
    try:
        action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logger.warning(
            "Memory does not suffice to capture steps of %d tokens; they will be launched kernel "
            "by kernel: %s",
            step.shape.tokens,
            error,
        )
    else:
        return True
    # Not before: the error holds what the step had computed.
    torch.cuda.empty_cache()
    return False


def _sizes(size: int, most: int) -> Iterator[int]:
    """Growing by 16, and from 128 on by an eighth of the last power of two."""
    while size <= most:
        yield size
        size += max(16, 2 ** (size.bit_length() - 1) // 8)


def _up_to(most: int, sizes: Iterable[int]) -> list[int]:
    return [*takewhile(lambda size: size < most, sizes), most]


def _signed(seed: int) -> int:
    """The int64 with the same 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
