"""The pod settings that people need, in the words of Kubernetes' own pod template.

What Kubernetes would refuse in the pod template is refused here, when the object is applied, so
that the operator's own apply of the Deployment cannot fail on it.
"""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deepseek_contract.placement import Affinity, Toleration, TopologySpread
from deepseek_contract.quantity import Quantity, amount
from deepseek_contract.schema import ApiModel, Rule, keyed, keys_match, no_doubles
from deepseek_contract.text import (
    PREFIX_LENGTH,
    QUALIFIED_NAME,
    SUBDOMAIN,
    DataKey,
    ImageName,
    LabelValue,
    ObjectName,
    VariableName,
)

# Amounts of these are set by `spec.gpu`; written here they would bypass it.
GPU_RESOURCES = "nvidia.com/"
NATIVE_RESOURCES = "kubernetes.io/"
# What a ResourceQuota calls devices; a container cannot ask for them by that name.
QUOTA_RESOURCES = "requests."
# These would show a pod devices that it was not given.
HIDDEN_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# Flags of `deepseek-worker serve` that no field of the object sets.
TUNING_FLAGS = (
    "--activations",
    "--api-processes",
    "--connection-max-requests",
    "--connection-max-seconds",
    "--dtype",
    "--kv-cache-bytes",
    "--max-batch-tokens",
    "--max-queued-requests",
    "--max-running-requests",
    "--metrics-aliases",
    "--no-prefix-cache",
    "--page-tokens",
    "--prefix-cache",
    "--rounding",
    "--seed",
    "--stall-seconds",
)

_REQUESTED = "cpu|memory|ephemeral-storage"
_DEVICE = rf"{SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"


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


def _bytes_are_whole(field: str) -> Rule:
    """Kubernetes takes `500m` of memory for half a byte, and then no container starts."""
    return Rule(
        cel=f"!has(self.{field}) || self.{field}.all(k, !(k in ['memory', 'ephemeral-storage'])"
        f" || !string(self.{field}[k]).endsWith('m'))",
        holds=lambda resources: (
            not any(
                name in {"memory", "ephemeral-storage"} and str(quantity).endswith("m")
                for name, quantity in (getattr(resources, field) or {}).items()
            )
        ),
        message="memory and ephemeral-storage are in bytes, and m is a thousandth of one: write"
        " 500Mi or 500M instead of 500m",
        field_path=f".{field}",
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
            # A quota's name for them is to be a qualified name too.
            longest_prefix=PREFIX_LENGTH - len(QUOTA_RESOURCES),
        ),
        keys_match(
            "requests",
            _REQUESTED,
            "requests may name cpu, memory and ephemeral-storage; devices are in limits",
        ),
        Rule(
            cel="!has(self.limits) || !self.limits.exists(k,"
            " k.startsWith('nvidia.com/') || k.startsWith('requests.')"
            " || k.contains('kubernetes.io/'))",
            holds=lambda resources: (
                not any(
                    key.startswith((GPU_RESOURCES, QUOTA_RESOURCES)) or NATIVE_RESOURCES in key
                    for key in resources.limits or {}
                )
            ),
            message="limits may not name GPUs (nvidia.com/…), which spec.gpu asks for, nor"
            " requests.… or kubernetes.io/…",
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
        _bytes_are_whole("limits"),
        _bytes_are_whole("requests"),
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
