"""What the operator asked for in all the tests before equals what its role allows."""

import json
from typing import Any, NamedTuple

import pytest

from demo import SYSTEM_NAMESPACE
from site_under_test import Site

pytestmark = pytest.mark.e2e

USER = f"system:serviceaccount:{SYSTEM_NAMESPACE}:deepseek-deepseek-operator"
# The chart's other roles are for people, by way of Kubernetes' own view and edit.
OF_THE_OPERATOR = (
    "app.kubernetes.io/instance=deepseek,!rbac.authorization.k8s.io/aggregate-to-admin"
)
# Every authenticated user may ask these; Kubernetes' own roles say so.
DISCOVERY = ("/api", "/apis", "/version", "/openapi")


class Right(NamedTuple):
    verb: str
    group: str
    resource: str


def test_no_right_is_missing_and_none_is_unused(site: Site) -> None:
    granted = rights(
        json.loads(site.kubectl("get", "clusterroles,roles", "-A", "-o", "json",
                                "-l", OF_THE_OPERATOR))["items"]
    )  # fmt: skip
    refused, asked = set(), set()
    # The server may be in the middle of the last line.
    whole, _, _ = site.cluster.control_plane.audit_log.read_text().rpartition("\n")
    for line in whole.splitlines():
        event = json.loads(line)
        if event["user"]["username"] != USER:
            continue
        if "objectRef" not in event:
            assert event["requestURI"].startswith(DISCOVERY), event["requestURI"]
            continue
        right = called(event)
        asked.add(right)
        if event.get("responseStatus", {}).get("code") == 403 and not is_being_deleted(event):
            refused.add(right)
        # The server asks for the right to create when an apply finds no object.
        if right.verb == "patch" and event.get("responseStatus", {}).get("code") == 201:
            asked.add(right._replace(verb="create"))

    assert refused == set()
    assert {right for right in granted if right not in asked} == set()


def called(event: dict[str, Any]) -> Right:
    thing = event["objectRef"]
    resource = "/".join(filter(None, (thing["resource"], thing.get("subresource"))))
    return Right(event["verb"], thing.get("apiGroup", ""), resource)


def is_being_deleted(event: dict[str, Any]) -> bool:
    """Whether the refusal is not about rights: a namespace that ends takes nothing new."""
    return "being terminated" in event["responseStatus"].get("message", "")


def rights(roles: list[dict[str, Any]]) -> set[Right]:
    return {
        Right(verb, group, resource)
        for role in roles
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
