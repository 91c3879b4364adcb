"""The pool's bytes: where a token's key and value are in each layer, and that pages are whole."""

import pytest
import torch

from deepseek_contract.sizing import kv_page_bytes
from deepseek_kernels import paged_decode
from deepseek_worker.memory.ledger import shape_of
from deepseek_worker.memory.pool import KV_TYPES, KvPool
from deepseek_worker.models.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    "llama", 10, 16, 8, 3, 4, 2, 6, 1e-6, 64, RopeConfig(), False, False, False, False,
    "float32", frozenset(),
)  # fmt: skip
MIXED = ("bf16", "int8", "fp8")


def pool(formats=("float32",) * 3, num_pages=5, page_tokens=4) -> KvPool:
    return KvPool(
        CONFIG,
        num_pages=num_pages,
        page_tokens=page_tokens,
        formats=formats,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
@pytest.mark.parametrize("formats", [("float32",) * 3, ("int8",) * 3, MIXED], ids="-".join)
def test_a_page_is_one_stretch_of_memory_of_the_predicted_size(formats, page_tokens):
    subject = pool(formats, page_tokens=page_tokens)

    assert subject.data[2].is_contiguous()
    assert subject.data[2].nbytes == kv_page_bytes(shape_of(CONFIG), formats, page_tokens)


def test_every_layer_has_its_own_precision():
    subject = pool(MIXED)

    assert [layer.keys.dtype for layer in subject.layers] == [KV_TYPES[kind] for kind in MIXED]
    assert [layer.key_scale is None for layer in subject.layers] == [True, False, False]


def test_no_write_touches_another_layer_place_or_page():
    subject = pool(MIXED)
    subject.data.zero_()
    one = torch.ones(1, 2, 2, 6)

    for layer in subject.layers:
        before = subject.data.clone()
        layer.write(torch.tensor([2]), torch.tensor([3]), one)
        changed = (subject.data != before).nonzero()[:, 0].unique().tolist()
        assert changed == [2]

    for layer in subject.layers:
        values = layer.read(torch.arange(5), torch.float32)
        assert values[2, 3].unique().tolist() == [1.0]
        assert values.count_nonzero() == 2 * 2 * 6


@pytest.mark.parametrize(
    ("kind", "error"), [("float32", 0.0), ("bf16", 2**-8), ("fp8", 2**-4), ("int8", 1 / 127)]
)
def test_what_is_read_is_what_was_written_within_the_precision(kind, error):
    subject = pool((kind,) * 3)
    torch.manual_seed(0)
    written = torch.randn(7, 2, 2, 6) * torch.tensor([0.1, 10.0])[None, None, :, None]
    page, offset = torch.tensor([0, 0, 1, 1, 4, 4, 4]), torch.tensor([0, 3, 1, 2, 0, 1, 2])

    subject.layers[1].write(page, offset, written)
    read = subject.layers[1].read(torch.tensor([4, 0, 1]), torch.float32)

    found = torch.stack([read[1, 0], read[1, 3], read[2, 1], read[2, 2], *read[0, :3]])
    largest = written.abs().amax(-1, keepdim=True)
    assert ((found - written).abs() <= error * largest).all()
    assert torch.equal(found, written) == (error == 0)


def test_fp8_scales_widen_the_range_of_a_head():
    subject = pool(("fp8",) * 3)
    large = torch.full((1, 2, 2, 6), 4480.0)
    place = torch.tensor([0])

    subject.layers[0].write(place, place, large)
    cut = subject.layers[0].read(place, torch.float32)[0, 0]
    subject.layers[0].scales.fill_(10.0)
    subject.layers[0].write(place, place, large)

    assert cut.unique().tolist() == [448.0]
    assert subject.layers[0].read(place, torch.float32)[0, 0].unique().tolist() == [4480.0]


@pytest.mark.parametrize("kind", ["float32", "fp8", "int8"])
def test_the_kernels_read_the_same_numbers(kind):
    subject = pool((kind,) * 3)
    layer = subject.layers[2]
    torch.manual_seed(0)
    tokens = torch.randn(4, 2, 2, 6)
    layer.write(torch.tensor([3, 3, 3, 3]), torch.arange(4), tokens)
    query = torch.randn(1, 4, 6)

    attended = paged_decode(
        query,
        layer.keys,
        layer.values,
        torch.tensor([[3]], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        key_scale=layer.key_scale,
        value_scale=layer.value_scale,
    )

    keys, values = layer.read(torch.tensor([3]), torch.float32)[0].unbind(1)
    scores = torch.einsum("hgd,thd->hgt", query.view(2, 2, 6), keys) * 6**-0.5
    expected = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values)
    assert torch.allclose(attended.view(2, 2, 6), expected, atol=1e-5)


def test_clearing_touches_the_named_pages_only():
    subject = pool(MIXED)
    subject.data.fill_(255)

    subject.clear([1, 3])

    assert subject.data.any(1).tolist() == [True, False, True, False, True]
    for layer in subject.layers:
        assert not layer.read(torch.tensor([1, 3]), torch.float32).any()
