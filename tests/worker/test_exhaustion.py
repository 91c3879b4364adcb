"""Out of memory has many words."""

import pytest
import torch

from deepseek_worker.memory.exhaustion import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuBLAS error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1131"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDNN_BACKEND_API_FAILED: INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("NCCL error: unhandled cuda error. Last error: Failed to CUDA calloc 608"),
        RuntimeError("NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("device-side assert"), ValueError("out of memory"), KeyError("x")]
)
def test_not_mistaken(error):
    assert not is_out_of_memory(error)
