"""From an `EngineConfig` to an `Engine`: device, precision, memory, weights, pages.

Everything that can be refused is, before the first weight is read.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from deepseek_contract.sizing import (
    CUDA_CONTEXT_BYTES,
    KvFormat,
    WeightFormat,
    product_bytes,
    weight_bytes,
)
from deepseek_worker.admission import Limits
from deepseek_worker.config import EngineConfig
from deepseek_worker.engine import Engine
from deepseek_worker.errors import DeviceUnavailable, UnsupportedModel
from deepseek_worker.graph_runner import MAX_CHUNKS, GraphRunner, graph_bytes
from deepseek_worker.layers.linear import packs_on
from deepseek_worker.memory.exhaustion import is_out_of_memory
from deepseek_worker.memory.kv_formats import (
    key_biases,
    kv_formats,
    outlier_layers,
    take_stored_scales,
)
from deepseek_worker.memory.ledger import MemoryRequest, plan_memory, shape_of
from deepseek_worker.memory.limits import (
    device_memory_bytes,
    free_bytes,
    hold_to,
    process_bytes,
    wait_until_free,
)
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.config import ModelConfig
from deepseek_worker.models.decoder import Decoder, projections
from deepseek_worker.processors import usable_cpus
from deepseek_worker.quantization.build import StorageOf, as_stored, projection_bytes, rounded
from deepseek_worker.quantization.schemes import PLAIN, choose_scheme
from deepseek_worker.quantization.stored import HEAD
from deepseek_worker.runner import Runner, TorchRunner
from deepseek_worker.scheduler import Scheduler, StepLimits
from deepseek_worker.tokenizer import load_tokenizer
from deepseek_worker.weights.adapters import adapter_bytes, attach, open_adapters
from deepseek_worker.weights.calibration import TEXT, load_calibrated
from deepseek_worker.weights.checkpoint import Checkpoint, open_checkpoint
from deepseek_worker.weights.files import find_model
from deepseek_worker.weights.loading import ReportProgress, fill_with_random, load
from deepseek_worker.weights.safetensors import read_config

logger = logging.getLogger(__name__)

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
DEFAULT_BATCH_TOKENS = 256
"""On a CPU."""
# On a GPU steps are measured in the arithmetic of their products. One of 108 TFLOP is as fast for
# each token as larger ones; one of 10 makes others wait for 15 ms on an H200.
STEP_FLOP = 108e12
SHORT_STEP_FLOP = 10.1e12
BATCH_TOKENS = (512, 8192)
"""A GPU's steps are between these."""


BuildRunner = Callable[[Decoder, KvPool, Limits, int], Runner]
# Weights take most of a start; what is left is capturing.
LOADED_FRACTION = 0.8
COMPILED_FRACTION = 0.1


def torch_runner(decoder: Decoder, pool: KvPool, _: Limits, seed: int) -> Runner:
    """Computes anywhere."""
    return TorchRunner(decoder, pool, seed)


def graph_runner(decoder: Decoder, pool: KvPool, limits: Limits, seed: int) -> GraphRunner:
    """Computes on a GPU; nothing is captured yet."""
    return GraphRunner(
        decoder,
        pool,
        max_running_requests=limits.max_running_requests,
        max_batch_tokens=limits.max_batch_tokens,
        max_context_tokens=limits.max_context_tokens,
        default_seed=seed,
    )


