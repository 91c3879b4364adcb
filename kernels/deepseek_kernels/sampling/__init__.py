"""Temperature, top-k, top-p and min-p sampling in a few passes over the logits."""

import torch
from torch import Tensor

from deepseek_kernels._operation import Operation
from deepseek_kernels._validation import FLOATS, check_range, check_tensor
from deepseek_kernels.cost import Cost
from deepseek_kernels.sampling import reference

MAX_VOCABULARY = 2**18 - 1


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw one token for each row; which one depends on the row's own arguments alone.

    `reference.py` defines the draw. What the device tensors hold is not checked.

    Args:
        logits: `[rows, vocabulary]` fp16, bf16 or fp32, rows at any stride.
        temperature: `[rows]` fp32; under 1e-5 the largest logit is taken.
        top_k: `[rows]` int32; 0 or the vocabulary and more keep all.
        top_p: `[rows]` fp32; 1 and more keep all.
        min_p: `[rows]` fp32; 0 keeps all.
        seeds: `[rows]` int64.
        positions: `[rows]` int64, the index of the drawn token in its sequence: a seed gives
            other noise at each.

    Returns:
        `[rows]` int64.

    Raises:
        ValueError: An argument of the wrong type, shape, stride or device.
    """
    check_tensor("logits", logits, shape=("rows", "vocabulary"), dtypes=FLOATS)
    rows, vocabulary = logits.shape
    check_range("the vocabulary of logits", vocabulary, 1, MAX_VOCABULARY)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    ):
        check_tensor(name, tensor, shape=(rows,), dtypes=(dtype,), like=logits, contiguous=True)
    return _sample(logits, temperature, top_k, top_p, min_p, seeds, positions)


def cost(logits: Tensor) -> Cost:
    """Return the work of one call: every logit read once."""
    return Cost(logits.numel() * logits.element_size(), 4 * logits.numel())


def _fake(logits: Tensor, *_: Tensor) -> Tensor:
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


_sample = Operation(reference.sample, fake=_fake)
