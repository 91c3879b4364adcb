"""The whole cluster: a control plane, nodes, DNS, and on demand what reads metrics."""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import (
    addons,
    debian,
    fixed,
    images,
    leftovers,
    network,
    places,
    processes,
    programs,
    storage,
    store,
)
from cluster.certificates import Authority, Pair
from cluster.control_plane import ControlPlane, Network
from cluster.errors import ClusterError
from cluster.fixed import Fixed
from cluster.network import ClusterNetwork
from cluster.node import Namespaces, Node
from cluster.progress import phase, say

DEFAULT_NAME = "default"
COMPONENTS = ("kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True)
class Cluster:
    """A real cluster of this machine, by its name; several can run beside each other."""

    name: str = DEFAULT_NAME
    num_nodes: int = 2
    """Only for a cluster that is not up yet."""
    node_grace_seconds: int = 20

    @property
    def state(self) -> Path:
        """Folder of everything that the cluster keeps."""
        return places.clusters() / self.name

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator."""
        return self.state / "kubeconfig"

    @property
    def network(self) -> ClusterNetwork:
        """Its addresses, chosen when it is first started.

        Raises:
            ClusterError: it was not started.
        """
        return ClusterNetwork(self._fixed.index)

    @property
    def control_plane(self) -> ControlPlane:
        """Its control plane."""
        return ControlPlane(
            self.name,
            components=COMPONENTS,
            network=Network(
                address=self.network.host,
                services=str(self.network.services),
                first_service=self.network.first_service,
            ),
            node_grace_seconds=self.node_grace_seconds,
        )

    @property
    def nodes(self) -> Sequence[Node]:
        """Its nodes, running or not."""
        addresses = self.network
        return [
            Node(
                name=f"node{number}",
                state=self.state,
                network=addresses.node(number),
                labels={"topology.kubernetes.io/zone": f"zone{number}"},
            )
            for number in range(1, self._fixed.num_nodes + 1)
        ]

    def node(self, name: str) -> Node:
        """One node by its name.

        Raises:
            ClusterError: there is no such node.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise ClusterError(f"no node {name!r}; there are {[node.name for node in self.nodes]}")

    @property
    def is_up(self) -> bool:
        """Whether it was started to the end and its API server answers."""
        return (self.state / "up").exists() and self.control_plane.is_running()

    def up(self, *, with_images: bool = False, metrics: bool = False) -> bool:
        """Start the cluster, or what of it is missing.

        Args:
            with_images: build the project's images and give them to the nodes.
            metrics: also run Prometheus and prometheus-adapter.

        Returns:
            Whether it was already up before.

        Raises:
            ClusterError: something is missing or fails; `down` then cleans up.
        """
        if os.geteuid() != 0:
            raise ClusterError("the cluster's nodes need root: namespaces, mounts and cgroups")
        if not 1 <= self.num_nodes <= network.MAX_NODES:
            raise ClusterError(f"{self.num_nodes} nodes; 1 to {network.MAX_NODES} are possible")
        with self._locked():
            was_up = self.is_up
            if with_images and not images.is_built() and not programs.is_built("kubelet"):
                needed = programs.FREE_BYTES_TO_BUILD + images.FREE_BYTES_TO_BUILD
                programs.check_disk(places.clusters(), needed, "build everything, once")
            # Before the nodes: what is in the store when they start costs them nothing.
            own = images.ensure() if with_images else {}
            if not was_up:
                self._start(metrics=metrics)
            self.load(own.values())
            if metrics:
                addons.start_metrics(self)
        return was_up

    def down(self) -> list[str]:
        """End everything of the cluster, also of one that was never finished.

        Returns:
            What could not be removed; empty when nothing is left.
        """
        with self._locked():
            return leftovers.remove(self.state)

    def load(self, references: Iterable[str]) -> None:
        """Give images of the store to every running node that lacks them."""
        wanted = set(references)
        for node in self.nodes:
            lacking = wanted - node.containerd.images()
            if lacking:
                with phase(f"gave {', '.join(sorted(lacking))} to {node.name}"):
                    node.containerd.load(store.layout(), lacking)

    def start_node(self, name: str) -> None:
        """Start a node unless it runs, and wait until it is Ready."""
        node = self.node(name)
        if node.namespaces is None:
            self._start_node(node)
        self._wait_ready(name)

    def stop_node(self, name: str) -> None:
        """End a node without a word, as a power cut does."""
        self.node(name).stop()

    def set_cable(self, name: str, *, connected: bool) -> None:
        """Cut a node off from the network while its pods go on, or connect it again."""
        network.set_cable(self._switch(), self.node(name), connected=connected)

    def set_gpus(self, node: str, units: Mapping[str, int]) -> None:
        """Let a node offer GPUs that are not there.

        Args:
            node: its name.
            units: resource name without `nvidia.com/` to number, `{"gpu": 2, "mig-1g.18gb": 3}`.
        """
        offered = {f"nvidia.com/{name}": str(number) for name, number in units.items()}
        patch = {"status": {"capacity": offered, "allocatable": offered}}
        self.control_plane.kubectl(
            "patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(patch)
        )

    def link_programs(self) -> Path:
        """A folder with kubectl and helm under their usual names, for PATH."""
        folder = self.state / "bin"
        folder.mkdir(exist_ok=True)
        for name, program in programs.ensure(["kubectl", "helm"]).items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(program)
        return folder

    def _start(self, *, metrics: bool) -> None:
        say(f"starting cluster {self.name!r}; state and logs are in {self.state}")
        debian.ensure(debian.CONTROL_PLANE, debian.NODES)
        programs.ensure(
            ["pause", "etcd", "kube-apiserver", "kubectl", *COMPONENTS,
             *store.PROGRAMS, "kubelet", "kube-proxy", "coredns", "helm"]
        )  # fmt: skip
        if metrics:
            programs.ensure(addons.METRICS_PROGRAMS)
        # What an earlier start left half-way is in the way of a new one.
        if self.state.exists():
            leftovers.end(self.state)
            shutil.rmtree(self.state)
        self._fix()
        with phase("gave the nodes their images"), store.locked():
            addons.ensure_images(metrics=metrics)
        with phase("connected the network"):
            switch = network.start_switch(self.state, self.network)
        with phase("started the control plane"):
            self.control_plane.start()
        for node in self.nodes:
            with phase(f"started {node.name}"):
                self._start_node(node, switch)
        network.route_services(self.network, self.nodes[0])
        # By file: the program must come up the same whoever started the cluster, and from where.
        enforce: list[str | Path] = [sys.executable, places.SOURCE, "--name", self.name, "enforce"]
        processes.start("policies", enforce, self.state)
        addons.start_dns(self)
        storage.start_storage(self)
        with phase("all nodes are Ready"):
            self._wait_ready(*(node.name for node in self.nodes))
        with phase("DNS answers"):
            addons.wait_for_dns(self)
        (self.state / "up").touch()

    def _start_node(self, node: Node, switch: Namespaces | None = None) -> None:
        folder = self.state / "certificates"
        authority = Authority(Pair(folder / "ca.crt", folder / "ca.key"), folder)
        with store.locked():
            node.prepare(authority, self.control_plane.server)
        node.start()
        others = [other for other in self.nodes if other is not node]
        network.plug_in(switch or self._switch(), node, others, self.network.interface)
        node.start_programs()

    def _wait_ready(self, *names: str) -> None:
        nodes = [f"node/{name}" for name in names]
        # A healthy kubelet may not have registered its node yet.
        try:
            for state in ("create", "condition=Ready"):
                self.control_plane.kubectl("wait", f"--for={state}", *nodes, "--timeout=240s")
        except ClusterError as error:
            ends = (
                f"{name}'s kubelet says last:\n{self.node(name).log('kubelet')}" for name in names
            )
            raise ClusterError("\n".join((str(error), *ends))) from None

    def _switch(self) -> Namespaces:
        for process in processes.recorded(self.state):
            if process.name == network.SWITCH and process.is_alive():
                return Namespaces(process)
        raise ClusterError(f"cluster {self.name!r} is not up")

    def _fix(self) -> None:
        """Choose what stays as it is while the cluster lives."""
        folder = places.clusters()
        with (folder / ".addresses.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            taken = {other.index for other in fixed.of_all()}
            chosen = network.choose(taken, network.routed())
            Fixed(chosen.index, self.num_nodes).write(self.state)

    @property
    def _fixed(self) -> Fixed:
        found = fixed.read(self.state)
        if found is None:
            raise ClusterError(
                f"cluster {self.name!r} is not up; start it with: python tools/cluster up"
            )
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one command at a time change the cluster; a second one waits and says so."""
        places.clusters().mkdir(parents=True, exist_ok=True)
        path = places.lock(self.name)
        while True:
            with path.open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    say(f"another command is at work on cluster {self.name!r}; waiting for it")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                # The holder before may have removed the file, and this is nobody's lock then.
                if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                    try:
                        yield
                    finally:
                        if not self.state.exists():
                            path.unlink()
                    return
