"""A node: a kubelet, its own containerd and its own kube-proxy, in namespaces of their own.

Process ids, mounts, network, host name: everything a node does happens in namespaces that the
kernel takes away when the node's first process ends. Ending that one process therefore ends
containerd, shims and pods together, and leaves no mount, no bridge and no firewall rule behind.
Inside, the usual paths hold: /var/lib/kubelet, /run/containerd/containerd.sock, /var/log/pods.
"""

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import processes, programs, store
from cluster.certificates import Authority, kubeconfig
from cluster.errors import ClusterError
from cluster.oci import Containerd
from cluster.processes import Process

START_SECONDS = 240.0
PAUSE_IMAGE = "localhost/pause:v1"
CGROUPS = Path("/sys/fs/cgroup")
_PROGRAMS = "/run/cluster/bin"
_OWN = "/var/lib/node"


@dataclass(frozen=True)
class Namespaces:
    """Namespaces held open by one process, which is their init."""

    process: Process

    @staticmethod
    def hold(name: str, state: Path, *kinds: str) -> "Namespaces":
        """Start a process in new namespaces of the given kinds, named as `unshare` names them."""
        flags = [f"--{kind}" for kind in kinds]
        if "mount" in kinds:
            flags += ["--propagation", "private"]
        if "pid" in kinds:
            flags += ["--mount-proc"]
        process = processes.start(
            name,
            # Ignoring SIGCHLD makes the kernel bury orphans, as an init must.
            ["/usr/bin/unshare", *flags, "--fork", "--kill-child",
             "/usr/bin/env", "--ignore-signal=CHLD", "sleep", "infinity"],
            state,
        )  # fmt: skip
        held = Namespaces(process)
        _wait_for(lambda: held.pid is not None, START_SECONDS, f"{name} did not start")
        return held

    @property
    def pid(self) -> int | None:
        """Process id of the init, seen from the host; None until it runs, and when it is gone."""
        if not self.process.is_alive():
            return None
        # The child has its namespaces once it has become another program.
        for child in _children(self.process.pid):
            with suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text().strip() == "sleep":
                    return child
        return None

    def command(self, *words: str | Path) -> list[str]:
        """The words that run a command inside.

        Raises:
            ClusterError: the namespaces are gone.
        """
        pid = self.pid
        if pid is None:
            raise ClusterError(f"{self.process.name} is not running")
        kinds = ["--net", "--mount"]
        if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            kinds += ["--pid", "--uts", "--ipc"]
        return ["/usr/bin/nsenter", "--target", str(pid), *kinds, *(str(word) for word in words)]

    def run(self, *words: str | Path) -> str:
        """Run a command inside and return what it prints."""
        return run(*self.command(*words))

    def end(self) -> None:
        """End all that runs inside at once; when this returns, nothing of it does."""
        # The init of a namespace of process ids ends after all the others.
        init = None if self.pid is None else processes.at(self.pid)
        processes.stop(filter(None, (self.process, init)), grace_seconds=0)

    def keep_running(self, log: str, *words: str) -> None:
        """Start a program inside that goes on when this command ends, and again when it ends.

        Args:
            log: file for its output, as seen from inside.
            words: the program and its arguments.
        """
        loop = 'while :; do "$@"; echo "ended with $?; starting again"; sleep 1; done'
        detached = (
            f"umask 022; exec >>{log} 2>&1 </dev/null; setsid /bin/sh -c '{loop}' sh \"$@\" &"
        )
        self.run("/bin/sh", "-c", detached, "sh", *words)


@dataclass(frozen=True)
class NodeNetwork:
    """Addresses of a node."""

    address: str
    prefix: int
    pods: str
    gateway: str
    cluster_pods: str
    cluster_dns: str


