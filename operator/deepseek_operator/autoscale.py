"""How many pods a tier has, and who decides it.

Pure: a tier with what is there of it goes in; the autoscaler it wants, what its Deployment's
manifest says of `replicas` and the condition ScalingActive come out. The plan and the status call
it. At any moment one writer sets `replicas`: the operator, or one autoscaler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from deepseek_contract import metrics as names
from deepseek_contract.deployment import Autoscaling, ScalingRules
from deepseek_contract.metrics import Metric, value_of_each_pod
from deepseek_contract.status import ScalingActiveReason
from deepseek_operator.kinds import (
    AUTOSCALER,
    DEPLOYMENT,
    FIELD_MANAGER,
    SCALED_OBJECT,
    Manifest,
)
from deepseek_operator.pods import is_ready
from deepseek_operator.render import LOADING_MINUTES, TIER_LABEL, Owner, child, deployment_name
from deepseek_operator.settings import Settings
from deepseek_operator.tiers import Tier

EXTERNAL_METRICS_GROUP = "external.metrics.k8s.io"
EXTERNAL_METRICS = f"v1beta1.{EXTERNAL_METRICS_GROUP}"
"""Name of the APIService."""
SCALE_DOWN_SECONDS = 300
"""For how long a lower wish has to last, as Kubernetes itself has it, unless loading the model
takes longer: pods that end too early cost that time again."""
KEDA_POLL_SECONDS = 15
_METRIC_OF: dict[str, Metric] = {
    "demand": names.GPU_MEMORY_DEMAND_PERCENT,
    "used": names.GPU_MEMORY_USED_PERCENT,
    # An HPA takes no name with a slash.
    "nvidia.com/gpu_memory_used_percent": names.GPU_MEMORY_USED_PERCENT,
}


@dataclass(frozen=True)
class ExternalMetrics:
    """The API external.metrics.k8s.io, which one server of a cluster can hold."""

    is_visible: bool = False
    """Whether the operator may look; one that serves named namespaces may not."""
    server: str | None = None
    """NAMESPACE/NAME of the Service that holds it; None while nobody does."""
    trouble: str | None = None
    """Why it does not answer, in the API server's words."""

    @property
    def is_kedas(self) -> bool:
        """Whether KEDA holds it, going by the names that its own chart gives."""
        return self.server is not None and "keda" in self.server


def external_metrics(api_service: Manifest | None) -> ExternalMetrics:
    """What an APIService, or the lack of one, says."""
    if api_service is None:
        return ExternalMetrics(is_visible=True)
    service = (api_service.get("spec") or {}).get("service") or {}
    available = _conditions(api_service).get("Available", {})
    trouble = None
    if available.get("status") != "True":
        trouble = available.get("message") or "it was not looked at yet"
    server = f"{service.get('namespace', '')}/{service.get('name', '')}"
    return ExternalMetrics(True, server, trouble)


@dataclass(frozen=True)
class ScaledTier:
    """One tier of an object, as far as its number of pods goes."""

    owner: Owner
    tier: Tier
    deployment: Manifest | None = None
    autoscaler: Manifest | None = None
    """The live HorizontalPodAutoscaler that the operator made."""
    scaled_object: Manifest | None = None
    """The live ScaledObject that the operator made."""
    foreign: tuple[str, ...] = ()
    """HorizontalPodAutoscalers of others that have this Deployment as their target."""
    pods: tuple[Manifest, ...] = field(default=(), repr=False)
    external_metrics: ExternalMetrics = field(default_factory=ExternalMetrics)

    @property
    def name(self) -> str:
        """The tier's."""
        return self.tier.name

    @property
    def scaling(self) -> Autoscaling | None:
        """How it is to be scaled; None where its number is fixed, such as 0."""
        return self.tier.spec.autoscaling if self.tier.replicas > 0 else None

    @property
    def provider(self) -> Literal["hpa", "keda", "none"] | None:
        """Who is to scale; None where the count is fixed."""
        return self.scaling.provider if self.scaling is not None else None

    @property
    def target(self) -> str:
        """Name of the Deployment; its autoscaler has the same."""
        return deployment_name(self.owner, self.name)

    @property
    def superfluous(self) -> tuple[Manifest, ...]:
        """Autoscalers of ours that are there and not wanted any more."""
        return tuple(
            live
            for live, provider in ((self.autoscaler, "hpa"), (self.scaled_object, "keda"))
            if live is not None
            and provider != self.provider
            and "deletionTimestamp" not in live["metadata"]
        )

    @property
    def is_scaled(self) -> bool:
        """Whether somebody else than the operator decides, or still does."""
        return self.scaling is not None or bool(self.superfluous or self.foreign)

    @property
    def wanted_replicas(self) -> int:
        """How many pods there are to be: the spec's number, or what the autoscaler has set."""
        if not self.is_scaled:
            return self.tier.replicas
        if self.deployment is None:
            return self._first_replicas
        count = int(self.deployment["spec"].get("replicas", 1))
        # An HPA takes 0 for a person's wish and would never scale up again.
        return self._first_replicas if count == 0 and self._is_ours_to_scale else count

    @property
    def _is_ours_to_scale(self) -> bool:
        return self.provider in {"hpa", "keda"}

    @property
    def _first_replicas(self) -> int:
        """How many pods a new Deployment starts with: as many as its autoscaler last wanted."""
        if self.scaling is None or not self._is_ours_to_scale:
            return self.tier.replicas
        last = int(((self.autoscaler or {}).get("status") or {}).get("desiredReplicas", 0))
        return max(self.scaling.min_replicas, min(last, self.scaling.max_replicas))


