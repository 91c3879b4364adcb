"""Rotation and frequencies; every scaling against transformers is in test_decoder.py."""

import math

import pytest
import torch

from deepseek_worker.layers.rope import Rope, inverse_frequencies, rotate
from deepseek_worker.models.config import RopeConfig


def rope(head_dim=8, config=None) -> Rope:
    config = config or RopeConfig()
    return Rope(*inverse_frequencies(config, head_dim), torch.float32, torch.device("cpu"))


def test_each_pair_of_halves_turns_by_its_angle():
    heads = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 5, 1000])

    turned = rotate(heads, *rope().angles(positions))

    frequencies = inverse_frequencies(RopeConfig(), 8)[0]
    for token, position in enumerate(positions):
        for pair in range(4):
            angle = float(position * frequencies[pair])
            a, b = heads[token, :, pair], heads[token, :, pair + 4]
            expected = a * math.cos(angle) - b * math.sin(angle)
            assert torch.allclose(turned[token, :, pair], expected, atol=1e-4)
            expected = b * math.cos(angle) + a * math.sin(angle)
            assert torch.allclose(turned[token, :, pair + 4], expected, atol=1e-4)


def test_position_zero_changes_nothing():
    heads = torch.randn(1, 3, 8)

    assert torch.equal(rotate(heads, *rope().angles(torch.tensor([0]))), heads)


def test_scores_depend_on_the_distance_alone():
    query, key = torch.randn(2, 1, 1, 8)

    def score(q, k):
        turned = [rotate(x, *rope().angles(torch.tensor([p]))) for x, p in ((query, q), (key, k))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)


def test_yarn_and_longrope_scale_cosine_and_sine():
    yarn = RopeConfig(
        type="yarn", parameters={"factor": 4.0, "original_max_position_embeddings": 64}
    )
    given = RopeConfig(
        type="yarn",
        parameters={
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 0.5,
        },
    )

    assert inverse_frequencies(yarn, 8)[1] == pytest.approx(0.1 * math.log(4) + 1)
    assert inverse_frequencies(given, 8)[1] == 0.5
    cosine, _ = rope(config=given).angles(torch.tensor([0]))
    assert cosine.unique().tolist() == [0.5]
