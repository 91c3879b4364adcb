r"""The kinds of text and number that the API takes, each with its limits.

Patterns are written for Go's and Rust's regular expressions alike: no look-around, no `\d` or
`\s`, whose meaning differs between them.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints

LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
QUALIFIED_NAME = rf"({SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
FILE_PATH = "[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*"
IMAGE = (
    r"[A-Za-z0-9]+(([._]|__|-+)[A-Za-z0-9]+)*(:[0-9]{1,5})?"
    r"(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[a-f0-9]{64})?"
)


def _integral(value: Any) -> Any:
    """JSON knows one kind of number: 3.0 is 3, as the API server has it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Int = Annotated[int, BeforeValidator(_integral)]
Percent = Annotated[Int, Field(ge=1, le=100)]
Seconds = Annotated[Int, Field(ge=0, le=86_400)]
Count = Annotated[Int, Field(ge=0, le=1_000_000)]
GiB = Annotated[Int, Field(ge=1, le=1_000_000)]
Bytes = Annotated[Int, Field(ge=0, le=2**62)]
LabelName = Annotated[str, StringConstraints(pattern=f"^{LABEL}$", max_length=63)]
ObjectName = Annotated[str, StringConstraints(pattern=f"^{SUBDOMAIN}$", max_length=253)]
QualifiedName = Annotated[str, StringConstraints(pattern=f"^{QUALIFIED_NAME}$", max_length=317)]
LabelValue = Annotated[
    str,
    StringConstraints(pattern="^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", max_length=63),
]
DataKey = Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
ImageName = Annotated[str, StringConstraints(pattern=f"^{IMAGE}$", max_length=512)]
VariableName = Annotated[str, StringConstraints(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
