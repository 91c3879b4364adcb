"""Choosing tokens: greedy, truncated, seeded, biased; and the logprobs beside them."""

import math
from collections import Counter

import pytest
import torch

from deepseek_worker.sampler import (
    NUM_CANDIDATES,
    allowed_tokens,
    sample,
    token_logprobs,
    uniform,
    unpack_bits,
)
from deepseek_worker.sequence import Request, SamplingParams, Sequence

VOCAB = 5000


class Only:
    """A guide to some tokens of 64, or to all."""

    is_finished = False
    error = None

    def __init__(self, *tokens: int) -> None:
        bits = sum(1 << token for token in tokens)
        self.bits = bits.to_bytes(8, "little") if tokens else None

    def allowed_tokens(self) -> bytes | None:
        return self.bits

    def advance(self, token_id: int) -> None:
        raise AssertionError("sampling changes nothing")


def sequence(prompt=(1, 2), generated=(), order=0, stop=(), guide=None, **sampling) -> Sequence:
    request = Request("r", tuple(prompt), SamplingParams(**sampling), guide=guide)
    subject = Sequence(request, order, 10_000, frozenset(stop))
    subject.tokens += generated
    return subject


def draw(logits: torch.Tensor, number: int = 1000, **sampling) -> Counter:
    """Sample one row many times, as the tokens of many requests of different seeds."""
    requests = [sequence(seed=seed, **sampling) for seed in range(number)]
    return Counter(s.token_id for s in sample(logits.expand(number, -1), requests, 0))


@pytest.fixture
def logits() -> torch.Tensor:
    """Probabilities 1/2, 1/4, 1/8, ... in a scattered order over a small vocabulary."""
    values = torch.full((64,), -1e4)
    for rank, token in enumerate((40, 3, 17, 9, 55)):
        values[token] = -rank * math.log(2)
    return values[None]


@pytest.fixture
def wide() -> torch.Tensor:
    """Nearly flat over more tokens than are looked at first."""
    return torch.linspace(0, 0.1, VOCAB)[None]


def test_greedy_takes_the_likeliest(logits):
    assert sample(logits, [sequence(temperature=0)], 0)[0].token_id == 40


def test_greedy_and_random_rows_share_a_batch(logits):
    rows = sample(
        logits.expand(3, -1),
        [sequence(temperature=0), sequence(temperature=1, top_k=1), sequence(temperature=1)],
        0,
    )

    assert [row.token_id for row in rows[:2]] == [40, 40]
    assert rows[2].token_id in (40, 3, 17, 9, 55)


def test_frequencies_follow_the_probabilities(logits):
    counts = draw(logits, temperature=1)

    # The five tokens have 16, 8, 4, 2 and 1 of 31 parts.
    for token, parts in ((40, 16), (3, 8), (17, 4)):
        assert counts[token] / 1000 == pytest.approx(parts / 31, abs=0.05)


def test_temperature_sharpens(logits):
    assert draw(logits, temperature=0.25)[40] > draw(logits, temperature=1)[40] + 250


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 1}, {40}),
        ({"top_k": 2}, {40, 3}),
        ({"top_k": 64}, {40, 3, 17, 9, 55}),
        ({"top_p": 0.5}, {40}),
        ({"top_p": 0.6}, {40, 3}),
        ({"top_p": 0.80}, {40, 3, 17}),
        ({"top_p": 1e-9}, {40}),
        ({"min_p": 0.3}, {40, 3}),
        ({"min_p": 1.0}, {40}),
        # Of the two that top_k leaves the first has 2/3, so it alone reaches 0.6.
        ({"top_k": 2, "top_p": 0.6}, {40}),
        ({"min_p": 0.2, "top_p": 0.9}, {40, 3, 17}),
    ],
)
def test_truncation_keeps_exactly(sampling, allowed, logits):
    assert set(draw(logits, temperature=1, **sampling)) == allowed


def test_a_token_that_begins_where_top_p_ends_is_not_kept():
    even = torch.tensor([[0.0, 0.0, -1e4]])

    assert len(draw(even, temperature=1, top_p=0.5)) == 1


def test_top_p_looks_beyond_the_first_candidates_when_it_has_to(wide):
    counts = draw(wide, temperature=1, top_p=0.9)

    ranks = [VOCAB - 1 - token for token in counts]
    assert max(ranks) > NUM_CANDIDATES
    probabilities = wide[0].softmax(-1).flip(0)
    kept = int((probabilities.cumsum(0) - probabilities < 0.9).sum())
    assert max(ranks) < kept


def test_min_p_looks_beyond_the_first_candidates_when_it_has_to(wide):
    counts = draw(wide, temperature=1, min_p=0.92)

    floor = 0.1 + math.log(0.92)
    assert min(wide[0, token].item() for token in counts) >= floor - 1e-4
    assert max(VOCAB - 1 - token for token in counts) > NUM_CANDIDATES
    assert max(VOCAB - 1 - token for token in counts) > NUM_CANDIDATES


def test_a_seed_repeats_and_does_not_depend_on_the_row_or_the_order(wide):
    request = {"temperature": 1.0, "seed": 7, "top_p": 0.9}
    company = [sequence(temperature=1.0, order=5), sequence(temperature=0)]

    alone = sample(wide, [sequence(**request)], 0)[0].token_id
    together = sample(wide.expand(3, -1), [*company, sequence(order=9, **request)], 1)[2].token_id

    assert alone == together


