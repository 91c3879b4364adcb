"""Turns logits into tokens: greedy, or one uniform number per token through the distribution.

The uniform number is a function of the request's seed and the token's place in its answer, so a
request gives the same tokens alone, in any batch, and after a preemption. Logprobs are of the
model's own distribution, before penalties, bias, temperature and truncation.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from deepseek_worker.sequence import SamplingParams, Sequence, TokenLogprobs

# Truncated rows look at this many of the likeliest tokens first; the whole vocabulary is sorted
# only when the truncation does not end among them.
NUM_CANDIDATES = 1024
MASK_64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's outcome; `token_id` is None when its logits are not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


def sample(logits: Tensor, sequences: Many[Sequence], default_seed: int) -> list[Sampled]:
    """Choose the next token of each sequence from its row of `[sequences, vocab]` float32."""
    likeliest, token_ids = logits.max(dim=-1)
    chosen: list[int] = token_ids.tolist()
    is_finite: list[bool] = torch.isfinite(likeliest).tolist()
    plain = all(_is_plain_greedy(sequence) for sequence in sequences)
    if not plain:
        chosen = _choose(_adjust(logits, sequences), sequences, default_seed)
    return [
        Sampled(
            chosen[row],
            None
            if sequence.request.sampling.logprobs is None
            else token_logprobs(logits[row : row + 1], [chosen[row]], sequence)[0],
        )
        if is_finite[row]
        else Sampled(None)
        for row, sequence in enumerate(sequences)
    ]


def token_logprobs(
    logits: Tensor, token_ids: Many[int], sequence: Sequence, *, of_prompt: bool = False
) -> list[TokenLogprobs]:
    """Logprob, rank and alternatives of one given token for each row of `[rows, vocab]`."""
    sampling = sequence.request.sampling
    num_top = (sampling.prompt_logprobs if of_prompt else sampling.logprobs) or 0
    logprobs = logits.log_softmax(dim=-1)
    given = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > given).sum(dim=-1) + 1
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids, top_values, strict=True)))
        for token_id, logprob, rank, top_ids, top_values in zip(
            token_ids,
            given[:, 0].tolist(),
            ranks.tolist(),
            ids.tolist(),
            values.tolist(),
            strict=True,
        )
    ]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the `index`-th token of a request with this seed.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), once for each argument.
    """
    return (_mix(_mix(seed & MASK_64) ^ index) >> 40) / 2**24


def _mix(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) & MASK_64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK_64
    return number ^ (number >> 31)


def _seed(sequence: Sequence, default_seed: int) -> int:
    seed = sequence.request.sampling.seed
    return _mix(default_seed) ^ sequence.order if seed is None else seed


def _is_adjusted(sequence: Sequence) -> bool:
    sampling = sequence.request.sampling
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sequence.num_generated_tokens < sampling.min_tokens
    )


def _is_plain_greedy(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature == 0 and not _is_adjusted(sequence)


def _adjust(logits: Tensor, sequences: Many[Sequence]) -> Tensor:
    """Apply penalties, bias and the ban of end tokens to a copy."""
    if not any(_is_adjusted(sequence) for sequence in sequences):
        return logits
    logits = logits.clone()
    for row, sequence in zip(logits, sequences, strict=True):
        sampling = sequence.request.sampling
        if sampling.repetition_penalty != 1.0:
            seen = _ids(set(sequence.tokens), row)
            values = row[seen]
            row[seen] = torch.where(
                values > 0,
                values / sampling.repetition_penalty,
                values * sampling.repetition_penalty,
            )
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = Counter(sequence.tokens[sequence.num_prompt_tokens :])
            times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
            row[_ids(counts, row)] -= times * sampling.frequency_penalty + sampling.presence_penalty
        if sampling.logit_bias:
            biases = dict(sampling.logit_bias)
            row[_ids(biases, row)] += torch.tensor(
                list(biases.values()), dtype=row.dtype, device=row.device
            )
        if sequence.num_generated_tokens < sampling.min_tokens:
            row[_ids(sequence.stop_token_ids, row)] = float("-inf")
    return logits


def _ids(token_ids: Iterable[int], row: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=row.device)


def _choose(logits: Tensor, sequences: Many[Sequence], default_seed: int) -> list[int]:
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    whole: list[int] = []
    truncated: list[int] = []
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        if sampling.temperature > 0:
            (truncated if _is_truncated(sampling) else whole).append(row)
    for rows, draw in ((whole, _draw_from_all), (truncated, _draw_from_likeliest)):
        if rows:
            requests = [sequences[row] for row in rows]
            temperatures = [s.request.sampling.temperature for s in requests]
            scaled = logits[rows] / _column(temperatures, logits)
            numbers = [uniform(_seed(s, default_seed), s.num_generated_tokens) for s in requests]
            drawn = draw(scaled, _column(numbers, logits), [s.request.sampling for s in requests])
            for row, token_id in zip(rows, drawn.tolist(), strict=True):
                chosen[row] = token_id
    return chosen


def _is_truncated(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _draw_from_all(scaled: Tensor, numbers: Tensor, _: Many[SamplingParams]) -> Tensor:
    return _invert(scaled.softmax(dim=-1), numbers)


def _draw_from_likeliest(scaled: Tensor, numbers: Tensor, sampling: Many[SamplingParams]) -> Tensor:
    vocab_size = scaled.shape[-1]
    total = scaled.logsumexp(dim=-1, keepdim=True)
    for num_candidates in (min(NUM_CANDIDATES, vocab_size), vocab_size):
        values, ids = scaled.topk(num_candidates, dim=-1)
        is_whole = num_candidates == vocab_size
        kept, is_certain = _truncate((values - total).exp(), sampling, is_whole=is_whole)
        if is_whole or is_certain:
            break
    return ids.gather(1, _invert(kept, numbers)[:, None])[:, 0]


def _truncate(
    probabilities: Tensor, sampling: Many[SamplingParams], *, is_whole: bool
) -> tuple[Tensor, bool]:
    """Zero what min-p, top-k and top-p, in this order, exclude of `[rows, candidates]`.

    Candidates come likeliest first, and are all there are when `is_whole`. The second result
    says whether nothing beyond the candidates could have been kept.
    """
    num_candidates = probabilities.shape[-1]
    min_p = _column([s.min_p for s in sampling], probabilities)
    top_k = _column([s.top_k or 2**24 for s in sampling], probabilities)
    top_p = _column([s.top_p for s in sampling], probabilities)
    rank = torch.arange(num_candidates, device=probabilities.device)
    kept = probabilities.where(probabilities >= min_p * probabilities[:, :1], 0.0)
    kept = kept.where(rank < top_k, 0.0)
    # Top-p is a share of what the other two left, which may reach beyond the candidates: all of
    # the distribution without min-p, an unknown part of it with one.
    reaches_beyond = (kept[:, -1:] > 0) & (top_k > num_candidates) & (not is_whole)
    mass = torch.where(reaches_beyond, 1.0, kept.sum(dim=-1, keepdim=True))
    before = kept.cumsum(dim=-1) - kept
    kept = kept.where((before < top_p * mass) | (rank == 0), 0.0)
    is_open = reaches_beyond & ((kept[:, -1:] > 0) | (min_p > 0))
    return kept, not bool(is_open.any())


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """For each row, the index at which the cumulated weights pass `numbers` of their sum."""
    cumulated = weights.cumsum(dim=-1)
    # A hair below, so that rounding never points past the last weight.
    target = numbers * cumulated[:, -1:] * (1 - 2**-20)
    return (cumulated <= target).sum(dim=-1)


def _column(numbers: Many[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]
