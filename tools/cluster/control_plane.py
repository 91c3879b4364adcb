"""etcd, kube-apiserver and what else decides: a control plane without nodes, ready in seconds.

Tests use it alone, several at a time and beside those of other test runs, with kwok for simulated
nodes; the whole cluster is built on it.
"""

import fcntl
import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster import certificates, files, leftovers, places, ports, processes, programs
from cluster.errors import ClusterError
from cluster.processes import Process

ADMIN_GROUP = "system:masters"
START_SECONDS = 240.0
RUN_AS_COMPONENTS = ("kube-controller-manager", "kube-scheduler", "kwok")


@dataclass(frozen=True)
class Network:
    """Addresses of a control plane."""

    address: str = "127.0.0.1"
    """Where the API server can be reached, from pods too when there are some."""
    services: str = "10.203.255.0/24"
    first_service: str = "10.203.255.1"


@dataclass
class ControlPlane:
    """A control plane: a context manager, or `start` and `stop`.

    With `with`, it is this process's own: others may use the name at the same time, and its
    processes end when the thread that started them does, even by SIGKILL.
    """

    name: str
    components: Sequence[str] = ("kube-controller-manager",)
    """Beside etcd and kube-apiserver: kube-controller-manager, kube-scheduler, kwok."""
    network: Network = Network()
    node_grace_seconds: int = 40
    """How long a silent node stays Ready."""
    node_lease_seconds: int = 40
    """How long a simulated node's Lease holds; it is renewed after a quarter of that."""
    api_server_flags: Sequence[str] = ()
    controller_manager_flags: Sequence[str] = ()
    dies_with_parent: bool = False
    _running: dict[str, Process] = field(default_factory=dict, init=False)
    _owned_name: str = field(default="", init=False)
    """Within `with`."""

    def __post_init__(self) -> None:
        unknown = set(self.components) - set(RUN_AS_COMPONENTS)
        if unknown:
            raise ClusterError(
                f"unknown components {sorted(unknown)}; allowed are {list(RUN_AS_COMPONENTS)}"
            )

    @property
    def state(self) -> Path:
        """Folder of its certificates, data and logs."""
        return places.clusters() / (self._owned_name or self.name)

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator."""
        return self.state / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """What pods asked of the API server, a JSON object a line."""
        return self.state / "audit.log"

    @property
    def ports(self) -> dict[str, int]:
        """Port of each server, chosen at the first start and kept over restarts."""
        file = self.state / "ports.json"
        if not file.exists():
            _choose_ports(file, ("etcd", "etcd-peer", "kube-apiserver", *RUN_AS_COMPONENTS))
        chosen: dict[str, int] = json.loads(file.read_text())
        return chosen

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine's own programs can reach it, so that it can have no nodes."""
        return self.network.address.startswith("127.")

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{self.network.address}:{self.ports['kube-apiserver']}"

    def __enter__(self) -> Self:
        leftovers.remove_orphans()
        self.dies_with_parent = True
        self._owned_name = leftovers.owned(self.name)
        self.stop()  # what this process may have left under this name
        with ExitStack() as undo:
            undo.callback(self.stop)
            self.start()
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and return when the API server is ready.

        Raises:
            ClusterError: a program ends or is not ready in time; the message shows its log.
        """
        self.prepare()
        self.start_etcd()
        self.start_api_server()
        for component in self.components:
            self.start_component(component)

    def stop(self) -> None:
        """End its processes and remove its folder."""
        leftovers.remove(self.state)
        self._running.clear()

    def prepare(self) -> None:
        """Build the programs and make certificates and kubeconfigs, where they are missing."""
        programs.ensure(["etcd", "kube-apiserver", "kubectl", *self.components])
        if self.kubeconfig.exists():
            return
        self.state.mkdir(parents=True, exist_ok=True)
        folder = self.state / "certificates"
        authority = certificates.authority(folder, "ca")
        authority.issue(
            "kube-apiserver",
            "kube-apiserver",
            [
                f"IP:{self.network.address}",
                "IP:127.0.0.1",
                f"IP:{self.network.first_service}",
                "DNS:localhost",
                "DNS:kubernetes.default.svc",
                "DNS:kubernetes.default.svc.cluster.local",
            ],
        )
        authority.issue("kubelet-client", "kube-apiserver-kubelet-client", user=ADMIN_GROUP)
        certificates.authority(folder, "front-proxy-ca").issue("front-proxy", "front-proxy-client")
        certificates.signing_key(folder, "service-accounts")
        for component in ("kube-controller-manager", "kube-scheduler"):
            self.issue_kubeconfig(component, f"system:{component}")
        self.issue_kubeconfig("kwok", "kwok", ADMIN_GROUP)
        # Last: that it exists says that all the others do.
        admin = authority.issue("admin", "admin", user=ADMIN_GROUP)
        certificates.kubeconfig(self.kubeconfig, self.server, authority.certificate, admin)

    def issue_kubeconfig(self, name: str, user: str, group: str = "") -> Path:
        """Make a kubeconfig for another user of this cluster, at NAME.kubeconfig."""
        folder = self.state / "certificates"
        pair = certificates.Pair(folder / "ca.crt", folder / "ca.key")
        client = certificates.Authority(pair, folder).issue(name, user, user=group)
        target = self.state / f"{name}.kubeconfig"
        return certificates.kubeconfig(target, self.server, folder / "ca.crt", client)

    def start_etcd(self) -> None:
        """Start etcd and wait until it answers."""
        ports = self.ports
        client, peer = (f"http://127.0.0.1:{ports[name]}" for name in ("etcd", "etcd-peer"))
        self._start(
            "etcd",
            f"--data-dir={self.state / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # A local cluster is rebuilt, not recovered.
            "--unsafe-no-fsync",
            "--quota-backend-bytes=4294967296",
        )
        self._wait("etcd", f"{client}/health")

    def start_api_server(self) -> None:
        """Start kube-apiserver and wait until it is ready."""
        folder = self.state / "certificates"
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.ports['etcd']}",
            f"--bind-address={self.network.address}",
            f"--advertise-address={self.network.address}",
            f"--secure-port={self.ports['kube-apiserver']}",
            f"--service-cluster-ip-range={self.network.services}",
            f"--tls-cert-file={folder / 'kube-apiserver.crt'}",
            f"--tls-private-key-file={folder / 'kube-apiserver.key'}",
            f"--client-ca-file={folder / 'ca.crt'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={folder / 'service-accounts.key'}",
            # The kubelets' names are in no DNS, so logs and exec go to their addresses.
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={folder / 'kubelet-client.crt'}",
            f"--kubelet-client-key={folder / 'kubelet-client.key'}",
            f"--kubelet-certificate-authority={folder / 'ca.crt'}",
            "--requestheader-allowed-names=front-proxy-client",
            f"--requestheader-client-ca-file={folder / 'front-proxy-ca.crt'}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={folder / 'front-proxy.crt'}",
            f"--proxy-client-key-file={folder / 'front-proxy.key'}",
            "--enable-aggregator-routing=true",
            # A loopback address may not be an endpoint, and without nodes nobody looks for one.
            f"--endpoint-reconciler-type={'none' if self.is_loopback else 'lease'}",
            "--allow-privileged=true",
            "--profiling=false",
            f"--audit-policy-file={places.SOURCE / 'manifests' / 'audit.yaml'}",
            f"--audit-log-path={self.audit_log}",
            *self.api_server_flags,
        )
        self._wait("kube-apiserver", f"{self.server}/readyz")

    def start_component(self, name: str) -> None:
        """Start one of `RUN_AS_COMPONENTS`."""
        folder = self.state / "certificates"
        if name == "kwok":
            self._start_kwok(name, "fake", self.ports[name])
            return
        flags = [
            f"--kubeconfig={self.state / f'{name}.kubeconfig'}",
            f"--authentication-kubeconfig={self.state / f'{name}.kubeconfig'}",
            f"--authorization-kubeconfig={self.state / f'{name}.kubeconfig'}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.ports[name]}",
            "--leader-elect=false",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        ]
        if name == "kube-controller-manager":
            flags += [
                f"--root-ca-file={folder / 'ca.crt'}",
                f"--service-account-private-key-file={folder / 'service-accounts.key'}",
                f"--cluster-signing-cert-file={folder / 'ca.crt'}",
                f"--cluster-signing-key-file={folder / 'ca.key'}",
                "--use-service-account-credentials=true",
                "--horizontal-pod-autoscaler-sync-period=5s",
                f"--node-monitor-grace-period={self.node_grace_seconds}s",
                "--node-monitor-period=2s",
                *self.controller_manager_flags,
            ]
        self._start(name, *flags)

    def start_zone(self, zone: str) -> None:
        """Start a kwok of its own for the nodes annotated `kwok.x-k8s.io/node: ZONE`.

        Its nodes are heard of until `stop_zone`, and again after the next start.
        """
        self._start_kwok(f"kwok-{zone}", zone, ports.choose(1)[0])

    def stop_zone(self, zone: str) -> None:
        """Let the nodes of a zone fall silent, all at once; their objects stay as they are."""
        self.stop_component(f"kwok-{zone}", grace_seconds=0)

    def _start_kwok(self, name: str, nodes: str, port: int) -> None:
        self._start(
            name,
            f"--kubeconfig={self.state / 'kwok.kubeconfig'}",
            f"--config={places.MANIFESTS / 'simulated.yaml'}",
            # Real nodes carry no such annotation, so kwok leaves them alone.
            f"--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node={nodes}",
            f"--node-lease-duration-seconds={self.node_lease_seconds}",
            f"--server-address=127.0.0.1:{port}",
            program="kwok",
        )

    def stop_component(self, name: str, grace_seconds: float = 5.0) -> None:
        """End one program, by its name; `start_component` and its like bring it back."""
        found = [process for process in processes.recorded(self.state) if process.name == name]
        processes.stop(found, grace_seconds)

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Run kubectl as administrator and return what it prints.

        Raises:
            ClusterError: it fails; the message has what it said.
        """
        done = subprocess.run(
            [programs.path("kubectl"), f"--kubeconfig={self.kubeconfig}", *words],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(words)} failed: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *manifests: object) -> None:
        """Apply objects as administrator, on the server side."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=document)

    def is_running(self) -> bool:
        """Whether the API server answers that it is ready."""
        return self.kubeconfig.exists() and _answers(f"{self.server}/readyz")

    def _start(self, name: str, *flags: str, program: str | None = None) -> None:
        self._running[name] = processes.start(
            name,
            [programs.path(program or name), *flags],
            self.state,
            dies_with_parent=self.dies_with_parent,
        )

    def _wait(self, name: str, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if _answers(url):
                return
            if not self._running[name].is_alive():
                break
            time.sleep(0.05)
        raise ClusterError(f"{name} did not become ready at {url}; its log ends:\n{self.log(name)}")

    def log(self, name: str, num_lines: int = 15) -> str:
        """The end of a program's log."""
        file = self.state / "logs" / f"{name}.log"
        if not file.exists():
            return f"(no {file})"
        return "\n".join(file.read_text(errors="replace").splitlines()[-num_lines:])


def _choose_ports(file: Path, names: Sequence[str]) -> None:
    """Write down ports that no other control plane has, running or stopped."""
    folder = places.clusters()
    with (folder / ".ports.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken: set[int] = set()
        for other in folder.glob("*/ports.json"):
            with suppress(FileNotFoundError):  # another one that ends just now
                taken.update(json.loads(other.read_text()).values())
        chosen = ports.choose(len(names), taken)
        files.write(file, json.dumps(dict(zip(names, chosen, strict=True))))


def _answers(url: str) -> bool:
    # Only whether something is ready there is asked, so its certificate does not matter.
    context = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False
