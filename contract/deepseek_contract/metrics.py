"""Every metric of worker and operator: name, type, unit, labels and help.

Both register from here, and `docs/reference/metrics.md`, the scrape settings and the adapter's
rules are generated from here. Percentages, where Prometheus' custom is a ratio, are the words of
the API and of the autoscaler's target.
"""

from dataclasses import dataclass
from typing import Literal

MetricType = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: Its full name; counters end in `_total`.
        type: Its type.
        unit: What its values count.
        help: What it tells.
        labels: Names of its labels.
        label_values: The fixed values of a label, where there are some.
        buckets: Upper bounds, for a histogram.
    """

    name: str
    type: MetricType
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    label_values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_LATENCY_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip
_RECONCILE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

GPU_MEMORY_USED_PERCENT = Metric(
    "deepseek_gpu_memory_used_percent",
    "gauge",
    "percent",
    "Bytes in use (weights, workspace, graphs, context, KV pages that requests hold) over the"
    " bytes that this worker may use.",
)
GPU_MEMORY_DEMAND_PERCENT = Metric(
    "deepseek_gpu_memory_demand_percent",
    "gauge",
    "percent",
    "KV bytes that running requests hold plus KV bytes that waiting requests need, over the KV"
    " pool. Cached pages that nobody holds count as free. It may exceed 100.",
)
MEMORY_BYTES = Metric(
    "deepseek_memory_bytes", "gauge", "bytes", "Memory of the worker by kind.", ("kind",)
)
MEMORY_LIMIT_BYTES = Metric(
    "deepseek_memory_limit_bytes", "gauge", "bytes", "Memory that the worker may use."
)
REQUESTS_RUNNING = Metric(
    "deepseek_requests_running", "gauge", "requests", "Requests that hold KV pages."
)
REQUESTS_WAITING = Metric(
    "deepseek_requests_waiting",
    "gauge",
    "requests",
    "Requests that wait for KV pages, for a place among the running ones, or for their turn.",
)
REQUESTS_TOTAL = Metric(
    "deepseek_requests_total",
    "counter",
    "requests",
    "Requests that ended, by why.",
    ("finish_reason",),
    ("stop", "length", "abort", "error"),
)
PROMPT_TOKENS_TOTAL = Metric(
    "deepseek_prompt_tokens_total", "counter", "tokens", "Prompt tokens of accepted requests."
)
GENERATION_TOKENS_TOTAL = Metric(
    "deepseek_generation_tokens_total", "counter", "tokens", "Tokens generated."
)
CACHED_PROMPT_TOKENS_TOTAL = Metric(
    "deepseek_cached_prompt_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens whose KV was found in the prefix cache.",
)
TIME_TO_FIRST_TOKEN_SECONDS = Metric(
    "deepseek_time_to_first_token_seconds",
    "histogram",
    "seconds",
    "Time from a request's arrival to its first token.",
    buckets=_LATENCY_SECONDS,
)
INTER_TOKEN_LATENCY_SECONDS = Metric(
    "deepseek_inter_token_latency_seconds",
    "histogram",
    "seconds",
    "Time between two tokens of a request.",
    buckets=_TOKEN_SECONDS,
)
REQUEST_DURATION_SECONDS = Metric(
    "deepseek_request_duration_seconds",
    "histogram",
    "seconds",
    "Time from a request's arrival to its end.",
    buckets=_LATENCY_SECONDS,
)
ENGINE_STEPS_TOTAL = Metric(
    "deepseek_engine_steps_total", "counter", "steps", "Steps of the engine."
)
PREEMPTIONS_TOTAL = Metric(
    "deepseek_preemptions_total",
    "counter",
    "requests",
    "Running requests that gave up their pages to others.",
)
OUT_OF_MEMORY_RETRIES_TOTAL = Metric(
    "deepseek_out_of_memory_retries_total",
    "counter",
    "batches",
    "Batches that were tried again because memory ran out.",
)
REQUESTS_REJECTED_TOTAL = Metric(
    "deepseek_requests_rejected_total",
    "counter",
    "requests",
    "Requests that were refused, by why.",
    ("reason",),
)
KV_PAGES = Metric(
    "deepseek_kv_pages",
    "gauge",
    "pages",
    "KV pages by state: free, held by requests, or cached for later ones.",
    ("state",),
    ("free", "held", "cached"),
)
ENGINE_LAST_STEP_TIMESTAMP_SECONDS = Metric(
    "deepseek_engine_last_step_timestamp_seconds",
    "gauge",
    "seconds",
    "When the engine last finished a step, in seconds since 1970.",
)
NON_FINITE_LOGITS_TOTAL = Metric(
    "deepseek_non_finite_logits_total",
    "counter",
    "requests",
    "Requests that ended because their logits were not finite.",
)

WORKER_METRICS = (
    GPU_MEMORY_USED_PERCENT,
    GPU_MEMORY_DEMAND_PERCENT,
    MEMORY_BYTES,
    MEMORY_LIMIT_BYTES,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_TOTAL,
    PROMPT_TOKENS_TOTAL,
    GENERATION_TOKENS_TOTAL,
    CACHED_PROMPT_TOKENS_TOTAL,
    TIME_TO_FIRST_TOKEN_SECONDS,
    INTER_TOKEN_LATENCY_SECONDS,
    REQUEST_DURATION_SECONDS,
    ENGINE_STEPS_TOTAL,
    PREEMPTIONS_TOTAL,
    OUT_OF_MEMORY_RETRIES_TOTAL,
    REQUESTS_REJECTED_TOTAL,
    KV_PAGES,
    ENGINE_LAST_STEP_TIMESTAMP_SECONDS,
    NON_FINITE_LOGITS_TOTAL,
)

VLLM_ALIASES: tuple[tuple[str, Metric], ...] = (
    ("vllm:num_requests_running", REQUESTS_RUNNING),
    ("vllm:num_requests_waiting", REQUESTS_WAITING),
    ("vllm:kv_cache_usage_perc", KV_PAGES),
    ("vllm:num_preemptions_total", PREEMPTIONS_TOTAL),
    ("vllm:prompt_tokens_total", PROMPT_TOKENS_TOTAL),
    ("vllm:prefix_cache_queries_total", PROMPT_TOKENS_TOTAL),
    ("vllm:prefix_cache_hits_total", CACHED_PROMPT_TOKENS_TOTAL),
    ("vllm:generation_tokens_total", GENERATION_TOKENS_TOTAL),
    ("vllm:request_success_total", REQUESTS_TOTAL),
    ("vllm:time_to_first_token_seconds", TIME_TO_FIRST_TOKEN_SECONDS),
    ("vllm:inter_token_latency_seconds", INTER_TOKEN_LATENCY_SECONDS),
    ("vllm:e2e_request_latency_seconds", REQUEST_DURATION_SECONDS),
)
"""vLLM's names, and whose values a worker shows under them with `--metrics-aliases vllm`.

