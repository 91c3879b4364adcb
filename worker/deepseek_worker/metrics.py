"""`GET /metrics`: what the contract names, from the server's own counts and the engine's."""

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from deepseek_contract import metrics as names
from deepseek_contract.metrics import Metric
from deepseek_worker.driver import EngineThread

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


# A counter's time of creation would be a family of its own, which nobody has described.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Counts what passes through the server, and reads the engine's counts when asked."""

    def __init__(self, engine: EngineThread) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(*_described(names.REQUESTS_TOTAL), registry=self._registry)
        self._rejected = Counter(
            *_described(names.REQUESTS_REJECTED_TOTAL), registry=self._registry
        )
        self._first_token = self._histogram(names.TIME_TO_FIRST_TOKEN_SECONDS)
        self._next_token = self._histogram(names.INTER_TOKEN_LATENCY_SECONDS)
        self._duration = self._histogram(names.REQUEST_DURATION_SECONDS)
        self._registry.register(_EngineCollector(engine))
        for finish_reason in names.REQUESTS_TOTAL.label_values:
            # A counter that first appears with its first event has no increase to alert on.
            self._requests.labels(finish_reason)

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it came."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """A request got further tokens, `seconds` each."""
        for _ in range(num_tokens):
            self._next_token.observe(seconds)

    def request_ended(self, finish_reason: str, seconds: float) -> None:
        """A request that was accepted ended, `seconds` after it came."""
        self._requests.labels(finish_reason).inc()
        self._duration.observe(seconds)

    def request_rejected(self, reason: str) -> None:
        """A request was refused."""
        self._rejected.labels(reason).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(*_described(metric), buckets=metric.buckets, registry=self._registry)


def _described(metric: Metric) -> tuple[str, str, tuple[str, ...]]:
    return metric.name, metric.help, metric.labels


class _EngineCollector(Collector):
    """The engine's counts as they are at the moment of the scrape."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Family]:
        """All families; the values of an engine that still loads are left out."""
        yield _family(
            names.ENGINE_LAST_STEP_TIMESTAMP_SECONDS, {(): self._engine.progress().last_step_at}
        )
        stats = self._engine.stats()
        if stats is None:
            return
        single = {
            names.GPU_MEMORY_USED_PERCENT: stats.used_percent,
            names.GPU_MEMORY_DEMAND_PERCENT: stats.demand_percent,
            names.MEMORY_LIMIT_BYTES: stats.limit_bytes,
            names.REQUESTS_RUNNING: stats.num_running,
            names.REQUESTS_WAITING: stats.num_waiting,
            names.PROMPT_TOKENS_TOTAL: stats.num_prompt_tokens,
            names.GENERATION_TOKENS_TOTAL: stats.num_generated_tokens,
            names.CACHED_PROMPT_TOKENS_TOTAL: stats.num_cached_tokens,
            names.ENGINE_STEPS_TOTAL: stats.num_steps,
            names.PREEMPTIONS_TOTAL: stats.num_preemptions,
            names.OUT_OF_MEMORY_RETRIES_TOTAL: stats.num_out_of_memory_retries,
            names.NON_FINITE_LOGITS_TOTAL: stats.num_non_finite_logits,
        }
        for metric, value in single.items():
            yield _family(metric, {(): value})
        yield _family(
            names.MEMORY_BYTES, {(kind,): size for kind, size in stats.measured_bytes.items()}
        )
        yield _family(
            names.KV_PAGES,
            {
                ("free",): stats.free_pages,
                ("held",): stats.held_pages,
                ("cached",): stats.cached_pages,
            },
        )


def _family(metric: Metric, values: dict[tuple[str, ...], float]) -> Family:
    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
