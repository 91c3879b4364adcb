"""One file from its address to its place: resumed, verified, then renamed.

A file under its own name is whole and verified. What is under way lies in `.download/`, beside
a note of the etag it began with, so that another process can go on with it.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import requests

from deepseek_worker.errors import ChecksumMismatch, NoSpace, Unreachable
from deepseek_worker.loading.source import RemoteFile
from deepseek_worker.loading.transport import NETWORK_ERRORS, Transport, TryAgain

PARTS = ".download"
CHUNK_BYTES = 1 << 20
# Less than this between two failures does not count as progress.
PROGRESS_BYTES = 1 << 16
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

logger = logging.getLogger(__name__)


def fetch(
    file: RemoteFile, destination: Path, transport: Transport, on_bytes: Callable[[int], None]
) -> int:
    """Have `file` in `destination`, whole and verified; returns its size in bytes.

    Args:
        file: What to have.
        destination: The folder.
        transport: Makes the requests.
        on_bytes: Told of each number of bytes that is there; negative when some were thrown away.

    Raises:
        SourceError: why it cannot be had.
    """
    final = destination / file.name
    if final.exists() and _mismatch(final, file) is None:
        on_bytes(final.stat().st_size)
        return final.stat().st_size
    part = _Part(file, destination, transport, on_bytes)
    if resumed := part.num_bytes():
        on_bytes(resumed)
    part.complete()
    while (mismatch := _mismatch(part.path, file)) is not None:
        part.discard()
        if resumed:
            # The old part may have been of other content: once more from the start.
            resumed = 0
            part.complete()
            continue
        raise ChecksumMismatch(
            f"{file.name}: {mismatch}; it has been deleted. Check the checksum of the source, or "
            "what the server or a proxy in between delivers"
        )
    os.replace(part.path, final)
    part.forget()
    _sync_folder(destination)
    return final.stat().st_size


class _Part:
    """The bytes of one file that are there so far."""

    def __init__(
        self,
        file: RemoteFile,
        destination: Path,
        transport: Transport,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.path = destination / PARTS / f"{file.name}.part"
        self._note = destination / PARTS / f"{file.name}.json"
        self._file = file
        self._transport = transport
        self._on_bytes = on_bytes
        self.path.parent.mkdir(exist_ok=True)
        noted = self._noted()
        known = file.digest is not None or noted.get("etag")
        if not known or noted.get("digest") != file.digest:
            self.path.unlink(missing_ok=True)

    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def discard(self) -> None:
        self._on_bytes(-self.num_bytes())
        self.path.unlink(missing_ok=True)

    def forget(self) -> None:
        self._note.unlink(missing_ok=True)

    def complete(self) -> None:
        """Ask for what is missing until nothing is."""
        attempt = 0
        while True:
            before = self.num_bytes()
            try:
                self._continue_from(before)
            except TryAgain as error:
                attempt = 1 if self.num_bytes() - before >= PROGRESS_BYTES else attempt + 1
                logger.warning(
                    "Download interrupted",
                    extra={"file": self._file.name, "attempt": attempt, "error": str(error)},
                )
                self._transport.retried(self._file.name, attempt, error)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise NoSpace(
                    f"{self.path.parent} is full ({error.strerror}); use a larger volume or a "
                    "smaller model. The download goes on from where it is"
                ) from error
            else:
                return

    def _continue_from(self, start: int) -> None:
        if start and start == self._file.size_bytes:
            return
        headers = {}
        if start:
            headers["range"] = f"bytes={start}-"
            if etag := self._noted().get("etag"):
                headers["if-range"] = etag
        with self._transport.get(self._file.url, headers) as response:
            if response.status_code == 416:
                self.discard()
                raise TryAgain(f"the server has no bytes after {start}; from the start again")
            if response.status_code == 206 and _range_start(response) != start:
                raise TryAgain(f"the server sent other bytes than those after {start}")
            if response.status_code == 200 and start:
                self.discard()
                start = 0
            self._write_note(response)
            self._append(response, start)

    def _append(self, response: requests.Response, start: int) -> None:
        expected = _total_bytes(response, start)
        if self._file.size_bytes is not None and expected not in (None, self._file.size_bytes):
            raise ChecksumMismatch(
                f"{self._file.name}: the server offers {expected} bytes, "
                f"{self._file.size_bytes} were promised"
            )
        if expected is not None:
            require_space(self.path.parent, expected - start)
        with self.path.open("ab") as part:
            self._copy(response, part)
            part.flush()
            os.fsync(part.fileno())
        if expected is not None and self.num_bytes() < expected:
            raise TryAgain(f"the answer ended at {self.num_bytes()} of {expected} bytes")

    def _copy(self, response: requests.Response, part: BinaryIO) -> None:
        patience = self._transport.patience
        window_start, window_bytes = time.monotonic(), 0
        while True:
            try:
                # Not read(), which waits for a whole chunk and would hide how slow it comes.
                chunk = response.raw.read1(CHUNK_BYTES, decode_content=False)
            except NETWORK_ERRORS as error:
                raise TryAgain(f"the connection broke: {error}") from error
            if not chunk:
                return
            if self._transport.cancelled.is_set():
                raise Unreachable("stopped, because another file failed")
            part.write(chunk)
            self._on_bytes(len(chunk))
            window_bytes += len(chunk)
            elapsed = time.monotonic() - window_start
            if elapsed >= patience.slow_seconds:
                if window_bytes < patience.slow_bytes_per_second * elapsed:
                    raise TryAgain(f"only {window_bytes} bytes came in {elapsed:.0f} s")
                window_start, window_bytes = time.monotonic(), 0

    def _noted(self) -> dict[str, str | None]:
        try:
            noted: dict[str, str | None] = json.loads(self._note.read_bytes())
        except (OSError, ValueError):
            return {}
        return noted

    def _write_note(self, response: requests.Response) -> None:
        etag = response.headers.get("etag", "")
        # A weak etag says that two answers mean the same, not that their bytes are equal.
        note = {"digest": self._file.digest, "etag": None if etag.startswith("W/") else etag}
        self._note.write_text(json.dumps(note))


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse what cannot fit before any of it comes.

    Raises:
        NoSpace: the file system of `folder` has less than `num_bytes` free.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise NoSpace(
            f"The model needs {num_bytes} more bytes, {folder} has {free} free; use a larger "
            "volume or a smaller model. The download goes on from where it is"
        )


def _mismatch(path: Path, file: RemoteFile) -> str | None:
    """What came in place of what was promised; None when they are the same."""
    size = path.stat().st_size
    if file.size_bytes is not None and size != file.size_bytes:
        return f"{size} bytes came, {file.size_bytes} were promised"
    if file.digest is None:
        return None
    # Git's identity of a file is that of its content after a header with its size.
    digest = (
        hashlib.sha256()
        if file.digest_kind == "sha256"
        else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    )
    with path.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() == file.digest:
        return None
    return f"its {file.digest_kind} is {digest.hexdigest()}, {file.digest} was promised"


def _range_start(response: requests.Response) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("content-range", ""))
    return int(match[1]) if match else None


def _total_bytes(response: requests.Response, start: int) -> int | None:
    length = response.headers.get("content-length", "")
    return start + int(length) if length.isascii() and length.isdigit() else None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
