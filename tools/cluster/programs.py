"""The programs that the cluster is made of, built from Go modules, once per version.

Each program lives in a Go module of its own under `programs/`, because their dependencies
clash. Its `go.mod` is the only place that names the version.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster import places
from cluster.errors import ClusterError
from cluster.progress import phase, say

FREE_BYTES_TO_BUILD = 15 * 2**30
"""Module downloads, Go's build cache and the programs themselves, on a cold machine."""


@dataclass(frozen=True)
class Program:
    """One command of one Go module."""

    name: str
    module: str
    """Folder under `programs/`, and the module whose version counts."""
    requirement: str | None
    """The required module that gives the version; None for our own source."""
    package: str
    minutes: float
    """About how long a cold build takes on two cores, for people who wait."""
    tags: str = ""
    """Build tags, which leave out what is not needed here."""


_CONTAINERD = "github.com/containerd/containerd/v2"
_KUBERNETES = "k8s.io/kubernetes"
_PROMETHEUS = "github.com/prometheus/prometheus"
PROGRAMS = {
    program.name: program
    for program in (
        Program("pause", "pause", None, ".", 0.1),
        Program("etcd", "etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3", 0.5),
        *(
            Program(name, "kubernetes", _KUBERNETES, f"{_KUBERNETES}/cmd/{name}", minutes)
            for name, minutes in (
                ("kube-apiserver", 3),
                ("kubectl", 0.5),
                ("kube-controller-manager", 1),
                ("kube-scheduler", 0.5),
                ("kubelet", 1),
                ("kube-proxy", 0.5),
            )
        ),
        *(
            Program(
                name,
                "containerd",
                _CONTAINERD,
                f"{_CONTAINERD}/cmd/{name}",
                minutes,
                # Snapshotters that need C libraries, and tracing, are of no use here.
                tags="no_btrfs,no_devmapper,no_zfs,no_tracing",
            )
            for name, minutes in (
                ("containerd", 2),
                ("containerd-shim-runc-v2", 0.2),
                ("ctr", 0.2),
            )
        ),
        Program("helm", "helm", "helm.sh/helm/v4", "helm.sh/helm/v4/cmd/helm", 2),
        Program("kwok", "kwok", "sigs.k8s.io/kwok", "sigs.k8s.io/kwok/cmd/kwok", 1),
        Program(
            "coredns", "coredns", "github.com/coredns/coredns", "github.com/coredns/coredns", 2
        ),
        Program(
            "prometheus-adapter",
            "prometheus-adapter",
            "sigs.k8s.io/prometheus-adapter",
            "sigs.k8s.io/prometheus-adapter/cmd/adapter",
            2.5,
        ),
        *(
            Program(
                name,
                "prometheus",
                _PROMETHEUS,
                f"{_PROMETHEUS}/cmd/{name}",
                minutes,
                # Of two dozen ways to discover targets, and their clouds' clients, only ours.
                tags="remove_all_sd,enable_kubernetes_sd",
            )
            for name, minutes in (("prometheus", 3), ("promtool", 0.5))
        ),
    )
}
OWN_SOURCE_VERSION = "v1"
SOURCES = {
    "keda": "github.com/kedacore/keda/v2",
    "gateway-api": "sigs.k8s.io/gateway-api",
}
"""Modules that are there for the CRDs in their sources, by the folder under `programs/`."""


def version(program: Program) -> str:
    """The version of a program, for example `v1.36.3`.

    Raises:
        ClusterError: its go.mod does not require the module that gives the version.
    """
    if program.requirement is None:
        return OWN_SOURCE_VERSION
    go_mod = places.PROGRAM_MODULES / program.module / "go.mod"
    return parse_requirement(go_mod.read_text(encoding="utf-8"), program.requirement)


def parse_requirement(go_mod: str, module: str) -> str:
    """The version at which the text of a go.mod requires `module`."""
    match = re.search(rf"^(?:require)?\s+{re.escape(module)} (v\S+)", go_mod, re.MULTILINE)
    if match is None:
        raise ClusterError(f"go.mod requires no {module}; add it with an exact version")
    return match.group(1)


def path(name: str) -> Path:
    """Where the built program is, or will be."""
    program = PROGRAMS[name]
    return places.binaries() / f"{name}-{version(program)}"


def is_built(name: str) -> bool:
    """Whether the program is there in the version that is wanted."""
    return path(name).exists()


def ensure(names: Iterable[str]) -> dict[str, Path]:
    """Build what is missing among `names`, in that order, and return where each program is.

    Raises:
        ClusterError: Go is missing, the disk is too full, or a build fails.
    """
    wanted = list(names)
    if all(is_built(name) for name in wanted):
        return {name: path(name) for name in wanted}
    places.binaries().mkdir(parents=True, exist_ok=True)
    with (places.binaries() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [PROGRAMS[name] for name in wanted if not is_built(name)]
        if missing:
            _check(missing)
        for program in missing:
            with phase(f"built {program.name} {version(program)}"):
                _build(program)
    return {name: path(name) for name in wanted}


def _check(missing: list[Program]) -> None:
    _require_go()
    check_disk(places.binaries(), FREE_BYTES_TO_BUILD, "build the cluster's programs")
    minutes = sum(program.minutes for program in missing)
    say(f"building {len(missing)} programs from source, about {minutes:.0f} minutes, once:")


def _require_go() -> None:
    if shutil.which("go") is None:
        raise ClusterError(
            "go was not found in PATH; the cluster's programs are built from source: "
            "install Go 1.26 or newer and run this again"
        )


def check_disk(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Refuse to start what would fill the disk.

    Raises:
        ClusterError: fewer than `needed_bytes` are free where `folder` is.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ClusterError(
            f"{needed_bytes / 2**30:.0f} GiB are needed in {folder} to {purpose}, "
            f"{free / 2**30:.1f} GiB are free; free some, or set DEEPSEEK_CACHE to another disk"
        )


def _build(program: Program) -> None:
    target = path(program.name)
    part = target.with_name(f".{target.name}.part")
    link = ["-s", "-w"]
    if program.module == "kubernetes":
        release = version(program)
        major, minor = release.removeprefix("v").split(".")[:2]
        package = "k8s.io/component-base/version"
        link += [
            f"-X {package}.gitVersion={release}",
            f"-X {package}.gitMajor={major}",
            f"-X {package}.gitMinor={minor}",
            f"-X {package}.gitTreeState=clean",
        ]
    done = subprocess.run(
        [
            "go",
            "build",
            "-trimpath",
            "-tags",
            program.tags,
            "-ldflags",
            " ".join(link),
            "-o",
            part,
            program.package,
        ],
        cwd=places.PROGRAM_MODULES / program.module,
        env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=readonly"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"go build of {program.name} failed:\n{done.stderr[-4000:]}")
    part.rename(target)


def sources(name: str) -> Path:
    """The folder of a Go module of `SOURCES`, of which nothing is built.

    Raises:
        ClusterError: Go is missing, or the module cannot be had.
    """
    _require_go()
    done = subprocess.run(
        ["go", "mod", "download", "-json", SOURCES[name]],
        cwd=places.PROGRAM_MODULES / name,
        env={**os.environ, "GOFLAGS": "-mod=readonly"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"{SOURCES[name]} cannot be had:\n{done.stderr or done.stdout}")
    return Path(json.loads(done.stdout)["Dir"])
