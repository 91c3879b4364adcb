"""NetworkPolicy, enforced by rules in each node's own firewall.

`ruleset` is pure: from pods, namespaces and policies to the text that `nft` loads. Every node
gets the same text; a packet that crosses two nodes is judged the same twice. `enforce` is the
program that keeps it current; it starts with the cluster and ends with it.
"""

import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.errors import ClusterError
from cluster.node import run

if TYPE_CHECKING:
    from cluster.cluster import Cluster

POLL_SECONDS = 0.3
TABLE = "policies"
PATHS = ("/api/v1/pods", "/api/v1/namespaces", "/apis/networking.k8s.io/v1/networkpolicies")

Labels = Mapping[str, str]
Document = Mapping[str, Any]


@dataclass(frozen=True)
class Pod:
    """What counts of a pod."""

    namespace: str
    labels: Labels
    address: str
    ports: Mapping[tuple[str, str], int]
    """Protocol and name of each named port, to its number."""


def ruleset(
    pods: Sequence[Document],
    namespaces: Sequence[Document],
    policies: Sequence[Document],
    trusted: str,
) -> str:
    """The text for `nft -f -` that replaces the rules before.

    Args:
        pods: as the API server lists them; so too the other two.
        namespaces: all of them.
        policies: all of them.
        trusted: network of nodes and host, which reach every pod, as kubelets must.
    """
    world = _World(_pods(pods), {_name(found): _labels(found) for found in namespaces})
    chains: list[str] = []
    incoming: list[str] = []
    outgoing: list[str] = []
    for number, pod in enumerate(world.pods):
        selecting = [
            policy["spec"]
            for policy in policies
            if policy["metadata"]["namespace"] == pod.namespace
            and selects(policy["spec"].get("podSelector", {}), pod.labels)
        ]
        for kind, verdicts, peers in (("Ingress", incoming, "from"), ("Egress", outgoing, "to")):
            chosen = [spec for spec in selecting if kind in _types(spec)]
            if chosen:
                name = f"{kind.lower()}_{number}"
                verdicts.append(f"{pod.address} : jump {name}")
                rules = [
                    line
                    for spec in chosen
                    for rule in spec.get(kind.lower()) or ()
                    for line in world.allowed(rule, peers, pod)
                ]
                chains.append(_chain(name, [*dict.fromkeys(rules), "drop"]))
    forward = [
        "type filter hook forward priority filter; policy accept;",
        "ct state established,related accept",
        f"ip saddr {trusted} accept",
    ]
    # A chain that allows returns, so that the other direction is judged too.
    if outgoing:
        forward.append(f"ip saddr vmap {{ {', '.join(outgoing)} }}")
    if incoming:
        forward.append(f"ip daddr vmap {{ {', '.join(incoming)} }}")
    body = "\n".join([*chains, _chain("forward", forward)])
    return f"table ip {TABLE}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n{body}\n}}\n"


def selects(selector: Document, labels: Labels) -> bool:
    """Whether a label selector of the Kubernetes API selects these labels; an empty one does."""
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_holds(term, labels) for term in selector.get("matchExpressions") or ())


def enforce(cluster: "Cluster") -> None:
    """Keep every running node's rules current, until this process is ended."""
    loaded: dict[str, tuple[int | None, str]] = {}
    client: _Client | None = None
    while True:
        try:
            client = client or _Client(cluster)
            pods, namespaces, policies = (client.items(path) for path in PATHS)
            text = ruleset(pods, namespaces, policies, str(cluster.network.nodes))
        except (OSError, http.client.HTTPException, ValueError):
            client = None  # the API server is away; what is loaded stays in force
        else:
            for node in cluster.nodes:
                held = node.namespaces
                state = (held.pid if held else None, text)
                if held and loaded.get(node.name) != state:
                    with suppress(ClusterError):  # ended meanwhile; seen again next time
                        run(*held.command("nft", "-f", "-"), stdin=text)
                        loaded[node.name] = state
        time.sleep(POLL_SECONDS)


