"""The pages of docs/reference: every field, value, setting, flag and metric, from its owner."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from chart_values import Values
from crds import CustomResource, custom_resource_definition
from deepseek_contract import deployment
from deepseek_contract.metrics import (
    OPERATOR_METRICS,
    TARGET_LABELS,
    VLLM_ALIASES,
    WORKER_METRICS,
    Metric,
)
from deepseek_contract.pod import TUNING_FLAGS
from deepseek_contract.schema import ApiModel, Rule, UpdateRule
from deepseek_contract.status import REASONS, TENANT_REASONS
from deepseek_operator.settings import Settings, variable_name
from deepseek_worker import openapi
from deepseek_worker.config import EngineConfig, LoadConfig, ServerConfig

Row = tuple[str, ...]


def deployment_page(resource: CustomResource) -> str:
    """Fields, rules, what is not available yet, and the conditions with their reasons."""
    refused = [
        (
            f"`{row.path}`",
            ", ".join(f"`{value}`" for value in row.values)
            or (f"above {row.above}" if row.above is not None else "any"),
            row.use or "",
        )
        for row in deployment.NOT_YET
    ]
    return _page(
        _resource_head(resource),
        "## Not available in this version",
        "The schema is complete; what has no behaviour yet is refused when it is applied.",
        _table(("field", "values", "instead"), refused),
        *_fields_and_rules(resource),
        *_conditions(
            REASONS,
            "[When something is wrong](../troubleshooting.md) says what each reason means and what"
            " to do.",
        ),
    )


def tenant_page(resource: CustomResource) -> str:
    """Fields and rules of the tenant, and the conditions with their reasons."""
    return _page(
        _resource_head(resource),
        *_fields_and_rules(resource),
        *_conditions(
            TENANT_REASONS,
            "[Tenants and partitions](../tenants.md#status) says when each is true and what to do.",
        ),
    )


def openapi_document() -> str:
    """The worker's API, as the worker itself serves it."""
    return json.dumps(openapi.document(), indent=1, ensure_ascii=False) + "\n"


def metrics_page() -> str:
    """All metrics."""
    added = ", ".join(f"`{label}`" for label in TARGET_LABELS)
    return _page(
        _head("Metrics", "contract/deepseek_contract/metrics.py"),
        f"Labels that Prometheus adds ({added}) are not listed.",
        "## Workers",
        _table(("name", "type", "unit", "labels", "meaning"), map(_metric_row, WORKER_METRICS)),
        "With `--metrics-aliases vllm` a worker shows some of them under vLLM's names too, with the"
        " label `model_name`:",
        _table(("vLLM's name", "values of"), [(f"`{a}`", f"`{m.name}`") for a, m in VLLM_ALIASES]),
        "## Operator",
        "`namespace` is the object's. A Prometheus that scrapes the operator as the chart has it"
        " calls that `exported_namespace`, since `namespace` is the operator's own there.",
        _table(("name", "type", "unit", "labels", "meaning"), map(_metric_row, OPERATOR_METRICS)),
    )


def values_page() -> str:
    """All values of the chart."""
    return _page(
        _head(
            "Values of the chart", "tools/chart_values.py", "operator/deepseek_operator/settings.py"
        ),
        "Set them by `helm install --set name=value` or `--values file.yaml`. A name that is not"
        " here is refused.",
        _table(("value", "type", "default", "meaning"), _value_rows(Values, "")),
    )


def settings_page() -> str:
    """All settings of the operator."""
    rows = [
        (
            f"`{variable_name(name)}`",
            _type_of(info),
            _code(_plain(info.default)),
            _line(info.description),
        )
        for name, info in Settings.model_fields.items()
    ]
    return _page(
        _head("Settings of the operator", "operator/deepseek_operator/settings.py"),
        "The chart sets these environment variables from its [values](values.md). One that starts"
        " with `DEEPSEEK_OPERATOR__` and is not here is an error. Lists are separated by commas.",
        _table(("variable", "type", "default", "meaning"), rows),
    )


def worker_page() -> str:
    """All flags of the worker."""
    serve = [*_flag_rows(EngineConfig), *_flag_rows(ServerConfig)]
    return _page(
        _head("Flags of the worker", "worker/deepseek_worker/config.py"),
        "## deepseek-worker serve",
        "The operator sets most of them from the object; `spec.pod.extraArgs` may hold: "
        + ", ".join(f"`{flag}`" for flag in TUNING_FLAGS)
        + ".",
        _table(("flag", "type", "default", "meaning"), serve),
        "## deepseek-worker load",
        _table(("flag", "type", "default", "meaning"), _flag_rows(LoadConfig)),
    )


def _page(*blocks: str) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def _head(title: str, *owners: str) -> str:
    sources = ", ".join(f"[`{owner}`](../../{owner})" for owner in owners)
    note = "<!-- Generated by tools/generate.py; do not edit. -->"
    return f"# {title}\n\n{note}\nGenerated from {sources}."


