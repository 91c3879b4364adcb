"""All that a cluster has on the machine, by its folder: how it is ended and removed.

A cluster of a test run belongs to the process that started it, which its folder's name tells, so
runs of several checkouts do not meet, and what one left that is gone can be told by that.
"""

import re
import shutil
from pathlib import Path

from cluster import network, places, processes
from cluster.node import cluster_cgroup, remove_cgroups

_OWNED = re.compile(r".+\.(\d+-\d+)")


def owned(name: str) -> str:
    """The name of a cluster that belongs to this process: NAME.PID-TICKS."""
    return f"{name}.{processes.owner()}"


def remove(state: Path) -> list[str]:
    """End every process of the cluster in a folder, and remove all that it has.

    Returns:
        What could not be removed; empty when nothing is left.
    """
    end(state)
    busy = remove_cgroups(cluster_cgroup(state))
    shutil.rmtree(state, ignore_errors=True)
    left = [f"cgroup {folder}" for folder in busy]
    left += [f"process {found.pid}" for found in processes.marked(state)]
    left += [f"mount {line}" for line in _mounts_below(state)]
    if state.exists():
        left.append(f"folder {state}")
    return left


def end(state: Path) -> None:
    """End every process of the cluster in a folder, recorded or not, and its network."""
    found = [*processes.recorded(state), *processes.marked(state)]
    processes.stop(found, grace_seconds=0)
    network.unplug_host(state)


def remove_orphans() -> None:
    """Remove the clusters of processes that are gone, of whatever checkout."""
    for state in places.clusters().glob("*"):
        found = _OWNED.fullmatch(state.name)
        if found is not None and not processes.is_owner_alive(found[1]):
            remove(state)
            places.lock(state.name).unlink(missing_ok=True)


def _mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split()[1].startswith(f"{folder}/")]
