"""Where a model comes from: the text of `spec.model.source`, taken apart.

The operator renders volumes and loader jobs from it, the loader downloads what it names.
"""

import re
from dataclasses import dataclass

from deepseek_contract.text import FILE_PATH, IMAGE, SUBDOMAIN

_URL_CHARACTER = r"[!-\"$-~]"
_HUB_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"
_FORMS = {
    "package": r"package://(?P<name>[a-z0-9]([-a-z0-9.]*[a-z0-9])?)",
    "oci": rf"oci://(?P<image>{IMAGE})(#path=(?P<path>{FILE_PATH}))?",
    "pvc": rf"pvc://(?P<claim>{SUBDOMAIN})(/(?P<path>{FILE_PATH}))?",
    "hf": (
        rf"hf://(?P<repository>{_HUB_NAME}/{_HUB_NAME})"
        r"(@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,127}))?"
    ),
    "https": (
        rf"(?P<url>https://{_HOST}(:[0-9]{{1,5}})?/{_URL_CHARACTER}*)"
        r"#sha256=(?P<sha256>[a-f0-9]{64})"
    ),
    "nodePath": rf"nodePath://(?P<path>/{FILE_PATH})",
}
_COMPILED = {scheme: re.compile(f"(?:{form})") for scheme, form in _FORMS.items()}
_GROUP_NAMES = re.compile(r"\(\?P<[a-z0-9]+>")

# Go's and Rust's engines read it as well: the group names, which CEL has no use for, are left out.
PATTERN = "^(" + "|".join(_GROUP_NAMES.sub("(", form) for form in _FORMS.values()) + ")$"

ALLOWED = (
    "package://NAME (a model in the worker's image), oci://IMAGE[#path=FOLDER], "
    "pvc://CLAIM[/FOLDER], hf://ORGANISATION/NAME[@REVISION], https://HOST/FILE#sha256=HEX and "
    "nodePath:///FOLDER"
)


@dataclass(frozen=True)
class PackageSource:
    """A model inside the worker's image, under `/models/NAME`."""

    name: str


@dataclass(frozen=True)
class OciSource:
    """A model in an image that the kubelet mounts; `path` is a folder or file in it."""

    image: str
    path: str | None


@dataclass(frozen=True)
class PvcSource:
    """A model on a volume that somebody else fills; `path` is a folder or file on it."""

    claim: str
    path: str | None


@dataclass(frozen=True)
class HubSource:
    """A model repository of the Hugging Face hub, downloaded by the loader."""

    repository: str
    revision: str | None


@dataclass(frozen=True)
class HttpsSource:
    """One file, downloaded by the loader; `sha256` is of its whole content."""

    url: str
    sha256: str


@dataclass(frozen=True)
class NodePathSource:
    """A folder or file of the node, where the namespace's pod security allows it."""

    path: str


Mounted = PackageSource | OciSource | PvcSource | NodePathSource
Downloaded = HubSource | HttpsSource
Source = Mounted | Downloaded

_KINDS: dict[str, type[Source]] = {
    "package": PackageSource,
    "oci": OciSource,
    "pvc": PvcSource,
    "hf": HubSource,
    "https": HttpsSource,
    "nodePath": NodePathSource,
}


def parse_source(text: str) -> Source:
    """Take `spec.model.source` apart.

    Raises:
        ValueError: The text has none of the forms of `ALLOWED`.
    """
    scheme = text.partition("://")[0]
    match = _COMPILED[scheme].fullmatch(text) if scheme in _COMPILED else None
    if match is None:
        raise ValueError(f"{text!r} is no source of a model; allowed are {ALLOWED}")
    return _KINDS[scheme](**match.groupdict())


def is_source(text: str) -> bool:
    """Whether `parse_source` takes the text."""
    scheme = text.partition("://")[0]
    return scheme in _COMPILED and _COMPILED[scheme].fullmatch(text) is not None
