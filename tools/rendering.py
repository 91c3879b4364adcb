"""The chart as helm renders it: for people without helm, and for the tests of the chart."""

import subprocess
from pathlib import Path

from cluster import programs

CHART = Path(__file__).resolve().parent.parent / "charts/deepseek-operator"
KUBERNETES = programs.version(programs.PROGRAMS["kube-apiserver"])
NAMESPACE = "deepseek-system"
SCOPES = {
    "cluster": (),
    "namespaced": ("--set=scope=namespaced", "--set=settings.watchNamespaces={models}"),
}


class RenderingError(Exception):
    """helm refuses the chart or its values; the text is helm's."""


def rendered(scope: str) -> str:
    """All objects of the chart in one scope, without the CRDs, which are in manifests/crds.

    Raises:
        RenderingError: The chart cannot be rendered.
    """
    header = (
        f"# The chart with its default values and the scope {scope}, rendered by\n"
        "# tools/generate.py; do not edit. Images carry the chart's appVersion as their tag.\n"
        f"# Apply manifests/crds and make the namespace {NAMESPACE} first.\n"
    )
    body = template("deepseek", "--set=crds.enabled=false", *SCOPES[scope])
    return header + body.rstrip("\n") + "\n"


def template(release: str, *flags: str, namespace: str = NAMESPACE) -> str:
    """What `helm template` prints.

    Raises:
        RenderingError: helm refuses the chart or its values.
    """
    return helm(
        "template",
        release,
        str(CHART),
        f"--namespace={namespace}",
        f"--kube-version={KUBERNETES}",
        *flags,
    )


def helm(*words: str) -> str:
    """Run the helm of the local cluster, which is built if it is not there yet.

    Raises:
        RenderingError: helm fails.
    """
    programs.ensure(["helm"])
    done = subprocess.run(
        [str(programs.path("helm")), *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RenderingError(done.stderr.strip() or done.stdout.strip())
    return done.stdout
