"""Logits of tiny random models against transformers, and what must be refused."""

import pytest
import torch

from deepseek_worker.layers.attention import Span, TorchAttention
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.weights.checkpoint import open_checkpoint
from deepseek_worker.weights.loading import load

CPU = torch.device("cpu")
SPANS = ((0, 1), (1, 9), (9, 33), (33, 34), (34, 60))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + index / 8 for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "multi-head": ("llama", {"num_key_value_heads": 4}),
    "multi-query": ("llama", {"num_key_value_heads": 1}),
    "head_dim is not hidden by heads": ("llama", {"head_dim": 32}),
    "head_dim is no power of two": ("llama", {"hidden_size": 60, "head_dim": 24}),
    "odd vocabulary": ("llama", {"vocab_size": 103}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "yarn rope": ("llama", {"rope_parameters": YARN}),
    "yarn rope with mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}},
    ),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
}


def logits_in_chunks(folder, token_ids: list[int]) -> torch.Tensor:
    """All logits, read as first token, chunks and single tokens, over scattered pages."""
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.config, torch.float32, CPU)
    load(decoder, checkpoint, lambda _: None)
    pool = KvPool(
        checkpoint.config, num_pages=20, page_tokens=4, formats=["float32"] * 2, device=CPU
    )
    pool.data.fill_(255)  # Not a number, in every format.
    attention = TorchAttention(pool, checkpoint.config.num_heads, torch.float32, decoder.rope)
    pages = [(7 * index + 3) % 20 for index in range(16)]
    rows = []
    for start, end in SPANS:
        plan = attention.plan([Span(pages, start, end)])
        hidden = decoder.forward(torch.tensor(token_ids[start:end]), attention, plan)
        rows.append(decoder.logits(hidden))
    return torch.cat(rows)


@pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES.keys())
@torch.inference_mode()
def test_logits_equal_those_of_transformers(kind, changes, make_checkpoint):
    folder, model = make_checkpoint(kind, **changes)
    token_ids = [(31 * index + 5) % 100 for index in range(60)]

    logits = logits_in_chunks(folder, token_ids)

    expected = model(torch.tensor([token_ids])).logits[0]
    assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()


@torch.inference_mode()
def test_sequences_of_one_step_do_not_see_each_other(tiny):
    folder, model = tiny
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.config, torch.float32, CPU)
    load(decoder, checkpoint, lambda _: None)
    pool = KvPool(
        checkpoint.config, num_pages=64, page_tokens=4, formats=["float32"] * 2, device=CPU
    )
    attention = TorchAttention(pool, checkpoint.config.num_heads, torch.float32, decoder.rope)
    lengths = (80, 30, 9, 2)
    prompts = [[(index * 7 + length) % 100 for index in range(length)] for length in lengths]
    pages, first = [], 0
    for length in lengths:
        needed = -(-length // 4)
        pages.append(list(range(first, first + needed)))
        first += needed

    def step(spans, token_ids):
        return decoder.forward(torch.tensor(token_ids), attention, attention.plan(spans))

    # All but the last token of each, then the last ones together: long and short in one group.
    step(
        [Span(own, 0, length - 1) for own, length in zip(pages, lengths, strict=True)],
        [token for prompt in prompts for token in prompt[:-1]],
    )
    hidden = step(
        [Span(own, length - 1, length) for own, length in zip(pages, lengths, strict=True)],
        [prompt[-1] for prompt in prompts],
    )

    logits = decoder.logits(hidden)
    for row, prompt in zip(logits, prompts, strict=True):
        expected = model(torch.tensor([prompt])).logits[0, -1]
        assert (row - expected).abs().max() < 2e-4 * expected.abs().max()


def test_parameters_are_as_many_as_the_checkpoint_has(tiny):
    folder, model = tiny
    checkpoint = open_checkpoint(folder)

    decoder = Decoder(checkpoint.config, torch.float32, CPU)

    assert decoder.weight_bytes() == 4 * sum(p.numel() for p in model.parameters())
    assert decoder.packed_head_bytes() == 0
