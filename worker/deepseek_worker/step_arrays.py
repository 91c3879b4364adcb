"""The numbers of one step, laid out so that they reach the device as one copy.

A `StepShape` says how much of everything a captured step has room for. Its arrays lie one after
another in one stretch of memory, at the same place on the host and on the device: numpy fills
them here, the kernels read them there.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array")
Numbers = NDArray[Any]

ALIGNMENT = 16
DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """What a step has room for."""

    tokens: int
    """Rows of the forward pass."""
    decoding: int
    """The first rows, one for each decoding sequence; 0 for steps that only read prompts."""
    prompts: int
    """Chunks of prompts; 0 for steps that only decode."""
    sampled: int
    """Rows whose next token is chosen; the decoding ones where there are no prompts."""


@dataclass(frozen=True, slots=True)
class StepArrays(Generic[Array]):
    """The arrays of a step: numpy's on the host, tensors on the device."""

    token_ids: Array
    """`[tokens]` int64; `-1 - place` stands for the token that was last kept in that place."""
    positions: Array
    """`[tokens]` int64."""
    slots: Array
    """`[tokens]` int64: where keys and values go; -1 for padding."""
    sampled_rows: Array
    """`[sampled]` int64."""
    sampled_slots: Array
    """`[sampled]` int64: the place of the sequence's slot in which the chosen token is kept."""
    seeds: Array
    """`[sampled]` int64."""
    indices: Array
    """`[sampled]` int64: which token of its answer is chosen."""
    temperature: Array
    """`[sampled]` float32, as the next two."""
    top_p: Array
    min_p: Array
    top_k: Array
    """`[sampled]` int32."""
    decoding_lengths: Array
    """`[decoding]` int32; 0 where there is no sequence."""
    prompt_starts: Array
    """`[prompts + 1]` int32: first rows, and the end of the last."""
    prompt_lengths: Array
    """`[prompts]` int32."""
    prompt_pages: Array
    """`[prompts, max_pages]` int32."""
    adapters: Array
    """`[tokens]` int32: the row's LoRA adapter, -1 for none; `[0]` where there are no adapters."""
    decoding_pages: Array
    """`[decoding, max_pages]` int32; the last, so that unused rows need not be copied."""


class StepLayout:
    """Where the arrays of a shape lie."""

    def __init__(self, shape: StepShape, max_pages: int, *, has_adapters: bool) -> None:
        tokens, sampled = ("int64", (shape.tokens,)), (shape.sampled,)
        arrays: dict[str, tuple[str, tuple[int, ...]]] = {
            "token_ids": tokens,
            "positions": tokens,
            "slots": tokens,
            "sampled_rows": ("int64", sampled),
            "sampled_slots": ("int64", sampled),
            "seeds": ("int64", sampled),
            "indices": ("int64", sampled),
            "temperature": ("float32", sampled),
            "top_p": ("float32", sampled),
            "min_p": ("float32", sampled),
            "top_k": ("int32", sampled),
            "decoding_lengths": ("int32", (shape.decoding,)),
            "prompt_starts": ("int32", (shape.prompts + 1,)),
            "prompt_lengths": ("int32", (shape.prompts,)),
            "prompt_pages": ("int32", (shape.prompts, max_pages)),
            "adapters": ("int32", (shape.tokens if has_adapters else 0,)),
            "decoding_pages": ("int32", (shape.decoding, max_pages)),
        }
        self._arrays: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        end = 0
        for field in fields(StepArrays):
            dtype, sizes = arrays[field.name]
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self._arrays[field.name] = (start, dtype, sizes)
            end = start + math.prod(sizes) * DTYPES[dtype].itemsize
        self.num_bytes = end
        self._decoding_pages_start = start
        self._decoding_row_bytes = max_pages * 4

    def used_bytes(self, num_decoding: int) -> int:
        """Bytes up to the page table's last used row."""
        return self._decoding_pages_start + num_decoding * self._decoding_row_bytes

    def tensors(self, memory: Tensor) -> StepArrays[Tensor]:
        """Views of `[bytes]` uint8 memory."""
        views = {}
        for name, (start, dtype, sizes) in self._arrays.items():
            end = start + math.prod(sizes) * DTYPES[dtype].itemsize
            views[name] = memory[start:end].view(DTYPES[dtype]).view(sizes)
        return StepArrays(**views)

    def numbers(self, memory: Tensor) -> StepArrays[Numbers]:
        """The same for numpy; the memory is the host's."""
        tensors = self.tensors(memory)
        return StepArrays(
            **{field.name: getattr(tensors, field.name).numpy() for field in fields(tensors)}
        )