@dataclass(frozen=True)
class ScalingState:
    """The condition ScalingActive of one tier."""

    status: Literal["True", "False", "Unknown"]
    reason: ScalingActiveReason
    message: str


def with_replicas(manifest: Manifest, tier: ScaledTier) -> Manifest:
    """The Deployment's manifest with `replicas`, or without where another writer has them.

    Leaving out a field that the operator alone owns would reset it to 1. So the live value is
    sent until `managedFields` names another owner, and only for the version in which it was read:
    an autoscaler that is quicker makes the API server refuse, not count again from 1.
    """
    live = tier.deployment
    spec, metadata = dict(manifest["spec"]), dict(manifest["metadata"])
    if live is None or not tier.is_scaled:
        spec["replicas"] = tier.wanted_replicas
    elif live["spec"].get("replicas", 1) != tier.wanted_replicas or not is_owned_by_another(live):
        spec["replicas"] = tier.wanted_replicas
        metadata["resourceVersion"] = live["metadata"]["resourceVersion"]
    return {**manifest, "metadata": metadata, "spec": spec}


def is_owned_by_another(deployment: Manifest) -> bool:
    """Whether a writer besides the operator owns `spec.replicas` of the live Deployment."""
    return any(manager != FIELD_MANAGER for manager in deployment.get("replicaManagers", ()))


def autoscaler(tier: ScaledTier, settings: Settings) -> Manifest | None:
    """The HorizontalPodAutoscaler or ScaledObject that a tier wants.

    None where it wants none, and while one of the other kind is still there: KEDA's webhook
    refuses a target that has an autoscaler, and two would stand in each other's way.
    """
    if tier.scaling is None or tier.superfluous:
        return None
    if tier.provider == "hpa":
        return _horizontal(tier, tier.scaling)
    if tier.provider == "keda" and settings.keda:
        return _scaled_object(tier, tier.scaling, settings)
    return None


def scaling_state(tier: ScaledTier, settings: Settings) -> ScalingState:
    """Whether the tier is scaled, by whom, or why not."""
    if tier.foreign:
        return _foreign(tier, ", ".join(tier.foreign))
    if tier.scaling is None:
        return ScalingState("False", "FixedReplicas", "spec.replicas sets the number of pods.")
    trouble = _provider_trouble(tier, settings)
    if trouble is not None:
        return ScalingState("False", "ProviderUnavailable", f"{trouble} {_HELD}")
    if tier.provider == "hpa":
        return _horizontal_state(tier, tier.scaling)
    if tier.provider == "keda":
        return _keda_state(tier, tier.scaling)
    return ScalingState(
        "False",
        "LeftToOthers",
        f"spec.autoscaling.provider is none: whoever scales Deployment {tier.target} sets its"
        " number of pods, and the operator leaves it alone.",
    )


def is_obstructed(tier: ScaledTier, settings: Settings) -> bool:
    """Whether the metrics do not come: who serves their API, which nobody watches, may be why.

    The autoscaler tells of a failure before the API's registration is read again, so what is
    known of that may be of before.
    """
    return tier.external_metrics.is_visible and scaling_state(tier, settings).reason in {
        "MetricUnavailable",
        "ProviderUnavailable",
    }