@dataclass(frozen=True)
class Node:
    """One node of a cluster; its folder lives as long as the cluster, over restarts."""

    name: str
    state: Path
    """The cluster's folder."""
    network: NodeNetwork
    labels: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """What the node keeps over a restart: /var/lib and /var/log as seen from inside."""
        return self.state / self.name

    @property
    def cgroup(self) -> str:
        """Root of the node's cgroups, in every controller."""
        return f"{cluster_cgroup(self.state)}/{self.name}"

    @property
    def namespaces(self) -> Namespaces | None:
        """The node's namespaces while it runs."""
        for process in processes.recorded(self.state):
            if process.name == self.name and process.is_alive():
                return Namespaces(process)
        return None

    @property
    def containerd(self) -> Containerd:
        """The node's containerd."""
        held = self._running()
        return Containerd(tuple(held.command(programs.path("ctr"), "-n", store.NAMESPACE)))

    def prepare(self, authority: Authority, server: str) -> None:
        """Make the node's folder: shared images, certificates and configuration."""
        own = self.folder / "lib" / "node"
        if own.exists():
            return
        store.copy_to(self.folder / "lib" / "containerd")
        (self.folder / "log").mkdir(parents=True, exist_ok=True)
        part = own.with_name("node.part")
        (part / "cni").mkdir(parents=True, exist_ok=True)
        shutil.copy(authority.certificate, part / "ca.crt")
        kubelet = authority.issue(
            self.name,
            f"system:node:{self.name}",
            [f"DNS:{self.name}", f"IP:{self.network.address}"],
            user="system:nodes",
        )
        shutil.copy(kubelet.certificate, part / "kubelet.crt")
        shutil.copy(kubelet.key, part / "kubelet.key")
        kubeconfig(part / "kubelet.kubeconfig", server, authority.certificate, kubelet)
        proxy = authority.issue(f"{self.name}-proxy", "system:kube-proxy")
        kubeconfig(part / "kube-proxy.kubeconfig", server, authority.certificate, proxy)
        (part / "containerd.toml").write_text(_containerd_configuration(), encoding="utf-8")
        for name, document in (
            ("cni/10-pods.conflist", self._pod_network()),
            ("kubelet.json", self._kubelet_configuration()),
            ("kube-proxy.json", self._proxy_configuration()),
        ):
            (part / name).write_text(json.dumps(document, indent=1), encoding="utf-8")
        (part / "resolv.conf").write_text("", encoding="utf-8")
        part.rename(own)

    def start(self) -> Namespaces:
        """Start the node's namespaces and mounts; `start_programs` follows once it has a link."""
        held = Namespaces.hold(self.name, self.state, "pid", "mount", "net", "uts", "ipc")
        binaries = programs.path("kubelet").parent
        for words in (
            ("hostname", self.name),
            ("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"),
            ("mkdir", "-p", _PROGRAMS, store.SEEN_BY_NODES),
            ("mount", "--bind", binaries, _PROGRAMS),
            ("mount", "--bind", store.folder(), store.SEEN_BY_NODES),
            ("mount", "-o", "remount,bind,ro", store.SEEN_BY_NODES),
            ("mount", "--bind", self.folder / "log", "/var/log"),
            ("mount", "--bind", self.folder / "lib", "/var/lib"),
            # Kubelet and CSI expect mounts under /var/lib to spread between containers.
            ("mount", "--make-rshared", "/"),
        ):
            held.run(*words)
        # Those of the pods before a power cut would hold the kubelet up for seconds each.
        remove_cgroups(self.cgroup)
        _make_cgroups(self.cgroup)
        return held

    def start_programs(self) -> None:
        """Start containerd, kubelet and kube-proxy."""
        held = self._running()
        num_starts = self._num_containerd_starts()
        held.keep_running(
            "/var/log/containerd.log",
            f"{_PROGRAMS}/{programs.path('containerd').name}",
            "--config",
            f"{_OWN}/containerd.toml",
        )
        # Its socket is there before it answers, and a kubelet that gets no answer ends.
        _wait_for(lambda: self._num_containerd_starts() > num_starts, START_SECONDS,
                  f"containerd of {self.name} did not start", self.log("containerd"))  # fmt: skip
        labels = ",".join(f"{key}={value}" for key, value in self.labels.items())
        held.keep_running(
            "/var/log/kubelet.log",
            f"{_PROGRAMS}/{programs.path('kubelet').name}",
            f"--config={_OWN}/kubelet.json",
            f"--kubeconfig={_OWN}/kubelet.kubeconfig",
            f"--hostname-override={self.name}",
            f"--node-ip={self.network.address}",
            f"--node-labels={labels}",
        )
        held.keep_running(
            "/var/log/kube-proxy.log",
            f"{_PROGRAMS}/{programs.path('kube-proxy').name}",
            f"--config={_OWN}/kube-proxy.json",
        )

    def stop(self) -> None:
        """End everything on the node at once, as a power cut does."""
        held = self.namespaces
        if held is not None:
            held.end()

    def _num_containerd_starts(self) -> int:
        """How often containerd has begun to answer kubelets, by its log."""
        file = self.folder / "log" / "containerd.log"
        if not file.exists():
            return 0
        return file.read_text(errors="replace").count("Start streaming server")

    def log(self, program: str, num_lines: int = 15) -> str:
        """The end of a program's log."""
        file = self.folder / "log" / f"{program}.log"
        if not file.exists():
            return f"(no {file})"
        return "\n".join(file.read_text(errors="replace").splitlines()[-num_lines:])

    def _running(self) -> Namespaces:
        held = self.namespaces
        if held is None:
            raise ClusterError(f"node {self.name} is not running")
        return held

    def _pod_network(self) -> dict[str, Any]:
        # Point to point: also pods of one node reach each other through routing, where Service
        # rules see them, whether or not the kernel shows bridged traffic to the firewall.
        return {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/cni",
                        "ranges": [[{"subnet": self.network.pods}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }

    def _kubelet_configuration(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{_OWN}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{_OWN}/kubelet.crt",
            "tlsPrivateKeyFile": f"{_OWN}/kubelet.key",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDNS": [self.network.cluster_dns],
            "clusterDomain": "cluster.local",
            "resolvConf": f"{_OWN}/resolv.conf",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": ["pods"],
            "failCgroupV1": False,
            "failSwapOn": False,
            # All nodes share one disk, which may be nearly full for reasons of its own.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "nodefs.inodesFree": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "nodeStatusUpdateFrequency": "5s",
            "nodeLeaseDurationSeconds": 10,
            "serializeImagePulls": False,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
            "kubeAPIQPS": 100,
            "kubeAPIBurst": 200,
        }

    def _proxy_configuration(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "hostnameOverride": self.name,
            "clientConnection": {"kubeconfig": f"{_OWN}/kube-proxy.kubeconfig"},
            "clusterCIDR": self.network.cluster_pods,
            "detectLocalMode": "ClusterCIDR",
            # Limits of the whole machine, which are not a node's to set.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "nftables": {"minSyncPeriod": "100ms"},
        }


def _containerd_configuration() -> str:
    return f"""\
version = 2
disabled_plugins = ["io.containerd.internal.v1.opt"]

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
# Without CAP_SYS_RESOURCE nobody may lower a process's oom_score_adj, and sandboxes would die.
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
runtime_path = "{_PROGRAMS}/{programs.path("containerd-shim-runc-v2").name}"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{_OWN}/cni"
"""


def run(*words: str | Path, stdin: str | None = None) -> str:
    """Run a command and return what it prints.

    Raises:
        ClusterError: it fails; the message has what it said.
    """
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"{' '.join(str(word) for word in words)} failed: {said}")
    return done.stdout


def cluster_cgroup(state: Path) -> str:
    """The cgroup of the nodes of the cluster in a folder, unlike that of its namesakes."""
    return f"deepseek-{state.name}-{hashlib.sha256(str(state).encode()).hexdigest()[:8]}"


def remove_cgroups(path: str, seconds: float = 30.0) -> list[str]:
    """Remove a cgroup and all below it in every controller.

    Args:
        path: the cgroup, relative to each controller's root.
        seconds: how long to try, while processes in it are on their way out.

    Returns:
        Those that are still busy.
    """
    deadline = time.monotonic() + seconds
    while True:
        busy = []
        for root in _cgroup_roots():
            for folder, _, _ in os.walk(root / path, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    busy.append(folder)
        if not busy or time.monotonic() > deadline:
            return busy
        time.sleep(0.05)


def _make_cgroups(path: str) -> None:
    """Make a cgroup that pods can be started in, under version 1 or 2."""
    for root in _cgroup_roots():
        if root != CGROUPS and (root / "cgroup.controllers").exists():
            continue  # version 2 beside version 1, which does the work then
        folder = root
        for part in Path(path).parts:
            if (folder / "cgroup.subtree_control").exists():
                offered = (folder / "cgroup.controllers").read_text().split()
                for controller in offered:
                    with suppress(OSError):  # not every controller can be handed down
                        (folder / "cgroup.subtree_control").write_text(f"+{controller}")
            parent, folder = folder, folder / part
            folder.mkdir(exist_ok=True)
            # Version 1 starts a cpuset empty, and nothing can run in an empty one.
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (parent / name).exists() and not (root / "cgroup.controllers").exists():
                    (folder / name).write_text((parent / name).read_text())


def _cgroup_roots() -> Iterator[Path]:
    if (CGROUPS / "cgroup.controllers").exists():
        yield CGROUPS
        return
    for root in sorted(CGROUPS.iterdir()):
        if root.is_dir() and not root.is_symlink() and (root / "cgroup.procs").exists():
            yield root


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _wait_for(
    condition: Callable[[], bool], seconds: float, complaint: str, detail: str = ""
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{complaint} within {seconds:.0f} s\n{detail}".strip())
        time.sleep(0.03)
