"""The engine: schedule → prepare → forward → commit, over and over.

Synchronous and for one thread: `driver.py` owns that thread. `startup.py` builds an engine.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from deepseek_worker.admission import Limits, check_request
from deepseek_worker.memory.ledger import MemoryPlan
from deepseek_worker.models.config import ModelConfig
from deepseek_worker.recovery import Failed, compute_what_fits
from deepseek_worker.runner import Runner, StepResult
from deepseek_worker.scheduler import Scheduled, Scheduler
from deepseek_worker.sequence import Output, Request, Sequence, TokenLogprobs
from deepseek_worker.stats import EngineStats

# After running out of memory the batch grows back by an eighth every so many steps.
STEPS_BEFORE_GROWING = 64


@dataclass(slots=True)
class Counters:
    """What only grows."""

    steps: int = 0
    out_of_memory_retries: int = 0
    non_finite_logits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0


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
    counters: Counters = field(default_factory=Counters)
    _sequences: dict[str, Sequence] = field(default_factory=dict)
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
        """Refuse what can never be served, or not now; see `check_request` for what it raises."""
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
        )
        self._num_added += 1
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> list[Output]:
        """Drop a request and free its pages; empty when there is no such request any more."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return []
        self.scheduler.remove(sequence)
        return [Output(request_id, finish_reason="abort", cached_tokens=sequence.num_cached_tokens)]

    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return self.scheduler.has_work()

    def step(self) -> list[Output]:
        """Compute one batch; returns what it produced, nothing when there is no work."""
        batch = self.scheduler.schedule()
        results = compute_what_fits(batch.entries, self._compute, self._recover_memory)
        outputs = [self._commit(entry, results[entry]) for entry in batch.entries]
        self.counters.steps += 1
        self._grow_batches_again()
        return [output for output in outputs if output is not None]

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
            num_non_finite_logits=counters.non_finite_logits,
            num_prompt_tokens=counters.prompt_tokens,
            num_generated_tokens=counters.generated_tokens,
            num_cached_tokens=counters.cached_tokens,
        )

    def _compute(self, entries: Many[Scheduled]) -> Mapping[Scheduled, StepResult]:
        """Prepare and forward; repeated for parts of the batch when it fails as a whole."""
        return self.runner.forward(self.runner.prepare(entries))

    def _commit(self, entry: Scheduled, result: StepResult | Failed) -> Output | None:
        sequence = entry.sequence
        if isinstance(result, Failed):
            return self._fail(sequence, result.reason, result.message)
        if not result.is_finite:
            self.counters.non_finite_logits += 1
            return self._fail(
                sequence,
                "NonFiniteLogits",
                "the model's output is not finite; if this repeats, its weights are broken or "
                "its dtype is too narrow",
            )
        is_sampled = entry.is_sampled
        if sequence.num_generated_tokens == 0 and entry.end >= sequence.num_prompt_tokens:
            self.counters.prompt_tokens += sequence.num_prompt_tokens
            self.counters.cached_tokens += sequence.num_cached_tokens
        self.scheduler.advance(entry)
        prompt_logprobs = _collect_prompt_logprobs(entry, result)
        if not is_sampled:
            return self._commit_chunk(sequence, prompt_logprobs)
        sampled = result.sampled
        assert sampled is not None  # noqa: S101
        assert sampled.token_id is not None  # noqa: S101
        reason = self.scheduler.append(sequence, sampled.token_id)
        self.counters.generated_tokens += 1
        if reason is not None:
            self._forget(sequence)
        return Output(
            sequence.request.request_id,
            token_ids=(sampled.token_id,),
            finish_reason=reason,
            stop_token_id=sampled.token_id if reason == "stop" else None,
            cached_tokens=sequence.num_cached_tokens,
            logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
            prompt_logprobs=prompt_logprobs,
        )

    def _commit_chunk(
        self, sequence: Sequence, prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    ) -> Output | None:
        """A chunk yields nothing, unless it was the last of a request for no tokens."""
        if sequence.num_computed_tokens < sequence.max_total_tokens:
            return None
        self._forget(sequence)
        return Output(
            sequence.request.request_id,
            finish_reason="length",
            cached_tokens=sequence.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        self.scheduler.finish(sequence)

    def _fail(self, sequence: Sequence, reason: str, message: str) -> Output:
        del self._sequences[sequence.request.request_id]
        self.scheduler.finish_broken(sequence)
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


def _collect_prompt_logprobs(
    entry: Scheduled, result: StepResult
) -> tuple[TokenLogprobs | None, ...] | None:
    """Keep a chunk's prompt logprobs; all of them once the prompt is read."""
    sequence = entry.sequence
    num_prompt = sequence.num_prompt_tokens
    if (
        sequence.request.sampling.prompt_logprobs is None
        or len(sequence.prompt_logprobs) == num_prompt
    ):
        return None
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)
    sequence.prompt_logprobs += result.prompt_logprobs
    if len(sequence.prompt_logprobs) < num_prompt or entry.end < num_prompt:
        return None
    return tuple(sequence.prompt_logprobs)