def load_seconds(pods: tuple[Manifest, ...]) -> int | None:
    """How long a worker takes from its start until it answers, going by the quickest.

    A pod that lost its readiness for a moment seems slower than it was; what is longer than a
    start may take is no start.
    """
    found = [seconds for pod in pods if (seconds := _start_seconds(pod)) is not None]
    return min((seconds for seconds in found if seconds <= 60 * LOADING_MINUTES), default=None)


_HELD = "Until then the number of pods stays as it is."


def _horizontal(tier: ScaledTier, scaling: Autoscaling) -> Manifest:
    labels = {names.DEPLOYMENT_LABEL: tier.owner.name, names.TIER_LABEL: tier.name}
    return child(AUTOSCALER, tier.owner, tier.target, {TIER_LABEL: tier.name}) | {
        "spec": {
            "scaleTargetRef": {
                "apiVersion": DEPLOYMENT.api_version,
                "kind": DEPLOYMENT.kind,
                "name": tier.target,
            },
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": metric.name, "selector": {"matchLabels": labels}},
                        # The values of all pods are added up, so that this is a mean a pod.
                        "target": {"type": "AverageValue", "averageValue": str(aim)},
                    },
                }
                for metric, aim in _aims(scaling)
            ],
            "behavior": _behavior(tier, scaling),
        }
    }


def _scaled_object(tier: ScaledTier, scaling: Autoscaling, settings: Settings) -> Manifest:
    labels = {
        names.NAMESPACE_LABEL: tier.owner.namespace,
        names.DEPLOYMENT_LABEL: tier.owner.name,
        names.TIER_LABEL: tier.name,
    }
    matchers = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return child(SCALED_OBJECT, tier.owner, tier.target, {TIER_LABEL: tier.name}) | {
        "spec": {
            "scaleTargetRef": {
                "apiVersion": DEPLOYMENT.api_version,
                "kind": DEPLOYMENT.kind,
                "name": tier.target,
            },
            "pollingInterval": KEDA_POLL_SECONDS,
            "minReplicaCount": scaling.min_replicas,
            "maxReplicaCount": scaling.max_replicas,
            "advanced": {
                "horizontalPodAutoscalerConfig": {"behavior": _behavior(tier, scaling)},
            },
            "triggers": [
                {
                    "type": "prometheus",
                    "name": metric.name.replace("_", "-"),
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": settings.prometheus_url,
                        "query": f"sum({value_of_each_pod(metric.name, matchers)})",
                        "threshold": str(aim),
                        # No series is no zero: KEDA would take the pods away.
                        "ignoreNullValues": "false",
                    },
                }
                for metric, aim in _aims(scaling)
            ],
        }
    }


def _aims(scaling: Autoscaling) -> tuple[tuple[Metric, int], ...]:
    """Metrics with the mean a pod that is aimed at; the largest wish of them counts.

    Waiting requests are always among them: a small model on a big card has no compute left long
    before its memory is full.
    """
    return (
        (_METRIC_OF[scaling.metric], scaling.gpu_memory_percent),
        (names.REQUESTS_WAITING, scaling.queued_requests_per_replica),
    )


def _behavior(tier: ScaledTier, scaling: Autoscaling) -> Manifest:
    given = scaling.behavior
    patience = SCALE_DOWN_SECONDS
    loading = load_seconds(tier.pods)
    if loading is not None:
        # In whole minutes, so that the autoscaler is not written for every second of difference.
        patience = max(patience, 60 * math.ceil(loading / 60))
    return {
        "scaleUp": _rules(given.scale_up if given else None, 0),
        "scaleDown": _rules(given.scale_down if given else None, patience),
    }


def _rules(given: ScalingRules | None, window_seconds: int) -> Manifest:
    # Within its tolerance an HPA takes the pods that there are for the pods that are wanted, which
    # during a rolling update is one too many or too few. Without one the count follows from the
    # metrics alone.
    rules: Manifest = {"stabilizationWindowSeconds": window_seconds, "tolerance": "0"}
    return rules | (given.document() if given is not None else {})


