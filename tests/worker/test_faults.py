"""Errors after which the device computes nothing any more."""

import pytest
import torch

from deepseek_worker.memory.exhaustion import is_out_of_memory
from deepseek_worker.memory.faults import is_device_fault


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "NVML: GPU is lost",
    ],
)
def test_recognised(words):
    assert is_device_fault(RuntimeError(words))
    assert not is_out_of_memory(RuntimeError(words))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("device-side assert"),
        RuntimeError("shape mismatch: misaligned address"),
        ValueError("CUDA error: unspecified launch failure"),
    ],
)
def test_not_mistaken(error):
    assert not is_device_fault(error)
