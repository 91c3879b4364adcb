"""The Debian packages that nodes and image builds need: checked, and installed when missing."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import ClusterError
from cluster.progress import phase

CONTROL_PLANE: Mapping[str, str] = {"openssl": "openssl"}
NODES: Mapping[str, str] = {
    "containerd": "containerd",
    "runc": "runc",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "iptables": "iptables",
    "nft": "nftables",
    "ip": "iproute2",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}
SERVICES = {"containerd"}
"""Packages that bring a service of the same name."""
POLICY = Path("/usr/sbin/policy-rc.d")
"""Debian asks this program whether a package may start its service."""
IMAGES: Mapping[str, str] = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "skopeo": "skopeo",
}


def missing(needed: Mapping[str, str]) -> list[str]:
    """Packages whose program is not there.

    Args:
        needed: program, by name or by path, to the package that has it.
    """
    search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return sorted(
        {package for program, package in needed.items() if not shutil.which(program, path=search)}
    )


def ensure(*groups: Mapping[str, str]) -> None:
    """Install the packages that are missing, without starting any service of theirs.

    Raises:
        ClusterError: something is missing and this is not root, or apt fails.
    """
    needed = {program: package for group in groups for program, package in group.items()}
    packages = missing(needed)
    if not packages:
        return
    words = " ".join(packages)
    if os.geteuid() != 0:
        raise ClusterError(f"packages are missing; as root: apt-get install {words}")
    with phase(f"installed {words}"), _no_services(packages):
        _apt("update")
        _apt("install", "--yes", "--no-install-recommends", *packages)
    still = missing(needed)
    if still:
        raise ClusterError(f"apt-get installed {words}, but {still} is still not there")


@contextmanager
def _no_services(packages: Iterable[str]) -> Iterator[None]:
    """Keep the packages' services from starting now, and under systemd from starting later."""
    own = not POLICY.exists()
    if own:
        POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if own:
            POLICY.unlink()
    services = sorted(SERVICES & set(packages))
    if services and Path("/run/systemd/system").exists():
        subprocess.run(["systemctl", "disable", "--quiet", *services], check=False)


def _apt(*words: str) -> None:
    done = subprocess.run(
        ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *words],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"apt-get {words[0]} failed: {done.stderr.strip()[-1000:]}")