def load_engine(
    config: EngineConfig, report: ReportProgress, build_runner: BuildRunner | None = None
) -> Engine:
    """Load the model and allocate its pages; `report` is told the loaded fraction.

    `build_runner` is for tests; by default the device decides.

    Raises:
        ModelError: the model is missing, broken, not served or too large.
        DeviceUnavailable: there is no such device.
    """
    phase = time.monotonic()
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
    dtype = _dtype(config, model, device)
    storage_of = _storage(config, model)
    formats = _kv_formats(config, model, dtype, device, checkpoint)
    limits = _limits(config, model, device, storage_of)
    adapters = open_adapters(config.lora, model)
    limit_bytes = config.memory_limit_bytes or (
        device_memory_bytes(device) * config.memory_limit_percent // 100
    )
    captured_bytes = (
        graph_bytes(limits.max_running_requests, limits.max_batch_tokens, model.num_layers)
        if device.type == "cuda"
        else 0
    )
    memory = plan_memory(
        shape_of(model),
        MemoryRequest(
            limit_bytes=limit_bytes,
            kv_cache_bytes=config.kv_cache_bytes,
            weight_bytes=predicted_weight_bytes(model, storage_of, dtype),
            kv_cache=formats,
            activation_bytes=dtype.itemsize,
            page_tokens=config.page_tokens,
            max_context_tokens=limits.max_context_tokens,
            max_running_requests=limits.max_running_requests,
            max_batch_tokens=limits.max_batch_tokens,
            is_cpu=device.type == "cpu",
            packs_tied_head=model.tie_word_embeddings and packs_on(device, dtype),
            adapters=adapter_bytes(adapters, model, dtype.itemsize, limits.max_batch_tokens),
            graph_bytes=captured_bytes,
        ),
    )
    if device.type == "cuda":
        needed_bytes = sum(memory.predicted_bytes.values()) - context_bytes
        wait_until_free(needed_bytes, partial(free_bytes, device))
        hold_to(limit_bytes - CUDA_CONTEXT_BYTES - captured_bytes, device)
    decoder = Decoder(model, dtype, device, storage_of)

    def report_loading(fraction: float) -> None:
        report(fraction * LOADED_FRACTION)

    if checkpoint is None:
        fill_with_random(decoder, config.seed)
    elif config.rounding == "calibrated":
        token_ids = load_tokenizer(config.model).encode(TEXT.read_text(encoding="utf-8"))
        load_calibrated(decoder, checkpoint, token_ids, KV_FORMATS[dtype], report_loading)
    else:
        load(decoder, checkpoint, report_loading)
    attach(decoder, adapters)
    pool = KvPool(
        model,
        num_pages=memory.num_pages,
        page_tokens=config.page_tokens,
        formats=formats,
        device=device,
    )
    if checkpoint is not None:
        take_stored_scales(pool.layers, checkpoint)
    measured_bytes = {
        "weights": decoder.weight_bytes(),
        "kv_cache": pool.data.nbytes,
        "workspace": decoder.packed_head_bytes(),
        "context": context_bytes,
    }
    limits = replace(
        limits,
        max_context_tokens=min(limits.max_context_tokens, memory.num_pages * config.page_tokens),
    )
    if build_runner is None:
        build_runner = torch_runner if device.type == "cpu" else graph_runner
    runner = build_runner(decoder, pool, limits, config.seed)
    if isinstance(runner, GraphRunner):
        phase = _ended("weights and pages", phase)
        _warm_up(runner, phase, report)
    report(1.0)
    logger.info(
        "Model loaded",
        extra={"predicted_bytes": dict(memory.predicted_bytes), "measured_bytes": measured_bytes},
    )
    return Engine(
        model=model,
        device=device.type,
        limits=limits,
        memory=memory,
        measured_bytes=measured_bytes,
        scheduler=Scheduler(
            num_pages=memory.num_pages,
            page_tokens=config.page_tokens,
            max_running_requests=limits.max_running_requests,
            limits=_step_limits(limits.max_batch_tokens, model, device, storage_of),
            prefix_cache=config.prefix_cache,
        ),
        runner=runner,
        adapters={adapter.name: index for index, adapter in enumerate(adapters)},
    )


def _warm_up(runner: GraphRunner, phase: float, report: ReportProgress) -> None:
    """Compile, compare and capture, so that no request has to wait for it."""
    runner.compile(lambda fraction: report(LOADED_FRACTION + fraction * COMPILED_FRACTION))
    phase = _ended("kernels", phase)
    # While no graph holds the memory that torch needs for it.
    phase = _ended("comparison with torch", phase, relative_error=_compare(runner))
    rest = 1 - LOADED_FRACTION - COMPILED_FRACTION
    runner.capture(lambda fraction: report(1 - rest * (1 - fraction)))
    _ended("graphs", phase)


def _compare(runner: GraphRunner) -> float:
    """The kernels' error against torch; not a number where memory does not suffice for that."""
    try:
        return runner.check()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("The kernels were not compared with torch in full: %s", error)
        return math.nan
    finally:
        torch.cuda.empty_cache()


def _ended(phase: str, started_at: float, **more: float) -> float:
    """Log how long a phase of the start took; returns when the next one began."""
    now = time.monotonic()
    extra = {"phase": phase, "seconds": round(now - started_at, 2), **more}
    logger.info("Start-up: %s took %.1f s", phase, now - started_at, extra=extra)
    return now


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable(
            "device is 'cuda', but torch finds no usable GPU; check the driver and the pod's GPU "
            "resource, or set device to 'cpu'"
        )
    return torch.device(config.device)


