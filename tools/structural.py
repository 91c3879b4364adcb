"""Turns a pydantic model of the contract into the structural schema that a CRD needs.

Called by `crds.py` and by the tests of the contract. It knows every keyword that it passes on; any
other is an error, so that nothing is lost on the way without somebody noticing.
"""

from typing import Any

from deepseek_contract.schema import ApiModel

Schema = dict[str, Any]

_KEPT = {
    "default",
    "enum",
    "format",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "pattern",
    "required",
    "type",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-validations",
}
_ORDER = ("description", "type", "default", "enum", "format")
# CEL's costs are estimated from these limits; without one the API server refuses the rules.
_LIMITS = {"string": ("maxLength",), "array": ("maxItems",), "integer": ("minimum", "maximum")}


class UnknownKeywordError(ValueError):
    """A schema that has no equal in a CRD."""


def structural(model: type[ApiModel]) -> Schema:
    """The schema of one kind, with `$ref` inlined and null meaning absent.

    Raises:
        UnknownKeywordError: The model uses something that a CRD cannot express.
    """
    raw = model.model_json_schema(by_alias=True, mode="validation")
    schema = _converted(raw, raw.get("$defs", {}), model.__name__)
    properties = schema["properties"]
    # The API server owns these three and checks them itself.
    properties["apiVersion"] = {"type": "string"}
    properties["kind"] = {"type": "string"}
    properties["metadata"] = {"type": "object"}
    schema["required"] = [name for name in schema["required"] if name == "spec"]
    return schema


def _converted(node: Schema, definitions: dict[str, Schema], where: str) -> Schema:
    node = _resolved(node, definitions)
    result: Schema = {}
    for keyword, value in node.items():
        if keyword in {"title", "$defs"} or (keyword == "default" and value is None):
            continue
        if keyword in {"properties", "items", "additionalProperties"}:
            result |= _nested(keyword, value, definitions, where)
        elif keyword == "description":
            result[keyword] = " ".join(value.split())
        elif keyword == "const":
            result["enum"] = [value]
        elif keyword in _KEPT or (keyword == "anyOf" and "x-kubernetes-int-or-string" in node):
            result[keyword] = value
        else:
            raise UnknownKeywordError(f"{where}: no CRD can say {keyword}: {value!r}")
    if result.get("type") == "integer":
        result["format"] = "int64"
    _demand_limits(result, where)
    return {key: result[key] for key in sorted(result, key=_place)}


def _nested(keyword: str, value: Any, definitions: dict[str, Schema], where: str) -> Schema:
    if keyword == "properties":
        parts = {
            name: _converted(part, definitions, f"{where}.{name}") for name, part in value.items()
        }
        return {keyword: parts}
    # `additionalProperties: false` beside properties is forbidden in a CRD: pruning and strict
    # field validation do its job.
    return {} if value is False else {keyword: _converted(value, definitions, f"{where}[]")}


def _resolved(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """The node with its reference and its null arm taken away; what is written beside wins."""
    while "$ref" in node or ("anyOf" in node and "x-kubernetes-int-or-string" not in node):
        if "$ref" in node:
            target = definitions[node["$ref"].removeprefix("#/$defs/")]
            node = target | {key: value for key, value in node.items() if key != "$ref"}
            continue
        arms = [arm for arm in node["anyOf"] if arm != {"type": "null"}]
        if len(arms) != 1:
            raise UnknownKeywordError(f"a CRD knows no union: {node['anyOf']!r}")
        node = arms[0] | {key: value for key, value in node.items() if key != "anyOf"}
    return node


def _demand_limits(schema: Schema, where: str) -> None:
    kind = schema.get("type")
    wanted: tuple[str, ...] = _LIMITS.get(str(kind), ())
    if kind == "object" and "additionalProperties" in schema:
        wanted = ("maxProperties",)
    if "enum" in schema:
        wanted = ()
    missing = [keyword for keyword in wanted if keyword not in schema]
    if missing and ".metadata" not in where:
        raise UnknownKeywordError(f"{where}: a {kind} needs {' and '.join(missing)}")


def _place(keyword: str) -> tuple[int, str]:
    return (_ORDER.index(keyword), "") if keyword in _ORDER else (len(_ORDER), keyword)
