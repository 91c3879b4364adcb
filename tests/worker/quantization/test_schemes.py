"""What flags mean for the weights."""

import pytest

from deepseek_worker.errors import UnsupportedModel
from deepseek_worker.quantization.schemes import PLAIN, Scheme, choose_scheme, sized_as


@pytest.mark.parametrize(
    ("weights", "activations", "scheme"),
    [
        ("auto", "auto", PLAIN),
        ("bf16", "16bit", PLAIN),
        ("fp8", "auto", Scheme("fp8", "8bit")),
        ("fp8", "16bit", Scheme("fp8", "16bit")),
        ("int8", "auto", Scheme("int8", "16bit")),
        ("int8", "8bit", Scheme("int8", "8bit")),
        ("int4", "auto", Scheme("int4", "16bit")),
    ],
)
def test_unquantized_checkpoints_are_rounded_as_asked(weights, activations, scheme):
    assert choose_scheme(weights, activations) == scheme


@pytest.mark.parametrize("weights", ["auto", "bf16", "int4"])
def test_8_bit_activations_need_8_bit_weights(weights):
    with pytest.raises(UnsupportedModel, match="activations is '8bit'"):
        choose_scheme(weights, "8bit")


@pytest.mark.parametrize(
    ("weights", "activations", "scheme"),
    [
        ("auto", "auto", Scheme("fp8", "8bit")),
        ("fp8", "16bit", Scheme("fp8", "16bit")),
        ("bf16", "auto", PLAIN),
    ],
)
def test_a_quantized_checkpoint_is_kept_as_it_is_or_dequantized(weights, activations, scheme):
    assert choose_scheme(weights, activations, Scheme("fp8", "8bit")) == scheme


@pytest.mark.parametrize(
    ("native", "weights", "activations", "named"),
    [
        (Scheme("int4"), "int8", "auto", "weights is 'int8'.*quantized, as int4"),
        (PLAIN, "int4", "auto", "no format of ours"),
        (Scheme("int4"), "auto", "8bit", "activations is '8bit'.*int4"),
        (Scheme("fp8_block", "8bit"), "fp8", "16bit", "activations is '16bit'.*fp8_block"),
    ],
)
def test_a_quantized_checkpoint_is_not_made_another(native, weights, activations, named):
    with pytest.raises(UnsupportedModel, match=named):
        choose_scheme(weights, activations, native)


def test_the_contract_has_a_size_for_every_scheme():
    assert sized_as(PLAIN, "float16") == "float16"
    assert sized_as(Scheme("fp8_block"), "bf16") == "fp8_block"
    assert sized_as(Scheme("int4"), "bf16") == "int4"
    assert sized_as(Scheme("int4", zero_points=True), "bf16") == "int4_zero_points"
