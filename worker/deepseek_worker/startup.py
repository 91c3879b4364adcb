"""From an `EngineConfig` to an `Engine`: device, precision, memory, weights, pages.

Everything that can be refused is, before the first weight is read.
"""

import logging
from dataclasses import replace

import torch

from deepseek_contract.sizing import KvFormat, WeightFormat
from deepseek_worker.admission import Limits
from deepseek_worker.config import EngineConfig
from deepseek_worker.engine import Engine
from deepseek_worker.errors import DeviceUnavailable, UnsupportedModel
from deepseek_worker.layers.linear import packs_on
from deepseek_worker.memory.ledger import MemoryRequest, plan_memory, shape_of
from deepseek_worker.memory.limits import device_memory_bytes, process_bytes, usable_cpus
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.config import ModelConfig
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.runner import Runner
from deepseek_worker.scheduler import Scheduler
from deepseek_worker.weights.checkpoint import open_checkpoint
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
DEFAULT_BATCH_TOKENS = {"cpu": 256, "cuda": 8192}


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
    measured_bytes = {
        "weights": decoder.weight_bytes(),
        "kv_cache": pool.data.nbytes,
        "workspace": decoder.packed_head_bytes(),
        "context": context_bytes,
    }
    logger.info(
        "Model loaded",
        extra={"predicted_bytes": dict(memory.predicted_bytes), "measured_bytes": measured_bytes},
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
        measured_bytes=measured_bytes,
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
