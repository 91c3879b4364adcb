"""Amounts of a resource as text, such as `500m` and `1.5Gi`.

A stricter form than Kubernetes' own: no exponents (`1e3` is a number to one YAML reader and text
to another), no sign, no zero, and nothing so long that Kubernetes would cut it silently. A bad
amount is refused when it is applied, instead of stopping the operator later.
"""

import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

_SCALES = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
}
PATTERN = (
    r"^([1-9][0-9]{0,14}"
    r"|[1-9][0-9]{0,8}m"
    r"|([1-9][0-9]{0,11}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9])(k|Ki)"
    r"|([1-9][0-9]{0,8}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9])(M|Mi)"
    r"|([1-9][0-9]{0,5}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9])(G|Gi)"
    r"|([1-9][0-9]{0,2}(\.[0-9]{1,3})?|0\.[0-9]{0,2}[1-9])(T|Ti)"
    r"|[1-9][0-9]{0,5}\.[0-9]{1,3}|0\.[0-9]{0,2}[1-9])$"
)
_ALLOWED = "an amount above zero such as 500m, 2 or 1.5Gi"
_COMPILED = re.compile(PATTERN)
_PARTS = re.compile(r"^([0-9.]+)([a-zA-Z]*)$")


class _QuantitySchema:
    """Teaches pydantic the API server's int-or-string."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _checked,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _schema: core_schema.CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 20,
            # Not a `pattern`: kubectl would show people that instead of what is allowed.
            "x-kubernetes-validations": [
                {"rule": f"string(self).matches(r'{PATTERN}')", "message": f"must be {_ALLOWED}"}
            ],
        }


Quantity = Annotated[int | str, _QuantitySchema]


def amount(quantity: int | str) -> Fraction:
    """What a quantity amounts to: cores, bytes or units.

    Raises:
        ValueError: The text is no quantity of the form above.
    """
    parts = _PARTS.match(str(quantity))
    if parts is None or not _COMPILED.fullmatch(str(quantity)):
        raise ValueError(f"{quantity!r} is not {_ALLOWED}")
    return Fraction(parts[1]) * _SCALES[parts[2]]


def _checked(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("quantity", "must be text or a whole number")
    if not _COMPILED.fullmatch(str(value)):
        raise PydanticCustomError("quantity", f"must be {_ALLOWED}")
    return value
