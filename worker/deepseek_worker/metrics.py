"""`GET /metrics`: what the contract names, from the API processes' counts and the engine's."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deepseek_contract import metrics as names
from deepseek_contract.metrics import Metric
from deepseek_worker.board import HISTOGRAMS, SUM, Board
from deepseek_worker.client import EngineClient
from deepseek_worker.errors import reasons

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts what passes through this process; shows what passed through all, and the engine's."""

    def __init__(self, engine: EngineClient, board: Board, alias_model: str | None = None) -> None:
        """Register everything.

        Args:
            engine: Whose counts are read.
            board: Where all API processes count.
            alias_model: The label `model_name` of vLLM's names for the same; None leaves them out.
        """
        self._board = board
        self._registry = CollectorRegistry()
        self._registry.register(_BoardCollector(board))
        self._registry.register(_EngineCollector(engine))
        self._aliases = CollectorRegistry()
        if alias_model is not None:
            self._aliases.register(_VllmCollector(self._registry, alias_model))

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it came."""
        self._observe(names.TIME_TO_FIRST_TOKEN_SECONDS, seconds)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """A request got further tokens, `seconds` each."""
        self._observe(names.INTER_TOKEN_LATENCY_SECONDS, seconds, num_tokens)

    def request_ended(self, finish_reason: str, seconds: float) -> None:
        """A request that was accepted ended, `seconds` after it came."""
        self._board.add((names.REQUESTS_TOTAL.name, finish_reason))
        self._observe(names.REQUEST_DURATION_SECONDS, seconds)

    def request_rejected(self, reason: str) -> None:
        """A request was refused."""
        self._board.add((names.REQUESTS_REJECTED_TOTAL.name, reason))

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry) + generate_latest(self._aliases)

    def _observe(self, metric: Metric, value: float, times: int = 1) -> None:
        self._board.add((metric.name, bisect_left(metric.buckets, value)), times)
        self._board.add((metric.name, SUM), value * times)


class _BoardCollector(Collector):
    """What all API processes have counted."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Family]:
        """All families; reasons that nothing was refused for are left out."""
        total = self._board.total
        ended = names.REQUESTS_TOTAL
        # A counter that first appears with its first event has no increase to alert on.
        yield _family(ended, {(why,): total((ended.name, why)) for why in ended.label_values})
        refused = names.REQUESTS_REJECTED_TOTAL
        counts = {(why,): total((refused.name, why)) for why in reasons()}
        yield _family(refused, {why: count for why, count in counts.items() if count})
        for metric in HISTOGRAMS:
            yield self._histogram(metric)

    def _histogram(self, metric: Metric) -> Family:
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        counts = (self._board.total((metric.name, at)) for at in range(len(bounds)))
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        total = self._board.total((metric.name, SUM))
        return HistogramMetricFamily(metric.name, metric.help, buckets=buckets, sum_value=total)


class _EngineCollector(Collector):
    """The engine's counts as they are at the moment of the scrape."""

    def __init__(self, engine: EngineClient) -> None:
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


class _VllmCollector(Collector):
    """The same values under the names that vLLM has for them."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}

    def describe(self) -> list[Family]:
        """Nothing: what is collected depends on the other registry."""
        return []

    def collect(self) -> Iterator[Family]:
        """Every alias whose values are there."""
        known = {family.name: family for family in self._registry.collect()}
        for alias, metric in names.VLLM_ALIASES:
            source = known.get(metric.name.removesuffix("_total"))
            if source is not None:
                yield self._renamed(alias, metric, source)

    def _renamed(self, alias: str, metric: Metric, source: Family) -> Family:
        bare = alias.removesuffix("_total")
        if metric is names.KV_PAGES:
            pages = {sample.labels["state"]: sample.value for sample in source.samples}
            family = Family(bare, "Share of the KV pages that requests hold.", "gauge")
            family.add_sample(bare, self._labels, pages["held"] / sum(pages.values()))
            return family
        family = Family(bare, metric.help, metric.type)
        for sample in source.samples:
            labels = dict(sample.labels)
            if metric is names.REQUESTS_TOTAL:
                labels = {"finished_reason": labels["finish_reason"]}
                if labels["finished_reason"] == "error":
                    continue
            name = bare + sample.name.removeprefix(source.name)
            family.add_sample(name, {**labels, **self._labels}, sample.value)
        return family


def _family(metric: Metric, values: dict[tuple[str, ...], float]) -> Family:
    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
