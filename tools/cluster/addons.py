"""What runs in the cluster beside the project: DNS always, Prometheus and its adapter on demand.

Their images hold one program each and are put together here, without a base image.
"""

import string
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cluster import places, programs, store
from cluster.node import PAUSE_IMAGE
from cluster.progress import phase

if TYPE_CHECKING:
    from cluster.cluster import Cluster

USER = 65532
CHART_FILES = places.REPOSITORY / "charts/deepseek-operator/files"
METRICS_PROGRAMS = ("prometheus", "prometheus-adapter")


def ensure_images(*, metrics: bool) -> list[str]:
    """Put the images of the add-ons into the store; the caller holds its lock.

    Args:
        metrics: also those of Prometheus and the adapter.

    Returns:
        Their references.
    """
    contents = {
        PAUSE_IMAGE: {"/pause": programs.path("pause")},
        _image("coredns"): {"/coredns": programs.path("coredns")},
    }
    if metrics:
        contents[_image("prometheus")] = {"/prometheus": programs.path("prometheus")}
        contents[_image("prometheus-adapter")] = {"/adapter": programs.path("prometheus-adapter")}
    missing = contents.keys() - store.references()
    for reference in sorted(missing):
        files = contents[reference]
        store.layout().add(reference, files, [next(iter(files))], USER)
    if missing:
        store.add(missing)
    return list(contents)


def start_dns(cluster: "Cluster") -> None:
    """Start CoreDNS."""
    _apply(cluster, "dns.yaml", {"dns": cluster.network.dns, "image": _image("coredns")})


def wait_for_dns(cluster: "Cluster") -> None:
    """Wait until CoreDNS answers."""
    _wait(cluster, "kube-system", "coredns")


def start_metrics(cluster: "Cluster") -> None:
    """Start Prometheus and prometheus-adapter, and wait until the external metrics API serves."""
    programs.ensure(METRICS_PROGRAMS)
    with store.locked():
        references = ensure_images(metrics=True)
    cluster.load(references)
    _apply(cluster, "metrics.yaml", metrics_values())
    with phase("Prometheus and the external metrics API serve"):
        _wait(cluster, "monitoring", "prometheus")
        _wait(cluster, "monitoring", "prometheus-adapter")
        cluster.control_plane.kubectl(
            "wait", "--for=condition=Available", "--timeout=240s",
            "apiservice/v1beta1.external.metrics.k8s.io",
        )  # fmt: skip


def metrics_values() -> dict[str, str]:
    """What is filled into metrics.yaml: images, and what the chart ships for others' Prometheus."""
    files = {"scrape": "scrape-config.yaml", "rules": "adapter-config.yaml"}
    return {
        "prometheus": _image("prometheus"),
        "adapter": _image("prometheus-adapter"),
        **{
            name: textwrap.indent((CHART_FILES / file).read_text(encoding="utf-8"), "    ")
            for name, file in files.items()
        },
    }


def _apply(cluster: "Cluster", manifest: str, values: Mapping[str, str]) -> None:
    text = (places.MANIFESTS / manifest).read_text(encoding="utf-8")
    cluster.control_plane.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", "-",
        stdin=string.Template(text).substitute(values),
    )  # fmt: skip


def _wait(cluster: "Cluster", namespace: str, deployment: str) -> None:
    cluster.control_plane.kubectl(
        "rollout", "status", f"deployment/{deployment}", "-n", namespace, "--timeout=240s"
    )


def _image(name: str) -> str:
    return f"localhost/{name}:{programs.version(programs.PROGRAMS[name])}"
