"""Which parts become one matrix, and how many bytes that is."""

import pytest
import torch

from deepseek_worker.layers.linear import PlainLinear, Projection
from deepseek_worker.quantization.build import (
    build_linear,
    everything_plain,
    projection_bytes,
    rounded,
)
from deepseek_worker.quantization.eight_bits import BlockScaledLinear, RowScaledLinear
from deepseek_worker.quantization.linears import JoinedLinear
from deepseek_worker.quantization.readers import PlainReader
from deepseek_worker.quantization.schemes import PLAIN, Scheme

CPU = torch.device("cpu")
WITH_ZEROS = Scheme("int4", zero_points=True)
BLOCKS = Scheme("fp8_block", "8bit")


def load(layer):
    """Fill by name, so that the result does not depend on how the parts are put together."""
    for slot in layer.slots():
        generator = torch.Generator().manual_seed(sum(map(ord, slot.name)))
        slot.store(torch.randn(slot.shape, generator=generator))
    layer.pack()
    return layer


def test_parts_that_are_stored_alike_are_one_matrix():
    layer = build_linear(
        Projection({"q": 9, "k": 3}, 20, False), rounded(Scheme("int8")), torch.float32, CPU
    )

    assert isinstance(layer, RowScaledLinear)


@torch.inference_mode()
def test_blocks_of_two_parts_never_overlap():
    aligned = Projection({"q": 256, "k": 100}, 130, False)
    ragged = Projection({"q": 192, "k": 64, "v": 64}, 130, True)

    one = build_linear(aligned, rounded(BLOCKS), torch.float32, CPU)
    several = load(build_linear(ragged, rounded(BLOCKS), torch.float32, CPU))

    assert isinstance(one, BlockScaledLinear)
    assert isinstance(several, JoinedLinear)
    plain = load(build_linear(ragged, everything_plain, torch.float32, CPU))
    x = torch.randn(3, 130)
    assert (several(x) - plain(x)).abs().max() < 0.1 * plain(x).abs().max()


@torch.inference_mode()
def test_a_part_that_the_checkpoint_left_plain_stays_plain():
    def storage_of(name):
        return PlainReader(), PLAIN if name == "k" else Scheme("int8")

    projection = Projection({"q": 8, "k": 4, "v": 4}, 64, True)
    layer = build_linear(projection, storage_of, torch.float32, CPU)
    plain = build_linear(projection, everything_plain, torch.float32, CPU)
    assert isinstance(layer, JoinedLinear)
    assert {slot.name for slot in layer.slots()} == {slot.name for slot in plain.slots()}
    load(layer)
    load(plain)
    x = torch.randn(3, 64)

    difference = (layer(x) - plain(x)).abs()
    assert difference[:, 8:12].max() < 1e-5
    assert 0 < difference.max() < 0.2


def test_the_head_is_never_rounded():
    layer = build_linear(
        Projection({"lm_head": 8}, 64, False), rounded(Scheme("int4")), torch.float32, CPU
    )

    assert isinstance(layer, PlainLinear)


@pytest.mark.parametrize(
    "scheme",
    [PLAIN, Scheme("fp8"), Scheme("int8"), BLOCKS, Scheme("int4"), WITH_ZEROS],
    ids=lambda scheme: f"{scheme.weights}{'-zeros' * scheme.zero_points}",
)
@pytest.mark.parametrize("parts", [{"a": 256, "b": 128}, {"a": 100, "b": 30}], ids=["even", "odd"])
def test_bytes_are_predicted_exactly(scheme, parts):
    projection = Projection(parts, 300, False)
    storage_of = rounded(scheme)
    layer = build_linear(projection, storage_of, torch.bfloat16, CPU)
    layer.randomize(torch.Generator().manual_seed(0))

    measured = sum(tensor.nbytes for tensor in layer.parameters())

    assert measured == projection_bytes(projection, storage_of, "bf16")
