"""Turns a reference and a kernel with one signature into a registered torch operator."""

import importlib
from collections.abc import Callable, Iterable
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from deepseek_kernels._backend import uses_triton

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = (Tensor, Parameter)


class Operation(Generic[P, R]):
    """One operator: `reference.f` and `kernel.f` of a folder, registered as `deepseek::f`.

    Both take the same positional arguments and the first is a tensor, whose device decides.
    Eager calls on plain tensors go straight to the implementation, because torch's dispatcher
    costs more than a small kernel; `torch.compile` and fake tensors take the operator.
    The kernel's module is imported on its first use: Triton is not needed before.
    """

    def __init__(
        self,
        reference: Callable[Concatenate[Tensor, P], R],
        *,
        fake: Callable[..., R],
        mutates: Iterable[str] = (),
    ) -> None:
        self._reference = reference
        self._kernel: Callable[Concatenate[Tensor, P], R] | None = None
        self._operator = torch.library.custom_op(
            f"deepseek::{reference.__name__}",
            self._run,
            mutates_args=tuple(mutates),
            schema=torch.library.infer_schema(reference, mutates_args=tuple(mutates)),
        )
        self._operator.register_fake(fake)

    def __call__(self, tensor: Tensor, *arguments: P.args, **options: P.kwargs) -> R:
        """Run the operation."""
        if type(tensor) in _PLAIN and not torch.compiler.is_compiling():
            return self._run(tensor, *arguments, **options)
        return cast("R", self._operator(tensor, *arguments, **options))

    def _run(self, tensor: Tensor, *arguments: P.args, **options: P.kwargs) -> R:
        if not uses_triton(tensor.device):
            return self._reference(tensor, *arguments, **options)
        if self._kernel is None:
            module = self._reference.__module__.removesuffix("reference") + "kernel"
            self._kernel = getattr(importlib.import_module(module), self._reference.__name__)
        return self._kernel(tensor, *arguments, **options)
