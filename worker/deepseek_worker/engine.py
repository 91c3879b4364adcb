"""The engine: schedule → prepare → forward → commit, over and over.

On a GPU a step is committed after the next one has been launched: the device chooses tokens and
feeds them on by itself, and the host learns them one step late. What was computed for a sequence
that turns out to be over is dropped.

Synchronous and for one thread: `driver.py` owns that thread. `startup.py` builds an engine.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from deepseek_worker.admission import Limits, check_request
from deepseek_worker.errors import UnknownModel
from deepseek_worker.memory.ledger import MemoryPlan
from deepseek_worker.models.config import ModelConfig
from deepseek_worker.recovery import Exhaustion, Failed, compute_what_fits
from deepseek_worker.runner import Runner, StepResult
from deepseek_worker.scheduler import Scheduled, Scheduler
from deepseek_worker.sequence import (
    NO_ADAPTER,
    FinishReason,
    Output,
    Request,
    Sequence,
    TokenLogprobs,
)
from deepseek_worker.stats import EngineStats

# After running out of memory the batch grows back by an eighth every so many steps.
STEPS_BEFORE_GROWING = 64
# How long before the device is done the next step is begun: twice as long as it took last time.
HOST_MARGIN = 2.0
HOST_MARGIN_SECONDS = 0.0005


@dataclass(slots=True)
class Counters:
    """What only grows."""

    steps: int = 0
    out_of_memory_retries: int = 0
    non_finite_logits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Launched:
    """An entry that is being computed."""

    entry: Scheduled
    is_sampled: bool
    num_preemptions: int
    """Of the sequence at that time; if there are more later, its pages are gone."""
    result: StepResult
    """On a GPU it waits for the device when it is first looked at."""


@dataclass(slots=True)
class Engine:
    """A loaded model and the requests it works on."""

    model: ModelConfig
    device: str
    limits: Limits
    memory: MemoryPlan
    measured_bytes: Mapping[str, int]
    scheduler: Scheduler
    runner: Runner
    adapters: Mapping[str, int] = field(default_factory=dict)
    """Names of LoRA adapters, and their places among the weights."""
    counters: Counters = field(default_factory=Counters)
    exhaustion: Exhaustion = field(default_factory=Exhaustion)
    _sequences: dict[str, Sequence] = field(default_factory=dict)
    _launched: list[Launched] = field(default_factory=list)
    _host_seconds: float = 0.0
    """What scheduling and launching took the last time."""
    _num_added: int = 0
    _steps_since_exhaustion: int = 0

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.limits.max_context_tokens

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.vocab_size

    def validate(self, request: Request, num_unfinished: int = 0) -> None:
        """Refuse what can never be served, or not now.

        Raises:
            UnknownModel: there is no such adapter.
            RequestError: see `check_request`.
            QueueFull: too many requests wait already.
        """
        if request.adapter is not None and request.adapter not in self.adapters:
            raise UnknownModel(f"There is no LoRA adapter '{request.adapter}' here.", "model")
        check_request(request, self.limits, self.vocab_size, num_unfinished)

    def add(self, request: Request) -> None:
        """Queue a request that `validate` accepted."""
        sampling = request.sampling
        eos = frozenset() if sampling.ignore_eos else self.model.eos_token_ids
        num_prompt = len(request.prompt_token_ids)
        sequence = Sequence(
            request,
            order=self._num_added,
            max_total_tokens=self.max_context_tokens
            if sampling.max_tokens is None
            else num_prompt + sampling.max_tokens,
            stop_token_ids=eos | frozenset(sampling.stop_token_ids),
            adapter=NO_ADAPTER if request.adapter is None else self.adapters[request.adapter],
        )
        self._num_added += 1
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> list[Output]:
        """Drop a request and free its pages; empty when there is no such request any more."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return []
        self.scheduler.finish(sequence)
        return [Output(request_id, finish_reason="abort", cached_tokens=sequence.num_cached_tokens)]

    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return bool(self._launched) or self.scheduler.has_work()

    def spare_seconds(self) -> float:
        """How long `step` may be put off, so that more requests join, and the device not wait."""
        if not self._launched:
            return 0.0
        return self.runner.seconds_left() - HOST_MARGIN * self._host_seconds - HOST_MARGIN_SECONDS

    def step(self) -> list[Output]:
        """Launch one batch; returns what it produced, or on a GPU what the one before did."""
        outputs = self._commit_launched() if self._must_know_all_tokens() else []
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        results = compute_what_fits(
            batch.entries, self._compute, self._recover_memory, self.limits.retries_per_batch
        )
        self.exhaustion.note(results)
        launched = [
            self._advance(entry, result)
            for entry, result in results.items()
            if not isinstance(result, Failed)
        ]
        self._host_seconds = time.perf_counter() - started
        outputs += self._commit_launched()
        self._launched = launched
        outputs += [
            self._fail(entry.sequence, result.reason, result.message)
            for entry, result in results.items()
            if isinstance(result, Failed) and self._is_unfinished(entry.sequence)
        ]
        if not self.runner.keeps_ahead:
            outputs += self._commit_launched()
        self.counters.steps += 1
        self._grow_batches_again()
        return outputs

    def stats(self) -> EngineStats:
        """Where the engine stands."""
        scheduler, pool, counters = self.scheduler, self.scheduler.pool, self.counters
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            pool_pages=pool.num_pages,
            free_pages=pool.num_blank,
            cached_pages=pool.num_cached,
            held_pages=pool.num_held,
            waiting_pages=scheduler.num_waiting_pages,
            page_tokens=scheduler.page_tokens,
            predicted_bytes=self.memory.predicted_bytes,
            measured_bytes={
                **self.measured_bytes,
                "workspace": self.measured_bytes["workspace"] + self.runner.workspace_bytes,
            },
            page_bytes=self.memory.page_bytes,
            limit_bytes=self.memory.limit_bytes,
            num_steps=counters.steps,
            num_preemptions=scheduler.num_preemptions,
            num_out_of_memory_retries=counters.out_of_memory_retries,
            num_out_of_memory_failures=self.exhaustion.num_failures,
            is_exhausted=self.exhaustion.is_used_up,
            num_non_finite_logits=counters.non_finite_logits,
            num_prompt_tokens=counters.prompt_tokens,
            num_generated_tokens=counters.generated_tokens,
            num_cached_tokens=counters.cached_tokens,
        )

    def _compute(self, entries: Many[Scheduled]) -> Mapping[Scheduled, StepResult]:
        """Prepare and forward; repeated for parts of the batch when it fails as a whole."""
        return self.runner.forward(self.runner.prepare(entries))

    def _must_know_all_tokens(self) -> bool:
        return bool(self._launched) and any(
            sequence.needs_known_tokens for sequence in self.scheduler.running
        )

    def _advance(self, entry: Scheduled, result: StepResult) -> Launched:
        is_sampled = self.scheduler.advance(entry)
        return Launched(entry, is_sampled, entry.sequence.num_preemptions, result)

    def _is_unfinished(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.request.request_id) is sequence

    def _commit_launched(self) -> list[Output]:
        launched, self._launched = self._launched, []
        outputs = [self._commit(one) for one in launched if self._is_unfinished(one.entry.sequence)]
        return [output for output in outputs if output is not None]

    def _commit(self, launched: Launched) -> Output | None:
        entry, result = launched.entry, launched.result
        sequence = entry.sequence
        if not result.is_finite:
            self.counters.non_finite_logits += 1
            self.scheduler.distrust(sequence)
            return self._fail(
                sequence,
                "NonFiniteLogits",
                "the model's output is not finite; if this repeats, its weights are broken or "
                "its dtype is too narrow",
            )
        if launched.num_preemptions == sequence.num_preemptions:
            self.scheduler.register(entry)
        # What was computed stays true when the pages are gone.
        sequence.prompt_logprobs += result.prompt_logprobs
        reason: FinishReason | None = None
        sampled = result.sampled if launched.is_sampled else None
        token_ids: tuple[int, ...] = ()
        if sampled is not None:
            assert sampled.token_id is not None  # noqa: S101 - it would not be finite
            token_ids = (sampled.token_id,)
            reason = self.scheduler.resolve(entry, sampled.token_id)
            self.counters.generated_tokens += 1
        elif entry.end >= sequence.max_total_tokens:
            reason = "length"
        else:
            return None
        prompt_logprobs = None
        if entry.end == sequence.num_prompt_tokens:
            # Its first token, or none asked for: once for each request.
            prompt_logprobs = _prompt_logprobs(sequence)
            self.counters.prompt_tokens += sequence.num_prompt_tokens
            self.counters.cached_tokens += sequence.num_cached_tokens
        guide = sequence.request.guide
        if guide is not None and guide.error is not None:
            return self._fail(sequence, "GuideFailed", guide.error)
        if reason is not None:
            self._forget(sequence)
        return Output(
            sequence.request.request_id,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=sampled.token_id
            if sampled and reason == "stop" and sampled.token_id in sequence.stop_token_ids
            else None,
            cached_tokens=sequence.num_cached_tokens,
            logprobs=(sampled.logprobs,) if sampled and sampled.logprobs else (),
            prompt_logprobs=prompt_logprobs,
        )

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        self.scheduler.finish(sequence)

    def _fail(self, sequence: Sequence, reason: str, message: str) -> Output:
        self._forget(sequence)
        return Output(
            sequence.request.request_id,
            finish_reason="error",
            error=message,
            error_reason=reason,
            cached_tokens=sequence.num_cached_tokens,
        )

    def _recover_memory(self, num_tokens: int) -> None:
        """Out of memory with this many tokens: remember it, and give back what is not needed."""
        self.counters.out_of_memory_retries += 1
        self._steps_since_exhaustion = 0
        fitted = min(self.scheduler.max_batch_tokens, num_tokens) // 2
        self.scheduler.max_batch_tokens = max(1, fitted)
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def _grow_batches_again(self) -> None:
        if self.scheduler.max_batch_tokens == self.limits.max_batch_tokens:
            return
        self._steps_since_exhaustion += 1
        if self._steps_since_exhaustion % STEPS_BEFORE_GROWING == 0:
            grown = self.scheduler.max_batch_tokens + self.limits.max_batch_tokens // 8 + 1
            self.scheduler.max_batch_tokens = min(grown, self.limits.max_batch_tokens)


def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprobs | None, ...] | None:
    """Of every token of a prompt that is read, if they were asked for."""
    if sequence.request.sampling.prompt_logprobs is None:
        return None
    return (None, *sequence.prompt_logprobs)
