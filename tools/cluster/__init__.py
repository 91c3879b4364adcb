"""The local cluster: a real Kubernetes on one machine, without Docker.

`python tools/cluster --help` is the command; tests and tools import `ControlPlane` and `Cluster`.
Needs nothing but the standard library, so it runs before the project's environment exists.
"""

from cluster.cluster import Cluster
from cluster.control_plane import ControlPlane
from cluster.errors import ClusterError

__all__ = ["Cluster", "ClusterError", "ControlPlane"]
