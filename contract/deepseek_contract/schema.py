"""What every type of the API shares: strictness, and rules that are CEL and Python at once.

`deployment.py` and `tenant.py` build on it; `tools/structural.py` turns the result into CRDs. It
decides nothing about a cluster and does no I/O.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from deepseek_contract.text import PREFIX_LENGTH, has_short_prefix

# kubectl leaves the message out under the other two, FieldValueRequired and FieldValueDuplicate.
Reason = Literal["FieldValueInvalid", "FieldValueForbidden"]

_PLACEHOLDER = re.compile(r"\{([A-Za-z.]+)\}")


@dataclass(frozen=True)
class Rule:
    """One rule of the API, for the API server (CEL) and for Python.

    Attributes:
        cel: True when the object is right; `self` is the object that carries the rule. None where
            the API server checks it by another keyword of the schema.
        holds: The same in Python.
        message: What is wrong and what is allowed. `{a.b}` stands for the text given there;
            numbers cannot stand there, whose length as text CEL does not bound.
        field_path: Where kubectl shows the error, relative to the object, such as `.gpu.mode`.
        reason: How kubectl introduces the error.
    """

    cel: str | None
    holds: Callable[[Any], bool]
    message: str
    field_path: str = ""
    reason: Reason = "FieldValueInvalid"

    def validation(self) -> dict[str, str] | None:
        """The entry of `x-kubernetes-validations`."""
        if self.cel is None:
            return None
        entry = {"rule": self.cel, "message": _PLACEHOLDER.sub("…", self.message)}
        if _PLACEHOLDER.search(self.message):
            entry["messageExpression"] = self._message_expression()
        if self.field_path:
            entry["fieldPath"] = self.field_path
        if self.reason != "FieldValueInvalid":
            entry["reason"] = self.reason
        return entry

    def explain(self, holder: "ApiModel") -> str:
        """The message with the values that were given."""
        return _PLACEHOLDER.sub(lambda match: str(_value_at(holder, match[1])), self.message)

    def _message_expression(self) -> str:
        # Splitting by a pattern with one group puts the captured paths at the odd places.
        parts = _PLACEHOLDER.split(self.message)
        terms = [
            f"self.{part}" if place % 2 else _cel_string(part)
            for place, part in enumerate(parts)
            if part
        ]
        return " + ".join(terms)


@dataclass(frozen=True)
class UpdateRule:
    """A rule over an object and the one that it replaces: `oldSelf` in CEL, `old` in Python."""

    cel: str
    holds: Callable[[Any, Any], bool]
    message: str
    field_path: str = ""

    def validation(self) -> dict[str, str]:
        """The entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel, "message": self.message, "reason": "FieldValueForbidden"}
        if self.field_path:
            entry["fieldPath"] = self.field_path
        return entry


@dataclass(frozen=True)
class NotYet:
    """A part of the API whose behaviour this version does not have, so that it is refused.

    Attributes:
        path: The field, from the top of the object.
        values: The values refused; empty refuses the field itself.
        above: The highest number that is served, for a field that is a number.
        use: What to do instead.
    """

    path: str
    values: tuple[str, ...] = ()
    above: int | None = None
    use: str = ""

    def rule(self) -> Rule:
        """The rule for the top of the object."""
        steps = self.path.split(".")
        absent = [f"!has(self.{'.'.join(steps[: n + 1])})" for n in range(len(steps))]
        message = f"{self.path} is not available in this version"
        if self.values:
            listed = ", ".join(f"'{value}'" for value in self.values)
            absent.append(f"!(self.{self.path} in [{listed}])")
            message = f"{self.path} {{{self.path}}} is not available in this version"
        elif self.above is not None:
            absent.append(f"self.{self.path} <= {self.above}")
            message = f"{self.path} above {self.above} is not available in this version"
        return Rule(
            cel=" || ".join(absent),
            holds=self._holds,
            message=f"{message}: {self.use}" if self.use else message,
            field_path=f".{self.path}",
            reason="FieldValueForbidden",
        )

    def _holds(self, document: "ApiModel") -> bool:
        value = _value_at(document, self.path)
        if value is None:
            return True
        if self.values:
            return value not in self.values
        return self.above is not None and bool(value <= self.above)