`kv_cache_usage_perc` is the share of the pages that requests hold, 0 to 1. `request_success`
counts by `finished_reason`, and leaves errors out. All carry the label `model_name`.
"""

NAMESPACE_LABEL = "namespace"
POD_LABEL = "pod"
DEPLOYMENT_LABEL = "deployment"
TIER_LABEL = "tier"
TARGET_LABELS = (NAMESPACE_LABEL, POD_LABEL, DEPLOYMENT_LABEL, TIER_LABEL)
"""What Prometheus adds to each series of a worker; the chart's scrape settings see to that."""

SCALING_METRICS = (GPU_MEMORY_DEMAND_PERCENT, GPU_MEMORY_USED_PERCENT, REQUESTS_WAITING)
"""What an autoscaler may go by."""
BRIDGED = "1m"
"""For how long the last value of a pod that could not be scraped counts, in Prometheus' words."""


def value_of_each_pod(series: str, matchers: str) -> str:
    """The query for the last value of each pod that an autoscaler adds up.

    A failed scrape is bridged, but only while Prometheus still knows the pod: without `up` a pod
    that was replaced would count beside its successor for another minute, and a rolling update
    would look like load. Two jobs that scrape the same pod count once.

    Args:
        series: A metric's name, or a template's place for one.
        matchers: Label matchers without braces, or a template's place for them.
    """
    on_pod = f"on ({NAMESPACE_LABEL}, {POD_LABEL})"
    return (
        f"max by ({POD_LABEL}) (last_over_time({series}{{{matchers}}}[{BRIDGED}])"
        f" and {on_pod} up{{{matchers}}})"
    )


