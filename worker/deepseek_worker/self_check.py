"""Compares the kernels with torch, once, before the first request.

A prompt and one token after it go through the decoder by the kernels; torch then computes each
block, and the logits, from what the kernels gave it. So roundings, which grow from block to block
where inputs are quantized, do not add up, and every block is compared as sharply as the first. A
GPU, a driver or a build that computes wrongly is noticed here, and not by whoever reads the
answers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import deepseek_kernels
from deepseek_worker.errors import DeviceUnavailable
from deepseek_worker.layers.attention import Span, TorchAttention
from deepseek_worker.layers.paged import DecodingRows, PagedAttention, PagedPlan, PromptRows
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import Decoder

NUM_TOKENS = 40
MAX_ERROR = 0.25
"""Of what a block adds, relative: roundings stay far below, and unrelated numbers are at 1.4."""
STREAM_ROUNDING = 0.02
"""Of the residual stream, which is rounded whole: what a block adds may be a small part of it."""


@dataclass(frozen=True, slots=True)
class Between:
    """What goes from one block to the next: see `Decoder.block`."""

    x: Tensor
    residual: Tensor | None

    @property
    def base(self) -> Tensor:
        """The residual stream before `x` is added, in float32."""
        if self.residual is None:
            return torch.zeros_like(self.x, dtype=torch.float32)
        return self.residual.float()

    def copied(self) -> tuple[Tensor, Tensor | None]:
        """What a block may write to."""
        return self.x.clone(), None if self.residual is None else self.residual.clone()


@dataclass(frozen=True, slots=True)
class Phase:
    """The prompt, or the token after it."""

    name: str
    token_ids: Tensor
    adapters: Tensor
    by_kernels: PagedPlan
    by_torch: Any
    """The plan of `TorchAttention`."""


@torch.inference_mode()
def check_kernels(decoder: Decoder, pool: KvPool, attention: PagedAttention) -> float:
    """Return the largest relative error; the pool's first pages are overwritten.

    Raises:
        DeviceUnavailable: something differs by more than roundings; the message says what.
    """
    num_tokens = min(NUM_TOKENS, len(pool.data) * pool.page_tokens - 1)
    if num_tokens < 1:
        return 0.0
    plain = TorchAttention(pool, decoder.config.num_heads, decoder.dtype, decoder.rope)
    phases = _phases(decoder, pool, plain, num_tokens)
    # All of ours before any of torch's, which writes to the same pages.
    ours = [(phase, _computed(decoder, attention, phase)) for phase in phases]
    errors: dict[str, float] = {}
    backend = deepseek_kernels.get_backend()
    deepseek_kernels.set_backend("reference")
    try:
        for phase, (betweens, _) in ours:
            decoder.choose_adapters(phase.adapters)
            for index, (given, got) in enumerate(pairwise(betweens)):
                wanted = Between(*decoder.block(index, *given.copied(), plain, phase.by_torch))
                errors |= _errors_of(f"{phase.name}, block {index}", given, got, wanted)
        _judge(errors)
        # Last, since a large vocabulary decoded to float32 may be too much for the memory left.
        for phase, (betweens, logits) in ours:
            decoder.choose_adapters(phase.adapters)
            wanted_logits = _logits(decoder, betweens[-1])
            errors[f"{phase.name}, logits"] = _relative(logits - wanted_logits, wanted_logits)
        return _judge(errors)
    finally:
        deepseek_kernels.set_backend(backend)


def _judge(errors: Mapping[str, float]) -> float:
    """The largest error."""
    # What is no number is the worst.
    place, error = max(errors.items(), key=lambda item: (math.isnan(item[1]), item[1]))
    if not error <= MAX_ERROR:
        raise DeviceUnavailable(
            f"what the kernels compute differs from torch's by {error:.2g} of its size ({place}), "
            f"where at most {MAX_ERROR} is rounding; this GPU, its driver or this build computes "
            "wrongly: try another node, or another image"
        )
    return error


def _computed(
    decoder: Decoder, attention: PagedAttention, phase: Phase
) -> tuple[list[Between], Tensor]:
    """What the kernels give before each block and after the last one, and their logits."""
    decoder.choose_adapters(phase.adapters)
    betweens = [Between(decoder.embedding(phase.token_ids), None)]
    for index in range(len(decoder.blocks)):
        given = betweens[-1].copied()
        betweens.append(Between(*decoder.block(index, *given, attention, phase.by_kernels)))
    return betweens, _logits(decoder, betweens[-1])


def _logits(decoder: Decoder, last: Between) -> Tensor:
    """Of the last token."""
    x, residual = last.copied()
    hidden, _ = decoder.final_norm(x, residual)
    return decoder.logits(hidden[-1:]).float()


def _errors_of(place: str, given: Between, got: Between, wanted: Between) -> dict[str, float]:
    """Of what a block's attention and its MLP add."""
    added = wanted.base - (given.base + given.x.float())
    size = added.norm() + STREAM_ROUNDING * wanted.base.norm()
    return {
        f"{place}, attention": float((got.base - wanted.base).norm() / size),
        f"{place}, MLP": _relative(got.x.float() - wanted.x.float(), wanted.x.float()),
    }


def _relative(difference: Tensor, wanted: Tensor) -> float:
    return float(difference.norm() / wanted.norm())


def _phases(
    decoder: Decoder, pool: KvPool, plain: TorchAttention, num_tokens: int
) -> tuple[Phase, Phase]:
    """A prompt of so many tokens, and one token more; their pages are the first of the pool."""
    end = num_tokens + 1
    ids = [(31 * index + 7) % decoder.config.vocab_size for index in range(end)]
    pages = list(range(-(-end // pool.page_tokens)))

    def numbers(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=decoder.device)

    token_ids = numbers(ids, torch.int64)
    # No adapter and the first two, in turns; a decoder without adapters takes no notice.
    num_kinds = min(decoder.num_adapters, 2) + 1
    adapters = numbers([index % num_kinds - 1 for index in range(end)])
    # A slot is a position.
    places = numbers(list(range(end)), torch.int64)
    table, length = numbers([pages]), numbers([end])
    prompt = PromptRows(table, numbers([0, num_tokens]), numbers([num_tokens]))
    decoding = DecodingRows(table, length, (length > 0)[:, None, None])

    def phase(
        name: str, start: int, end: int, decoding: DecodingRows | None, prompt: PromptRows | None
    ) -> Phase:
        of = slice(start, end)
        by_kernels = PagedPlan(places[of], places[of], decoding, prompt)
        by_torch = plain.plan([Span(pages, start, end)])
        return Phase(name, token_ids[of], adapters[of], by_kernels, by_torch)

    return (
        phase("prompt", 0, num_tokens, None, prompt),
        phase("next token", num_tokens, end, decoding, None),
    )
