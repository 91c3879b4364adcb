"""The pod settings that people need, in the words of Kubernetes' own pod template.

What Kubernetes would refuse in the pod template is refused here, when the object is applied, so
that the operator's own apply of the Deployment cannot fail on it.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.alias_generators import to_camel

from deepseek_contract.quantity import Quantity, amount
from deepseek_contract.schema import ApiModel, Rule, keyed, no_doubles
from deepseek_contract.text import (
    QUALIFIED_NAME,
    SUBDOMAIN,
    DataKey,
    ImageName,
    LabelName,
    LabelValue,
    ObjectName,
    QualifiedName,
    VariableName,
)

# Amounts of these are set by `spec.gpu`; written here they would bypass it.
GPU_RESOURCES = "nvidia.com/"
NATIVE_RESOURCES = "kubernetes.io/"
# These would show a pod devices that it was not given.
HIDDEN_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# Flags of `deepseek-worker serve` that no field of the object sets.
TUNING_FLAGS = (
    "--connection-max-requests",
    "--connection-max-seconds",
    "--dtype",
    "--kv-cache-bytes",
    "--max-batch-tokens",
    "--max-queued-requests",
    "--max-running-requests",
    "--no-prefix-cache",
    "--page-tokens",
    "--prefix-cache",
    "--seed",
    "--stall-seconds",
)

_REQUESTED = "cpu|memory|ephemeral-storage"
_DEVICE = rf"{SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"


def keys_match(field: str, pattern: str, message: str) -> Rule:
    """Keys of a map have no pattern in a structural schema, so a rule checks them.

    Args:
        field: The map's name in Python.
        pattern: What each key must match from end to end.
        message: What is allowed.
    """
    compiled = re.compile(pattern)

    def hold(part: Any) -> bool:
        return all(compiled.fullmatch(key) for key in getattr(part, field) or {})

    alias = to_camel(field)
    return Rule(
        cel=f"!has(self.{alias}) || self.{alias}.all(k, k.matches(r'^({pattern})$'))",
        holds=hold,
        message=message,
        field_path=f".{alias}",
    )


class SecretKey(ApiModel):
    """One key of a Secret in the object's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: DataKey
    """Key in the Secret's data."""
    optional: bool | None = None
    """Whether the pod may start without it."""


class ConfigMapKey(ApiModel):
    """One key of a ConfigMap in the object's namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: DataKey
    """Key in the ConfigMap's data."""
    optional: bool | None = None
    """Whether the pod may start without it."""


class PodField(ApiModel):
    """A field of the pod itself."""

    field_path: Literal[
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "spec.nodeName",
        "spec.serviceAccountName",
        "status.hostIP",
        "status.hostIPs",
        "status.podIP",
        "status.podIPs",
    ]
    """Which field."""


class EnvironmentSource(ApiModel):
    """Where the value of an environment variable is taken from."""

    secret_key_ref: SecretKey | None = None
    """A key of a Secret."""
    config_map_key_ref: ConfigMapKey | None = None
    """A key of a ConfigMap."""
    field_ref: PodField | None = None
    """A field of the pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(has(self.secretKeyRef) ? 1 : 0) + (has(self.configMapKeyRef) ? 1 : 0)"
            " + (has(self.fieldRef) ? 1 : 0) == 1",
            holds=lambda source: (
                [source.secret_key_ref, source.config_map_key_ref, source.field_ref].count(None)
                == 2
            ),
            message="valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    )


class EnvironmentVariable(ApiModel):
    """An environment variable of the worker's container."""

    name: VariableName
    """Name; `CUDA_VISIBLE_DEVICES` and `NVIDIA_VISIBLE_DEVICES` are refused."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """The value itself."""
    value_from: EnvironmentSource | None = None
    """Where the value is taken from."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.value) || !has(self.valueFrom)",
            holds=lambda variable: variable.value is None or variable.value_from is None,
            message="only one of value and valueFrom may be given for {name}",
        ),
        Rule(
            cel="!(self.name in ['CUDA_VISIBLE_DEVICES', 'NVIDIA_VISIBLE_DEVICES'])",
            holds=lambda variable: variable.name not in HIDDEN_ENVIRONMENT,
            message="{name} would show the pod devices that it was not given: use spec.gpu",
            field_path=".name",
            reason="FieldValueForbidden",
        ),
    )


