"""One kernel where its tiles fill the multiprocessors, product and gate apart elsewhere."""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deepseek_kernels._backend import has_wgmma, multiprocessors
from deepseek_kernels._configs import pick
from deepseek_kernels.gate.kernel import silu_mul
from deepseek_kernels.gated_matmul._device import BLOCK_M, TOKENS, gated_matmul_kernel
from deepseek_kernels.matmul.kernel import matmul
from deepseek_kernels.matmul_w8a8.kernel import ALIGNMENT, fits_descriptors

LEAST_FILLED = 0.94
"""Of the multiprocessors' time, with the last round of tiles. The kernel takes 0.93 to 0.95 of the
time of the library's product and the gate where all of it is filled, from 1,024 tokens up."""

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def gated_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Launch the kernel for `reference.gated_matmul`, or two where those are faster."""
    if fits_specialized(x, weight) and _fills(x, weight):
        return specialized(x, weight)
    return silu_mul(matmul(x, weight, None))


def fits_specialized(x: Tensor, weight: Tensor) -> bool:
    """Tell whether Hopper's asynchronous matrix products and its copy engine apply."""
    if triton.knobs.runtime.interpret or not has_wgmma(x.device) or x.dtype not in _TYPES:
        return False
    row_bytes = weight.shape[0] // 2 * x.element_size()
    aligned = row_bytes % ALIGNMENT == 0 and fits_descriptors(x) and fits_descriptors(weight)
    return aligned and len(x) > 0 and row_bytes > 0


def _fills(x: Tensor, weight: Tensor) -> bool:
    block_n = pick("gated_matmul", m=len(x))["block_n"]
    tiles, programs = _tiles(x, weight, block_n), multiprocessors(x.device)
    return tiles >= LEAST_FILLED * -(-tiles // programs) * programs


def _tiles(x: Tensor, weight: Tensor, block_n: int) -> int:
    return -(-len(x) // int(BLOCK_M.value)) * -(-weight.shape[0] // 2 // block_n)


def specialized(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply and gate in one kernel; the arguments must be `fits_specialized`."""
    tokens, columns = x.shape
    rows = weight.shape[0] // 2
    config = pick("gated_matmul", m=tokens)
    block_n, block_k = config["block_n"], config["block_k"]
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    gated_matmul_kernel[(min(multiprocessors(x.device), _tiles(x, weight, block_n)),)](
        _descriptor(x, [TOKENS.value, block_k]),
        _descriptor(weight, [block_n, block_k]),
        _descriptor(out, [TOKENS.value, block_n]),
        tokens,
        rows,
        columns,
        GROUP_M=config["group_m"],
        STAGES=config["stages"],
        num_warps=4,
        # Three groups of warps share the registers: the loading one gives its own away.
        maxnreg=168,
    )
    return out


def _descriptor(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, block, layout)
