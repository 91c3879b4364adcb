"""`DeepSeekDeployment`: one model, served by GPU worker pods.

The source of the CRD and of its reference page. The operator reads objects through it; what it
accepts and what the API server accepts is the same, which a test holds against a real server.
"""

import math
import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deepseek_contract.model import FallbackModel, ModelSpec
from deepseek_contract.pod import PodSettings
from deepseek_contract.schema import (
    ApiModel,
    NotYet,
    Rule,
    UpdateRule,
    keyed,
    keys_match,
    no_doubles,
    section,
)
from deepseek_contract.status import DeepSeekDeploymentStatus, Metadata
from deepseek_contract.text import (
    LABEL,
    QUALIFIED_NAME,
    SUBDOMAIN,
    DataKey,
    GiB,
    LabelName,
    ObjectName,
    Percent,
    Seconds,
)

GROUP = "deepseek.dev"
VERSION = "v1alpha1"
KIND = "DeepSeekDeployment"
PLURAL = "deepseekdeployments"

# Children take the object's name with a suffix of up to 11 characters; Services allow 63.
NAME_MAX_LENGTH = 52

# Parts of the API whose behaviour comes later. The change that brings one deletes its row.
NOT_YET = (
    NotYet("spec.gpu.mode", values=("dra",), use="use whole, mig, vgpu or cpu"),
    NotYet("spec.gpu.count", above=1, use="a model is served by one GPU a pod"),
    NotYet("spec.memory"),
)


class ApiKeySecret(ApiModel):
    """A Secret that holds the API keys that clients send."""

    name: ObjectName
    """Name of the Secret, in the object's namespace."""
    key: DataKey = "api-key"
    """Key in the Secret's data; its value holds one API key a line."""


class Gpu(ApiModel):
    """What the model computes on."""

    mode: Literal["whole", "mig", "vgpu", "cpu", "dra"] = "whole"
    """`whole`: GPUs of its own; `mig`: a MIG slice; `vgpu`: a share of a GPU's memory, which needs
    HAMi's scheduler; `cpu`: no GPU, for small models; `dra`: reserved."""
    count: Annotated[int, Field(ge=1, le=16)] = 1
    """GPUs a pod, over which the model is split."""
    mig_profile: (
        Annotated[str, Field(pattern=r"^[1-7]g\.[1-9][0-9]{0,2}gb(\+me|\+gfx)?$", max_length=16)]
        | None
    ) = None
    """The MIG profile, such as `1g.18gb`, with the mode `mig`; one that some node must offer."""
    memory_gib: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, Field(alias="memoryGiB")] = (
        None
    )
    """GPU memory a pod, with the mode `vgpu`."""
    memory_limit_percent: Percent = 90
    """How much of the memory that the pod is given the worker may use: of the GPU's, or with the
    mode `cpu` of the container's limit."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.mode == 'mig') == has(self.migProfile)",
            holds=lambda gpu: (gpu.mode == "mig") == (gpu.mig_profile is not None),
            message="migProfile belongs to the mode mig, and that mode needs it; mode is {mode}",
            field_path=".migProfile",
        ),
        Rule(
            cel="(self.mode == 'vgpu') == has(self.memoryGiB)",
            holds=lambda gpu: (gpu.mode == "vgpu") == (gpu.memory_gib is not None),
            message="memoryGiB belongs to the mode vgpu, and that mode needs it; mode is {mode}",
            field_path=".memoryGiB",
        ),
        Rule(
            cel="self.mode in ['whole', 'dra'] || self.count == 1",
            holds=lambda gpu: gpu.mode in {"whole", "dra"} or gpu.count == 1,
            message="with the mode {mode} the count must be 1: a process sees one MIG slice, a pod"
            " has one share of a GPU, and neither can be joined by tensor parallelism",
            field_path=".count",
        ),
    )


class Memory(ApiModel):
    """Where KV pages and weights go when the GPU's memory is full."""

    host_kv_gib: Annotated[GiB | None, Field(alias="hostKvGiB")] = None
    """Pinned host memory for KV pages, a pod."""
    disk_kv_gib: Annotated[GiB | None, Field(alias="diskKvGiB")] = None
    """Disk for KV pages, a pod."""
    weight_streaming: Literal["auto", "off", "on"] = "auto"
    """Whether weights are streamed from the host when they do not fit."""