class _Client:
    """One kept connection to the API server."""

    def __init__(self, cluster: "Cluster") -> None:
        folder = cluster.state / "certificates"
        trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        trust.load_cert_chain(folder / "admin.crt", folder / "admin.key")
        server = urllib.parse.urlsplit(cluster.control_plane.server)
        self._connection = http.client.HTTPSConnection(
            str(server.hostname), server.port, context=trust, timeout=5
        )

    def items(self, path: str) -> list[Document]:
        """Everything at a path, from the API server's own memory."""
        self._connection.request("GET", f"{path}?resourceVersion=0")
        answer = self._connection.getresponse()
        content = json.loads(answer.read())
        if answer.status != http.client.OK:
            raise ValueError(f"{path}: {content.get('message')}")
        found: list[Document] = content["items"]
        return found


@dataclass(frozen=True)
class _World:
    pods: Sequence[Pod]
    namespaces: Mapping[str, Labels]

    def allowed(self, rule: Document, peers: str, pod: Pod) -> Iterator[str]:
        """Lines that let through what one rule of a policy on `pod` allows."""
        side = "saddr" if peers == "from" else "daddr"
        if not rule.get(peers):
            yield from _lines("", rule, [pod] if peers == "from" else [])
            return
        for peer in rule[peers]:
            if "ipBlock" in peer:
                block = f"ip {side} {peer['ipBlock']['cidr']}"
                if peer["ipBlock"].get("except"):
                    block += f" ip {side} != {{ {', '.join(peer['ipBlock']['except'])} }}"
                yield from _lines(block, rule, [pod] if peers == "from" else [])
                continue
            chosen = [other for other in self.pods if self._is_peer(peer, other, pod.namespace)]
            if peers == "from" and chosen:
                addresses = ", ".join(other.address for other in chosen)
                yield from _lines(f"ip saddr {{ {addresses} }}", rule, [pod])
            elif peers == "to":
                for other in chosen:
                    yield from _lines(f"ip daddr {other.address}", rule, [other])

    def _is_peer(self, peer: Document, other: Pod, own_namespace: str) -> bool:
        if "namespaceSelector" in peer:
            labels = self.namespaces.get(other.namespace, {})
            in_namespace = selects(peer["namespaceSelector"], labels)
        else:
            in_namespace = other.namespace == own_namespace
        return in_namespace and selects(peer.get("podSelector") or {}, other.labels)


def _lines(peer: str, rule: Document, targets: Iterable[Pod]) -> Iterator[str]:
    """One line for each port of a rule; named ports are those of the pods that are reached."""
    if not rule.get("ports"):
        yield f"{peer} return".strip()
    for port in rule.get("ports") or ():
        protocol = port.get("protocol", "TCP").lower()
        number = port.get("port")
        if number is None:
            yield f"{peer} meta l4proto {protocol} return".strip()
        elif isinstance(number, int):
            end = f"-{port['endPort']}" if "endPort" in port else ""
            yield f"{peer} {protocol} dport {number}{end} return".strip()
        else:
            for target in targets:
                if (protocol, number) in target.ports:
                    yield f"{peer} {protocol} dport {target.ports[protocol, number]} return".strip()


def _pods(documents: Iterable[Document]) -> list[Pod]:
    """Pods with an address of their own that may still send or receive, in a stable order."""
    found = []
    for document in documents:
        status, spec = document.get("status", {}), document["spec"]
        if (
            not status.get("podIP")
            or spec.get("hostNetwork")
            or status.get("phase") in {"Succeeded", "Failed"}
        ):
            continue
        ports = {
            (port.get("protocol", "TCP").lower(), port["name"]): port["containerPort"]
            for container in spec["containers"]
            for port in container.get("ports") or ()
            if "name" in port
        }
        namespace = document["metadata"]["namespace"]
        found.append(Pod(namespace, _labels(document), status["podIP"], ports))
    return sorted(found, key=lambda pod: pod.address)


def _types(spec: Document) -> Sequence[str]:
    declared: Sequence[str] = spec.get("policyTypes") or ()
    return declared or (["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])


def _holds(term: Document, labels: Labels) -> bool:
    key: str = term["key"]
    operator: str = term["operator"]
    values: Sequence[str] = term.get("values") or ()
    if operator == "In":
        return labels.get(key) in values
    if operator == "NotIn":
        return labels.get(key) not in values
    return (key in labels) == (operator == "Exists")


def _chain(name: str, rules: Iterable[str]) -> str:
    lines = "\n".join(f"    {rule}" for rule in rules)
    return f"  chain {name} {{\n{lines}\n  }}"


def _name(document: Document) -> str:
    return str(document["metadata"]["name"])


def _labels(document: Document) -> Labels:
    labels: Labels = document["metadata"].get("labels") or {}
    return labels
