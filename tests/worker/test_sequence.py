"""Facts that follow from a sequence's few numbers."""

from deepseek_worker.sequence import Request, SamplingParams, Sequence


def sequence(num_prompt: int) -> Sequence:
    return Sequence(Request("r", (7,) * num_prompt, SamplingParams()), 0, 100, frozenset())


def test_starts_with_the_prompt_and_nothing_computed():
    subject = sequence(5)

    assert subject.tokens == [7] * 5
    assert (subject.num_uncomputed_tokens, subject.num_generated_tokens) == (5, 0)


def test_decodes_when_only_its_newest_token_is_uncomputed():
    subject = sequence(5)
    subject.num_computed_tokens = 5
    subject.tokens.append(1)

    assert subject.is_decoding


def test_the_last_token_of_a_prompt_is_not_decoding():
    subject = sequence(5)
    subject.num_computed_tokens = 4

    assert not subject.is_decoding


def test_a_preempted_sequence_prefills_what_it_generated():
    subject = sequence(5)
    subject.tokens += [1, 2, 3]

    assert not subject.is_decoding
    assert subject.num_uncomputed_tokens == 8


def test_sequences_are_themselves_not_their_content():
    assert sequence(2) != sequence(2)
    assert len({sequence(2), sequence(2)}) == 2