def _resource_head(resource: CustomResource) -> str:
    module = resource.model.__module__.replace(".", "/")
    group = f"{deployment.GROUP}/{deployment.VERSION}"
    return _page(
        _head(resource.kind, f"contract/{module}.py"),
        f"`{group}`, {resource.scope.lower()}, short name `{resource.short_name}`. "
        + _line(resource.model.__doc__),
    ).rstrip()


def _fields_and_rules(resource: CustomResource) -> Iterator[str]:
    schema = custom_resource_definition(resource)["spec"]["versions"][0]["schema"]
    properties = schema["openAPIV3Schema"]["properties"]
    header = ("field", "type", "default", "meaning")
    yield "## Spec"
    yield _table(header, _field_rows(properties["spec"], "spec"))
    yield "## Rules"
    yield "Each is checked when the object is applied, by the API server itself."
    yield "\n".join(f"- {message}" for message in _messages(resource.model))
    yield "## Status"
    yield _table(header, _field_rows(properties["status"], "status"))


def _conditions(reasons: Mapping[Any, tuple[str, ...]], pointer: str) -> Iterator[str]:
    yield "## Conditions"
    yield pointer
    yield _table(
        ("condition", "reasons"),
        (
            (f"`{kind}`", ", ".join(f"`{word}`" for word in words))
            for kind, words in reasons.items()
        ),
    )


def _field_rows(schema: dict[str, Any], path: str) -> Iterator[Row]:
    required = schema.get("required", [])
    for name, part in schema["properties"].items():
        here = f"{path}.{name}"
        default = "required" if name in required else _default(part)
        yield f"`{here}`", _schema_type(part), default, _line(part.get("description"))
        inner = part.get("items", part)
        if "properties" in inner:
            yield from _field_rows(inner, f"{here}[]" if "items" in part else here)


def _default(part: dict[str, Any]) -> str:
    # A section's default is spelled out by its own fields.
    return _code(part["default"]) if "default" in part and "properties" not in part else ""


def _schema_type(part: dict[str, Any]) -> str:
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if part.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "items" in part:
        return f"list of {_schema_type(part['items'])}"
    if "additionalProperties" in part:
        return f"map of {_schema_type(part['additionalProperties'])}"
    if part["type"] == "integer" and part["maximum"] < 2**32:
        return f"{part['minimum']} to {part['maximum']}"
    return str(part["type"])


def _messages(model: type[ApiModel]) -> list[str]:
    """Messages of the rules of this part and all parts below, each once."""
    found: list[Rule | UpdateRule] = []
    for part in _parts(model, set()):
        found += [*part.rules, *part.update_rules]
    refusals = {row.rule().message for row in deployment.NOT_YET}
    texts = [rule.message for rule in found if rule.message not in refusals]
    return [text.replace("{", "<").replace("}", ">") for text in dict.fromkeys(texts)]


def _parts(model: type[ApiModel], seen: set[type[ApiModel]]) -> Iterator[type[ApiModel]]:
    if model in seen:
        return
    seen.add(model)
    yield model
    for info in model.model_fields.values():
        for inner in _models_in(info.annotation):
            yield from _parts(inner, seen)


def _models_in(annotation: Any) -> Iterator[type[ApiModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _metric_row(metric: Metric) -> Row:
    values = f" ({', '.join(metric.label_values)})" if metric.label_values else ""
    labels = ", ".join(f"`{label}`" for label in metric.labels) + values
    return f"`{metric.name}`", metric.type, metric.unit, labels, metric.help


def _value_rows(model: type[BaseModel], path: str) -> Iterator[Row]:
    for info in model.model_fields.values():
        default = info.get_default(call_default_factory=True)
        here = f"{path}{info.alias}"
        if isinstance(default, BaseModel):
            yield f"`{here}`", "", "", _line(info.description)
            yield from _value_rows(type(default), f"{here}.")
        else:
            yield f"`{here}`", _type_of(info), _code(_plain(default)), _line(info.description)


def _flag_rows(model: type[BaseModel]) -> Iterator[Row]:
    for name, info in model.model_fields.items():
        flag = f"`--{name.replace('_', '-')}`"
        if info.annotation is bool:
            flag += f", `--no-{name.replace('_', '-')}`"
        default = "required" if info.is_required() else _code(_plain(info.default))
        yield flag, _type_of(info), default, _line(info.description)


def _type_of(info: FieldInfo) -> str:
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return _named(info.annotation, names)


def _named(annotation: Any, names: dict[Any, str]) -> str:
    if annotation in names:
        return names[annotation]
    origin = get_origin(annotation)
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in {list, tuple}:
        return "list"
    if origin is dict:
        return "map"
    if arguments:
        return ", ".join(_named(argument, names) for argument in arguments)
    return "path" if annotation.__name__ == "Path" else annotation.__name__.lower()


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def _code(value: Any) -> str:
    if value in (None, "", [], {}):
        return ""
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, list):
        value = ", ".join(value)
    if isinstance(value, dict):
        value = json.dumps(value)
    return f"`{value}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _table(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines
    )
