"""Checks of arguments, each refused with what was given and what is allowed."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    like: Tensor | None = None,
    contiguous: bool = False,
) -> None:
    """Refuse a tensor that a kernel cannot read.

    Args:
        name: The argument, as the caller wrote it.
        tensor: What was given.
        shape: One entry per dimension: a size, or a word for a dimension of any size.
        dtypes: Allowed types.
        like: A tensor on whose device this one must be.
        contiguous: Whether every stride must be the dense one. Else only the last
            dimension's stride must be 1 and the others are taken from the tensor.

    Raises:
        ValueError: Names the argument, what was given and what is allowed.
    """
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise ValueError(f"{name} is a {kind}; a tensor is required")  # noqa: TRY004
    if tensor.dtype not in dtypes:
        allowed = ", ".join(map(_name, dtypes))
        raise ValueError(f"{name} has dtype {_name(tensor.dtype)}; allowed are {allowed}")
    given = tensor.shape
    if not _fits(given, shape):
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} has shape {list(given)}; required is [{wanted}]")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; the other tensors are on {like.device}")
    if contiguous:
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")
    elif given and given[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; required is 1"
        )


def _fits(given: Sequence[int], shape: Sequence[int | str]) -> bool:
    """Compare sizes; a loop, since every eager call of every operation runs it several times."""
    if len(given) != len(shape):
        return False
    for have, want in zip(given, shape, strict=True):
        if have != want and not isinstance(want, str):
            return False
    return True


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Refuse a value outside a fixed set."""
    if value not in allowed:
        raise ValueError(f"{name} is {_name(value)}; allowed are {', '.join(map(_name, allowed))}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside `[low, high]`, or one that is no number."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; allowed is {low} to {high}")


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")
