"""The chart's files for a Prometheus and a prometheus-adapter of the installation's own.

What they call the workers' metrics comes from the contract, so that a name that changes there
changes in the scrape settings, in the adapter's rules and in the operator's autoscalers at once.
"""

import yaml

from deepseek_contract import metrics
from deepseek_operator.render import DEPLOYMENT_LABEL, TIER_LABEL

_HEADER = (
    "# Generated from contract/deepseek_contract/metrics.py by tools/generate.py; do not edit.\n"
)


def scrape_config() -> str:
    """Scrape settings for a Prometheus that knows no PodMonitors."""
    pod = "__meta_kubernetes_pod"
    targets = {
        metrics.NAMESPACE_LABEL: "__meta_kubernetes_namespace",
        metrics.POD_LABEL: f"{pod}_name",
        "node": f"{pod}_node_name",
        "job": f"{pod}_label_app_kubernetes_io_name",
        metrics.DEPLOYMENT_LABEL: f"{pod}_label_{_mangled(DEPLOYMENT_LABEL)}",
        metrics.TIER_LABEL: f"{pod}_label_{_mangled(TIER_LABEL)}",
    }
    job = {
        "job_name": "deepseek",
        "kubernetes_sd_configs": [{"role": "pod"}],
        "relabel_configs": [
            {
                "source_labels": [
                    f"{pod}_label_app_kubernetes_io_name",
                    f"{pod}_container_port_name",
                ],
                "regex": "deepseek-worker;http|deepseek-operator;metrics",
                "action": "keep",
            },
            {
                "source_labels": [f"{pod}_phase"],
                "regex": "Succeeded|Failed",
                "action": "drop",
            },
            *(
                {"source_labels": [source], "target_label": label}
                for label, source in targets.items()
            ),
        ],
    }
    return (
        f"{_HEADER}# For a Prometheus without PodMonitors: an item of scrape_configs. The rules of"
        f" the adapter and the\n# autoscalers go by the labels {', '.join(metrics.TARGET_LABELS)}."
        f"\n{_dumped([job])}"
    )


def adapter_config() -> str:
    """The configuration of a prometheus-adapter that serves nobody else."""
    return f"{_HEADER}# One series a pod, which the autoscaler adds up.\n" + _dumped(
        {"externalRules": _rules()}
    )


def adapter_values() -> str:
    """Values for the chart of prometheus-adapter that the community keeps."""
    return (
        f"{_HEADER}# Values for the community's chart of prometheus-adapter. Helm replaces lists:"
        " where it has\n# external rules already, add these to them.\n"
        + _dumped({"rules": {"external": _rules()}})
    )


def _rules() -> list[dict[str, object]]:
    return [
        {
            "seriesQuery": f'{metric.name}{{{metrics.DEPLOYMENT_LABEL}!=""}}',
            "resources": {"overrides": {metrics.NAMESPACE_LABEL: {"resource": "namespace"}}},
            "name": {"matches": metric.name},
            "metricsQuery": metrics.value_of_each_pod("<<.Series>>", "<<.LabelMatchers>>"),
        }
        for metric in metrics.SCALING_METRICS
    ]


def _mangled(label: str) -> str:
    return label.replace(".", "_").replace("/", "_").replace("-", "_")


def _dumped(document: object) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=1000)
