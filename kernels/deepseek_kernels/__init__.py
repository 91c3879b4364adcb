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
from deepseek_kernels.page_copy import (
    copy_pages_from_host,
    copy_pages_to_host,
    gather_pages,
    scatter_pages,
)
from deepseek_kernels.rope_kv_write import mla_rope_kv_write, rope_kv_write
from deepseek_kernels.sampling import sample
from deepseek_kernels.silu_mul import silu_mul, silu_mul_quantize

__all__ = [
    "UnsupportedDevice",
    "copy_pages_from_host",
    "copy_pages_to_host",
    "gather_pages",
    "get_backend",
    "layer_norm",
    "layer_norm_quantize",
    "mla_rope_kv_write",
    "rms_norm",
    "rms_norm_quantize",
    "rope_kv_write",
    "sample",
    "scatter_pages",
    "set_backend",
    "silu_mul",
    "silu_mul_quantize",
]
