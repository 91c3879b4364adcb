"""Volumes for claims: ready-made folders of each node, in place of a provisioner."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.cluster import Cluster
    from cluster.node import Node

CLASS = "standard"
VOLUMES_PER_NODE = 12
SIZE_GIB = 500
"""What a volume says it holds: the folders have no limit of their own."""


def start_storage(cluster: "Cluster") -> None:
    """Make the default storage class and the volumes of every node."""
    volumes = [
        volume(node, f"{node.name}-{number}", CLASS)
        for node in cluster.nodes
        for number in range(1, VOLUMES_PER_NODE + 1)
    ]
    cluster.control_plane.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": CLASS,
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
        *volumes,
    )


def volume(node: "Node", name: str, storage_class: str) -> dict[str, Any]:
    """A volume on one node, and its folder."""
    folder = node.folder / "lib" / "volumes" / name
    folder.mkdir(parents=True, exist_ok=True)
    # As provisioners of local folders do: the kubelet sets a pod's fsGroup on a local volume only
    # while no other pod has it mounted.
    folder.chmod(0o777)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": f"{SIZE_GIB}Gi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "storageClassName": storage_class,
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": f"/var/lib/volumes/{name}"},
            "nodeAffinity": {
                "required": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {
                                    "key": "kubernetes.io/hostname",
                                    "operator": "In",
                                    "values": [node.name],
                                }
                            ]
                        }
                    ]
                }
            },
        },
    }