class Resources(ApiModel):
    """What the worker's container asks for and may use, besides GPUs."""

    limits: Annotated[dict[str, Quantity], Field(max_length=16)] | None = None
    """The most that the container may use: of cpu, memory and ephemeral-storage, and a number of
    devices of other kinds than GPUs, such as `rdma/hca`."""
    requests: Annotated[dict[str, Quantity], Field(max_length=16)] | None = None
    """What the scheduler sets aside: of cpu, memory and ephemeral-storage."""

    rules: ClassVar[tuple[Rule, ...]] = (
        keys_match(
            "limits",
            f"{_REQUESTED}|{_DEVICE}",
            "limits may name cpu, memory, ephemeral-storage and devices such as rdma/hca",
        ),
        keys_match(
            "requests",
            _REQUESTED,
            "requests may name cpu, memory and ephemeral-storage; devices are in limits",
        ),
        Rule(
            cel="!has(self.limits) || !self.limits.exists(k,"
            " k.startsWith('nvidia.com/') || k.contains('kubernetes.io/'))",
            holds=lambda resources: (
                not any(
                    key.startswith(GPU_RESOURCES) or NATIVE_RESOURCES in key
                    for key in resources.limits or {}
                )
            ),
            message="limits may not name GPUs (nvidia.com/…), which spec.gpu asks for, nor"
            " kubernetes.io/…",
            field_path=".limits",
            reason="FieldValueForbidden",
        ),
        Rule(
            cel="!has(self.limits) || self.limits.all(k, !k.contains('/')"
            " || string(self.limits[k]).matches(r'^[1-9][0-9]*$'))",
            holds=lambda resources: all(
                "/" not in name or re.fullmatch("[1-9][0-9]*", str(quantity))
                for name, quantity in (resources.limits or {}).items()
            ),
            message="devices are whole: their number may not have a unit or a fraction",
            field_path=".limits",
        ),
        Rule(
            cel="!has(self.limits) || !has(self.requests) || self.requests.all(k,"
            " !(k in self.limits) || quantity(string(self.requests[k]))"
            ".compareTo(quantity(string(self.limits[k]))) <= 0)",
            holds=lambda resources: all(
                name not in (resources.limits or {})
                or amount(requested) <= amount(resources.limits[name])
                for name, requested in (resources.requests or {}).items()
            ),
            message="a request may not be above the limit of the same resource",
            field_path=".requests",
        ),
    )


class Toleration(ApiModel):
    """A taint that the pods tolerate."""

    key: QualifiedName | None = None
    """The taint's key; absent with `Exists`, every key."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """How the taint's value is compared."""
    value: LabelValue | None = None
    """The taint's value, with `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; absent, every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """How long the pod stays on a node with a `NoExecute` taint; absent, for ever."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.operator == 'Exists' || has(self.key)",
            holds=lambda toleration: toleration.operator == "Exists" or toleration.key is not None,
            message="a toleration without key needs the operator Exists",
        ),
        Rule(
            cel="self.operator == 'Equal' || !has(self.value) || self.value == ''",
            holds=lambda toleration: toleration.operator == "Equal" or not toleration.value,
            message="a toleration with the operator Exists may not have a value",
        ),
        Rule(
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            holds=lambda toleration: (
                toleration.toleration_seconds is None or toleration.effect == "NoExecute"
            ),
            message="tolerationSeconds needs the effect NoExecute",
        ),
    )


