r"""The kinds of text and number that the API takes, each with its limits.

Patterns are written for Go's and Rust's regular expressions alike: no look-around, no `\d` or
`\s`, whose meaning differs between them.
"""

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
QUALIFIED_NAME = rf"({SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
FILE_PATH = "[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*"
IMAGE = (
    r"[A-Za-z0-9]+(([._]|__|-+)[A-Za-z0-9]+)*(:[0-9]{1,5})?"
    r"(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[a-f0-9]{64})?"
)
PREFIX_LENGTH = 253
"""The most characters before the `/` of a qualified name, which a pattern cannot count."""
_PREFIX_MESSAGE = f"may have at most {PREFIX_LENGTH} characters before its /"


def has_short_prefix(name: str, longest: int = PREFIX_LENGTH) -> bool:
    """Whether no more than `longest` characters are before the name's `/`, if it has one."""
    return name.find("/") <= longest


def _with_short_prefix(name: str) -> str:
    if not has_short_prefix(name):
        raise PydanticCustomError("prefix", _PREFIX_MESSAGE)
    return name


Percent = Annotated[int, Field(ge=1, le=100)]
Seconds = Annotated[int, Field(ge=0, le=86_400)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
GiB = Annotated[int, Field(ge=1, le=1_000_000)]
Bytes = Annotated[int, Field(ge=0, le=2**62)]
LabelName = Annotated[str, StringConstraints(pattern=f"^{LABEL}$", max_length=63)]
ObjectName = Annotated[str, StringConstraints(pattern=f"^{SUBDOMAIN}$", max_length=253)]
QualifiedName = Annotated[
    str,
    StringConstraints(pattern=f"^{QUALIFIED_NAME}$", max_length=PREFIX_LENGTH + 64),
    AfterValidator(_with_short_prefix),
    Field(
        json_schema_extra={
            "x-kubernetes-validations": [
                {"rule": f"self.indexOf('/') <= {PREFIX_LENGTH}", "message": _PREFIX_MESSAGE}
            ]
        }
    ),
]
LabelValue = Annotated[
    str,
    StringConstraints(pattern="^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63),
]
DataKey = Annotated[
    str, StringConstraints(pattern=r"^\.?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$", max_length=253)
]
ImageName = Annotated[str, StringConstraints(pattern=f"^{IMAGE}$", max_length=512)]
VariableName = Annotated[str, StringConstraints(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
