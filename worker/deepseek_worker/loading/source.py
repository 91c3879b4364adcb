"""What a model source names, and which of a repository's files serving needs.

Pure: the loader asks the network, this module only reads what came back.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from deepseek_contract.source import Downloaded, HttpsSource, HubSource, parse_source
from deepseek_worker.errors import InvalidFlags, SourceNotFound

GGUF_NAME = re.compile(r"[\w-][\w.-]*\.gguf")
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
INDEX = "model.safetensors.index.json"
SUPPORT_FILES = frozenset({
    "config.json", "generation_config.json", "quantize_config.json", "quant_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
})  # fmt: skip
# Best quality first among the formats that the engine reads.
GGUF_PREFERENCE = ("BF16", "F16", "Q8_0", "F32", "Q4_1")

DigestKind = Literal["sha256", "git-sha1"]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file to have, with what is known of it before it comes."""

    name: str
    url: str
    size_bytes: int | None = None
    digest: str | None = None
    """Lower-case hex; None where the server promises nothing but the size."""
    digest_kind: DigestKind = "sha256"


def downloaded_source(text: str) -> Downloaded:
    """Read a `--source`.

    Raises:
        InvalidFlags: it is none that a loader downloads.
    """
    try:
        source = parse_source(text)
    except ValueError:
        source = None
    if not isinstance(source, Downloaded):
        raise InvalidFlags(
            f"--source {redacted(text)!r} is not understood; use hf://ORGANISATION/NAME[@REVISION] "
            "or https://HOST/PATH#sha256=HEX with 64 hexadecimal digits in lower case"
        )
    return source


def identity(source: Downloaded) -> str:
    """Equal for equal content, wherever it comes from; fit for logs."""
    if isinstance(source, HttpsSource):
        return f"sha256:{source.sha256}"
    return f"hf://{source.repository}@{revision(source)}"


def revision(source: HubSource) -> str:
    """The branch, tag or commit to ask for."""
    return source.revision or "main"


def file_of_address(source: HttpsSource) -> RemoteFile:
    """The one file behind an address: a GGUF, which holds weights, configuration and tokenizer."""
    name = PurePosixPath(urlsplit(source.url).path).name
    if not GGUF_NAME.fullmatch(name):
        name = "model.gguf"
    return RemoteFile(name, source.url, digest=source.sha256)


def redacted(url: str) -> str:
    """The address without credentials, query and fragment: fit for logs and conditions."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host, query="", fragment=""))


def files_of_repository(
    siblings: Iterable[dict[str, Any]], index: bytes | None, file_url: Callable[[str], str]
) -> tuple[RemoteFile, ...]:
    """The files that serving needs, of all that a repository lists.

    Args:
        siblings: `siblings` of the hub's model information, asked for with `blobs=true`.
        index: The content of `model.safetensors.index.json`, if the repository has it.
        file_url: From a file's name to its address.

    Raises:
        SourceNotFound: no weights in a format that the engine reads, or a shard is missing.
    """
    found = {
        entry["rfilename"]: _remote_file(entry, file_url)
        for entry in siblings
        # Sub-folders hold other formats of the same weights; a name with dots could leave the
        # destination.
        if "/" not in entry["rfilename"] and not entry["rfilename"].startswith(".")
    }
    weights = _safetensors(found, index) or _gguf(found)
    if not weights:
        raise SourceNotFound(
            "The repository has neither *.safetensors nor *.gguf at its top level; it has "
            + (", ".join(sorted(found)[:20]) or "no files")
        )
    names = set(weights) | (SUPPORT_FILES & found.keys())
    if index is not None:
        names.add(INDEX)
    return tuple(found[name] for name in sorted(names))


def _remote_file(entry: dict[str, Any], file_url: Callable[[str], str]) -> RemoteFile:
    name = entry["rfilename"]
    lfs = entry.get("lfs") or {}
    sha256, size_bytes = lfs.get("sha256"), lfs.get("size", entry.get("size"))
    # Git hashes a file together with its size.
    git_sha1 = entry.get("blobId") if size_bytes is not None else None
    return RemoteFile(
        name=name,
        url=file_url(name),
        size_bytes=size_bytes,
        digest=(sha256 or git_sha1 or "").lower() or None,
        digest_kind="sha256" if sha256 else "git-sha1",
    )


def _safetensors(found: dict[str, RemoteFile], index: bytes | None) -> set[str]:
    if index is not None:
        shards = set(json.loads(index)["weight_map"].values())
        if missing := sorted(shards - found.keys()):
            raise SourceNotFound(
                f"{INDEX} names shards that the repository does not have: {', '.join(missing)}"
            )
        return shards
    if "model.safetensors" in found:
        return {"model.safetensors"}
    return {
        name for name in found if name.endswith(".safetensors") and not name.startswith("adapter_")
    }


def _gguf(found: dict[str, RemoteFile]) -> set[str]:
    # A repository often holds one model in many quantizations: one of them is enough.
    for wanted in GGUF_PREFERENCE:
        for name in sorted(found):
            if name.endswith(".gguf") and _quantization(name) == wanted:
                return _whole_series(name, found)
    unnamed = [name for name in found if name.endswith(".gguf") and _quantization(name) is None]
    return _whole_series(unnamed[0], found) if len(unnamed) == 1 else set()


def _quantization(name: str) -> str | None:
    stem = match["stem"] if (match := SHARD.fullmatch(name)) else name.removesuffix(".gguf")
    match = re.search(r"[.-]((?:I?Q\d\w*|BF16|F16|F32))$", stem, re.IGNORECASE)
    return match[1].upper() if match else None


def _whole_series(name: str, found: dict[str, RemoteFile]) -> set[str]:
    match = SHARD.fullmatch(name)
    if match is None:
        return {name}
    total = int(match["total"])
    series = {f"{match['stem']}-{n:05d}-of-{total:05d}.gguf" for n in range(1, total + 1)}
    if missing := sorted(series - found.keys()):
        raise SourceNotFound(f"The repository lacks parts of its GGUF: {', '.join(missing)}")
    return series
