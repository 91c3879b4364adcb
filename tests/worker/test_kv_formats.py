"""Which layers keep their keys precise."""

import pytest
import torch

from deepseek_worker.memory.kv_formats import (
    key_biases,
    kv_formats,
    outlier_layers,
    take_stored_scales,
)
from deepseek_worker.memory.pool import KvPool
from deepseek_worker.models.config import ModelConfig, RopeConfig

# Norms of the key biases of Qwen2.5-Math-7B, as published: two layers stand out.
QWEN_MATH = [(605.0, 400.0), *[(22.0, 8.0)] * 26, (921.0, 600.0)]


class Files:
    """A checkpoint of the given tensors."""

    def __init__(self, **tensors):
        self._tensors = {name.replace("__", "."): value for name, value in tensors.items()}
        self.shapes = {name: tuple(value.shape) for name, value in self._tensors.items()}

    def tensor(self, name):
        return self._tensors[name]


def bias(layer, value):
    return {f"model__layers__{layer}__self_attn__k_proj__bias": torch.full((16,), value)}


def test_the_layers_that_break_with_8_bit_keys_stand_out():
    assert outlier_layers(QWEN_MATH) == [0, 27]


def test_models_without_key_biases_have_no_outliers():
    assert key_biases(Files(), 2) == []
    assert outlier_layers([]) == []


def test_even_biases_are_no_outliers_unless_they_fill_the_range():
    assert outlier_layers([(20.0, 5.0)] * 4) == []
    assert outlier_layers([(500.0, 300.0)] * 4) == [0, 1, 2, 3]


def test_norms_are_those_of_the_files():
    files = Files(**bias(0, 1.0), **bias(1, -50.0))

    assert key_biases(files, 2) == [(4.0, 1.0), (200.0, 50.0)]
    assert outlier_layers([*key_biases(files, 2), (4.0, 1.0)]) == [1]


@pytest.mark.parametrize("asked", ["bf16", "fp8", "int8"])
def test_what_was_asked_for_holds_in_every_layer(asked):
    assert kv_formats(asked, "bf16", 3, [1]) == (asked,) * 3


def test_auto_keeps_outliers_precise_and_rounds_the_rest():
    assert kv_formats("auto", "bf16", 3, [1]) == ("int8", "bf16", "int8")
    assert kv_formats("auto", "float16", 2, []) == ("int8", "int8")
    assert kv_formats("auto", "float32", 2, None) == ("float32", "float32")


def test_calibrated_scales_of_the_checkpoint_reach_fp8_pages_only():
    config = ModelConfig(
        "llama", 10, 16, 8, 3, 4, 2, 4, 1e-6, 64, RopeConfig(), False, False, False, False,
        "float32", frozenset(),
    )  # fmt: skip
    pool = KvPool(
        config,
        num_pages=1,
        page_tokens=4,
        formats=("fp8", "int8", "fp8"),
        device=torch.device("cpu"),
    )
    pool.data.zero_()
    scales = {
        f"model__layers__{layer}__self_attn__{kind}_scale": torch.tensor([layer + value])
        for layer in (0, 1)
        for kind, value in (("k", 0.5), ("v", 0.25))
    }
    scales["model__layers__2__self_attn__k_proj__k_scale"] = torch.tensor(3.0)

    take_stored_scales(pool.layers, Files(**scales))

    assert pool.layers[0].scales.tolist() == [[0.5, 0.5], [0.25, 0.25]]
    assert not pool.data.any()
    assert pool.layers[2].scales.tolist() == [[3.0, 3.0], [1.0, 1.0]]
