"""Chooses between the Triton kernels and the references, once per device."""

import functools
import warnings
from typing import Literal, get_args

import torch

from deepseek_kernels.errors import UnsupportedDevice

Backend = Literal["auto", "triton", "reference"]

MINIMUM_CAPABILITY = (9, 0)

REGISTERS = 65536
"""Of a multiprocessor, 32 bits each."""

_backend: Backend = "auto"
_uses_triton: dict[torch.device, bool] = {}


def set_backend(backend: Backend) -> None:
    """Select what runs the operations of this process.

    Args:
        backend: `auto` takes the Triton kernels on GPUs from Hopper on and the references
            elsewhere, with one warning on a GPU that is too old. `triton` refuses instead of
            falling back; on CPU tensors it needs Triton's interpreter (`TRITON_INTERPRET=1`
            in the environment before the first kernel is imported). `reference` takes the
            references everywhere.

    Raises:
        ValueError: The name is none of the three.
    """
    global _backend  # noqa: PLW0603
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}; allowed are {', '.join(get_args(Backend))}")
    _backend = backend
    _uses_triton.clear()


def get_backend() -> Backend:
    """Return what `set_backend` selected."""
    return _backend


def uses_triton(device: torch.device) -> bool:
    """Tell whether operations on tensors of this device run Triton kernels.

    Raises:
        UnsupportedDevice: Triton was asked for by name and cannot run there.
    """
    chosen = _uses_triton.get(device)
    if chosen is None:
        chosen = _uses_triton[device] = _choose(device)
    return chosen


def _choose(device: torch.device) -> bool:
    if _backend == "reference" or (_backend == "auto" and device.type != "cuda"):
        return False
    obstacle = _obstacle(device)
    if obstacle is None:
        return True
    if _backend == "triton":
        raise UnsupportedDevice(
            f"{obstacle}; call set_backend('auto') to fall back to the references"
        )
    warnings.warn(f"{obstacle}; falling back to the references", RuntimeWarning, stacklevel=4)
    return False


def _obstacle(device: torch.device) -> str | None:
    if device.type == "cpu":
        if _interprets():
            return None
        return (
            "the Triton kernels run on CPU tensors only in Triton's interpreter, which "
            "TRITON_INTERPRET=1 turns on before the first kernel is imported"
        )
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the Triton kernels are written for NVIDIA GPUs, not for {device.type!r}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return (
            f"the Triton kernels need compute capability {_dotted(MINIMUM_CAPABILITY)} or "
            f"higher and {name} has {_dotted(capability)}"
        )
    return None


def _interprets() -> bool:
    import triton  # noqa: PLC0415 - a CPU-only process never needs Triton

    return bool(triton.knobs.runtime.interpret)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many programs run at once, for kernels that size their grid by it.

    The interpreter runs programs one after another, so one on a CPU; tensors without storage
    stand for the H200 (132).
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132 if device.type == "meta" else 1


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Tell whether the device is a Hopper GPU; tensors without storage stand for one."""
    return device.type == "meta" or torch.cuda.get_device_capability(device)[0] == 9
