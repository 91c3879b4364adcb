"""The HTTPRoute of the Gateway API that an object may ask for, and whether Gateways take it.

Pure. Timeouts are in the API's standard channel; retries are experimental. The API server refuses
to apply them where the standard CRD is installed: they are left out then, and the condition Routed
says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepseek_contract.deployment import DeepSeekDeploymentSpec, HttpRoute
from deepseek_contract.status import RoutedReason
from deepseek_operator.kinds import HTTP_ROUTE, Manifest
from deepseek_operator.render import Owner, child, with_hash
from deepseek_operator.settings import Settings

RETRIED_CODES = (502, 503, 504)
"""Answers of a pod that ends or is overloaded, and of a Gateway that reaches none."""


@dataclass(frozen=True)
class RouteState:
    """The condition Routed."""

    status: Literal["True", "False", "Unknown"]
    reason: RoutedReason
    message: str


def http_route(owner: Owner, spec: DeepSeekDeploymentSpec) -> Manifest | None:
    """The route that an object wants, if it wants one."""
    wanted = spec.routing.http_route
    if wanted is None:
        return None
    parents = [
        {"group": HTTP_ROUTE.group, "kind": "Gateway", **gateway.document()}
        for gateway in wanted.gateways
    ]
    rule: Manifest = {
        "backendRefs": [{"name": owner.name, "port": spec.routing.service.port}],
    }
    if wanted.timeout_seconds is not None:
        rule["timeouts"] = {"request": f"{wanted.timeout_seconds}s"}
    if wanted.retry_attempts is not None:
        rule["retry"] = {"attempts": wanted.retry_attempts, "codes": list(RETRIED_CODES)}
    route_spec: Manifest = {"parentRefs": parents, "rules": [rule]}
    if wanted.hostnames:
        route_spec["hostnames"] = list(wanted.hostnames)
    return with_hash(child(HTTP_ROUTE, owner, owner.name) | {"spec": route_spec})


def route_state(
    spec: DeepSeekDeploymentSpec, live: Manifest | None, settings: Settings
) -> RouteState | None:
    """Whether the route works; None for an object without one."""
    wanted = spec.routing.http_route
    if wanted is None:
        return None
    if not settings.gateway_api:
        return RouteState(
            "False",
            "GatewayApiMissing",
            "This installation does not use the Gateway API: install its CRDs and set"
            " settings.gatewayApi of the chart, or leave spec.routing.httpRoute out.",
        )
    if live is None:
        message = "The HTTPRoute is not there yet. It needs the CRDs of the Gateway API."
        return RouteState("Unknown", "Waiting", message)
    return _said_by_gateways(live, wanted)


def _said_by_gateways(live: Manifest, wanted: HttpRoute) -> RouteState:
    parents = (live.get("status") or {}).get("parents") or []
    for parent in parents:
        for condition in parent.get("conditions") or []:
            if condition["type"] in {"Accepted", "ResolvedRefs"} and condition["status"] == "False":
                return RouteState(
                    "False",
                    "NotAccepted",
                    f"Gateway {parent['parentRef'].get('name')} does not take the route:"
                    f" {condition.get('reason')}: {condition.get('message', '')!r}.",
                )
    if len(parents) < len(wanted.gateways):
        message = "The HTTPRoute is there, and its Gateways have not said yet that they take it."
        return RouteState("Unknown", "Waiting", message)
    if wanted.retry_attempts is not None and not _retries(live):
        return RouteState(
            "True",
            "RetryUnsupported",
            "The route works without retries: the Gateway API's standard CRD does not have them."
            " Install its experimental channel, or leave retryAttempts out.",
        )
    return RouteState("True", "Accepted", "The Gateways take the route.")


def without_retries(manifest: Manifest) -> Manifest | None:
    """The route as the standard CRD takes it; None where there is nothing to leave out."""
    rules = manifest["spec"]["rules"]
    plainer = [{key: part for key, part in rule.items() if key != "retry"} for rule in rules]
    return (
        None if plainer == rules else {**manifest, "spec": {**manifest["spec"], "rules": plainer}}
    )


def _retries(live: Manifest) -> bool:
    return all("retry" in rule for rule in live["spec"].get("rules") or [])
