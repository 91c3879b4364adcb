"""Adapters in a decoder: the bytes they take, and where nothing is added."""

import pytest
import torch

from deepseek_worker.config import LoraAdapter
from deepseek_worker.layers.lora import AdaptedLinear
from deepseek_worker.models.decoder import Decoder
from deepseek_worker.weights.adapters import adapter_bytes, attach, open_adapters
from deepseek_worker.weights.checkpoint import open_checkpoint
from deepseek_worker.weights.loading import load

CPU = torch.device("cpu")


@pytest.fixture
def decoder(tiny):
    checkpoint = open_checkpoint(tiny[0])
    decoder = Decoder(checkpoint.config, torch.float32, CPU)
    load(decoder, checkpoint, lambda _: None)
    return decoder


@pytest.fixture
def opened(tiny, make_adapter, decoder):
    def open_(*options):
        folders = [make_adapter(tiny[1], seed=n, **given) for n, given in enumerate(options)]
        wanted = [LoraAdapter(name=f"a{n}", path=folder) for n, folder in enumerate(folders)]
        return open_adapters(wanted, decoder.config)

    return open_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_bytes_are_those_that_are_taken(tiny, opened, dtype):
    decoder = Decoder(open_checkpoint(tiny[0]).config, dtype, CPU)
    adapters = opened({"rank": 3}, {"rank": 5, "targets": ("v_proj", "down_proj")})
    before = decoder.weight_bytes()
    predicted = adapter_bytes(adapters, decoder.config, dtype.itemsize, 256)

    attach(decoder, adapters)

    assert decoder.weight_bytes() - before == predicted.weights > 0
    assert predicted.workspace > 0


def test_projections_that_no_adapter_changes_stay_as_they_are(decoder, opened):
    attach(decoder, opened({"targets": ("q_proj",)}, {"targets": ("down_proj",)}))

    for block in decoder.blocks:
        kinds = [type(linear) for linear in (block.qkv, block.output, block.gate_up, block.down)]
        assert [kind is AdaptedLinear for kind in kinds] == [True, False, False, True]


def test_without_adapters_the_decoder_is_left_alone(decoder):
    attach(decoder, ())

    assert decoder.adapter_rows is None
    assert not any(isinstance(layer, AdaptedLinear) for layer in decoder.layers())
    assert adapter_bytes((), decoder.config, 4, 256).weights == 0
