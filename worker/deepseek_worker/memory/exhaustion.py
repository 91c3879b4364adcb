"""Recognises "out of memory" in its many disguises."""

import torch

# On a MIG slice in a container the allocator itself trips over NVML; cuBLAS, cuDNN, NCCL and
# Triton have words of their own. Sources: pytorch#112377, pytorch#197312.
WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HOST_ALLOCATION_FAILED",
    "DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "cudaErrorMemoryAllocation",
    "Failed to CUDA calloc",
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once could have gone through."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)
