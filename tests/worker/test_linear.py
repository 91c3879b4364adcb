"""Fused projections: packed and plain give the same, parts lie where they belong."""

import pytest
import torch

from deepseek_worker.layers.linear import Embedding, Linear, TiedHead, packs_on

CPU = torch.device("cpu")


def linear(bias=True, dtype=torch.float32) -> Linear:
    torch.manual_seed(0)
    layer = Linear({"a": 5, "b": 3}, 7, bias=bias, dtype=dtype, device=CPU)
    for slot in layer.slots():
        slot.target.normal_()
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 8, 65])
@torch.inference_mode()
def test_packing_changes_no_result(bias, rows):
    layer = linear(bias)
    x = torch.randn(rows, 7)
    plain = layer(x)

    layer.pack()

    assert torch.allclose(layer(x), plain, atol=1e-5)
    assert layer(x).shape == (rows, 8)


def test_parts_are_views_of_one_matrix_in_order():
    layer = linear()
    names = [slot.name for slot in layer.slots()]

    first, second = (slot.target for slot in layer.slots() if slot.name.endswith("weight"))

    assert names == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert torch.equal(torch.cat((first, second)), layer.weight)


def test_float16_is_computed_plainly():
    assert not packs_on(CPU, torch.float16)
    assert packs_on(CPU, torch.float32) == torch._C._has_mkldnn
    assert not packs_on(torch.device("meta"), torch.float32)


@torch.inference_mode()
def test_a_tied_head_scores_with_the_table_and_keeps_it():
    embedding = Embedding("e", 11, 6, torch.float32, CPU)
    embedding.weight.normal_()
    head = TiedHead(embedding)
    x = torch.randn(2, 6)
    expected = x @ embedding.weight.T

    head.pack()

    assert torch.allclose(head(x), expected, atol=1e-5)
    assert list(head.slots()) == []
    assert embedding(torch.tensor([3, 3])).shape == (2, 6)
    assert torch.equal(embedding(torch.tensor([3]))[0], embedding.weight[3])
