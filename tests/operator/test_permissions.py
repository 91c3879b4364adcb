"""The list of rights. That it is what the operator uses: TestRights in test_controller.py."""

from deepseek_operator.kinds import CHILD_KINDS, watched_kinds
from deepseek_operator.permissions import (
    GATEWAY_API,
    KEDA,
    OWN_NAMESPACE,
    SERVED_NAMESPACES,
    WHOLE_CLUSTER,
    Rule,
)


def test_no_resource_is_named_twice() -> None:
    rules = (*SERVED_NAMESPACES, *KEDA, *GATEWAY_API, *WHOLE_CLUSTER, *OWN_NAMESPACE)

    assert len({(rule.group, rule.resource) for rule in rules}) == len(rules)


def test_every_watched_kind_may_be_listed_and_watched() -> None:
    allowed = {
        (rule.group, rule.resource): rule.verbs
        for rule in (*SERVED_NAMESPACES, *KEDA, *GATEWAY_API)
    }

    for kind in watched_kinds(keda=True, gateway_api=True):
        assert {"list", "watch"} <= set(allowed[kind.group, kind.plural])
    for kind in CHILD_KINDS:
        assert "create" in allowed[kind.group, kind.plural]


def test_nothing_is_given_by_a_wildcard_and_no_object_can_be_changed_by_it() -> None:
    for rule in (*SERVED_NAMESPACES, *KEDA, *GATEWAY_API, *WHOLE_CLUSTER, *OWN_NAMESPACE):
        assert "*" not in (rule.group, rule.resource, *rule.verbs)
    assert Rule("deepseek.dev", "deepseekdeployments", ("list", "watch")) in SERVED_NAMESPACES


def test_a_rule_is_written_as_roles_have_it() -> None:
    assert Rule("apps", "deployments", ("get",)).manifest() == {
        "apiGroups": ["apps"],
        "resources": ["deployments"],
        "verbs": ["get"],
    }
    assert Rule("", "leases", ("get",), ("mine",)).manifest()["resourceNames"] == ["mine"]
