"""Recognises errors after which a device computes nothing any more for this process."""

# What follows "CUDA error: " in torch's words for it. After each of them the context is lost, so
# every later call fails too. Source: the error codes of the CUDA driver API that are marked as
# leaving the process in an inconsistent state.
WORDS = (
    "an illegal instruction was encountered",
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "hardware stack error",
    "invalid address space",
    "invalid program counter",
    "misaligned address",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected",
    "unknown error",
    "unspecified launch failure",
)
# Of CUDA, NVML and the driver, when the device itself is gone.
GONE = (
    "CUDA-capable device(s) is/are busy or unavailable",
    "GPU is lost",
    "no CUDA-capable device is detected",
)


def is_device_fault(error: BaseException) -> bool:
    """Whether the device, not the batch, is what failed."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if any(words in text for words in GONE):
        return True
    return "CUDA error" in text and any(words in text for words in WORDS)
