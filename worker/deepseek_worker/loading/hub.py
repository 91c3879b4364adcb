"""The two questions a model hub answers: what is in a repository, and the bytes of a file."""

import json
from typing import Any
from urllib.parse import quote

from deepseek_contract.source import HubSource
from deepseek_worker.errors import SourceError, SourceNotFound
from deepseek_worker.loading.source import (
    INDEX,
    RemoteFile,
    files_of_repository,
    identity,
    revision,
)
from deepseek_worker.loading.transport import NETWORK_ERRORS, Transport, TryAgain

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_METADATA_BYTES = 64 << 20


def list_files(
    source: HubSource, endpoint: str, transport: Transport
) -> tuple[str, tuple[RemoteFile, ...]]:
    """The commit that the revision means now, and the files to have of it.

    Raises:
        SourceError: the repository cannot be read or holds nothing to serve.
    """
    endpoint = endpoint.rstrip("/")
    wanted = quote(revision(source), safe="")
    address = f"{endpoint}/api/models/{source.repository}/revision/{wanted}?blobs=true"
    information = _json(_read(address, transport), address)
    commit, siblings = information.get("sha"), information.get("siblings")
    if not isinstance(commit, str) or not isinstance(siblings, list):
        raise SourceError(f"{endpoint} does not answer as a model hub does: no sha, no siblings")

    def file_url(name: str) -> str:
        return f"{endpoint}/{source.repository}/resolve/{commit}/{quote(name)}"

    try:
        has_index = any(entry["rfilename"] == INDEX for entry in siblings)
        index = _read(file_url(INDEX), transport) if has_index else None
        return commit, files_of_repository(siblings, index, file_url)
    except SourceNotFound as error:
        raise SourceNotFound(f"{identity(source)}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{identity(source)}: the list of its files or its {INDEX} is malformed: {error!r}"
        ) from error


def _read(url: str, transport: Transport) -> bytes:
    attempt = 0
    while True:
        try:
            return _read_once(url, transport)
        except TryAgain as error:
            attempt += 1
            transport.retried("the list of the repository's files", attempt, error)


def _read_once(url: str, transport: Transport) -> bytes:
    with transport.get(url, {}) as response:
        try:
            body: bytes = response.raw.read(MAX_METADATA_BYTES + 1, decode_content=True)
        except NETWORK_ERRORS as error:
            raise TryAgain(f"the connection broke: {error}") from error
    if len(body) > MAX_METADATA_BYTES:
        raise SourceError(f"{url} is longer than {MAX_METADATA_BYTES} bytes, as no such list is")
    return body


def _json(body: bytes, url: str) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError as error:
        raise SourceError(f"{url} does not answer as a model hub does: {error}") from error
    if not isinstance(parsed, dict):
        raise SourceError(f"{url} does not answer as a model hub does: no object")
    return parsed
