"""Addresses of objects."""

import pytest

from deepseek_operator.kinds import (
    CHILD_KINDS,
    DEEPSEEK_DEPLOYMENT,
    DEPLOYMENT,
    KIND_OF,
    POD,
    Reference,
    reference,
)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (POD.path(None), "/api/v1/pods"),
        (POD.path("team"), "/api/v1/namespaces/team/pods"),
        (DEPLOYMENT.path("team", "x"), "/apis/apps/v1/namespaces/team/deployments/x"),
        (
            DEEPSEEK_DEPLOYMENT.path("team", "x", "status"),
            "/apis/deepseek.dev/v1alpha1/namespaces/team/deepseekdeployments/x/status",
        ),
    ],
)
def test_paths(path: str, wanted: str) -> None:
    assert path == wanted


def test_resources_are_spelled_as_in_roles() -> None:
    assert POD.resource == "pods"
    assert DEPLOYMENT.resource == "deployments.apps"


def test_every_child_is_found_by_its_kind() -> None:
    assert all(KIND_OF[kind.kind] is kind for kind in CHILD_KINDS)


def test_a_reference_is_read_from_a_manifest() -> None:
    manifest = {"kind": "Pod", "metadata": {"namespace": "team", "name": "x"}}

    assert reference(manifest) == Reference("Pod", "team", "x")
