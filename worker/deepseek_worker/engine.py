"""The engine: schedule → prepare → forward → commit, over and over.

Synchronous and for one thread: `driver.py` owns that thread. `load_engine` builds everything
from an `EngineConfig`.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import torch

from deepseek_contract.sizing import KvFormat, WeightFormat
from deepseek_worker.config import EngineConfig
from deepseek_worker.errors import (
    DeviceUnavailable,
    InvalidRequest,
    QueueFull,
    RequestTooLarge,
    UnsupportedModel,
)
from deepseek_worker.layers.linear import packs_on
from deepseek_worker.memory.ledger import MemoryPlan, MemoryRequest, plan_memory, shape_of
from deepseek_worker.memory.limits import device_memory_bytes, process_bytes, usable_cpus
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.config import ModelConfig
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.recovery import Failed, compute_what_fits
from deepseek_worker.runner import Runner, StepResult
from deepseek_worker.scheduler import Scheduled, Scheduler
from deepseek_worker.sequence import Output, Request, SamplingParams, Sequence, TokenLogprobs
from deepseek_worker.weights.checkpoint import open_checkpoint
from deepseek_worker.weights.files import find_model
from deepseek_worker.weights.loading import ReportProgress, fill_with_random, load
from deepseek_worker.weights.safetensors import read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS: dict[torch.dtype, WeightFormat] = {
    torch.float32: "float32",
    torch.bfloat16: "bf16",
    torch.float16: "float16",
}
KV_FORMATS: dict[torch.dtype, KvFormat] = {
    torch.float32: "float32",
    torch.bfloat16: "bf16",
    torch.float16: "float16",
}
DEFAULT_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
# After running out of memory the batch grows back by an eighth every so many steps.
STEPS_BEFORE_GROWING = 64


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts and bytes after a step."""

    num_running: int
    num_waiting: int
    pool_pages: int
    free_pages: int
    """Pages without content."""
    cached_pages: int
    """Pages that nobody holds and a later prompt may find."""
    held_pages: int
    waiting_pages: int
    """Pages that waiting requests need for the tokens they have now."""
    page_tokens: int
    predicted_bytes: Mapping[str, int]
    measured_bytes: Mapping[str, int]
    page_bytes: int
    limit_bytes: int
    num_steps: int
    num_preemptions: int
    num_out_of_memory_retries: int
    num_non_finite_logits: int
    num_prompt_tokens: int
    """Of admitted requests, cached ones included."""
    num_generated_tokens: int
    num_cached_tokens: int

    @property
    def used_percent(self) -> float:
        """Weights, workspace, context and held pages over the limit."""
        others = sum(size for kind, size in self.measured_bytes.items() if kind != "kv_cache")
        return 100 * (others + self.held_pages * self.page_bytes) / self.limit_bytes

    @property
    def demand_percent(self) -> float:
        """Pages that requests hold or wait for over the pool; may exceed 100."""
        return 100 * (self.held_pages + self.waiting_pages) / self.pool_pages


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
class Limits:
    """What the engine serves within, all defaults resolved."""

    max_context_tokens: int
    max_running_requests: int
    max_batch_tokens: int
    max_queued_requests: int


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

    def validate(self, request: Request, num_queued: int = 0) -> None:
        """Refuse what can never be served, or not now. Callable from any thread.

        Raises:
            InvalidRequest: the prompt is empty or a value is out of range.
            RequestTooLarge: prompt and answer exceed the context.
            QueueFull: `num_queued` requests wait already.
        """
        _check_sampling(request.sampling, self.vocab_size)
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequest("the prompt is empty; it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise InvalidRequest(f"prompt token ids have to be in [0, {self.vocab_size})")
        max_tokens = request.sampling.max_tokens
        num_asked = len(prompt) + (1 if max_tokens is None else max_tokens)
        if num_asked > self.max_context_tokens:
            raise RequestTooLarge(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, but the "
                f"context is {self.max_context_tokens} tokens; shorten one of them"
            )
        if num_queued >= self.limits.max_queued_requests + self.limits.max_running_requests:
            raise QueueFull(f"{num_queued} requests wait already; try again later")

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
        return self.runner.forward(self.runner.prepare(entries))

    def _commit(self, entry: Scheduled, result: StepResult | Failed) -> Output | None:
        sequence = entry.sequence
        if isinstance(result, Failed):
            return self._fail(sequence, result.reason, result.message)
        if result.sampled is not None and result.sampled.token_id is None:
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
        self.scheduler.max_batch_tokens = max(
            self.limits.max_running_requests, min(self.scheduler.max_batch_tokens, num_tokens) // 2
        )
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def _grow_batches_again(self) -> None:
        if self.scheduler.max_batch_tokens == self.limits.max_batch_tokens:
            return
        self._steps_since_exhaustion += 1
        if self._steps_since_exhaustion % STEPS_BEFORE_GROWING == 0:
            grown = self.scheduler.max_batch_tokens + self.limits.max_batch_tokens // 8 + 1
            self.scheduler.max_batch_tokens = min(grown, self.limits.max_batch_tokens)


def load_engine(config: EngineConfig, report: ReportProgress) -> Engine:
    """Load the model and allocate its pages; `report` is told the loaded fraction.

    Raises:
        ModelError: the model is missing, broken, not served or too large.
        DeviceUnavailable: there is no such device.
    """
    device = _device(config)
    if device.type == "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    context_bytes = process_bytes(device)
    checkpoint = None
    if config.load_format == "dummy":
        model = read_config(find_model(config.model))
    else:
        checkpoint = open_checkpoint(config.model)
        model = checkpoint.config
    dtype, kv_dtype = _dtypes(config, model, device)
    limits = _limits(config, model, device)
    limit_bytes = config.memory_limit_bytes or (
        device_memory_bytes(device) * config.memory_limit_percent // 100
    )
    memory = plan_memory(
        shape_of(model),
        MemoryRequest(
            limit_bytes=limit_bytes,
            kv_cache_bytes=config.kv_cache_bytes,
            weights=FORMATS[dtype],
            kv_cache=KV_FORMATS[kv_dtype],
            activation_bytes=dtype.itemsize,
            page_tokens=config.page_tokens,
            max_context_tokens=limits.max_context_tokens,
            max_running_requests=limits.max_running_requests,
            max_batch_tokens=limits.max_batch_tokens,
            is_cpu=device.type == "cpu",
            packs_tied_head=model.tie_word_embeddings and packs_on(device, dtype),
        ),
    )
    decoder = Decoder(model, dtype, device)
    if checkpoint is None:
        fill_with_random(decoder, config.seed)
    else:
        load(decoder, checkpoint, report)
    pool = KvPool(
        model,
        num_pages=memory.num_pages,
        page_tokens=config.page_tokens,
        dtype=kv_dtype,
        device=device,
    )
    return Engine(
        model=model,
        device=device.type,
        limits=replace(
            limits,
            max_context_tokens=min(
                limits.max_context_tokens, memory.num_pages * config.page_tokens
            ),
        ),
        memory=memory,
        measured_bytes={
            "weights": decoder.weight_bytes(),
            "kv_cache": pool.data.nbytes,
            "workspace": decoder.packed_head_bytes(),
            "context": context_bytes,
        },
        scheduler=Scheduler(
            num_pages=memory.num_pages,
            page_tokens=config.page_tokens,
            max_running_requests=limits.max_running_requests,
            max_batch_tokens=limits.max_batch_tokens,
            prefix_cache=config.prefix_cache,
        ),
        runner=Runner(decoder, pool, config.seed),
    )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable(
            "device is 'cuda', but torch finds no usable GPU; check the driver and the pod's GPU "
            "resource, or set device to 'cpu'"
        )
    return torch.device(config.device)


def _dtypes(
    config: EngineConfig, model: ModelConfig, device: torch.device
) -> tuple[torch.dtype, torch.dtype]:
    """Of weights and activations, and of the KV cache."""
    name: str = config.dtype
    if name == "auto":
        own = model.dtype if model.dtype in DTYPES else "bfloat16"
        name = "float32" if device.type == "cpu" else own
        name = "bfloat16" if config.weights == "bf16" else name
    if config.weights == "bf16" and name != "bfloat16":
        raise UnsupportedModel(
            f"weights is 'bf16' and dtype is {name!r}; leave one of them at 'auto'"
        )
    dtype = DTYPES[name]
    return dtype, torch.bfloat16 if config.kv_cache == "bf16" else dtype


def _limits(config: EngineConfig, model: ModelConfig, device: torch.device) -> Limits:
    longest = model.max_context_tokens
    if config.max_context_tokens is not None and config.max_context_tokens > longest:
        raise UnsupportedModel(
            f"max_context_tokens is {config.max_context_tokens}, but the model's positions are "
            f"made for {longest}; lower it"
        )
    max_batch_tokens = config.max_batch_tokens or DEFAULT_BATCH_TOKENS[device.type]
    return Limits(
        max_context_tokens=config.max_context_tokens or longest,
        # Every running sequence gets at least its one token in each step.
        max_running_requests=min(config.max_running_requests, max_batch_tokens),
        max_batch_tokens=max_batch_tokens,
        max_queued_requests=config.max_queued_requests,
    )


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


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    ranges = {
        "temperature": (sampling.temperature, 0.0, math.inf),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "top_k": (sampling.top_k, 0, math.inf),
        "max_tokens": (sampling.max_tokens or 0, 0, math.inf),
        "min_tokens": (sampling.min_tokens, 0, math.inf),
        "presence_penalty": (sampling.presence_penalty, -math.inf, math.inf),
        "frequency_penalty": (sampling.frequency_penalty, -math.inf, math.inf),
        "repetition_penalty": (sampling.repetition_penalty, 0.0, math.inf),
    }
    for name, (value, low, high) in ranges.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(f"{name} is {value}; it has to be in [{low}, {high}] and finite")
    if sampling.top_p == 0 or sampling.repetition_penalty == 0:
        raise InvalidRequest("top_p and repetition_penalty have to be above 0")
    ids = [*sampling.stop_token_ids, *(token_id for token_id, _ in sampling.logit_bias)]
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"token id {token_id} is not in [0, {vocab_size})")
