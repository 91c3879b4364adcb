"""`deepseek-worker load`: have a model in a folder, once, whoever else wants the same.

A lock on the folder keeps two loaders from downloading twice, files are resumed and verified
one by one, and the marker that names the source is written when all are there.
"""

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepseek_contract.source import Downloaded, HttpsSource, HubSource
from deepseek_worker.config import LoadConfig
from deepseek_worker.loading.fetch import PARTS, fetch, require_space
from deepseek_worker.loading.hub import DEFAULT_ENDPOINT, list_files
from deepseek_worker.loading.source import (
    RemoteFile,
    downloaded_source,
    file_of_address,
    identity,
)
from deepseek_worker.loading.transport import Authorities, Credentials, Patience, Transport
from deepseek_worker.secret_files import SecretFile

MARKER = ".deepseek-model.json"
LOCK = ".deepseek-lock"
PARALLEL_FILES = 4
REPORT_SECONDS = 5.0

logger = logging.getLogger(__name__)


def load(
    config: LoadConfig, patience: Patience | None = None, authority: Path | None = None
) -> None:
    """Have the source's files in the destination.

    Args:
        config: What to have, and where.
        patience: How long to wait for the server.
        authority: Certificates to trust beside the public ones.

    Raises:
        InvalidFlags: the source is not understood.
        SourceError: it cannot be had; what has come stays, and the next run goes on from there.
    """
    source = downloaded_source(config.source)
    destination = config.destination
    destination.mkdir(parents=True, exist_ok=True)
    with _alone(destination):
        marker = _read_marker(destination)
        if marker.get("source") == identity(source) and _is_whole(destination, marker):
            logger.info("Model is complete already", extra={"source": identity(source)})
            return
        transport = Transport(_credentials(config, source), patience, Authorities(authority))
        revision, files = _resolve(source, config, transport)
        _clear(destination, marker, keep=files)
        sizes = _fetch_all(files, destination, transport)
        _write_marker(destination, source, revision, files, sizes)
        logger.info(
            "Model is complete",
            extra={
                "source": identity(source),
                "revision": revision,
                "files": len(files),
                "bytes": sum(sizes.values()),
            },
        )


def _credentials(config: LoadConfig, source: Downloaded) -> Credentials | None:
    if config.token_file is None:
        return None
    origin = (
        source.url if isinstance(source, HttpsSource) else config.hf_endpoint or DEFAULT_ENDPOINT
    )
    return Credentials(SecretFile(config.token_file, "--token-file").lines()[0], origin)


def _resolve(
    source: Downloaded, config: LoadConfig, transport: Transport
) -> tuple[str | None, tuple[RemoteFile, ...]]:
    if isinstance(source, HubSource):
        return list_files(source, config.hf_endpoint or DEFAULT_ENDPOINT, transport)
    return None, (file_of_address(source),)


def _fetch_all(
    files: tuple[RemoteFile, ...], destination: Path, transport: Transport
) -> dict[str, int]:
    report = _Report(files)
    missing = sum(file.size_bytes or 0 for file in files) - _bytes_there(files, destination)
    require_space(destination, missing)
    sizes: dict[str, int] = {}
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        started = {
            pool.submit(fetch, file, destination, transport, report.add): file for file in files
        }
        try:
            for future in as_completed(started):
                sizes[started[future].name] = future.result()
        except BaseException:
            transport.cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise
    return sizes


def _bytes_there(files: tuple[RemoteFile, ...], destination: Path) -> int:
    paths = [
        path
        for file in files
        for path in (destination / file.name, destination / PARTS / f"{file.name}.part")
    ]
    return sum(path.stat().st_size for path in paths if path.exists())


class _Report:
    """Progress as a log line every few seconds."""

    def __init__(self, files: tuple[RemoteFile, ...]) -> None:
        sizes = [file.size_bytes for file in files]
        self._total = None if None in sizes else sum(size or 0 for size in sizes)
        self._lock = threading.Lock()
        self._done = 0
        self._said_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now - self._said_at < REPORT_SECONDS:
                return
            self._said_at = now
            fields: dict[str, object] = {"bytes": self._done, "total_bytes": self._total}
            if self._total:
                fields["percent"] = round(100 * self._done / self._total, 1)
        logger.info("Downloading", extra=fields)


@contextmanager
def _alone(destination: Path) -> Iterator[None]:
    with (destination / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info(
                "Another loader is at work here; waiting for it",
                extra={"destination": str(destination)},
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_marker(destination: Path) -> dict[str, Any]:
    try:
        marker: dict[str, Any] = json.loads((destination / MARKER).read_bytes())
    except (OSError, ValueError):
        return {}
    return marker


def _is_whole(destination: Path, marker: dict[str, Any]) -> bool:
    paths = {destination / file["name"]: file["size_bytes"] for file in marker["files"]}
    return all(path.exists() and path.stat().st_size == size for path, size in paths.items())


def _clear(destination: Path, marker: dict[str, Any], keep: tuple[RemoteFile, ...]) -> None:
    """Remove the marker first, then what only an earlier source needed."""
    (destination / MARKER).unlink(missing_ok=True)
    kept = {file.name for file in keep}
    for name in {file["name"] for file in marker.get("files", ())} - kept:
        (destination / name).unlink(missing_ok=True)


def _write_marker(
    destination: Path,
    source: Downloaded,
    revision: str | None,
    files: tuple[RemoteFile, ...],
    sizes: dict[str, int],
) -> None:
    described = [
        {key: value for key, value in asdict(file).items() if key != "url"}
        | {"size_bytes": sizes[file.name]}
        for file in files
    ]
    marker = {"source": identity(source), "revision": revision, "files": described}
    unfinished = destination / PARTS / MARKER
    unfinished.write_text(json.dumps(marker, indent=1))
    os.replace(unfinished, destination / MARKER)
    for left in (destination / PARTS).iterdir():
        left.unlink()
    (destination / PARTS).rmdir()
