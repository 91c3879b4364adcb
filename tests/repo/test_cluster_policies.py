"""NetworkPolicy objects become firewall rules that say the same."""

import re

import pytest

from cluster.policies import ruleset, selects

NODES = "10.201.0.0/24"


def pod(name, namespace="here", address="10.0.0.1", ports=(), phase="Running", **labels):
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"ports": list(ports)}]},
        "status": {"podIP": address, "phase": phase},
    }


def namespace(name, **labels):
    return {"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name} | labels}}


def policy(spec, in_namespace="here"):
    return {"metadata": {"name": "p", "namespace": in_namespace}, "spec": spec}


HTTP = {"name": "http", "containerPort": 8000}
SERVER = pod("server", address="10.0.0.1", ports=[HTTP], app="server")
FRIEND = pod("friend", address="10.0.0.2", app="friend")
STRANGER = pod("stranger", namespace="there", address="10.0.0.3", ports=[HTTP], app="friend")
PODS = [SERVER, FRIEND, STRANGER]
NAMESPACES = [namespace("here"), namespace("there", team="red")]


def rules(chain_kind, spec, pods=PODS):
    """The lines of the one chain of this kind for the server."""
    text = ruleset(pods, NAMESPACES, [policy({"podSelector": {"matchLabels": {"app": "server"}}}
                                             | spec)], NODES)  # fmt: skip
    chains = dict(re.findall(r"chain (\w+) \{\n(.*?)\n  \}", text, re.DOTALL))
    found = [body for name, body in chains.items() if name.startswith(chain_kind)]
    assert len(found) <= 1
    return [line.strip() for line in found[0].splitlines()] if found else None


def test_without_policies_everything_passes():
    text = ruleset(PODS, NAMESPACES, [], NODES)

    assert "jump" not in text
    assert "drop" not in text


def test_rules_replace_those_before():
    assert ruleset([], [], [], NODES).startswith("table ip policies\ndelete table ip policies\n")


def test_a_policy_without_rules_lets_nothing_in():
    assert rules("ingress", {}) == ["drop"]
    assert rules("egress", {}) is None


def test_a_policy_of_another_namespace_does_not_count():
    text = ruleset(PODS, NAMESPACES, [policy({"podSelector": {}}, "elsewhere")], NODES)

    assert "jump" not in text


def test_an_empty_selector_selects_every_pod_of_the_namespace():
    text = ruleset(PODS, NAMESPACES, [policy({"podSelector": {}})], NODES)

    assert re.search(r"ip daddr vmap \{ 10\.0\.0\.1 : jump \w+, 10\.0\.0\.2 : jump \w+ \}", text)


@pytest.mark.parametrize(
    ("rule", "lines"),
    [
        pytest.param({}, ["return"], id="anybody, any port"),
        pytest.param({"from": [{"podSelector": {}}]}, ["ip saddr { 10.0.0.1, 10.0.0.2 } return"],
                     id="pods of the own namespace"),
        pytest.param({"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]},
                     ["ip saddr { 10.0.0.2 } return"], id="some pods of the own namespace"),
        pytest.param({"from": [{"namespaceSelector": {"matchLabels": {"team": "red"}}}]},
                     ["ip saddr { 10.0.0.3 } return"], id="pods of another namespace"),
        pytest.param({"from": [{"namespaceSelector": {},
                                "podSelector": {"matchLabels": {"app": "friend"}}}]},
                     ["ip saddr { 10.0.0.2, 10.0.0.3 } return"], id="some pods of all namespaces"),
        pytest.param({"from": [{"podSelector": {"matchLabels": {"app": "nobody"}}}]}, [],
                     id="pods that are not there"),
        pytest.param({"from": [{"ipBlock": {"cidr": "10.9.0.0/16", "except": ["10.9.1.0/24"]}}]},
                     ["ip saddr 10.9.0.0/16 ip saddr != { 10.9.1.0/24 } return"], id="addresses"),
        pytest.param({"ports": [{"port": 80}]}, ["tcp dport 80 return"], id="a port"),
        pytest.param({"ports": [{"protocol": "UDP", "port": 53}]}, ["udp dport 53 return"],
                     id="a port of another protocol"),
        pytest.param({"ports": [{"port": 80, "endPort": 90}]}, ["tcp dport 80-90 return"],
                     id="a range of ports"),
        pytest.param({"ports": [{"protocol": "UDP"}]}, ["meta l4proto udp return"],
                     id="every port of a protocol"),
        pytest.param({"ports": [{"port": "http"}]}, ["tcp dport 8000 return"], id="a named port"),
        pytest.param({"ports": [{"port": "other"}]}, [], id="a port that the pod does not name"),
    ],
)  # fmt: skip
def test_a_rule_lets_in_what_it_allows(rule, lines):
    assert rules("ingress", {"ingress": [rule]}) == [*lines, "drop"]


@pytest.mark.parametrize(
    ("rule", "lines"),
    [
        pytest.param({}, ["return"], id="anything"),
        pytest.param({"to": [{"namespaceSelector": {"matchLabels": {"team": "red"}}}],
                      "ports": [{"port": "http"}]},
                     ["ip daddr 10.0.0.3 tcp dport 8000 return"],
                     id="a named port of the pods that are reached"),
        pytest.param({"to": [{"podSelector": {}}]},
                     ["ip daddr 10.0.0.1 return", "ip daddr 10.0.0.2 return"],
                     id="pods of the own namespace"),
        pytest.param({"ports": [{"protocol": "UDP", "port": 53}, {"port": 53}]},
                     ["udp dport 53 return", "tcp dport 53 return"], id="any DNS server"),
    ],
)  # fmt: skip
def test_a_rule_lets_out_what_it_allows(rule, lines):
    spec = {"policyTypes": ["Egress"], "egress": [rule]}

    assert rules("egress", spec) == [*lines, "drop"]
    assert rules("ingress", spec) is None


def test_egress_rules_alone_also_close_ingress():
    assert rules("ingress", {"egress": [{}]}) == ["drop"]
    assert rules("egress", {"egress": [{}]}) == ["return", "drop"]


def test_policies_on_one_pod_add_up():
    one = policy({"podSelector": {}, "ingress": [{"ports": [{"port": 1}]}]})
    two = policy({"podSelector": {}, "ingress": [{"ports": [{"port": 2}]}]})

    text = ruleset([SERVER], NAMESPACES, [one, two], NODES)

    assert re.search(r"tcp dport 1 return\s+tcp dport 2 return\s+drop", text)


def test_nodes_and_answers_always_pass():
    lines = ruleset(PODS, NAMESPACES, [policy({"podSelector": {}})], NODES).splitlines()
    first = next(i for i, line in enumerate(lines) if "jump" in line)

    assert [line.strip() for line in lines[first - 2 : first]] == [
        "ct state established,related accept",
        f"ip saddr {NODES} accept",
    ]


def test_ended_pods_and_those_of_the_host_have_no_rules():
    pods = [
        pod("done", address="10.0.0.4", phase="Succeeded"),
        pod("host", address="10.201.0.11") | {"spec": {"hostNetwork": True, "containers": []}},
        {"metadata": {"name": "new", "namespace": "here"}, "spec": {"containers": []}},
    ]

    assert "jump" not in ruleset(pods, NAMESPACES, [policy({"podSelector": {}})], NODES)


def test_the_order_of_a_listing_does_not_matter():
    policies = [policy({"podSelector": {}})]

    assert ruleset(PODS, NAMESPACES, policies, NODES) == ruleset(
        PODS[::-1], NAMESPACES[::-1], policies, NODES
    )


@pytest.mark.parametrize(
    ("term", "selected"),
    [
        ({"key": "a", "operator": "In", "values": ["1", "2"]}, True),
        ({"key": "a", "operator": "In", "values": ["2"]}, False),
        ({"key": "a", "operator": "NotIn", "values": ["2"]}, True),
        ({"key": "b", "operator": "NotIn", "values": ["2"]}, True),
        ({"key": "a", "operator": "Exists"}, True),
        ({"key": "b", "operator": "Exists"}, False),
        ({"key": "b", "operator": "DoesNotExist"}, True),
        ({"key": "a", "operator": "DoesNotExist"}, False),
    ],
    ids=str,
)
def test_expressions_select_as_kubernetes_says(term, selected):
    assert selects({"matchExpressions": [term]}, {"a": "1"}) is selected
