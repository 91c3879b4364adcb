"""The operator's own metrics, as `deepseek_contract.metrics` defines them."""

from __future__ import annotations

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

    def forget(self, namespace: str, name: str) -> None:
        """An object that is gone has no series."""
        told = self._told.pop((namespace, name), None)
        if told is None:
            return
        self._forget_conditions(namespace, name, told)
        self._ready.remove(namespace, name)
        self._wanted.remove(namespace, name)

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