def _provider_trouble(tier: ScaledTier, settings: Settings) -> str | None:
    metrics = tier.external_metrics
    if tier.provider == "keda" and not settings.keda:
        return (
            "spec.autoscaling.provider is keda, which this installation does not use: set"
            " settings.keda of the chart, or change the provider."
        )
    if tier.provider == "none" or not metrics.is_visible:
        return None
    if metrics.server is None:
        return (
            f"Nobody serves the API {EXTERNAL_METRICS_GROUP}: install prometheus-adapter with the"
            " chart's rules for the provider hpa, or KEDA for the provider keda."
        )
    if metrics.is_kedas != (tier.provider == "keda"):
        other = "hpa" if tier.provider == "keda" else "keda"
        return (
            f"The API {EXTERNAL_METRICS_GROUP} is held by the Service {metrics.server}, and one"
            f" server can hold it: set spec.autoscaling.provider to {other}, or install another"
            " server."
        )
    if metrics.trouble is not None:
        return (
            f"The API {EXTERNAL_METRICS_GROUP} at the Service {metrics.server} does not answer:"
            f" {metrics.trouble!r}."
        )
    return None


def _foreign(tier: ScaledTier, names: str) -> ScalingState:
    return ScalingState(
        "False",
        "ForeignAutoscaler",
        f"An autoscaler of somebody else has Deployment {tier.target} as its target: {names}."
        " Delete it, or set spec.autoscaling.provider to none and leave the number of pods to it.",
    )


def _horizontal_state(tier: ScaledTier, scaling: Autoscaling) -> ScalingState:
    live = tier.autoscaler
    conditions = _conditions(live)
    active, able = conditions.get("ScalingActive"), conditions.get("AbleToScale")
    if live is None or active is None:
        if able is not None and able["status"] == "False":
            return _unavailable(able)
        message = f"HorizontalPodAutoscaler {tier.target} has not looked at the metrics yet."
        return ScalingState("Unknown", "Starting", message)
    if active.get("reason") == "AmbiguousSelector":
        return _foreign(tier, f"{active.get('message', '')!r}")
    if active["status"] != "True":
        return _no_metrics(tier, active)
    if able is not None and able["status"] == "False":
        return _unavailable(able)
    return _scaling(scaling, f"HorizontalPodAutoscaler {tier.target}", live, conditions)


def _keda_state(tier: ScaledTier, scaling: Autoscaling) -> ScalingState:
    ready = _conditions(tier.scaled_object).get("Ready")
    if ready is None or ready["status"] == "Unknown":
        message = f"KEDA has not looked at ScaledObject {tier.target} yet."
        return ScalingState("Unknown", "Starting", message)
    if ready["status"] != "True":
        return _no_metrics(tier, ready)
    return _scaling(scaling, f"ScaledObject {tier.target}", None, {})


def _no_metrics(tier: ScaledTier, condition: Manifest) -> ScalingState:
    if not any(is_ready(pod) for pod in tier.pods):
        message = f"No pod of Deployment {tier.target} answers yet, and metrics come from pods."
        return ScalingState("False", "Starting", message)
    return ScalingState(
        "False",
        "MetricUnavailable",
        f"The metrics cannot be read: {condition.get('message', '')!r}. Look whether Prometheus"
        " scrapes the pods, with the labels of the chart's scrape settings, and whether the"
        f" adapter has the chart's rules. {_HELD}",
    )


def _unavailable(condition: Manifest) -> ScalingState:
    return ScalingState(
        "False",
        "ProviderUnavailable",
        f"The autoscaler cannot scale the Deployment: {condition.get('message', '')!r}. {_HELD}",
    )


def _scaling(
    scaling: Autoscaling, who: str, live: Manifest | None, conditions: dict[str, Manifest]
) -> ScalingState:
    words = f"{who} sets the number of pods, from {scaling.min_replicas} to {scaling.max_replicas}"
    wanted = ((live or {}).get("status") or {}).get("desiredReplicas")
    if wanted is not None:
        words += f"; it wants {wanted} now"
    limited = conditions.get("ScalingLimited", {})
    if limited.get("status") == "True" and limited.get("reason") == "TooManyReplicas":
        words += ", and would want more if maxReplicas allowed it"
    return ScalingState("True", "Scaling", f"{words}.")


def _conditions(live: Manifest | None) -> dict[str, Manifest]:
    status = (live or {}).get("status") or {}
    return {condition["type"]: condition for condition in status.get("conditions") or []}


def _start_seconds(pod: Manifest) -> int | None:
    status = pod["status"]
    started = [
        container["state"]["running"].get("startedAt")
        for container in status.get("containers") or []
        if "running" in (container.get("state") or {})
    ]
    ready = [
        condition.get("lastTransitionTime")
        for condition in status.get("conditions") or []
        if condition["type"] == "Ready" and condition["status"] == "True"
    ]
    if len(ready) != 1 or not ready[0] or len(started) != 1 or not started[0]:
        return None
    return int((_moment(ready[0]) - _moment(started[0])).total_seconds())


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
