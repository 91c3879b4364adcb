"""The pool's tensor: where a token's row is, and that pages are whole."""

import torch

from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.config import ModelConfig, RopeConfig


def pool(num_pages=5, page_tokens=4) -> KvPool:
    config = ModelConfig(
        "llama", 10, 16, 8, 3, 4, 2, 4, 1e-6, 64, RopeConfig(), False, False, False, False,
        "float32", frozenset(),
    )  # fmt: skip
    return KvPool(
        config,
        num_pages=num_pages,
        page_tokens=page_tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_a_page_is_one_stretch_of_memory_over_all_layers():
    subject = pool()

    assert subject.data[2].is_contiguous()
    assert subject.data[2].numel() == 3 * 4 * 2 * 2 * 4


def test_rows_of_a_slot_are_its_place_in_each_layer():
    subject = pool()
    subject.data.zero_()
    slot = torch.tensor([2 * 4 + 3])

    for layer, rows in enumerate(subject.layer_rows(slot)):
        subject.rows[rows] = layer + 1.0

    assert [subject.data[2, layer, 3].unique().item() for layer in range(3)] == [1, 2, 3]
    assert subject.data.count_nonzero() == 3 * 2 * 2 * 4


def test_pages_of_a_layer_are_its_part_of_them():
    subject = pool()
    subject.data.normal_()

    for layer, indices in enumerate(subject.layer_page_indices(torch.tensor([4, 0]))):
        assert torch.equal(subject.layer_pages[indices], subject.data[[4, 0], layer])


def test_clearing_touches_the_named_pages_only():
    subject = pool()
    subject.data.fill_(float("nan"))

    subject.clear([1, 3])

    finite = subject.data.flatten(1).isfinite().all(1).tolist()
    assert finite == [False, True, False, True, False]