class LabelRequirement(ApiModel):
    """A condition on one label."""

    key: QualifiedName
    """The label's key."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How it is compared."""
    values: Annotated[list[LabelValue], Field(max_length=64)] | None = None
    """The values for `In` and `NotIn`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            holds=lambda label: (label.operator in {"In", "NotIn"}) == bool(label.values),
            message="In and NotIn need values, Exists and DoesNotExist may not have any",
        ),
    )


class LabelSelector(ApiModel):
    """Which pods or namespaces are meant, by their labels."""

    match_labels: Annotated[dict[str, LabelValue], Field(max_length=16)] | None = None
    """Labels that must have these values."""
    match_expressions: Annotated[list[LabelRequirement], Field(max_length=16)] | None = None
    """Further conditions, all of which must hold."""

    rules: ClassVar[tuple[Rule, ...]] = (
        keys_match("match_labels", QUALIFIED_NAME, "matchLabels may only name labels"),
    )


class NodeRequirement(ApiModel):
    """A condition on one label or field of a node."""

    key: QualifiedName
    """The label's key, or `metadata.name` among fields."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How it is compared."""
    values: Annotated[list[LabelValue], Field(max_length=64)] | None = None
    """The values: some for `In` and `NotIn`, one whole number for `Gt` and `Lt`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.operator in ['Exists', 'DoesNotExist']"
            " ? !has(self.values) || size(self.values) == 0"
            " : has(self.values) && size(self.values) > 0",
            holds=lambda node: (node.operator in {"Exists", "DoesNotExist"}) != bool(node.values),
            message="Exists and DoesNotExist may not have values, the other operators need them",
        ),
        Rule(
            cel="!(self.operator in ['Gt', 'Lt']) || (has(self.values) && size(self.values) == 1"
            " && self.values[0].matches(r'^[0-9]{1,18}$'))",
            holds=lambda node: (
                node.operator not in {"Gt", "Lt"}
                or [bool(re.fullmatch("[0-9]{1,18}", value)) for value in node.values or []]
                == [True]
            ),
            message="Gt and Lt need one whole number",
        ),
    )


class NodeFieldRequirement(ApiModel):
    """A condition on the node's name."""

    key: Literal["metadata.name"]
    """The only field that can be compared."""
    operator: Literal["In", "NotIn"]
    """How it is compared."""
    values: Annotated[list[ObjectName], Field(min_length=1, max_length=1)]
    """The node's name."""


class NodeSelectorTerm(ApiModel):
    """Conditions on a node, all of which must hold."""

    match_expressions: Annotated[list[NodeRequirement], Field(max_length=16)] | None = None
    """Conditions on labels."""
    match_fields: Annotated[list[NodeFieldRequirement], Field(max_length=16)] | None = None
    """Conditions on the node's name."""


class NodeSelector(ApiModel):
    """Terms, one of which must hold."""

    node_selector_terms: Annotated[list[NodeSelectorTerm], Field(min_length=1, max_length=16)]
    """The terms."""


class WeightedNodeSelectorTerm(ApiModel):
    """A term that is wished for."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """How much, against other wishes."""
    preference: NodeSelectorTerm
    """The term."""


class NodeAffinity(ApiModel):
    """Which nodes the pods may or should run on."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Nodes on which the pods may run."""
    preferred_during_scheduling_ignored_during_execution: (
        Annotated[list[WeightedNodeSelectorTerm], Field(max_length=16)] | None
    ) = None
    """Nodes on which the pods should run."""


class PodAffinityTerm(ApiModel):
    """Other pods, and how near is near."""

    topology_key: QualifiedName
    """The node label whose value says what is near, such as `kubernetes.io/hostname`."""
    label_selector: LabelSelector | None = None
    """Which pods."""
    namespaces: Annotated[list[LabelName], Field(max_length=16)] | None = None
    """Where they are; absent, in the object's namespace."""
    namespace_selector: LabelSelector | None = None
    """Where they are, by labels of namespaces."""


