"""From entries to rows: order, positions and which rows are scored."""

import pytest
import torch

from deepseek_worker.scheduler import Scheduled
from deepseek_worker.sequence import Request, SamplingParams, Sequence


def entry(tokens, start, num_tokens, pages, order=0, **sampling) -> Scheduled:
    request = Request(str(order), tuple(tokens), SamplingParams(temperature=0, **sampling))
    sequence = Sequence(request, order, 1000, frozenset())
    sequence.pages = pages
    return Scheduled(sequence, start, num_tokens)


@pytest.fixture
def runner(tiny, make_engine):
    return make_engine(tiny[0]).runner


def test_decoding_rows_come_first_and_longest_first(runner):
    chunk = entry(range(10), 0, 10, [0])
    short = entry(range(20), 19, 1, [1, 2])
    long = entry(range(40), 39, 1, [3, 4, 5])

    inputs = runner.prepare([chunk, short, long])

    assert inputs.entries == (long, short, chunk)
    assert inputs.token_ids.tolist() == [39, 19, *range(10)]
    assert inputs.last_rows.tolist() == [0, 1, 11]


def test_a_chunk_inside_a_prompt_is_not_scored(runner):
    inputs = runner.prepare([entry(range(40), 0, 16, [0, 1, 2])])

    assert inputs.last_rows.tolist() == []
    (result,) = runner.forward(inputs).values()
    assert result.sampled is None


def test_computing_the_same_entries_twice_gives_the_same(runner):
    entries = [entry(range(30), 0, 30, [0, 1], 0), entry(range(5), 0, 5, [2], 1)]

    first = runner.forward(runner.prepare(entries))
    second = runner.forward(runner.prepare(entries))

    assert first == second


def test_prompt_logprobs_are_scored_in_bounded_chunks(runner, monkeypatch):
    vocab = runner._decoder.config.vocab_size
    monkeypatch.setattr("deepseek_worker.runner.LOGITS_CHUNK_BYTES", 4 * vocab * 8)
    most_rows = []
    logits = runner._decoder.logits

    def record(hidden):
        most_rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(runner._decoder, "logits", record)
    scored = entry([index % 100 for index in range(60)], 0, 60, [0, 1, 2, 3], prompt_logprobs=0)

    (result,) = runner.forward(runner.prepare([scored])).values()

    assert len(result.prompt_logprobs) == 59
    assert max(most_rows) <= 8


def test_no_tensor_keeps_a_graph(runner):
    inputs = runner.prepare([entry(range(5), 0, 5, [0])])

    runner.forward(inputs)

    assert not runner._decoder.embedding.weight.requires_grad
    assert torch.is_grad_enabled()