class ScalingPolicy(ApiModel):
    """How much may change in how much time."""

    type: Literal["Pods", "Percent"]
    """What `value` counts."""
    value: Annotated[int, Field(ge=1, le=1000)]
    """How much."""
    period_seconds: Annotated[int, Field(ge=1, le=1800)]
    """In how much time."""


class ScalingRules(ApiModel):
    """How fast one direction goes."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """For how long earlier wishes are remembered."""
    select_policy: Literal["Max", "Min", "Disabled"] | None = None
    """Which policy counts when there are several."""
    policies: Annotated[list[ScalingPolicy], Field(min_length=1, max_length=8)] | None = None
    """The policies."""


class ScalingBehavior(ApiModel):
    """How fast the count follows the metrics."""

    scale_up: ScalingRules | None = None
    """Upwards."""
    scale_down: ScalingRules | None = None
    """Downwards."""


class Autoscaling(ApiModel):
    """How many pods there are, by memory demand and queue."""

    min_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Fewest pods."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """Most pods."""
    gpu_memory_percent: Percent = 80
    """The mean memory percentage a pod that is aimed at."""
    metric: Literal["demand", "used", "nvidia.com/gpu_memory_used_percent"] = "demand"
    """Which percentage: `demand` follows the load; `used`, also under the familiar name
    `nvidia.com/gpu_memory_used_percent`, includes weights."""
    queued_requests_per_replica: Annotated[int, Field(ge=1, le=10_000)] = 8
    """The mean number of waiting requests a pod that is aimed at."""
    behavior: ScalingBehavior | None = None
    """How fast the count follows."""
    provider: Literal["hpa", "keda", "none"] = "hpa"
    """Who scales."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.minReplicas <= self.maxReplicas",
            holds=lambda scaling: scaling.min_replicas <= scaling.max_replicas,
            message="minReplicas may not be above maxReplicas",
            field_path=".minReplicas",
        ),
    )


class Fallback(ApiModel):
    """A smaller model that serves while the primary cannot."""

    name: Annotated[str, Field(pattern=f"^{LABEL}$", max_length=10)]
    """Name of the tier; `primary` is taken."""
    model: FallbackModel
    """The model."""
    gpu: Gpu = section(Gpu)
    """What it computes on."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.name != 'primary'",
            holds=lambda fallback: fallback.name != "primary",
            message="a fallback may not be named primary",
            field_path=".name",
        ),
    )


class Degrade(ApiModel):
    """When a fallback takes over."""

    after_seconds: Seconds = 60
    """For how long the primary must have been unable to run."""


class Promote(ApiModel):
    """When the primary takes over again."""

    after_seconds: Seconds = 300
    """For how long the primary must have been ready."""
    strategy: Literal["surge", "swap"] = "surge"
    """`surge` starts the primary beside the fallback; `swap` drains the fallback first."""


class Recovery(ApiModel):
    """What is done about faults."""

    retries_per_batch: Annotated[int, Field(ge=0, le=10)] = 3
    """How often a batch that ran out of memory is halved and tried again, before its requests are
    tried one by one and only those that cannot run alone fail."""
    node_switches_per_hour: Annotated[int, Field(ge=0, le=60)] = 6
    """How many pods may be moved to another node in an hour, when their node or device fails; 0
    leaves that to the fallbacks."""
    drain_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """How long a pod that ends may finish its requests."""


class ServiceSettings(ApiModel):
    """The Service, which has the object's name."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """How the Service is reached."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 80
    """The Service's port."""
    annotations: (
        Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=16)] | None
    ) = None
    """Annotations of the Service, such as those that load balancers read."""

    rules: ClassVar[tuple[Rule, ...]] = (
        keys_match("annotations", QUALIFIED_NAME, "annotations must have Kubernetes' form of key"),
    )


class Gateway(ApiModel):
    """A Gateway to attach to."""

    name: ObjectName
    """Name of the Gateway."""
    namespace: LabelName | None = None
    """Its namespace; absent, the object's."""
    section_name: ObjectName | None = None
    """One listener of the Gateway; absent, all."""


def _is_same_parent(one: Gateway, other: Gateway) -> bool:
    """Whether the Gateway API takes two entries for the same: without a section, all are meant."""
    sections = (one.section_name, other.section_name)
    is_same_section = None in sections or sections[0] == sections[1]
    return (one.name, one.namespace) == (other.name, other.namespace) and is_same_section


