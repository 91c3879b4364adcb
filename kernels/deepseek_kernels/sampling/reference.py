"""Draws one token a row by sorting, the specification of the kernel that does not sort.

A row's logits are divided by its temperature. Then top-k keeps the k largest, top-p the fewest
of those, largest first, whose probabilities reach p of what top-k kept, and min-p those whose
probability is at least min_p of the largest. Equal logits are kept or dropped together, so the
kept set is everything from one threshold up and does not depend on how ties are sorted.

Among the kept, the token with the largest `logit + noise` is drawn, the lowest on a tie. The
noise is Gumbel's and made from seed, position and token alone: Philox makes two keys of the
first two, and a hash of token and keys the noise. So a row draws the same token in any batch.
Rows of temperature 0 (under 1e-5) take the largest logit. NaN counts as minus infinity, infinity
as the largest finite number; a row of nothing else gives token 0.

Probabilities are summed in integers of 2^-27 of the largest, so that the order of summation
does not matter.
"""

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1e-5
MASS_SCALE = 2.0**27
_LARGEST = torch.finfo(torch.float32).max
_WORD = 0xFFFFFFFF


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return the token of each row, `[rows]` int64."""
    greedy = temperature < GREEDY_TEMPERATURE
    scaled = _scaled(logits, torch.where(greedy, 1.0, 1.0 / temperature.float()))
    largest = scaled.amax(-1, keepdim=True)
    ordered = scaled.sort(dim=-1, descending=True).values
    threshold = torch.maximum(
        _top_k_threshold(ordered, top_k), _top_p_threshold(ordered, largest, top_k, top_p)
    )
    threshold = torch.where(greedy[:, None], largest, threshold)
    kept = (scaled >= threshold) & (scaled > -torch.inf)
    kept &= (scaled - largest >= min_p.float().log()[:, None]) | greedy[:, None]
    noise = gumbel(seeds, positions, logits.shape[-1])
    score = scaled + torch.where(greedy[:, None], 0.0, noise)
    # argmax does not promise the first of equal elements.
    score = torch.where(kept, score, -torch.inf)
    best = score.amax(-1, keepdim=True)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    first = torch.where(kept & (score == best), tokens, logits.shape[-1]).amin(-1)
    return torch.where(kept.any(-1), first, 0)


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return noise `[rows, vocabulary]` fp32: minus the log of an exponential variate."""
    first, second = _row_keys(seeds, positions)
    tokens = torch.arange(vocabulary, device=seeds.device)[None, :]
    bits = _mixed(_mixed(tokens ^ first[:, None]) ^ second[:, None]).float()
    uniform = ((bits + 0.5) * 2.0**-32).clamp_max(1.0 - 2.0**-24)
    # -log(1 - u) loses all digits of a small u, and small ones win.
    small = uniform + uniform * uniform * 0.5
    exponential = torch.where(uniform < 2.0**-10, small, -torch.log(1.0 - uniform))
    return -torch.log(exponential)


def _scaled(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    finite = logits.float().nan_to_num(-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    return (finite * inverse_temperature[:, None]).clamp_max(_LARGEST)


def _mass(scaled: Tensor, largest: Tensor) -> Tensor:
    share = torch.exp(scaled - largest).nan_to_num(0.0)
    return (share * MASS_SCALE + 0.5).long()


def _top_k_threshold(ordered: Tensor, top_k: Tensor) -> Tensor:
    vocabulary = ordered.shape[-1]
    active = (top_k > 0) & (top_k < vocabulary)
    last = torch.where(active, top_k, 1).long() - 1
    # Fewer than k finite logits: all of them.
    return torch.where(active[:, None], ordered.gather(-1, last[:, None]), -torch.inf)


def _top_p_threshold(ordered: Tensor, largest: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    mass = _mass(ordered, largest)
    mass = torch.where(ordered >= _top_k_threshold(ordered, top_k), mass, 0)
    sums = mass.cumsum(-1)
    target = (sums[:, -1].double() * top_p.double()).ceil().long().clamp_min(1)
    short = (sums < target[:, None]).sum(-1, keepdim=True).clamp_max(ordered.shape[-1] - 1)
    return torch.where(top_p[:, None] < 1.0, ordered.gather(-1, short), -torch.inf)


def _row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two words of Philox4x32-10 with key seed and counter position."""
    c0, c1 = positions & _WORD, (positions >> 32) & _WORD
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    for _ in range(10):
        low0, high0 = _multiply(0xD2511F53, c0)
        low2, high2 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1


def _mixed(bits: Tensor) -> Tensor:
    """Mix 32 bits: the finaliser of MurmurHash3, a bijection."""
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x85EBCA6B) & _WORD
    bits = bits ^ (bits >> 13)
    bits = (bits * 0xC2B2AE35) & _WORD
    return bits ^ (bits >> 16)


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and high words of a product of two 32-bit words."""
    product = word * factor
    return product & _WORD, (product >> 32) & _WORD