class WeightedPodAffinityTerm(ApiModel):
    """A term that is wished for."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """How much, against other wishes."""
    pod_affinity_term: PodAffinityTerm
    """The term."""


class PodAffinity(ApiModel):
    """Which pods to be near to, or far from."""

    required_during_scheduling_ignored_during_execution: (
        Annotated[list[PodAffinityTerm], Field(max_length=16)] | None
    ) = None
    """What must hold."""
    preferred_during_scheduling_ignored_during_execution: (
        Annotated[list[WeightedPodAffinityTerm], Field(max_length=16)] | None
    ) = None
    """What should hold."""


class Affinity(ApiModel):
    """Where the pods may and should run."""

    node_affinity: NodeAffinity | None = None
    """By the nodes' labels."""
    pod_affinity: PodAffinity | None = None
    """Near to other pods."""
    pod_anti_affinity: PodAffinity | None = None
    """Away from other pods."""


class TopologySpread(ApiModel):
    """How evenly the object's own pods are spread; the operator fills in their selector."""

    topology_key: QualifiedName
    """The node label over whose values they are spread."""
    max_skew: Annotated[int, Field(ge=1, le=1000)] = 1
    """By how many pods two values may differ."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """Whether a pod waits when it would break this."""
    min_domains: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Over how many values at least; only with `DoNotSchedule`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
            holds=lambda spread: (
                spread.min_domains is None or spread.when_unsatisfiable == "DoNotSchedule"
            ),
            message="minDomains needs whenUnsatisfiable: DoNotSchedule",
        ),
    )


class PullSecret(ApiModel):
    """A Secret with the credentials of an image registry."""

    name: ObjectName
    """Name of the Secret, in the object's namespace."""


class PodSettings(ApiModel):
    """Settings of the worker's pods."""

    image: ImageName | None = None
    """The worker's image; absent, the one that the operator was installed with."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled; absent, as the operator was installed with."""
    image_pull_secrets: Annotated[list[PullSecret], keyed("name", max_items=16)] | None = None
    """Credentials for the worker's image and for `oci://` models."""
    resources: Resources | None = None
    """CPU, memory and the like; GPUs are in `spec.gpu`."""
    env: Annotated[list[EnvironmentVariable], keyed("name", max_items=64)] | None = None
    """Further environment variables of the worker."""
    extra_args: (
        Annotated[
            list[Annotated[str, Field(pattern="^--[a-z][a-z0-9-]*(=[ -~]*)?$", max_length=256)]],
            Field(max_length=32),
        ]
        | None
    ) = None
    """Further flags of the worker, each as `--flag=value`; see the reference of its flags."""
    node_selector: Annotated[dict[str, LabelValue], Field(max_length=32)] | None = None
    """Labels that a node must have."""
    affinity: Affinity | None = None
    """Where the pods may and should run."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] | None = None
    """Taints that the pods tolerate."""
    topology_spread: (
        Annotated[list[TopologySpread], keyed("topologyKey", "whenUnsatisfiable", max_items=8)]
        | None
    ) = None
    """How evenly the pods are spread."""
    priority_class_name: ObjectName | None = None
    """Kubernetes' priority class of the pods."""
    runtime_class_name: ObjectName | None = None
    """The container runtime's class, such as `nvidia`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        no_doubles("image_pull_secrets", "name"),
        no_doubles("env", "name"),
        no_doubles("topology_spread", "topology_key", "when_unsatisfiable"),
        Rule(
            cel="!has(self.extraArgs) || self.extraArgs.all(a, a.split('=')[0] in ["
            + ", ".join(f"'{flag}'" for flag in TUNING_FLAGS)
            + "])",
            holds=lambda pod: all(
                flag.partition("=")[0] in TUNING_FLAGS for flag in pod.extra_args or []
            ),
            message="extraArgs may hold "
            + ", ".join(TUNING_FLAGS)
            + "; the other flags are set from fields of the object",
            field_path=".extraArgs",
        ),
        Rule(
            cel="!has(self.extraArgs) || self.extraArgs.all(a,"
            " self.extraArgs.exists_one(b, a.split('=')[0] == b.split('=')[0]))",
            holds=lambda pod: (
                len({flag.partition("=")[0] for flag in pod.extra_args or []})
                == len(pod.extra_args or [])
            ),
            message="extraArgs gives a flag twice",
            field_path=".extraArgs",
        ),
        keys_match("node_selector", QUALIFIED_NAME, "nodeSelector may only name labels"),
    )