def test_seeds_and_places_in_the_answer_give_different_numbers():
    numbers = [uniform(seed, index) for seed in range(50) for index in range(50)]

    assert len(set(numbers)) > 2490
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 + 5])
def test_any_integer_is_a_seed(seed, logits):
    assert sample(logits, [sequence(temperature=1, seed=seed)], 0)[0].token_id is not None


def test_bias_moves_a_token_up_and_down(logits):
    up = sample(logits, [sequence(temperature=0, logit_bias=((5, 1e5),))], 0)[0]
    down = sample(logits, [sequence(temperature=0, logit_bias=((40, -100.0),))], 0)[0]

    assert up.token_id == 5
    assert down.token_id == 3


def test_presence_and_frequency_count_generated_tokens_only(logits):
    prompt_only = sequence(prompt=(40, 40), temperature=0, presence_penalty=2.0)
    once = sequence(generated=(40,), temperature=0, presence_penalty=0.8)
    thrice = sequence(generated=(40, 40, 40), temperature=0, frequency_penalty=0.3)

    rows = sample(logits.expand(3, -1), [prompt_only, once, thrice], 0)

    assert [row.token_id for row in rows] == [40, 3, 3]


def test_repetition_penalty_counts_the_prompt_and_pushes_either_sign_down():
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.2]])
    positive = sequence(prompt=(0,), temperature=0, repetition_penalty=2.0)
    negative = sequence(
        prompt=(2,), temperature=0, repetition_penalty=2.0, logit_bias=((0, -9.0), (1, -9.0))
    )

    rows = sample(logits.expand(2, -1), [positive, negative], 0)

    assert [row.token_id for row in rows] == [1, 3]


def test_end_tokens_are_banned_until_min_tokens(logits):
    early = sequence(temperature=0, stop=(40,), min_tokens=1)
    late = sequence(generated=(9,), temperature=0, stop=(40,), min_tokens=1)

    rows = sample(logits.expand(2, -1), [early, late], 0)

    assert [row.token_id for row in rows] == [3, 40]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_give_no_token_and_spare_the_others(value, logits):
    broken = logits.clone()
    broken[0, 7] = value
    requests = [sequence(temperature=1), sequence(temperature=1, logprobs=2)]

    rows = sample(torch.cat((broken, logits)), requests, 0)

    assert rows[0].token_id is None
    assert rows[1].token_id is not None


def test_masked_tokens_are_no_error(logits):
    logits[0, 0] = float("-inf")

    assert sample(logits, [sequence(temperature=0)], 0)[0].token_id == 40


def test_logprobs_are_finite_ordered_and_of_the_unbiased_model(logits):
    logits[0, 63] = -50.0
    request = sequence(temperature=0, logprobs=5, logit_bias=tuple((t, -100.0) for t in range(63)))

    (row,) = sample(logits, [request], 0)

    assert row.token_id == 63
    assert row.logprobs.token_id == 63
    assert [token for token, _ in row.logprobs.top] == [40, 3, 17, 9, 55]
    assert all(math.isfinite(value) for _, value in row.logprobs.top)
    assert row.logprobs.top[0][1] == pytest.approx(math.log(16 / 31), abs=1e-4)


def test_ranks_count_from_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])

    rows = token_logprobs(logits, [2, 0], sequence(prompt_logprobs=1), of_prompt=True)

    assert [row.rank for row in rows] == [2, 1]
    assert [row.top[0][0] for row in rows] == [1, 0]


def test_more_alternatives_than_tokens_are_all_tokens():
    (row,) = token_logprobs(torch.zeros(1, 3), [0], sequence(logprobs=20))

    assert len(row.top) == 3
    assert sum(math.exp(value) for _, value in row.top) == pytest.approx(1.0)


def test_a_guide_leaves_only_what_it_allows(logits):
    guided = sequence(temperature=0, guide=Only(3, 9, 63))

    free, held, open_ = sample(
        logits.expand(3, -1),
        [sequence(temperature=0), guided, sequence(temperature=0, guide=Only())],
        0,
    )

    assert (free.token_id, held.token_id, open_.token_id) == (40, 3, 40)
    assert draw(logits, 100, guide=Only(9, 31)) == {9: 100}
    biased = sequence(temperature=0, guide=Only(3, 9), logit_bias=((40, 100.0), (9, 90.0)))
    assert sample(logits, [biased], 0)[0].token_id == 9


def test_logprobs_beside_a_guide_are_the_model_s_own(logits):
    (row,) = sample(logits, [sequence(temperature=0, guide=Only(9), logprobs=1)], 0)

    assert row.token_id == 9
    assert row.logprobs.rank == 4
    assert row.logprobs.top[0][0] == 40


def test_the_guides_bits_are_one_row_for_each_sequence():
    guides = [Only(0, 31, 32, 63), None, Only()]

    bitmask = allowed_tokens([sequence(guide=guide) for guide in guides], 64)

    assert bitmask.dtype == torch.int32
    assert bitmask.shape == (3, 2)
    bits = unpack_bits(bitmask, 60)
    assert bits.shape == (3, 60)
    assert bits[0].nonzero().flatten().tolist() == [0, 31, 32]
    assert bits[1:].all()
