"""Compares the kernels with torch, once, before the first request.

A prompt and one token after it go through the decoder both ways, over the same pages. A GPU, a
driver or a build that computes wrongly is noticed here, and not by whoever reads the answers.
"""

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
"""Of the logits, relative: roundings stay far below, and unrelated logits are at 1.4."""


@torch.inference_mode()
def check_kernels(decoder: Decoder, pool: KvPool, attention: PagedAttention) -> float:
    """Return the relative error; the pool's first pages are overwritten.

    Raises:
        DeviceUnavailable: the two differ by more than roundings.
    """
    num_tokens = min(NUM_TOKENS, len(pool.data) * pool.page_tokens - 1)
    if num_tokens < 1:
        return 0.0
    ids = [(31 * index + 7) % decoder.config.vocab_size for index in range(num_tokens + 1)]
    token_ids = torch.tensor(ids, device=decoder.device)
    # No adapter and the first two, in turns; `decoder.forward` takes no notice without adapters.
    adapters = torch.arange(num_tokens + 1, dtype=torch.int32, device=decoder.device)
    adapters = adapters % (min(decoder.num_adapters, 2) + 1) - 1
    ours = _by_kernels(decoder, pool, attention, token_ids, adapters)
    theirs = _by_torch(decoder, pool, token_ids, adapters)
    error = float((ours - theirs).norm() / theirs.norm())
    if not error <= MAX_ERROR:
        raise DeviceUnavailable(
            f"the kernels' logits differ from torch's by {error:.2g} of their size, where at most "
            f"{MAX_ERROR} is rounding; this GPU, its driver or this build computes wrongly: try "
            "another node, or another image"
        )
    return error


def _pages(pool: KvPool, num_tokens: int) -> list[int]:
    return list(range(-(-num_tokens // pool.page_tokens)))


def _by_torch(decoder: Decoder, pool: KvPool, token_ids: Tensor, adapters: Tensor) -> Tensor:
    attention = TorchAttention(pool, decoder.config.num_heads, decoder.dtype, decoder.rope)
    last = len(token_ids) - 1
    pages = _pages(pool, len(token_ids))
    backend = deepseek_kernels.get_backend()
    deepseek_kernels.set_backend("reference")
    try:
        rows = [
            decoder.forward(
                token_ids[start:end],
                attention,
                attention.plan([Span(pages, start, end)]),
                adapters[start:end],
            )[-1:]
            for start, end in ((0, last), (last, last + 1))
        ]
        return decoder.logits(torch.cat(rows)).float()
    finally:
        deepseek_kernels.set_backend(backend)


def _by_kernels(
    decoder: Decoder,
    pool: KvPool,
    attention: PagedAttention,
    token_ids: Tensor,
    adapters: Tensor,
) -> Tensor:
    last = len(token_ids) - 1
    pages = _pages(pool, len(token_ids))

    def numbers(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=decoder.device)

    def places(start: int, end: int) -> tuple[Tensor, Tensor]:
        # The pages are the first of the pool, so a slot is a position.
        positions = numbers(list(range(start, end)), torch.int64)
        return positions, positions

    table, length = numbers([pages]), numbers([last + 1])
    prompt = PromptRows(table, numbers([0, last]), numbers([last]))
    decoding = DecodingRows(table, length, (length > 0)[:, None, None])
    rows = [
        decoder.forward(
            token_ids[:last],
            attention,
            PagedPlan(*places(0, last), None, prompt),
            adapters[:last],
        )[-1:],
        decoder.forward(
            token_ids[last:],
            attention,
            PagedPlan(*places(last, last + 1), decoding, None),
            adapters[last:],
        ),
    ]
    return decoder.logits(torch.cat(rows)).float()
