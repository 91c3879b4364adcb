"""Where pods may and should run: tolerations, affinity and spread, in the words of Kubernetes."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deepseek_contract.schema import ApiModel, Rule, keys_match
from deepseek_contract.text import (
    QUALIFIED_NAME,
    LabelName,
    LabelValue,
    ObjectName,
    QualifiedName,
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
