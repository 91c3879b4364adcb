"""The check of the kernels, which on a CPU are their references."""

import pytest
import torch

import deepseek_kernels
from deepseek_worker.errors import DeviceUnavailable
from deepseek_worker.layers.paged import PagedAttention
from deepseek_worker.self_check import check_kernels
from deepseek_worker.startup import graph_runner


@pytest.fixture
def parts(tiny, make_engine):
    runner = make_engine(tiny[0], graph_runner, max_running_requests=2, max_batch_tokens=16).runner
    return runner._decoder, runner._pool, runner._attention


def test_kernels_that_compute_what_torch_does_pass(parts):
    assert check_kernels(*parts) < 1e-4


@pytest.mark.parametrize("broken", ["attend", "write"])
def test_kernels_that_compute_something_else_are_refused(broken, parts, monkeypatch):
    decoder, pool, attention = parts
    for layer in pool.layers:
        layer.pages.fill_(3.0)
    real = getattr(PagedAttention, broken)

    def wrong(self, layer, qkv, plan):
        if broken == "attend":
            return torch.randn_like(real(self, layer, qkv, plan))
        return None

    monkeypatch.setattr(PagedAttention, broken, wrong)

    with pytest.raises(DeviceUnavailable, match="differs from torch's by"):
        check_kernels(decoder, pool, attention)


@pytest.fixture
def adapted_parts(tiny, make_engine, make_adapter):
    lora = [f"a{seed}={make_adapter(tiny[1], seed=seed)}" for seed in range(3)]
    options = {"max_running_requests": 2, "max_batch_tokens": 16, "lora": lora}
    runner = make_engine(tiny[0], graph_runner, **options).runner
    return runner._decoder, runner._pool, runner._attention


def test_adapters_are_compared_too(adapted_parts, monkeypatch):
    assert check_kernels(*adapted_parts) < 1e-4
    real = deepseek_kernels.lora_add

    def wrong(out, x, a, b, adapters, widths):
        # As if the kernel gave each row its neighbour's adapter.
        if deepseek_kernels.get_backend() != "reference":
            adapters = adapters.roll(1)
        real(out, x, a, b, adapters, widths)

    monkeypatch.setattr(deepseek_kernels, "lora_add", wrong)

    with pytest.raises(DeviceUnavailable, match="differs from torch's by"):
        check_kernels(*adapted_parts)


def test_logits_that_are_no_numbers_are_refused(parts):
    decoder, pool, attention = parts
    decoder.final_norm.weight.fill_(float("nan"))

    with pytest.raises(DeviceUnavailable):
        check_kernels(decoder, pool, attention)
