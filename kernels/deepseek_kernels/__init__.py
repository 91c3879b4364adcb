"""Triton inference kernels for Hopper, each beside its plain reference.

The functions below validate their arguments, choose kernel or reference by device, and are
registered with torch under `torch.ops.deepseek`. `<op>/reference.py` is the specification.
"""

from deepseek_kernels._backend import get_backend, set_backend
from deepseek_kernels.errors import UnsupportedDevice
from deepseek_kernels.norm import (
    layer_norm,
    layer_norm_quantize,
    rms_norm,
    rms_norm_quantize,
)

__all__ = [
    "UnsupportedDevice",
    "get_backend",
    "layer_norm",
    "layer_norm_quantize",
    "rms_norm",
    "rms_norm_quantize",
    "set_backend",
]
