"""Brings tensors from files to a GPU at the speed of the disk or of the link.

A copy from pageable memory goes through the driver's own buffer, piece after piece, on one core: a
tenth of what a PCIe 5 link carries. Here threads read pieces of a file straight into page-locked
buffers, and the GPU's copy engine takes each from there while others are being read. The tensors
that come next are under way while one is packed.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from deepseek_worker.errors import BrokenCheckpoint

PIECE_BYTES = 8 << 20
NUM_BUFFERS = 8
"""Threads that read, each with a piece of its own."""
AHEAD_BYTES = 256 << 20
"""Tensors that come next are started up to so many bytes, one of them whatever its size."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of a tensor are in a file, row after row."""

    path: Path
    first_byte: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Transfer:
    """Reads tensors in the order in which they will be asked for."""

    def __init__(self, extents: Mapping[str, Extent], device: torch.device) -> None:
        """Open the files; nothing is read yet.

        Args:
            extents: By name, in the order in which `tensor` is asked for them.
            device: Where the tensors are needed.

        Raises:
            BrokenCheckpoint: a file cannot be opened.
        """
        self._device = device
        self._waiting = deque(extents.items())
        self._started: dict[str, _Started] = {}
        self._ahead_bytes = 0
        self._is_ended = threading.Event()
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(NUM_BUFFERS):
            data = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
            self._buffers.put(_Buffer(data))
        self._threads = ThreadPoolExecutor(NUM_BUFFERS, thread_name_prefix="weights")
        self._files: dict[Path, int] = {}
        for path in dict.fromkeys(extent.path for extent in extents.values()):
            try:
                self._files[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                self.close()
                raise _unreadable(path, error) from error

    def tensor(self, name: str) -> Tensor:
        """The tensor on the device, as it is stored.

        Raises:
            BrokenCheckpoint: the file ends before the tensor does, or cannot be read.
            KeyError: the name was not announced, or was asked for before.
        """
        while name not in self._started and self._waiting:
            self._start_next()
        started = self._started.pop(name)
        self._ahead_bytes -= started.extent.num_bytes
        while self._waiting and self._has_room_for(self._waiting[0][1]):
            self._start_next()
        for piece in started.pieces:
            copied = piece.result()
            if copied is not None:
                torch.cuda.current_stream(self._device).wait_event(copied)
        return started.data.view(started.extent.dtype).view(started.extent.shape)

    def close(self) -> None:
        """Stop reading; tensors that were not asked for are dropped."""
        self._is_ended.set()
        self._threads.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        self._started.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _has_room_for(self, extent: Extent) -> bool:
        return not self._started or self._ahead_bytes + extent.num_bytes <= AHEAD_BYTES

    def _start_next(self) -> None:
        name, extent = self._waiting.popleft()
        data = torch.empty(extent.num_bytes, dtype=torch.uint8, device=self._device)
        if self._stream is not None:
            # The memory may have been another tensor's, which is still being packed.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._started[name] = _Started(
            extent,
            data,
            [
                self._threads.submit(self._bring, extent, first, piece)
                for first, piece in _pieces(data)
            ],
        )
        self._ahead_bytes += extent.num_bytes

    def _bring(self, extent: Extent, first_byte: int, piece: Tensor) -> "torch.cuda.Event | None":
        """Read a piece and have it copied, on a thread; returns when it will be there."""
        buffer = self._buffers.get()
        try:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            read = buffer.data[: len(piece)]
            self._read(extent, first_byte, read.numpy().data)
            if self._stream is None:
                piece.copy_(read)
                return None
            with torch.cuda.stream(self._stream):
                piece.copy_(read, non_blocking=True)
                buffer.copied = self._stream.record_event()
            return buffer.copied
        finally:
            self._buffers.put(buffer)

    def _read(self, extent: Extent, first_byte: int, piece: memoryview) -> None:
        done = 0
        while done < len(piece) and not self._is_ended.is_set():
            place = extent.first_byte + first_byte + done
            try:
                count = os.preadv(self._files[extent.path], [piece[done:]], place)
            except OSError as error:
                raise _unreadable(extent.path, error) from error
            if count == 0:
                raise BrokenCheckpoint(
                    f"{extent.path} became shorter while it was read; download the model again"
                )
            done += count


@dataclass(slots=True)
class _Buffer:
    data: Tensor
    copied: "torch.cuda.Event | None" = None
    """When the last piece has left it."""


@dataclass(frozen=True, slots=True)
class _Started:
    extent: Extent
    data: Tensor
    pieces: "list[Future[torch.cuda.Event | None]]"


def _pieces(data: Tensor) -> Iterator[tuple[int, Tensor]]:
    for first in range(0, len(data), PIECE_BYTES):
        yield first, data[first : first + PIECE_BYTES]


def _unreadable(path: Path, error: OSError) -> BrokenCheckpoint:
    return BrokenCheckpoint(f"{path} cannot be read: {error.strerror}; look at its volume")
