"""What runs in the cluster beside the project: DNS always, Prometheus and its adapter on demand.

Their images hold one program each and are put together here, without a base image.
"""

import re
import shutil
import string
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import debian, places, programs, store
from cluster.errors import ClusterError
from cluster.node import PAUSE_IMAGE
from cluster.progress import phase

if TYPE_CHECKING:
    from cluster.cluster import Cluster

MANIFESTS = places.SOURCE / "manifests"
USER = 65532


def ensure_images(*, metrics: bool) -> list[str]:
    """Put the images of the add-ons into the store; the caller holds its lock.

    Args:
        metrics: also those of Prometheus and the adapter.

    Returns:
        Their references.
    """
    contents = {
        PAUSE_IMAGE: {"/pause": programs.path("pause")},
        _dns_image(): {"/coredns": programs.path("coredns")},
    }
    if metrics:
        contents[_adapter_image()] = {"/adapter": programs.path("prometheus-adapter")}
        contents[_prometheus_image()] = _with_libraries(_prometheus())
    layout = store.layout()
    missing = contents.keys() - layout.references()
    for reference in sorted(missing):
        files = contents[reference]
        entrypoint = next(iter(files))
        layout.add(reference, files, [entrypoint], USER)
    if missing or not store.folder().exists():
        store.add(contents)
    return list(contents)


def start_dns(cluster: "Cluster") -> None:
    """Start CoreDNS."""
    _apply(cluster, "dns.yaml", {"dns": cluster.network.dns, "image": _dns_image()})


def wait_for_dns(cluster: "Cluster") -> None:
    """Wait until CoreDNS answers."""
    _wait(cluster, "kube-system", "coredns")


def start_metrics(cluster: "Cluster") -> None:
    """Start Prometheus and prometheus-adapter, and wait until the external metrics API serves."""
    debian.ensure(debian.METRICS)
    programs.ensure(["prometheus-adapter"])
    with store.locked():
        references = ensure_images(metrics=True)
    cluster.load(references)
    _apply(
        cluster, "metrics.yaml", {"prometheus": _prometheus_image(), "adapter": _adapter_image()}
    )
    with phase("Prometheus and the external metrics API serve"):
        _wait(cluster, "monitoring", "prometheus")
        _wait(cluster, "monitoring", "prometheus-adapter")
        cluster.control_plane.kubectl(
            "wait", "--for=condition=Available", "--timeout=60s",
            "apiservice/v1beta1.external.metrics.k8s.io",
        )  # fmt: skip


def _apply(cluster: "Cluster", manifest: str, values: Mapping[str, str]) -> None:
    text = (MANIFESTS / manifest).read_text(encoding="utf-8")
    cluster.control_plane.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", "-",
        stdin=string.Template(text).substitute(values),
    )  # fmt: skip


def _wait(cluster: "Cluster", namespace: str, deployment: str) -> None:
    cluster.control_plane.kubectl(
        "rollout", "status", f"deployment/{deployment}", "-n", namespace, "--timeout=120s"
    )


def _dns_image() -> str:
    return _image("coredns")


def _adapter_image() -> str:
    return _image("prometheus-adapter")


def _image(name: str) -> str:
    return f"localhost/{name}:{programs.version(programs.PROGRAMS[name])}"


def _prometheus_image() -> str:
    said = subprocess.run([_prometheus(), "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"version (\d+\.\d+\.\d+)", said.stdout + said.stderr)
    if match is None:
        raise ClusterError(f"{_prometheus()} --version says nothing known: {said.stdout[:200]}")
    return f"localhost/prometheus:v{match.group(1)}"


def _prometheus() -> Path:
    found = shutil.which("prometheus")
    if found is None:
        raise ClusterError("prometheus was not found in PATH; install the Debian package")
    return Path(found)


def _with_libraries(program: Path) -> dict[str, Path]:
    """A program and the shared libraries that it is linked to, each at its own path."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    libraries = re.findall(r"(/\S+) \(0x", listed)
    return {str(program): program, **{name: Path(name) for name in libraries}}