def _storage(config: EngineConfig, model: ModelConfig) -> StorageOf:
    stored = model.quantization
    if config.rounding == "calibrated" and (stored or config.weights in ("auto", "bf16")):
        raise UnsupportedModel(
            f"rounding is 'calibrated' and weights is {config.weights!r}, but "
            + ("the checkpoint is quantized already" if stored else "nothing is rounded then")
            + "; leave rounding at 'nearest', or give an unquantized checkpoint and a format"
        )
    if stored is None:
        return rounded(choose_scheme(config.weights, config.activations))
    scheme = choose_scheme(config.weights, config.activations, stored.native)
    if scheme == PLAIN and config.weights == "auto":
        logger.warning(
            "No kernel multiplies weights stored as %s; they are dequantized and take the memory "
            "of an unquantized model",
            stored,
        )
    return as_stored(stored, scheme)


def predicted_weight_bytes(model: ModelConfig, storage_of: StorageOf, dtype: torch.dtype) -> int:
    """Bytes of all weights: the contract's formula, projection by projection."""
    plain = FORMATS[dtype]
    difference = sum(
        projection_bytes(projection, storage_of, plain)
        - product_bytes(projection.out_features, projection.in_features, plain)
        for projection in projections(model)
    )
    return weight_bytes(shape_of(model), plain) + difference


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Of activations, and of weights that are not quantized."""
    name: str = config.dtype
    if name == "auto":
        own = model.dtype if model.dtype in DTYPES else "bfloat16"
        name = "float32" if device.type == "cpu" else own
        name = "bfloat16" if config.weights == "bf16" else name
    if config.weights == "bf16" and name != "bfloat16":
        raise UnsupportedModel(
            f"weights is 'bf16' and dtype is {name!r}; leave one of them at 'auto'"
        )
    return DTYPES[name]


def _kv_formats(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    checkpoint: Checkpoint | None,
) -> tuple[KvFormat, ...]:
    """Of each layer. Random weights and CPUs keep `auto` as precise as the computation."""
    biases = [] if checkpoint is None else key_biases(checkpoint, model.num_layers)
    outliers = outlier_layers(biases)
    if outliers and config.kv_cache in ("fp8", "int8"):
        logger.warning(
            "Keys of the layers %s have channels that %s can hardly hold; kv_cache 'auto' keeps "
            "these layers more precise",
            outliers,
            config.kv_cache,
        )
    may_round = checkpoint is not None and device.type == "cuda"
    return kv_formats(
        config.kv_cache, KV_FORMATS[dtype], model.num_layers, outliers if may_round else None
    )


def _limits(
    config: EngineConfig, model: ModelConfig, device: torch.device, storage_of: StorageOf
) -> Limits:
    longest = model.max_context_tokens
    if config.max_context_tokens is not None and config.max_context_tokens > longest:
        raise UnsupportedModel(
            f"max_context_tokens is {config.max_context_tokens}, but the model's positions are "
            f"made for {longest}; lower it"
        )
    max_batch_tokens = config.max_batch_tokens or DEFAULT_BATCH_TOKENS
    if config.max_batch_tokens is None and device.type == "cuda":
        least, most = BATCH_TOKENS
        max_batch_tokens = min(max(least, _tokens_of(STEP_FLOP, model, storage_of)), most)
    return Limits(
        max_context_tokens=config.max_context_tokens or longest,
        # Every running sequence gets at least its one token in each step.
        max_running_requests=min(config.max_running_requests, max_batch_tokens),
        max_batch_tokens=max_batch_tokens,
        max_queued_requests=config.max_queued_requests,
        retries_per_batch=config.retries_per_batch,
    )


def _step_limits(
    max_batch_tokens: int, model: ModelConfig, device: torch.device, storage_of: StorageOf
) -> StepLimits:
    if device.type == "cpu":
        return StepLimits.plain(max_batch_tokens)
    short = min(_tokens_of(SHORT_STEP_FLOP, model, storage_of), max_batch_tokens)
    return StepLimits(max_batch_tokens, short, MAX_CHUNKS)


def _tokens_of(step_flop: float, model: ModelConfig, storage_of: StorageOf) -> int:
    """How many tokens take this much arithmetic, counted in products of 16 bits."""
    flop_per_token = 0.0
    for projection in projections(model):
        if HEAD in projection.parts:
            continue  # It scores a few rows of a step.
        _, scheme = storage_of(next(iter(projection.parts)))
        speed = 2 if scheme.activations == "8bit" else 1
        flop_per_token += 2 * projection.out_features * projection.in_features / speed
    # A multiple of 128 wastes no part of a tile: 768 tokens take as long as 704.
    return max(128, int(step_flop / flop_per_token) // 128 * 128)
