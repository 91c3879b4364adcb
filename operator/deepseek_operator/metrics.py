"""The operator's own metrics, as `deepseek_contract.metrics` defines them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from deepseek_contract import metrics as definitions
from deepseek_operator.api import Attributes

CONDITION_STATUSES = ("True", "False", "Unknown")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts what the operator does. Safe to use from several threads."""

    def __init__(self) -> None:
        # A second series per counter, with its age, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._reconcile_seconds = self._histogram(definitions.OPERATOR_RECONCILE_DURATION_SECONDS)
        self._errors = self._counter(definitions.OPERATOR_RECONCILE_ERRORS_TOTAL)
        self._requests = self._counter(definitions.OPERATOR_API_REQUESTS_TOTAL)
        self._last_event = self._gauge(definitions.OPERATOR_LAST_EVENT_TIMESTAMP_SECONDS)
        self._leader = self._gauge(definitions.OPERATOR_LEADER)
        self._conditions = self._gauge(definitions.DEPLOYMENT_CONDITION)
        self._ready = self._gauge(definitions.DEPLOYMENT_READY_REPLICAS)
        self._wanted = self._gauge(definitions.DEPLOYMENT_WANTED_REPLICAS)
        self._probes = self._counter(definitions.OPERATOR_PROBES_TOTAL)
        self._tenant_bytes = (
            self._gauge(definitions.TENANT_QUOTA_BYTES),
            self._gauge(definitions.TENANT_USED_BYTES),
            self._gauge(definitions.TENANT_PAST_USED_BYTES),
        )
        self._known_tenants: set[str] = set()
        self._level = self._gauge(definitions.RECOVERY_LEVEL)
        self._switches = self._counter(definitions.NODE_SWITCHES_TOTAL)
        self._transitions = self._counter(definitions.DEPLOYMENT_TIER_TRANSITIONS_TOTAL)
        self._transitions_told: dict[tuple[str, str], set[str]] = {}
        self._told: dict[tuple[str, str], set[str]] = {}

    def count_request(self, attributes: Attributes, code: str) -> None:
        """One finished request to the API server."""
        self._requests.labels(attributes.verb, attributes.resource, code).inc()

    def reconciled(self, seconds: float) -> None:
        """One reconcile that went through."""
        self._reconcile_seconds.observe(seconds)

    def failed(self, reason: str) -> None:
        """One reconcile that did not."""
        self._errors.labels(reason).inc()

    def heard(self, timestamp_seconds: float) -> None:
        """The API server said something at this time."""
        self._last_event.set(timestamp_seconds)

    def probed(self, outcome: str) -> None:
        """One worker was asked how it does."""
        self._probes.labels(outcome).inc()

    def lead(self, *, is_leader: bool) -> None:
        """Whether this process holds the Lease."""
        self._leader.set(int(is_leader))

    def tell(self, namespace: str, name: str, wanted: int, status: dict[str, Any]) -> None:
        """The state of one object."""
        types = {condition["type"]: condition["status"] for condition in status["conditions"]}
        for kind, value in types.items():
            for candidate in CONDITION_STATUSES:
                series = self._conditions.labels(namespace, name, kind, candidate)
                series.set(int(candidate == value))
        self._forget_conditions(
            namespace, name, self._told.get((namespace, name), set()) - {*types}
        )
        self._told[namespace, name] = set(types)
        self._ready.labels(namespace, name).set(status.get("readyReplicas", 0))
        self._wanted.labels(namespace, name).set(wanted)
        self._level.labels(namespace, name).set((status.get("recovery") or {}).get("level", 0))

    def switched_node(self, namespace: str, name: str, cause: str) -> None:
        """One pod was put into quarantine."""
        self._switches.labels(namespace, name, cause).inc()

    def switched(self, namespace: str, name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        """A status was written that may tell of another tier than the one before."""
        before, after = _degraded_reason(old), _degraded_reason(new)
        if after is None or after == (before or "PrimaryServing"):
            return
        self._transitions.labels(namespace, name, after).inc()
        self._transitions_told.setdefault((namespace, name), set()).add(after)

    def forget(self, namespace: str, name: str) -> None:
        """An object that is gone has no series."""
        for reason in self._transitions_told.pop((namespace, name), ()):
            self._transitions.remove(namespace, name, reason)
        told = self._told.pop((namespace, name), None)
        if told is None:
            return
        self._forget_conditions(namespace, name, told)
        self._ready.remove(namespace, name)
        self._wanted.remove(namespace, name)
        self._level.remove(namespace, name)
        self._switches.remove_by_labels({"namespace": namespace, "deployment": name})

    def tell_tenant(self, tenant: str, *, quota: int, used: int, past_used: float) -> None:
        """Bytes of one tenant."""
        self._known_tenants.add(tenant)
        for gauge, amount in zip(self._tenant_bytes, (quota, used, past_used), strict=True):
            gauge.labels(tenant).set(amount)

    def keep_tenants(self, names: Collection[str]) -> None:
        """A tenant that is gone has no series."""
        for tenant in self._known_tenants - set(names):
            for gauge in self._tenant_bytes:
                gauge.remove(tenant)
        self._known_tenants &= set(names)

    def text(self) -> bytes:
        """All of it in Prometheus' format."""
        return generate_latest(self.registry)

    def _forget_conditions(self, namespace: str, name: str, types: set[str]) -> None:
        for kind in types:
            for candidate in CONDITION_STATUSES:
                self._conditions.remove(namespace, name, kind, candidate)

    def _counter(self, metric: definitions.Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _gauge(self, metric: definitions.Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: definitions.Metric) -> Histogram:
        return Histogram(
            metric.name,
            metric.help,
            metric.labels,
            registry=self.registry,
            buckets=metric.buckets,
        )


def _degraded_reason(status: dict[str, Any]) -> str | None:
    for condition in status.get("conditions") or []:
        if condition["type"] == "Degraded":
            return str(condition.get("reason"))
    return None
