"""Speed of the start: a checkpoint from files in the page cache to packed weights on the device.

Random weights of a published shape are written as safetensors files, read once, and then loaded
into each format, quantized on the way where it is one. Beside the rate, in bytes of the files, is
what limits it: reading the same files into memory, and copies of pinned memory to the device. The
last row is the time of `--rounding calibrated`, whose text is random here.
"""

import gc
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rows import Row, make_row
from safetensors.torch import save_file

from deepseek_worker.models.decoder import Decoder
from deepseek_worker.quantization.build import everything_plain, rounded
from deepseek_worker.quantization.schemes import choose_scheme
from deepseek_worker.startup import KV_FORMATS
from deepseek_worker.weights.calibration import load_calibrated
from deepseek_worker.weights.loading import load
from deepseek_worker.weights.safetensors import SafetensorsCheckpoint, read_config
from deepseek_worker.weights.transfer import NUM_BUFFERS, PIECE_BYTES

FORMATS = ("bf16", "fp8", "int8", "int4")
CALIBRATED_TOKENS = 30_000
"""Of the text that calibrated rounding reads."""
FILE_BYTES = 4 << 30
"""As public checkpoints are split."""


def write_checkpoint(shape: Path, folder: Path, device: torch.device) -> int:
    """Write random bf16 weights for a config.json beside a copy of it; returns their bytes."""
    shutil.copy(shape / "config.json", folder)
    decoder = Decoder(read_config(shape), torch.bfloat16, torch.device("meta"), everything_plain)
    generator = torch.Generator(device=device).manual_seed(0)
    waiting: dict[str, torch.Tensor] = {}
    waiting_bytes = total_bytes = num_files = 0

    def flush() -> None:
        nonlocal waiting_bytes, num_files
        save_file(waiting, folder / f"model-{num_files:05}.safetensors")
        waiting.clear()
        waiting_bytes, num_files = 0, num_files + 1

    for slot in (slot for layer in decoder.layers() for slot in layer.slots() if slot.is_required):
        if len(slot.shape) == 1:
            tensor = torch.ones(slot.shape, dtype=torch.bfloat16)
        else:
            drawn = torch.randn(slot.shape, generator=generator, device=device)
            tensor = drawn.div_(math.sqrt(slot.shape[1])).bfloat16().cpu()
        waiting[slot.name] = tensor
        waiting_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        if waiting_bytes >= FILE_BYTES:
            flush()
    if waiting:
        flush()
    return total_bytes


def read_seconds(files: Sequence[Path]) -> float:
    """Read files into memory as the loader does, with as many threads, and nothing else."""
    pieces = [
        (file, first) for file in files for first in range(0, file.stat().st_size, PIECE_BYTES)
    ]
    opened = {file: os.open(file, os.O_RDONLY) for file in files}

    def read(turn: int) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        for file, first in pieces[turn::NUM_BUFFERS]:
            os.preadv(opened[file], [buffer], first)

    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_BUFFERS) as threads:
        list(threads.map(read, range(NUM_BUFFERS)))
    elapsed = time.perf_counter() - started
    for descriptor in opened.values():
        os.close(descriptor)
    return elapsed


def load_seconds(folder: Path, weights: str, device: torch.device) -> float:
    """Load a checkpoint into one format, from opening its files on."""
    started = time.perf_counter()
    checkpoint = SafetensorsCheckpoint(folder)
    load(_decoder(checkpoint, weights, device), checkpoint, lambda _: None)
    return _ended(started, device)


def calibrate_seconds(folder: Path, weights: str, num_tokens: int, device: torch.device) -> float:
    """Load a checkpoint with rounding for the inputs of a random text."""
    started = time.perf_counter()
    checkpoint = SafetensorsCheckpoint(folder)
    decoder = _decoder(checkpoint, weights, device)
    draw = random.Random(0)
    token_ids = [draw.randrange(checkpoint.config.vocab_size) for _ in range(num_tokens)]
    load_calibrated(decoder, checkpoint, token_ids, KV_FORMATS[decoder.dtype], lambda _: None)
    return _ended(started, device)


def measure(
    shape: Path,
    device: torch.device,
    rounds: int,
    link_gb_per_s: float | None,
    formats: Sequence[str] = FORMATS,
) -> list[Row]:
    """Load a shape into each format, `rounds` times."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="loading-") as name:
        folder = Path(name)
        size_gb = write_checkpoint(shape, folder, device) / 1e9
        files = sorted(folder.glob("*.safetensors"))
        read_seconds(files)
        read_gb_per_s = size_gb / min(read_seconds(files) for _ in range(rounds))
        note = f"reading the files alone {read_gb_per_s:.1f} GB/s"
        if link_gb_per_s is not None:
            note += f", pinned copies {link_gb_per_s:.1f} GB/s"
        for weights in formats:
            load_seconds(folder, weights, device)
            rates = [size_gb / load_seconds(folder, weights, device) for _ in range(rounds)]
            title = f"loading, {shape.name}, {size_gb:.1f} GB in the page cache, to {weights}"
            rows.append(make_row(title, rates, "GB/s", note=note))
    return rows


def measure_calibrated(
    shape: Path, weights: str, device: torch.device, num_tokens: int = CALIBRATED_TOKENS
) -> Row:
    """Load a shape once with calibrated rounding."""
    with tempfile.TemporaryDirectory(prefix="loading-") as name:
        write_checkpoint(shape, Path(name), device)
        seconds = calibrate_seconds(Path(name), weights, num_tokens, device)
    title = f"loading, {shape.name}, to {weights} with calibrated rounding, {num_tokens:,} tokens"
    return make_row(title, [seconds], "s", better="lower")


def _decoder(checkpoint: SafetensorsCheckpoint, weights: str, device: torch.device) -> Decoder:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Decoder(checkpoint.config, dtype, device, rounded(choose_scheme(weights, "auto")))


def _ended(started: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elapsed = time.perf_counter() - started
    gc.collect()
    return elapsed
