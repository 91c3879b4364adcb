"""Paged attention against attention written out, over mixed steps and dirty pages."""

import itertools
import math
import random

import pytest
import torch

from deepseek_worker.layers.attention import MAX_PADDING_PAGES, Span, TorchAttention
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.config import ModelConfig, RopeConfig

PAGE_TOKENS = 4
NUM_PAGES = 200


class Still:
    """A rope that turns nothing."""

    def __init__(self, head_dim):
        self.head_dim = head_dim

    def angles(self, positions):
        one = torch.ones(len(positions), 1, self.head_dim)
        return one, torch.zeros_like(one)


def attention(heads=6, kv_heads=2, head_dim=8, formats=("float32", "float32")):
    config = ModelConfig(
        "llama", 10, heads * head_dim, 8, 2, heads, kv_heads, head_dim, 1e-6, 4096,
        RopeConfig(), False, False, False, False, "float32", frozenset(),
    )  # fmt: skip
    pool = KvPool(
        config,
        num_pages=NUM_PAGES,
        page_tokens=PAGE_TOKENS,
        formats=formats,
        device=torch.device("cpu"),
    )
    # What earlier sequences left is anything: here, no number in any format.
    pool.data.fill_(255)
    return TorchAttention(pool, heads, torch.float32, Still(head_dim)), config


def written_out(queries, keys, values, start):
    """One sequence: `[new, heads, dim]` against `[all, kv_heads, dim]`, causal."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(queries.shape[-1])
    hidden = torch.arange(len(keys)) > torch.arange(start, start + len(queries))[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


class Session:
    """Sequences that grow step by step, computed both ways."""

    def __init__(self, seed, **shape):
        self.attention, config = attention(**shape)
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        draw = random.Random(seed)
        self.free = draw.sample(range(NUM_PAGES), NUM_PAGES)
        self.pages = {}
        self.history = {}
        torch.manual_seed(seed)

    def step(self, work):
        """`work` maps a sequence to its new tokens, in row order; compares both layers."""
        spans, rows = [], []
        for name, num_new in work.items():
            history = self.history.setdefault(name, [])
            pages = self.pages.setdefault(name, [])
            start = len(history)
            while len(pages) * PAGE_TOKENS < start + num_new:
                pages.append(self.free.pop())
            new = torch.randn(num_new, self.heads + 2 * self.kv_heads, self.head_dim)
            history += list(new)
            spans.append(Span(pages, start, start + num_new))
            rows.append(new)
        qkv = torch.cat(rows).flatten(1)
        plan = self.attention.plan(spans)
        for layer in (0, 1):
            computed = qkv.clone()
            self.attention.write(layer, computed, plan)
            result = self.attention.attend(layer, computed, plan)
            assert torch.allclose(result, self.expected(work), atol=1e-5)
        return plan

    def expected(self, work):
        parts = []
        for name, num_new in work.items():
            everything = torch.stack(self.history[name])
            queries, keys, values = everything.split(
                [self.heads, self.kv_heads, self.kv_heads], dim=1
            )
            start = len(everything) - num_new
            parts.append(written_out(queries[start:], keys, values, start))
        return torch.cat(parts)


@pytest.mark.parametrize(
    "shape",
    [{}, {"kv_heads": 6}, {"kv_heads": 1}, {"heads": 9, "kv_heads": 3, "head_dim": 6}],
    ids=["grouped", "multi-head", "multi-query", "odd"],
)
def test_chunks_and_decoding_equal_attention_written_out(shape):
    session = Session(1, **shape)

    session.step({"a": 1})
    session.step({"a": 1, "b": 7, "c": 16})
    session.step({"c": 1, "b": 1, "a": 1, "d": 3})
    session.step({"c": 1, "b": 5, "d": 9})


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_equal_attention_written_out(seed):
    draw = random.Random(seed)
    session = Session(seed)
    names = [f"s{index}" for index in range(5)]
    session.step({name: draw.randint(1, 30) for name in names})
    for _ in range(6):
        decoding = sorted(
            draw.sample(names, draw.randint(1, 5)), key=lambda n: -len(session.history[n])
        )
        chunk = [name for name in names if name not in decoding][: draw.randint(0, 1)]
        session.step(dict.fromkeys(decoding, 1) | {name: draw.randint(2, 9) for name in chunk})


def test_similar_lengths_share_a_group_and_a_very_long_one_stays_apart():
    session = Session(3)
    session.step({"long": 300, "x": 20, "y": 22, "z": 9})

    plan = session.step({"long": 1, "y": 1, "x": 1, "z": 1})

    assert [group.num_sequences for group in plan.groups] == [1, 3]
    assert 300 // PAGE_TOKENS > MAX_PADDING_PAGES


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("bf16", 0.02), ("fp8", 0.1), ("int8", 0.02)], ids=lambda value: value
)
def test_a_cache_of_lower_precision_is_close(kind, tolerance):
    session = Session(5, formats=("float32", kind))
    torch.manual_seed(0)
    qkv = torch.randn(9, 10 * 8)
    plan = session.attention.plan([Span([1, 2, 3], 0, 9)])
    exact, rounded = (attended(session, layer, qkv, plan) for layer in (0, 1))

    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, atol=tolerance)


def attended(session, layer, qkv, plan):
    session.attention.write(layer, qkv, plan)
    return session.attention.attend(layer, qkv, plan)


@pytest.mark.parametrize("kind", ["float32", "bf16", "fp8", "int8"])
def test_where_a_prompt_is_cut_changes_nothing(kind):
    session = Session(5, formats=("float32", kind))
    qkv = torch.randn(9, 10 * 8)
    whole = attended(session, 1, qkv, session.attention.plan([Span([1, 2, 3], 0, 9)]))

    for cuts in ((0, 1, 9), (0, 4, 9), (0, 8, 9), tuple(range(10))):
        parts = [
            attended(session, 1, qkv[a:b], session.attention.plan([Span([7, 8, 9], a, b)]))
            for a, b in itertools.pairwise(cuts)
        ]
        assert torch.allclose(torch.cat(parts), whole, atol=1e-6)


def test_the_workspace_is_counted_and_reused():
    session = Session(6)
    assert session.attention.workspace_bytes == 0

    session.step({"a": 40})
    session.step({"a": 1})
    first = session.attention.workspace_bytes
    session.step({"a": 1})

    assert first > 0
    assert session.attention.workspace_bytes == first
