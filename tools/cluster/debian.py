"""The Debian packages that nodes and image builds need: checked, and installed when missing."""

import os
import shutil
import subprocess
from collections.abc import Mapping

from cluster.errors import ClusterError
from cluster.progress import phase

CONTROL_PLANE: Mapping[str, str] = {"openssl": "openssl"}
NODES: Mapping[str, str] = {
    "runc": "runc",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "iptables": "iptables",
    "nft": "nftables",
    "ip": "iproute2",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}
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
    """Install the packages that are missing; none of them brings a service.

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
    with phase(f"installed {words}"):
        _apt("update")
        _apt("install", "--yes", "--no-install-recommends", *packages)
    still = missing(needed)
    if still:
        raise ClusterError(f"apt-get installed {words}, but {still} is still not there")


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