OPERATOR_RECONCILE_DURATION_SECONDS = Metric(
    "deepseek_operator_reconcile_duration_seconds",
    "histogram",
    "seconds",
    "Time of one reconciliation of one object.",
    buckets=_RECONCILE_SECONDS,
)
OPERATOR_RECONCILE_ERRORS_TOTAL = Metric(
    "deepseek_operator_reconcile_errors_total",
    "counter",
    "reconciliations",
    "Reconciliations that failed, by why.",
    ("reason",),
)
OPERATOR_API_REQUESTS_TOTAL = Metric(
    "deepseek_operator_api_requests_total",
    "counter",
    "requests",
    "Requests to the Kubernetes API.",
    ("verb", "resource", "code"),
)
OPERATOR_LAST_EVENT_TIMESTAMP_SECONDS = Metric(
    "deepseek_operator_last_event_timestamp_seconds",
    "gauge",
    "seconds",
    "When the operator last heard from the Kubernetes API, in seconds since 1970.",
)
OPERATOR_PROBES_TOTAL = Metric(
    "deepseek_operator_probes_total",
    "counter",
    "probes",
    "Times that a worker was asked how it does, by what came of it.",
    ("outcome",),
    ("answered", "silent", "refused", "forbidden", "unreadable"),
)
OPERATOR_LEADER = Metric(
    "deepseek_operator_leader", "gauge", "boolean", "1 while this process holds the Lease."
)
DEPLOYMENT_CONDITION = Metric(
    "deepseek_deployment_condition",
    "gauge",
    "boolean",
    "1 for the status that each condition of each DeepSeekDeployment has.",
    ("namespace", "deployment", "type", "status"),
)
DEPLOYMENT_READY_REPLICAS = Metric(
    "deepseek_deployment_ready_replicas",
    "gauge",
    "pods",
    "Pods of the current generation that answer.",
    ("namespace", "deployment"),
)
RECOVERY_LEVEL = Metric(
    "deepseek_recovery_level",
    "gauge",
    "levels",
    "How far the recovery ladder has been climbed: 1 batches are retried, 2 pods change node, 3 a"
    " fallback serves or is needed.",
    ("namespace", "deployment"),
)
NODE_SWITCHES_TOTAL = Metric(
    "deepseek_node_switches_total",
    "counter",
    "pods",
    "Pods that left their node, by why.",
    ("namespace", "deployment", "cause"),
)
DEPLOYMENT_WANTED_REPLICAS = Metric(
    "deepseek_deployment_wanted_replicas",
    "gauge",
    "pods",
    "Pods that the object asks for.",
    ("namespace", "deployment"),
)
TENANT_QUOTA_BYTES = Metric(
    "deepseek_tenant_quota_bytes",
    "gauge",
    "bytes",
    "GPU memory that each DeepSeekTenant may use now.",
    ("tenant",),
)
TENANT_USED_BYTES = Metric(
    "deepseek_tenant_used_bytes",
    "gauge",
    "bytes",
    "GPU memory that the pods of each DeepSeekTenant hold.",
    ("tenant",),
)
TENANT_PAST_USED_BYTES = Metric(
    "deepseek_tenant_past_used_bytes",
    "gauge",
    "bytes",
    "GPU memory that each DeepSeekTenant used in the past, decayed.",
    ("tenant",),
)

DEPLOYMENT_TIER_TRANSITIONS_TOTAL = Metric(
    "deepseek_deployment_tier_transitions_total",
    "counter",
    "transitions",
    "Changes of which model serves, or is to serve, by the reason of the condition Degraded.",
    ("namespace", "deployment", "reason"),
)

OPERATOR_METRICS = (
    OPERATOR_RECONCILE_DURATION_SECONDS,
    OPERATOR_RECONCILE_ERRORS_TOTAL,
    OPERATOR_API_REQUESTS_TOTAL,
    OPERATOR_LAST_EVENT_TIMESTAMP_SECONDS,
    OPERATOR_PROBES_TOTAL,
    OPERATOR_LEADER,
    DEPLOYMENT_CONDITION,
    DEPLOYMENT_READY_REPLICAS,
    DEPLOYMENT_WANTED_REPLICAS,
    TENANT_QUOTA_BYTES,
    TENANT_USED_BYTES,
    TENANT_PAST_USED_BYTES,
    RECOVERY_LEVEL,
    NODE_SWITCHES_TOTAL,
    DEPLOYMENT_TIER_TRANSITIONS_TOTAL,
)
