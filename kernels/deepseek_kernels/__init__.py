"""Triton inference kernels for Hopper, each beside its plain reference.

The functions below validate their arguments, choose kernel or reference by device, and are
registered with torch under `torch.ops.deepseek`. `<op>/reference.py` is the specification.
"""

from deepseek_kernels._backend import get_backend, set_backend
from deepseek_kernels.errors import UnsupportedDevice
from deepseek_kernels.gate import silu_mul, silu_mul_quantize
from deepseek_kernels.gated_matmul import gated_matmul
from deepseek_kernels.kv_write import mla_rope_kv_write, rope_kv_write
from deepseek_kernels.layer_norm_gelu_matmul import (
    fold_layer_norm,
    layer_norm_gelu_matmul,
    layer_norm_matmul_gelu,
)
from deepseek_kernels.lora import lora_add
from deepseek_kernels.matmul import matmul
from deepseek_kernels.matmul_w4a16 import (
    gated_matmul_w4a16,
    matmul_w4a16,
    pack_w4a16,
    quantize_w4a16,
    unpack_w4a16,
)
from deepseek_kernels.matmul_w8a8 import matmul_w8a8, quantize
from deepseek_kernels.matmul_w8a16 import matmul_w8a16, quantize_weight, quantize_weight_blocks
from deepseek_kernels.mla_decode import mla_decode
from deepseek_kernels.moe import moe_combine, moe_group, moe_matmul, moe_route
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
from deepseek_kernels.page_scoring import page_scores, select_pages, update_page_bounds
from deepseek_kernels.paged_decode import paged_decode
from deepseek_kernels.paged_prefill import paged_prefill
from deepseek_kernels.penalties import penalize
from deepseek_kernels.sampling import sample

__all__ = [
    "UnsupportedDevice",
    "copy_pages_from_host",
    "copy_pages_to_host",
    "fold_layer_norm",
    "gated_matmul",
    "gated_matmul_w4a16",
    "gather_pages",
    "get_backend",
    "layer_norm",
    "layer_norm_gelu_matmul",
    "layer_norm_matmul_gelu",
    "layer_norm_quantize",
    "lora_add",
    "matmul",
    "matmul_w4a16",
    "matmul_w8a8",
    "matmul_w8a16",
    "mla_decode",
    "mla_rope_kv_write",
    "moe_combine",
    "moe_group",
    "moe_matmul",
    "moe_route",
    "pack_w4a16",
    "page_scores",
    "paged_decode",
    "paged_prefill",
    "penalize",
    "quantize",
    "quantize_w4a16",
    "quantize_weight",
    "quantize_weight_blocks",
    "rms_norm",
    "rms_norm_quantize",
    "rope_kv_write",
    "sample",
    "scatter_pages",
    "select_pages",
    "set_backend",
    "silu_mul",
    "silu_mul_quantize",
    "unpack_w4a16",
    "update_page_bounds",
]
