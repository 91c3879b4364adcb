"""Install, upgrade, uninstall, install again: the users' deployments keep serving."""

import json
from pathlib import Path

import httpx
import pytest

from demo import CHART, SYSTEM_NAMESPACE, install
from site_under_test import DSD, Namespace, Site, eventually

pytestmark = pytest.mark.e2e

CRDS = {"deepseekdeployments.deepseek.dev", "deepseektenants.deepseek.dev"}


def objects_of_the_release(site: Site) -> set[str]:
    """Everything in the cluster that carries the release's labels, by kind and name."""
    kinds = site.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    found = site.kubectl(
        "get", ",".join(kind for kind in kinds if not kind.endswith((".metrics.k8s.io",))),
        "-A", "-l", "app.kubernetes.io/instance=deepseek", "-o", "name", "--ignore-not-found",
    )  # fmt: skip
    return set(found.split())


def answers(namespace: Namespace) -> bool:
    answer = httpx.post(
        f"{namespace.url('smollm2')}/completions",
        json={"model": "smollm2", "prompt": "Hello", "max_tokens": 1},
        timeout=60,
    )
    return answer.status_code == 200


def test_an_upgrade_from_the_previous_commits_chart_and_an_uninstall_leave_users_untouched(
    site: Site, namespace: Namespace, tmp_path: Path
) -> None:
    site.helm("uninstall", "deepseek", "--namespace", SYSTEM_NAMESPACE, "--wait")
    old = site.chart_at("HEAD~1", tmp_path)
    install(site.target, chart=old)
    namespace.serve()
    namespace.wait_ready("smollm2")
    pod = namespace.pods("smollm2")[0]["metadata"]["uid"]

    install(site.target, chart=CHART)

    namespace.wait_ready("smollm2")
    assert [found["metadata"]["uid"] for found in namespace.pods("smollm2")] == [pod]

    site.helm("uninstall", "deepseek", "--namespace", SYSTEM_NAMESPACE, "--wait")

    left = eventually(
        lambda: (found := objects_of_the_release(site)) and not leftovers(found) and found,
        "only the CRDs are left",
    )
    assert {name.rpartition("/")[2] for name in left} == CRDS
    # The Lease belongs to the operator's pod, so that nobody waits for one that is gone.
    eventually(lambda: not site.system.items("leases"), "the Lease is gone")
    assert answers(namespace)

    install(site.target, chart=CHART)

    namespace.kubectl(
        "patch", DSD, "smollm2", "--type=merge", "-p", json.dumps({"spec": {"replicas": 2}})
    )
    namespace.wait_replicas("smollm2", 2)
    uids = {found["metadata"]["uid"] for found in namespace.pods("smollm2")}
    assert len(uids) == 2
    assert pod in uids


def leftovers(found: set[str]) -> set[str]:
    return {name for name in found if not name.startswith("customresourcedefinition")}
