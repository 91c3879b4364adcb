"""Slots are the only way weights come in, so together they have to be all of the weights."""

import pytest
import torch

from deepseek_worker.layers.parameters import Slot
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.weights.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("llama", {"attention_bias": True})],
)
def test_slots_cover_every_parameter_exactly_once(kind, changes, make_checkpoint):
    folder, _ = make_checkpoint(kind, **changes)
    decoder = Decoder(open_checkpoint(folder).config, torch.float32, torch.device("cpu"))
    for layer in decoder.layers():
        for parameter in layer.parameters():
            parameter.zero_()

    slots: list[Slot] = [slot for layer in decoder.layers() for slot in layer.slots()]
    for slot in slots:
        slot.store(torch.ones(slot.shape))

    assert len({slot.name for slot in slots}) == len(slots)
    for layer in decoder.layers():
        for parameter in layer.parameters():
            assert parameter.min() == parameter.max() == 1
