"""Clusters beside each other share no address, with each other or with the machine."""

import ipaddress
from itertools import combinations

import pytest

from cluster import ClusterError, network
from cluster.network import MAX_CLUSTERS, MAX_NODES, ClusterNetwork


def test_no_two_clusters_share_an_address():
    parts = [
        part
        for index in range(MAX_CLUSTERS)
        for part in (
            ClusterNetwork(index).nodes,
            ClusterNetwork(index).pods,
            ClusterNetwork(index).services,
        )
    ]

    assert not any(one.overlaps(other) for one, other in combinations(parts, 2))


@pytest.mark.parametrize("index", [0, MAX_CLUSTERS - 1])
def test_nodes_have_pods_of_their_own_within_the_cluster(index):
    cluster = ClusterNetwork(index)

    nodes = [cluster.node(number) for number in range(1, MAX_NODES + 1)]

    pods = [ipaddress.ip_network(node.pods) for node in nodes]
    assert all(part.subnet_of(cluster.pods) for part in pods)
    assert not any(one.overlaps(other) for one, other in combinations(pods, 2))
    addresses = [node.address for node in nodes]
    assert len({*addresses, cluster.host}) == MAX_NODES + 1
    assert all(ipaddress.ip_address(address) in cluster.nodes for address in addresses)


def test_the_interface_has_a_name_that_linux_allows():
    assert len(ClusterNetwork(MAX_CLUSTERS - 1).interface) <= 15


@pytest.mark.parametrize(
    ("taken", "route", "index"),
    [
        pytest.param(set(), "192.0.2.0/24", 0, id="nothing in the way"),
        pytest.param({0, 1}, "192.0.2.0/24", 2, id="other clusters"),
        pytest.param(set(), "10.201.0.0/24", 1, id="a route to the first nodes"),
        pytest.param(set(), "10.202.16.5/32", 0, id="a route to the second pods"),
        pytest.param({0}, "10.203.1.0/24", 2, id="both"),
    ],
)
def test_free_addresses_are_chosen(taken, route, index):
    assert network.choose(taken, [ipaddress.IPv4Network(route)]).index == index


def test_no_room_is_said():
    with pytest.raises(ClusterError, match="leave no room"):
        network.choose(set(), [ipaddress.IPv4Network("10.0.0.0/8")])


def test_hardware_addresses_are_stable_and_made_here():
    assert network.hardware_address("10.201.0.12") == "02:00:0a:c9:00:0c"