class HttpRoute(ApiModel):
    """An HTTPRoute of the Gateway API."""

    gateways: Annotated[list[Gateway], Field(min_length=1, max_length=8)]
    """The Gateways that the route is attached to."""
    hostnames: (
        Annotated[
            list[Annotated[str, Field(pattern=rf"^(\*\.)?{SUBDOMAIN}$", max_length=253)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    """Host names that the route answers to; absent, all."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """How long a request may take, streams included; absent, as the Gateway has it."""
    retry_attempts: Annotated[int, Field(ge=1, le=10)] | None = None
    """How often the Gateway repeats a request that a pod did not answer. Needs the experimental
    channel of the Gateway API; otherwise the condition `Routed` says `RetryUnsupported`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            # CEL keeps `namespace` for itself.
            cel="self.gateways.all(a, self.gateways.exists_one(b, a.name == b.name"
            " && has(a.__namespace__) == has(b.__namespace__)"
            " && (!has(a.__namespace__) || a.__namespace__ == b.__namespace__)"
            " && (!has(a.sectionName) || !has(b.sectionName) || a.sectionName == b.sectionName)))",
            holds=lambda route: all(
                sum(_is_same_parent(one, other) for other in route.gateways) == 1
                for one in route.gateways
            ),
            message="gateways names a Gateway twice: give each entry a sectionName of its own, or"
            " leave one out",
            field_path=".gateways",
        ),
    )


class Routing(ApiModel):
    """How requests reach the pods."""

    service: ServiceSettings = section(ServiceSettings)
    """The Service."""
    http_route: HttpRoute | None = None
    """An HTTPRoute of the Gateway API."""


class Security(ApiModel):
    """Who may ask."""

    api_key_secret: ApiKeySecret | None = None
    """API keys, one of which a request must carry; absent, every request is answered."""


def _same(one: str, other: str) -> str:
    """CEL for two tiers that need the same; slices and shares are left to those who order them."""
    equal = ("model.source", "model.weights", "model.kvCache", "gpu.mode", "gpu.count")
    return " && ".join(
        [
            *(f"{one}.{path} == {other}.{path}" for path in equal),
            *(f"!has({one}.gpu.{field})" for field in ("migProfile", "memoryGiB")),
        ]
    )


def _is_same(
    one: "Fallback | DeepSeekDeploymentSpec", other: "Fallback | DeepSeekDeploymentSpec"
) -> bool:
    def needs(tier: "Fallback | DeepSeekDeploymentSpec") -> tuple[object, ...]:
        model, gpu = tier.model, tier.gpu
        return (model.source, model.weights, model.kv_cache, gpu.mode, gpu.count)

    is_whole = one.gpu.mig_profile is None and one.gpu.memory_gib is None
    return is_whole and needs(one) == needs(other)


class DeepSeekDeploymentSpec(ApiModel):
    """What is wanted."""

    model: ModelSpec = section(ModelSpec)
    """The model."""
    gpu: Gpu = section(Gpu)
    """What it computes on."""
    memory: Memory | None = None
    """Where KV pages and weights go when the GPU's memory is full."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Number of pods."""
    autoscaling: Autoscaling | None = None
    """Lets metrics set the number of pods."""
    min_available: Annotated[int, Field(ge=0, le=1000)] = 1
    """How many pods must be ready for the object to be Ready; never more than `replicas`."""
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    """Which deployments of a tenant give way first: those with the lowest."""
    fallbacks: Annotated[list[Fallback], keyed("name", max_items=4)] | None = None
    """Smaller models, in the order in which they are tried."""
    degrade: Degrade | None = None
    """When a fallback takes over."""
    promote: Promote | None = None
    """When the primary takes over again."""
    rollout: Literal["auto", "surge", "replace", "viaFallback"] = "auto"
    """How a change reaches the pods: `surge` starts a new pod before it ends an old one, which
    needs a free GPU; `replace` ends one first; `viaFallback` serves a fallback meanwhile; `auto`
    surges on `cpu` and where a GPU is free, else replaces one of several, else goes through a
    fallback, and without one waits for a GPU."""
    recovery: Recovery = section(Recovery)
    """What is done about faults."""
    routing: Routing = section(Routing)
    """How requests reach the pods."""
    security: Security = section(Security)
    """Who may ask."""
    pod: PodSettings = section(PodSettings)
    """Settings of the pods."""

    rules: ClassVar[tuple[Rule, ...]] = (
        no_doubles("fallbacks", "name"),
        Rule(
            cel="!has(self.fallbacks) || self.fallbacks.all(f, f.gpu.mode != self.gpu.mode"
            " || (f.gpu.count <= self.gpu.count && (!has(f.gpu.memoryGiB)"
            " || !has(self.gpu.memoryGiB) || f.gpu.memoryGiB <= self.gpu.memoryGiB)))",
            holds=lambda spec: all(
                fallback.gpu.mode != spec.gpu.mode
                or (
                    fallback.gpu.count <= spec.gpu.count
                    and (fallback.gpu.memory_gib or 0) <= (spec.gpu.memory_gib or math.inf)
                )
                for fallback in spec.fallbacks or []
            ),
            message="a fallback may not ask for more GPUs, or more of one, than the primary: where"
            " the primary finds no place, it would not either",
            field_path=".fallbacks",
        ),
        Rule(
            cel=f"!has(self.fallbacks) || self.fallbacks.all(f, !({_same('f', 'self')}))",
            holds=lambda spec: (
                not any(_is_same(fallback, spec) for fallback in spec.fallbacks or [])
            ),
            message="a fallback must differ from the primary, in its model's source, weights or"
            " kvCache or in gpu",
            field_path=".fallbacks",
        ),
        Rule(
            cel="!has(self.fallbacks) || self.fallbacks.all(f,"
            f" !self.fallbacks.exists(g, g.name != f.name && {_same('f', 'g')}))",
            holds=lambda spec: (
                not any(
                    one.name != other.name and _is_same(one, other)
                    for one in spec.fallbacks or []
                    for other in spec.fallbacks or []
                )
            ),
            message="two fallbacks are the same model on the same gpu: leave one out",
            field_path=".fallbacks",
        ),
        Rule(
            cel="!has(self.degrade) || has(self.fallbacks)",
            holds=lambda spec: spec.degrade is None or spec.fallbacks is not None,
            message="degrade needs fallbacks",
            field_path=".degrade",
        ),
        Rule(
            cel="!has(self.promote) || has(self.fallbacks)",
            holds=lambda spec: spec.promote is None or spec.fallbacks is not None,
            message="promote needs fallbacks",
            field_path=".promote",
        ),
        Rule(
            cel="self.rollout != 'viaFallback' || has(self.fallbacks)",
            holds=lambda spec: spec.rollout != "viaFallback" or spec.fallbacks is not None,
            message="rollout viaFallback needs fallbacks",
            field_path=".rollout",
        ),
    )
    update_rules: ClassVar[tuple[UpdateRule, ...]] = (
        UpdateRule(
            cel="!has(self.autoscaling) || !has(oldSelf.autoscaling)"
            " || self.replicas == oldSelf.replicas",
            holds=lambda new, old: (
                new.autoscaling is None or old.autoscaling is None or new.replicas == old.replicas
            ),
            message="replicas is set by autoscaling: change autoscaling.minReplicas or maxReplicas",
            field_path=".replicas",
        ),
    )


class DeepSeekDeployment(ApiModel):
    """A model that is served, in the GPU memory there is."""

    api_version: Literal["deepseek.dev/v1alpha1"]
    """Version of this API."""
    kind: Literal["DeepSeekDeployment"]
    """Kind of the object."""
    metadata: Metadata
    """Name, namespace and so on."""
    spec: DeepSeekDeploymentSpec
    """What is wanted."""
    status: DeepSeekDeploymentStatus | None = None
    """What is."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.size() <= {NAME_MAX_LENGTH}"
            " && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            holds=lambda document: (
                len(document.metadata.name) <= NAME_MAX_LENGTH
                and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", document.metadata.name) is not None
            ),
            message=f"metadata.name must be 1 to {NAME_MAX_LENGTH} small letters, digits and"
            " dashes, a letter first and no dash last: the Service takes it as its name",
        ),
        Rule(
            cel="!has(self.spec) || !has(self.spec.model) || !has(self.spec.model.lora)"
            " || self.spec.model.lora.all(a, a.name != (has(self.spec.model.servedName)"
            " ? self.spec.model.servedName : self.metadata.name))",
            holds=lambda document: all(
                adapter.name != (document.spec.model.served_name or document.metadata.name)
                for adapter in document.spec.model.lora or []
            ),
            message="an adapter may not have the name that the model itself is served under:"
            " spec.model.servedName, or metadata.name without it",
            field_path=".spec.model.lora",
        ),
        *(part.rule() for part in NOT_YET),
    )
