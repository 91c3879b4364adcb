"""Fused projections: packed and plain give the same, parts lie where they belong."""

import pytest
import torch

from deepseek_worker.layers import linear as linear_module
from deepseek_worker.layers.linear import (
    Embedding,
    PlainLinear,
    Projection,
    TiedHead,
    linear_in_blocks,
    packs_on,
)

CPU = torch.device("cpu")


def linear(bias=True, dtype=torch.float32) -> PlainLinear:
    torch.manual_seed(0)
    layer = PlainLinear(Projection({"a": 5, "b": 3}, 7, bias), dtype, CPU)
    for slot in layer.slots():
        slot.store(torch.randn(slot.shape))
    return layer


@pytest.fixture(params=[True, False], ids=["MKL", "oneDNN"])
def _suits_mkl(request, monkeypatch):
    """As on a processor of either kind."""
    monkeypatch.setattr(linear_module, "_suits_mkl", lambda: request.param)


@pytest.mark.usefixtures("_suits_mkl")
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
    slots = {slot.name: slot for slot in layer.slots()}
    first, second = torch.randn(5, 7), torch.randn(3, 7)

    slots["b.weight"].store(second)
    slots["a.weight"].store(first)

    assert list(slots) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert torch.equal(torch.cat((first, second)), layer.weight)


@pytest.mark.parametrize("bias", [torch.randn(192), None])
@pytest.mark.parametrize("rows", [1, 4, 15])
def test_blocks_give_what_the_whole_matrix_gives(bias, rows):
    x, weight = torch.randn(rows, 40), torch.randn(192, 40)

    product = linear_in_blocks(x, weight, bias)

    assert torch.allclose(product, torch.nn.functional.linear(x, weight, bias), atol=1e-4)
    assert product.is_contiguous()


def test_few_rows_are_multiplied_in_blocks_where_blocks_divide_the_features(monkeypatch):
    calls = []
    monkeypatch.setattr(
        linear_module, "linear_in_blocks", lambda x, weight, bias: calls.append(len(x))
    )
    whole = PlainLinear(Projection({"a": 64, "b": 128}, 7, has_bias=False), torch.float32, CPU)
    ragged = PlainLinear(Projection({"a": 65}, 7, has_bias=False), torch.float32, CPU)

    for rows in (1, 3, 4, 15, 16):
        whole(torch.zeros(rows, 7))
        ragged(torch.zeros(rows, 7))

    assert calls == [4, 15]


@pytest.mark.parametrize("suits_mkl", [True, False])
def test_what_is_packed_depends_on_type_and_processor(monkeypatch, suits_mkl):
    monkeypatch.setattr(linear_module, "_suits_mkl", lambda: suits_mkl)
    has_onednn = torch._C._has_mkldnn

    assert packs_on(CPU, torch.float32) == (has_onednn and not suits_mkl)
    assert packs_on(CPU, torch.bfloat16) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert not packs_on(CPU, torch.float16)
    assert not packs_on(torch.device("meta"), torch.float32)


@pytest.mark.usefixtures("_suits_mkl")
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
