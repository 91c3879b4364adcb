"""The values of the chart: their defaults, what each means and what it may be.

`values.yaml`, `values.schema.json`, the environment of the operator's container and
`docs/reference/values.md` are written from here. What the operator itself is told comes from its
own `Settings`, field by field.
"""

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from deepseek_operator.permissions import (
    GATEWAY_API,
    KEDA,
    OWN_NAMESPACE,
    SERVED_NAMESPACES,
    WHOLE_CLUSTER,
    Rule,
)
from deepseek_operator.settings import Settings, variable_name

# What the chart knows better than a person: where each comes from instead.
DERIVED = {
    "namespace": "valueFrom: {fieldRef: {fieldPath: metadata.namespace}}",
    "identity": "valueFrom: {fieldRef: {fieldPath: metadata.name}}",
    "pod_uid": "valueFrom: {fieldRef: {fieldPath: metadata.uid}}",
    "worker_image": (
        'value: {{ include "deepseek-operator.image" (list .Values.worker.image .) | quote }}'
    ),
}

NameOverride = Annotated[str, Field(pattern="^([a-z]([-a-z0-9]*[a-z0-9])?)?$", max_length=53)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Labels = dict[str, str]
FreeForm = dict[str, Any]


class ValueModel(BaseModel):
    """A part of the values: a name that is not known is an error."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_by_name=True,
    )


class Image(ValueModel):
    """An image by tag or digest."""

    repository: Annotated[str, Field(min_length=1)]
    """Registry and repository."""
    tag: str = ""
    """Tag; empty takes the chart's appVersion."""
    digest: Annotated[str, Field(pattern="^(sha256:[a-f0-9]{64})?$")] = ""
    """Digest; it goes before the tag."""


class OperatorImage(Image):
    """The operator's image."""

    repository: Annotated[str, Field(min_length=1)] = "deepseek-operator"
    """Registry and repository."""
    pull_policy: Annotated[str, Field(pattern="^(Always|IfNotPresent|Never)$")] = "IfNotPresent"
    """When it is pulled."""


class WorkerImage(Image):
    """The worker's image."""

    repository: Annotated[str, Field(min_length=1)] = "deepseek-worker"
    """Registry and repository."""


class Worker(ValueModel):
    """What the workers run."""

    image: WorkerImage = WorkerImage()
    """Image of the worker and of the model loader, unless an object names its own."""


class PullSecret(ValueModel):
    """A Secret with credentials of a registry."""

    name: Annotated[str, Field(min_length=1)]
    """Its name."""


class Crds(ValueModel):
    """The kinds of objects."""

    enabled: bool = True
    """Install and upgrade the CRDs with the chart. They stay when the chart is uninstalled, and
    all objects with them."""


class ServiceAccount(ValueModel):
    """The operator's ServiceAccount."""

    create: bool = True
    """Whether the chart makes it."""
    name: Annotated[str, Field(pattern="^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)] = ""
    """Its name; empty takes the release's."""
    annotations: Labels = {}
    """Annotations, such as for a cloud's identities."""


class Rbac(ValueModel):
    """The operator's rights."""

    create: bool = True
    """Whether the chart makes the operator's roles."""
    aggregate: bool = True
    """Whether those who may view or edit a namespace may view or edit its DeepSeekDeployments.
    It takes ClusterRoles, so it does nothing in the scope `namespaced`."""


class PodMonitors(ValueModel):
    """How a Prometheus of the Prometheus operator finds operator and workers."""

    enabled: bool | Literal["auto"] = "auto"
    """Whether two PodMonitors are made, of the operator and of the workers in all served
    namespaces; needs the CRDs of the Prometheus operator. `auto`: where helm finds them in the
    cluster. For a Prometheus of another kind there is `files/scrape-config.yaml`."""
    labels: Labels = {}
    """Labels by which a Prometheus selects them, of other keys than the chart's own."""
    interval_seconds: Annotated[int, Field(ge=1, le=30)] = 15
    """How often they are scraped. Autoscaling bridges a failed scrape for a minute."""


class PrometheusAdapter(ValueModel):
    """The rules by which prometheus-adapter serves the workers' metrics to autoscalers."""

    config_map: bool = False
    """Whether they are made a ConfigMap, RELEASE-adapter-rules with the key config.yaml, for an
    adapter that has no others. Another one takes them from `files/adapter-values.yaml`."""


class Tenants(ValueModel):
    """What tenants may be given; in the scope `cluster`, by ValidatingAdmissionPolicies."""

    max_percent: Annotated[int, Field(ge=1, le=100)] = 65
    """The highest gpuMemory.maxPercent that a DeepSeekTenant may have."""
    vgpu_pods_name_memory: bool = True
    """Whether each pod of a tenant whose partition is vgpu must ask for one device and name its
    memory, without which HAMi would give it a whole card."""


class NetworkPolicy(ValueModel):
    """Who may reach the operator."""

    enabled: bool = True
    """Whether only `settings.prometheusNamespaces` may reach it. What it reaches itself is not
    limited: it is the API server, whose address differs between clusters."""


def _settings_model() -> type[ValueModel]:
    fields: dict[str, Any] = {}
    for name, info in Settings.model_fields.items():
        if name in DERIVED:
            continue
        kind: Any = info.annotation
        for limit in info.metadata:
            kind = Annotated[kind, limit]
        fields[name] = (
            kind,
            Field(info.default, description=" ".join((info.description or "").split())),
        )
    return create_model("SettingsValues", __base__=ValueModel, __doc__="Settings.", **fields)


SettingsValues = _settings_model()


class Values(ValueModel):
    """All values of the chart."""

    name_override: NameOverride = ""
    """Part of the objects' names instead of the chart's name."""
    fullname_override: NameOverride = ""
    """The objects' name."""
    image: OperatorImage = OperatorImage()
    """The operator's image."""
    image_pull_secrets: list[PullSecret] = []
    """Credentials for the operator's image."""
    worker: Worker = Worker()
    """What the workers run."""
    crds: Crds = Crds()
    """The kinds of objects."""
    scope: Literal["cluster", "namespaced"] = "cluster"
    """`cluster`: every namespace is served, by a ClusterRole. `namespaced`: those in
    `settings.watchNamespaces`, by a Role in each, and nothing of the cluster is touched but the
    CRDs if they are enabled; tenants and a look at the nodes take the scope `cluster`."""
    settings: SettingsValues = SettingsValues()  # type: ignore[valid-type]
    """The operator's settings, one environment variable each."""
    service_account: ServiceAccount = ServiceAccount()
    """The operator's ServiceAccount."""
    rbac: Rbac = Rbac()
    """The operator's rights."""
    pod_monitor: PodMonitors = PodMonitors()
    """How a Prometheus of the Prometheus operator finds operator and workers."""
    prometheus_adapter: PrometheusAdapter = PrometheusAdapter()
    """The rules by which prometheus-adapter serves the workers' metrics to autoscalers."""
    tenants: Tenants = Tenants()
    """What tenants may be given; in the scope `cluster`, by ValidatingAdmissionPolicies."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Who may reach the operator."""
    resources: FreeForm = {
        "requests": {"cpu": "50m", "memory": "128Mi"},
        "limits": {"memory": "384Mi"},
    }
    """Resources of the operator's container. 500 objects among 1,000 nodes and 6,500 foreign pods
    take less than 300 MiB."""
    pod_annotations: Labels = {}
    """Annotations of the operator's pod."""
    pod_labels: Labels = {}
    """Labels of the operator's pod, of other keys than the chart's own."""
    node_selector: Labels = {}
    """Labels that the operator's node must have."""
    affinity: FreeForm = {}
    """Where the operator may and should run."""
    tolerations: list[FreeForm] = []
    """Taints that the operator tolerates."""
    priority_class_name: str = ""
    """Priority class of the operator's pod."""


def schema_json() -> str:
    """`values.schema.json`."""
    schema = Values.model_json_schema(by_alias=True)
    # Helm gives these to every chart that is part of another.
    schema["properties"]["global"] = {"type": "object"}
    schema["allOf"] = [
        _namespaces_where("namespaced", {"minItems": 1}),
        _namespaces_where("cluster", {"maxItems": 0}),
    ]
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | _without_titles(schema)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def values_yaml() -> str:
    """`values.yaml`: every value with its default and what it means."""
    lines = [
        "# Generated from tools/chart_values.py and deepseek_operator/settings.py; do not edit.",
        "# values.schema.json refuses what is not one of these.",
    ]
    lines += _value_lines(Values, 0)
    return "\n".join(lines) + "\n"


def settings_template() -> str:
    """`templates/_settings.tpl`: one environment variable for each setting."""
    lines = [
        "{{/* Generated from deepseek_operator/settings.py by tools/generate.py; do not edit. */}}",
        '{{- define "deepseek-operator.environment" -}}',
    ]
    for name, info in Settings.model_fields.items():
        lines.append(f"- name: {variable_name(name)}")
        lines.append(f"  {DERIVED.get(name) or _setting_value(name, info)}")
    lines.append("{{- end }}")
    return "\n".join(lines) + "\n"


def _namespaces_where(scope: str, limit: dict[str, int]) -> dict[str, Any]:
    """Ties `settings.watchNamespaces` to the scope."""
    namespaces = {"properties": {"watchNamespaces": limit}}
    return {
        "if": {"properties": {"scope": {"const": scope}}},
        "then": {"properties": {"settings": namespaces}},
    }


def permissions_template() -> str:
    """`templates/_permissions.tpl`: the rules of the operator's roles."""
    served = [line for rule in SERVED_NAMESPACES for line in _rule_lines(rule)]
    keda = [line for rule in KEDA for line in _rule_lines(rule)]
    gateway = [line for rule in GATEWAY_API for line in _rule_lines(rule)]
    cluster = [line for rule in WHOLE_CLUSTER for line in _rule_lines(rule)]
    own = [line for rule in OWN_NAMESPACE for line in _lease_lines(rule)]
    return "\n".join(
        [
            "{{/* Generated from deepseek_operator/permissions.py by tools/generate.py. */}}",
            '{{- define "deepseek-operator.servedRules" -}}',
            *served,
            "{{- if .Values.settings.keda }}",
            *keda,
            "{{- end }}",
            "{{- if .Values.settings.gatewayApi }}",
            *gateway,
            "{{- end }}",
            "{{- end }}",
            '{{- define "deepseek-operator.clusterRules" -}}',
            *cluster,
            "{{- end }}",
            '{{- define "deepseek-operator.ownRules" -}}',
            *own,
            "{{- end }}\n",
        ]
    )


def _rule_lines(rule: Rule, extra: str = "") -> list[str]:
    return [
        f'- apiGroups: ["{rule.group}"]',
        f"  resources: [{rule.resource}]",
        *([f"  resourceNames: [{', '.join(rule.names)}]"] if rule.names else []),
        *([extra] if extra else []),
        f"  verbs: [{', '.join(rule.verbs)}]",
    ]


def _lease_lines(rule: Rule) -> list[str]:
    """Rights on the one Lease; what is to be created has no name that a rule could go by."""
    others = tuple(verb for verb in rule.verbs if verb != "create")
    name = "  resourceNames: [{{ .Values.settings.leaseName | quote }}]"
    return [
        *_rule_lines(replace(rule, verbs=("create",))),
        *_rule_lines(replace(rule, verbs=others), name),
    ]


def _without_titles(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str))
    }


def _setting_value(name: str, info: FieldInfo) -> str:
    value = f".Values.settings.{to_camel(name)}"
    # YAML's numbers may reach a template as floats, and large ones would be written as 1e+06.
    number = f"{{{{ int64 {value} | quote }}}}"
    if isinstance(info.default, tuple):
        return f'value: {{{{ join "," {value} | quote }}}}'
    if info.annotation is int:
        return f"value: {number}"
    if info.annotation == int | None:
        return f'value: {{{{ if kindIs "invalid" {value} }}}}""{{{{ else }}}}{number}{{{{ end }}}}'
    return f"value: {{{{ {value} | quote }}}}"


def _value_lines(model: type[BaseModel], depth: int) -> list[str]:
    lines: list[str] = []
    indent = "  " * depth
    for place, info in enumerate(model.model_fields.values()):
        if place or not depth:
            lines.append("")
        lines += [
            f"{indent}# {line}" for line in _wrapped(info.description or "", 98 - len(indent))
        ]
        default = info.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            lines.append(f"{indent}{info.alias}:")
            lines += _value_lines(type(default), depth + 1)
        else:
            plain = list(default) if isinstance(default, tuple) else default
            written = yaml.safe_dump({info.alias: plain}, sort_keys=False)
            lines += [indent + line.replace("''", '""') for line in written.splitlines()]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