class ApiModel(BaseModel):
    """A part of an API object: unknown fields are errors, null means absent, 3.0 is 3."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_by_alias=True,
        validate_by_name=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    update_rules: ClassVar[tuple[UpdateRule, ...]] = ()

    @classmethod
    def parse(cls, document: object) -> Self:
        """Read a document as the API server does: camelCase names, nothing unknown.

        Raises:
            pydantic.ValidationError: The document breaks the schema or a rule.
        """
        return cls.model_validate(document, by_alias=True, by_name=False)

    @classmethod
    def from_stored(cls, document: object) -> Self:
        """Read an object that the API server has accepted, leaving out fields not known here.

        During an upgrade the operator and the CRD are of different versions.

        Raises:
            pydantic.ValidationError: What is known here is not as it is allowed here.
        """
        return cls.model_validate(document, by_alias=True, by_name=False, extra="ignore")

    def document(self) -> dict[str, Any]:
        """The object as the API server stores it: camelCase, defaults filled in, no nulls."""
        return self.model_dump(by_alias=True, exclude_none=True)

    def broken_update_rules(self, old: Self) -> list[str]:
        """Messages of the update rules of this part that replacing `old` by this breaks."""
        return [rule.message for rule in self.update_rules if not rule.holds(self, old)]

    @model_validator(mode="before")
    @classmethod
    def _as_json(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # One level further reaches maps of plain values; parts see to themselves.
        return {
            key: _without_nulls(value) if isinstance(value, dict) else value
            for key, value in _without_nulls(data).items()
        }

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        broken = [rule.explain(self) for rule in self.rules if not rule.holds(self)]
        if broken:
            raise ValueError("; ".join(broken))
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Carry the rules into the JSON schema, from where the CRD takes them."""
        result = handler(schema)
        written = [rule.validation() for rule in cls.rules]
        written += [rule.validation() for rule in cls.update_rules]
        validations = [entry for entry in written if entry is not None]
        if validations:
            handler.resolve_ref_schema(result)["x-kubernetes-validations"] = validations
        return result


def section(part: type[ApiModel]) -> Any:
    """A nested part that is there even when it is not written, with its own defaults.

    The schema's default is written out: the API server checks rules against it as it stands.
    """
    return Field(default_factory=part, json_schema_extra={"default": part().document()})


def keyed(*keys: str, max_items: int) -> Any:
    """A list whose items are told apart by `keys`, for server-side apply and for doubles."""
    extra: dict[str, Any] = {
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": list(keys),
    }
    return Field(max_length=max_items, json_schema_extra=extra)


def keys_match(
    field: str, pattern: str, message: str, *, longest_prefix: int = PREFIX_LENGTH
) -> Rule:
    """Keys of a map have no pattern in a structural schema, so a rule checks them.

    Args:
        field: The map's name in Python.
        pattern: What each key must match from end to end.
        message: What is allowed.
        longest_prefix: The most characters before the `/` of a key, where the pattern has one.
    """
    compiled = re.compile(pattern)

    def hold(part: Any) -> bool:
        return all(
            compiled.fullmatch(key) and has_short_prefix(key, longest_prefix)
            for key in getattr(part, field) or {}
        )

    alias = to_camel(field)
    each = f"k.matches(r'^({pattern})$')"
    if "/" in pattern:
        each += f" && k.indexOf('/') <= {longest_prefix}"
        message += f", with at most {longest_prefix} characters before the /"
    return Rule(
        cel=f"!has(self.{alias}) || self.{alias}.all(k, {each})",
        holds=hold,
        message=message,
        field_path=f".{alias}",
    )


def no_doubles(field: str, *keys: str) -> Rule:
    """The Python side of `keyed`: the API server checks doubles by the list's type."""
    return Rule(
        cel=None,
        holds=lambda part: not _doubles(getattr(part, field), keys),
        message=f"{to_camel(field)} names an entry twice",
    )


def _doubles(items: list[Any] | None, keys: tuple[str, ...]) -> bool:
    seen = [tuple(getattr(item, key) for key in keys) for item in items or []]
    return len(seen) != len(set(seen))


def _without_nulls(data: dict[Any, Any]) -> dict[Any, Any]:
    """Null means absent, and JSON knows one kind of number: 3.0 is 3."""
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in data.items()
        if value is not None
    }


def _value_at(holder: Any, path: str) -> Any:
    value = holder
    for step in path.split("."):
        if value is None:
            return None
        fields = type(value).model_fields
        value = getattr(value, next(n for n, field in fields.items() if field.alias == step))
    return value


def _cel_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
