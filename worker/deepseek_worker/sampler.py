"""Turns logits into tokens: greedy, or one uniform number per token through the distribution.

The uniform number is a function of the request's seed and the token's place in its answer, so a
request gives the same tokens alone, in any batch, and after a preemption. Logprobs are of the
model's own distribution, before penalties, bias, temperature and truncation.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields

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
    """Choose the next token of each sequence from its row of `[sequences, vocab]`."""
    logits = logits.float()
    likeliest, token_ids = logits.max(dim=-1)
    chosen: list[int] = token_ids.tolist()
    is_finite: list[bool] = torch.isfinite(likeliest).tolist()
    plain = all(_is_plain_greedy(sequence) for sequence in sequences)
    if not plain:
        chosen = _choose(adjust(logits, sequences), sequences, default_seed)
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


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of given tokens, still tensors, which may be on their way to the host."""

    token_ids: Tensor
    """`[rows]` int64."""
    logprobs: Tensor
    """`[rows]` float32."""
    ranks: Tensor
    """`[rows]` int64."""
    top_ids: Tensor
    """`[rows, top]` int64, likeliest first."""
    top_logprobs: Tensor
    """`[rows, top]` float32."""

    def to_host(self) -> "Scores":
        """Start the copy; the values are there once the stream has come this far."""
        return Scores(*(to_host(getattr(self, field.name)) for field in fields(self)))

    def described(self) -> list[TokenLogprobs]:
        """The values, row by row."""
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(zip(ids, values, strict=True)))
            for token_id, logprob, rank, ids, values in zip(
                self.token_ids.tolist(),
                self.logprobs.tolist(),
                self.ranks.tolist(),
                self.top_ids.tolist(),
                self.top_logprobs.tolist(),
                strict=True,
            )
        ]


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Scores:
    """Logprob, rank and alternatives of one given token for each row of `[rows, vocab]`."""
    logprobs = logits.float().log_softmax(dim=-1)
    given = logprobs.gather(1, token_ids[:, None])
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return Scores(token_ids, given[:, 0], (logprobs > given).sum(dim=-1) + 1, ids, values)


def token_logprobs(
    logits: Tensor, token_ids: Many[int], sequence: Sequence, *, of_prompt: bool = False
) -> list[TokenLogprobs]:
    """As `score`, for tokens and wishes that the host knows."""
    sampling = sequence.request.sampling
    num_top = (sampling.prompt_logprobs if of_prompt else sampling.logprobs) or 0
    given = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    return score(logits, given, num_top).described()


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy to memory of the host, which later steps do not overwrite."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Start a copy of the host's memory to a device, which is in order with what is launched."""
    if device.type == "cpu":
        return tensor
    # From memory that is not pinned the copy would wait for the device.
    return tensor.pin_memory().to(device, non_blocking=True)


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


def seed_of(sequence: Sequence, default_seed: int) -> int:
    """The request's own seed, or one of its place in the order of arrival; 64 bits."""
    seed = sequence.request.sampling.seed
    return _mix(default_seed) ^ sequence.order if seed is None else seed


def is_penalized(sequence: Sequence) -> bool:
    """Whether penalties, biases or bans of end tokens change the sequence's next logits."""
    sampling = sequence.request.sampling
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sequence.num_generated_tokens < sampling.min_tokens
    )


def is_adjusted(sequence: Sequence) -> bool:
    """Whether penalties or a guide change the sequence's next logits."""
    return sequence.request.guide is not None or is_penalized(sequence)


def _is_plain_greedy(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature == 0 and not is_adjusted(sequence)


def adjust(logits: Tensor, sequences: Many[Sequence]) -> Tensor:
    """Apply penalties, bias, the ban of end tokens and the guides to a copy."""
    if not any(is_adjusted(sequence) for sequence in sequences):
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
    mask_guided(logits, sequences)
    return logits


def mask_guided(logits: Tensor, sequences: Many[Sequence]) -> None:
    """Leave the rows of sequences with a guide the tokens that it allows, in place."""
    guided = [row for row, sequence in enumerate(sequences) if sequence.request.guide is not None]
    if not guided:
        return
    vocab_size = logits.shape[-1]
    bitmask = allowed_tokens([sequences[row] for row in guided], vocab_size)
    allowed = unpack_bits(to_device(bitmask, logits.device), vocab_size)
    rows = to_device(torch.tensor(guided), logits.device)
    logits.index_copy_(0, rows, logits.index_select(0, rows).where(allowed, -torch.inf))


def allowed_tokens(sequences: Many[Sequence], vocab_size: int) -> Tensor:
    """The guides' bits, `[sequences, ceil(vocab / 32)]` int32 on the host; all where none is."""
    bitmask = torch.full((len(sequences), -(-vocab_size // 32)), -1, dtype=torch.int32)
    for row, sequence in zip(bitmask, sequences, strict=True):
        guide = sequence.request.guide
        bits = None if guide is None else guide.allowed_tokens()
        if bits is not None:
            row.copy_(torch.frombuffer(bytearray(bits), dtype=torch.int32))
    return bitmask


def unpack_bits(bitmask: Tensor, vocab_size: int) -> Tensor:
    """`[rows, words]` int32, lowest bit first, as `[rows, vocab]` bool."""
    places = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return ((bitmask[:, :, None] >> places) & 1).flatten(1)[:, :vocab_size].bool()


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
            numbers = [uniform(seed_of(s, default_seed), s.num_generated_tokens) for s in requests]
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
