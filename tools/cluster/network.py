"""The network of a cluster: a switch in a namespace of its own, one cable to the host.

All that the host sees is one interface and its routes. The interface is one end of a pair whose
other end lies in the switch. The kernel removes both some time after the switch's process ended,
seconds later on a busy machine; whoever needs it gone unplugs the host.
"""

import ipaddress
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError
from cluster.node import Namespaces, Node, NodeNetwork, run

MAX_CLUSTERS = 16
MAX_NODES = 15
_NODES = ipaddress.IPv4Network("10.201.0.0/16")
_PODS = ipaddress.IPv4Network("10.202.0.0/16")
_SERVICES = ipaddress.IPv4Network("10.203.0.0/16")
SWITCH = "switch"


@dataclass(frozen=True)
class ClusterNetwork:
    """Addresses of one cluster out of those that fit beside each other on a machine."""

    index: int

    @property
    def nodes(self) -> ipaddress.IPv4Network:
        """Subnet of the nodes and of the host's own address."""
        return _subnet(_NODES, 24, self.index)

    @property
    def pods(self) -> ipaddress.IPv4Network:
        """Subnet of all pods."""
        return _subnet(_PODS, 20, self.index)

    @property
    def services(self) -> ipaddress.IPv4Network:
        """Subnet of Service addresses."""
        return _subnet(_SERVICES, 24, self.index)

    @property
    def host(self) -> str:
        """The host's address on the switch, where the API server listens."""
        return str(self.nodes[1])

    @property
    def first_service(self) -> str:
        """Address of the Service `kubernetes`."""
        return str(self.services[1])

    @property
    def dns(self) -> str:
        """Address of the DNS Service."""
        return str(self.services[10])

    @property
    def interface(self) -> str:
        """Name of the host's interface."""
        return f"deepseek{self.index}"

    def node(self, number: int) -> NodeNetwork:
        """Addresses of node `number`, counted from 1."""
        pods = _subnet(self.pods, 24, number)
        return NodeNetwork(
            address=str(self.nodes[10 + number]),
            prefix=self.nodes.prefixlen,
            pods=str(pods),
            gateway=self.host,
            cluster_pods=str(self.pods),
            cluster_dns=self.dns,
        )


def routed() -> list[ipaddress.IPv4Network]:
    """The networks that this machine has routes to, the default route aside."""
    listed = json.loads(run("ip", "-4", "-json", "route", "show", "table", "all"))
    return [
        ipaddress.IPv4Network(route["dst"])
        for route in listed
        if route["dst"] != "default" and route.get("type", "unicast") == "unicast"
    ]


def choose(taken: Collection[int], routes: Sequence[ipaddress.IPv4Network]) -> ClusterNetwork:
    """The first set of addresses that no other cluster and no route of this machine uses.

    Raises:
        ClusterError: there is none.
    """
    for index in range(MAX_CLUSTERS):
        network = ClusterNetwork(index)
        own = (network.nodes, network.pods, network.services)
        if index not in taken and not any(part.overlaps(route) for part in own for route in routes):
            return network
    raise ClusterError(
        f"{len(taken)} clusters and this machine's routes leave no room in {_NODES}, {_PODS} and "
        f"{_SERVICES} for another; see `ip route`, and end clusters that are not needed"
    )


def start_switch(state: Path, network: ClusterNetwork) -> Namespaces:
    """Start the switch and plug the host in."""
    switch = Namespaces.hold(SWITCH, state, "net")
    run(
        "ip", "link", "add", network.interface, "type", "veth",
        "peer", "name", "host", "netns", str(switch.pid),
    )  # fmt: skip
    # A cluster of another cache folder may have chosen the same name at the same time.
    run("ip", "link", "set", network.interface, "alias", str(state))
    run("ip", "address", "add", f"{network.host}/{network.nodes.prefixlen}",
        "dev", network.interface)  # fmt: skip
    run("ip", "link", "set", network.interface, "up")
    for words in (
        ("link", "add", "bridge", "type", "bridge"),
        ("link", "set", "bridge", "up"),
        ("link", "set", "host", "master", "bridge", "up"),
    ):
        switch.run("ip", *words)
    return switch


def unplug_host(state: Path) -> None:
    """Remove the host's interface of the cluster in a folder; it is gone when this returns."""
    for alias in Path("/sys/class/net").glob("*/ifalias"):
        with suppress(OSError, ClusterError):  # the kernel was first
            if alias.read_text(encoding="utf-8").rstrip("\n") == str(state):
                run("ip", "link", "delete", alias.parent.name)


def plug_in(switch: Namespaces, node: Node, others: list[Node], interface: str) -> None:
    """Give a started node its cable, and routes between its pods, the others' and the host."""
    held = node.namespaces
    if held is None:
        raise ClusterError(f"node {node.name} is not running")
    # The cable of the node before it was stopped goes with its namespace, but not at once.
    with suppress(ClusterError):
        switch.run("ip", "link", "delete", node.name)
    switch.run(
        "ip", "link", "add", node.name, "type", "veth",
        "peer", "name", "eth0", "address", hardware_address(node.network.address),
        "netns", str(held.pid),
    )  # fmt: skip
    switch.run("ip", "link", "set", node.name, "master", "bridge", "up")
    addresses = node.network
    for words in (
        ("link", "set", "lo", "up"),
        ("address", "add", f"{addresses.address}/{addresses.prefix}", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
        ("route", "add", "default", "via", addresses.gateway),
        *(("route", "add", other.network.pods, "via", other.network.address) for other in others),
    ):
        held.run("ip", *words)
    held.run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
    run("ip", "route", "replace", addresses.pods, "via", addresses.address, "dev", interface)


def hardware_address(address: str) -> str:
    """A node's own, the same after each start: its neighbours remember it for up to a minute."""
    return ":".join(f"{byte:02x}" for byte in (2, 0, *ipaddress.IPv4Address(address).packed))


def route_services(network: ClusterNetwork, node: Node) -> None:
    """Let the host reach Services, through one node's kube-proxy."""
    run("ip", "route", "replace", str(network.services), "via", node.network.address,
        "dev", network.interface)  # fmt: skip


def set_cable(switch: Namespaces, node: Node, *, connected: bool) -> None:
    """Cut a node off from everything, or connect it again."""
    switch.run("ip", "link", "set", node.name, "up" if connected else "down")


def _subnet(network: ipaddress.IPv4Network, prefix: int, index: int) -> ipaddress.IPv4Network:
    first = int(network.network_address) + index * 2 ** (32 - prefix)
    return ipaddress.IPv4Network((first, prefix))
