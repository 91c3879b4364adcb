"""The states of penalties on the device: when they are written, counted, and given to others."""

import pytest
import torch

from deepseek_kernels.penalties import IN_PROMPT, IS_END
from deepseek_worker.penalties import LEAST_ROWS, Chosen, Penalties
from deepseek_worker.sequence import Request, SamplingParams, Sequence

VOCAB = 40
CPU = torch.device("cpu")


def make(slot=0, prompt=(3, 4, 3), **sampling):
    request = Request("a", prompt, SamplingParams(**sampling))
    sequence = Sequence(request, 0, 100, frozenset(sampling.get("stop_token_ids", ())))
    sequence.slot = slot
    return sequence


@pytest.fixture
def penalties():
    return Penalties(20, VOCAB, CPU)


def step(penalties, *sequences, newest=0):
    """Zero logits for each; the newest token of all is the one given."""
    logits = torch.zeros(len(sequences), VOCAB)
    chosen = [Chosen(row, sequence, 0) for row, sequence in enumerate(sequences)]
    return penalties.apply(logits, torch.tensor([newest]), chosen)[0]


def changed(row):
    return {token: float(row[token]) for token in row.nonzero()[:, 0].tolist()}


def test_a_token_is_counted_in_the_step_after_it_was_chosen(penalties):
    sequence = make(frequency_penalty=1.0)

    found = [step(penalties, sequence)]
    for token in (7, 7, 9):
        # The host need not know it.
        sequence.tokens.append(-1)
        found.append(step(penalties, sequence, newest=token))

    assert [changed(rows[0]) for rows in found] == [{}, {7: -1}, {7: -2}, {7: -2, 9: -1}]


def test_a_step_that_is_repeated_counts_once(penalties):
    sequence = make(frequency_penalty=1.0)
    step(penalties, sequence)
    sequence.tokens.append(-1)

    first, again = (step(penalties, sequence, newest=7) for _ in range(2))

    assert changed(first[0]) == changed(again[0]) == {7: -1}


def test_after_a_preemption_the_host_tells_all_tokens_again(penalties):
    sequence = make(frequency_penalty=1.0)
    step(penalties, sequence)
    sequence.tokens.append(-1)
    step(penalties, sequence, newest=7)
    sequence.tokens[-1] = 7
    sequence.tokens.append(8)
    sequence.num_preemptions, sequence.slot = 1, 5

    found = step(penalties, sequence, newest=31)

    assert changed(found[0]) == {7: -1, 8: -1}


def test_a_slot_forgets_who_had_it(penalties):
    step(penalties, make(prompt=(1, 2), repetition_penalty=2.0, logit_bias=((5, 1.0),)))

    found = step(penalties, make(prompt=(3,), logit_bias=((6, 2.0),)))

    assert changed(found[0]) == {6: 2.0}
    assert penalties._seen[0].nonzero()[:, 0].tolist() == [3]


def test_sequences_without_penalties_among_others_have_no_row(penalties):
    plain, biased = make(0), make(1, logit_bias=((5, 1.0),))

    found = step(penalties, plain, biased, plain)

    assert [changed(row) for row in found] == [{}, {5: 1.0}, {}]
    assert len(penalties._rows) == 1


def test_ends_are_banned_until_there_are_tokens_enough(penalties):
    sequence = make(min_tokens=2, stop_token_ids=(9, VOCAB + 5), presence_penalty=1.0)

    found = []
    for _ in range(3):
        found.append(float(step(penalties, sequence, newest=11)[0, 9]))
        sequence.tokens.append(-1)

    assert found == [-torch.inf, -torch.inf, 0.0]
    assert penalties._seen[0, 9] == IS_END
    assert penalties._seen[0, 3] == IN_PROMPT


def test_room_grows_and_keeps_what_is_there(penalties):
    assert penalties.num_bytes == 0
    first = make(0, prompt=(3,), logit_bias=((5, 1.0),))
    step(penalties, first)
    assert len(penalties._seen) == LEAST_ROWS

    for slot in range(1, 20):
        step(penalties, make(slot, prompt=(slot,), logit_bias=((6, 1.0),)))

    assert len(penalties._seen) == 20
    assert changed(step(penalties, first)[0]) == {5: 1.0}
