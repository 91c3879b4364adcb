"""Whatever happens to the children or to the operator, the right state comes back."""

import json

import pytest

from site_under_test import DSD, OPERATOR, Namespace, Site, eventually

pytestmark = pytest.mark.e2e

CHILDREN = {
    "deployment": "smollm2-primary",
    "service": "smollm2",
    "poddisruptionbudget": "smollm2",
    "serviceaccount": "smollm2",
    "networkpolicy": "smollm2",
    "secret": "smollm2-state-token",
}
OURS = "app.kubernetes.io/managed-by=deepseek-operator"
DRIFT = {
    "deployment": {"spec": {"template": {"spec": {"serviceAccountName": "default"}}}},
    "service": {"spec": {"selector": {"deepseek.dev/deployment": "another"}}},
    "poddisruptionbudget": {"spec": {"maxUnavailable": "100%"}},
    "networkpolicy": {"spec": {"ingress": [{}]}},
    "serviceaccount": {"automountServiceAccountToken": True},
    "secret": {"metadata": {"labels": {"app.kubernetes.io/name": "another"}}},
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_deleted_child_comes_back(namespace: Namespace, kind: str) -> None:
    name = CHILDREN[kind]
    namespace.serve()
    old = eventually(lambda: namespace.get(kind, name), f"{kind} exists")["metadata"]["uid"]

    namespace.kubectl("delete", kind, name, "--wait=false")

    eventually(lambda: namespace.get(kind, name)["metadata"]["uid"] != old, f"a new {kind} exists")


@pytest.mark.parametrize("kind", DRIFT)
def test_a_changed_child_is_set_right(namespace: Namespace, kind: str) -> None:
    name = CHILDREN[kind]
    namespace.serve()
    wanted = eventually(lambda: namespace.get(kind, name), f"{kind} exists")

    said = namespace.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(DRIFT[kind]))
    assert "no change" not in said

    def is_as_before() -> bool:
        now = namespace.get(kind, name)
        if kind == "serviceaccount":
            return now.get("automountServiceAccountToken") == wanted.get(
                "automountServiceAccountToken"
            )
        if kind == "secret":
            return bool(now["metadata"]["labels"] == wanted["metadata"]["labels"])
        return bool(now["spec"] == wanted["spec"])

    eventually(is_as_before, f"{kind} is as it was")


def test_an_operator_killed_in_the_middle_finishes_after_its_restart(
    site: Site, namespace: Namespace
) -> None:
    for number in range(8):
        namespace.serve(f"killed-{number}", replicas=0)
    site.system.kubectl(
        "delete", "pods", "-l", "app.kubernetes.io/name=deepseek-operator",
        "--force", "--grace-period=0",
    )  # fmt: skip

    for number in range(8):
        for kind, name in CHILDREN.items():
            eventually(
                lambda kind=kind, name=name, number=number: namespace.get(
                    kind, name.replace("smollm2", f"killed-{number}")
                ),
                f"{kind} of killed-{number} exists",
            )
        assert len(namespace.items("deployments", f"deepseek.dev/deployment=killed-{number}")) == 1


def test_two_operators_do_the_work_of_one(site: Site, namespace: Namespace) -> None:
    site.system.kubectl("scale", OPERATOR, "--replicas=2")
    try:
        site.system.kubectl("rollout", "status", OPERATOR, "--timeout=240s")
        namespace.serve("alone", replicas=0)
        namespace.wait_reason("alone", "ScaledToZero")
        holder = site.system.get("lease", "deepseek-operator")["spec"]["holderIdentity"]
        pods = site.system.items("pods", "app.kubernetes.io/name=deepseek-operator")

        assert holder in {pod["metadata"]["name"] for pod in pods}
        told = eventually(lambda: reasons_told(namespace), "an event")
        assert len(told) == len(set(told))
    finally:
        site.system.kubectl("scale", OPERATOR, "--replicas=1")
        site.system.kubectl("rollout", "status", OPERATOR, "--timeout=240s")


def reasons_told(namespace: Namespace) -> list[str]:
    """Of the events that the operator posted."""
    return [
        event["reason"]
        for event in namespace.items("events")
        if event["source"].get("component") == "deepseek-operator"
    ]


def test_deleting_works_while_the_operator_is_gone(site: Site, namespace: Namespace) -> None:
    namespace.serve("orphan", replicas=0)
    for kind in CHILDREN:
        eventually(lambda kind=kind: namespace.items(kind, OURS), f"a {kind}")
    site.system.kubectl("scale", OPERATOR, "--replicas=0")
    try:
        eventually(
            lambda: not site.system.items("pods", "app.kubernetes.io/name=deepseek-operator"),
            "no operator pod",
        )

        namespace.kubectl("delete", DSD, "orphan", "--timeout=240s")

        for kind in CHILDREN:
            eventually(lambda kind=kind: not namespace.items(kind, OURS), f"no {kind} is left")
    finally:
        site.system.kubectl("scale", OPERATOR, "--replicas=1")
        site.system.kubectl("rollout", "status", OPERATOR, "--timeout=240s")


def test_a_deleted_lease_comes_back_and_work_goes_on(site: Site, namespace: Namespace) -> None:
    site.system.kubectl("delete", "lease", "deepseek-operator")

    eventually(
        lambda: site.system.get("lease", "deepseek-operator")["spec"].get("holderIdentity"),
        "somebody holds the Lease",
    )
    namespace.serve("after", replicas=0)
    eventually(lambda: namespace.get("service", "after"), "the Service")
