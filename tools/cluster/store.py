"""The image store: a containerd folder with every image unpacked once, which all nodes share.

A node's containerd starts from a copy of this folder in which only the databases are copies:
each layer is a symbolic link into the store, which nodes see read-only, and each blob a hard
link. So gigabytes of layers cost a node neither time nor disk, and what is new on a node stays
its own. While a cluster is up, nothing is removed from the store.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import files, places, processes, programs
from cluster.errors import ClusterError
from cluster.oci import Containerd, Layout, link

START_SECONDS = 240.0
NAMESPACE = "k8s.io"
PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
SEEN_BY_NODES = Path("/run/cluster/store")
"""Where a node must have the store's folder mounted."""
_BLOBS = Path("io.containerd.content.v1.content/blobs/sha256")
_SNAPSHOTS = Path("io.containerd.snapshotter.v1.overlayfs/snapshots")


def layout() -> Layout:
    """All images as files."""
    return Layout(places.images() / "layout")


def folder() -> Path:
    """The containerd folder that nodes start from; its form is that of one version."""
    return places.images() / f"store-{programs.path('containerd').name}"


@contextmanager
def locked() -> Iterator[None]:
    """Keep others from changing the images, or from copying them half-way."""
    places.images().mkdir(parents=True, exist_ok=True)
    with (places.images() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def references() -> set[str]:
    """The images that were unpacked to the end; one that a crash interrupted is none."""
    try:
        return set(json.loads(_record().read_text(encoding="utf-8")))
    except FileNotFoundError:
        return set()


def add(wanted: Iterable[str]) -> None:
    """Unpack images of the layout into the store; the caller holds `locked`."""
    names = set(wanted)
    with _containerd() as containerd:
        missing = names - containerd.images()
        if missing:
            containerd.load(layout(), missing)
    _share_blobs()
    _set_references(references() | names)


def remove(unwanted: Collection[str]) -> None:
    """Drop images from store and layout; the caller holds `locked`."""
    _set_references(references() - set(unwanted))
    with _containerd() as containerd:
        stale = set(unwanted) & containerd.images()
        if stale:
            containerd.remove(stale)
    layout().remove(unwanted)


def remove_others() -> None:
    """Remove the stores of other versions of containerd; the caller holds `locked`."""
    for path in places.images().glob("store*"):
        if path not in {folder(), _record()}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def copy_to(target: Path) -> None:
    """Make a node's containerd folder; the caller holds `locked`.

    Args:
        target: the new folder; the node must see the store at `SEEN_BY_NODES`.
    """
    target.mkdir(parents=True)
    for plugin in folder().iterdir():
        own = target / plugin.name
        own.mkdir(mode=0o700)
        for database in plugin.glob("*.db"):
            shutil.copy2(database, own)
    for blob in (folder() / _BLOBS).iterdir():
        (target / _BLOBS).mkdir(parents=True, exist_ok=True)
        os.link(blob, target / _BLOBS / blob.name)
    (target / _SNAPSHOTS).mkdir(mode=0o700)
    for snapshot in (folder() / _SNAPSHOTS).iterdir():
        (target / _SNAPSHOTS / snapshot.name).symlink_to(SEEN_BY_NODES / _SNAPSHOTS / snapshot.name)


def _record() -> Path:
    return folder().with_name(f"{folder().name}.json")


def _set_references(names: Collection[str]) -> None:
    files.write(_record(), json.dumps(sorted(names)))


def _share_blobs() -> None:
    """Keep one copy of each layer: the layout's file becomes another name of the store's."""
    blobs = folder() / _BLOBS
    for file in (layout().folder / "blobs" / "sha256").iterdir():
        stored = blobs / file.name
        if stored.exists() and not stored.samefile(file):
            link(stored, file)


@contextmanager
def _containerd() -> Iterator[Containerd]:
    """A containerd that works on the store, in mounts of its own so that none can be left."""
    with tempfile.TemporaryDirectory(prefix="deepseek-store-") as name:
        work = Path(name)
        address = work / "containerd.sock"
        config = work / "config.toml"
        config.write_text(
            "version = 2\n"
            f'root = "{folder()}"\n'
            f'state = "{work / "state"}"\n'
            'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]\n'
            f'[grpc]\naddress = "{address}"\n'
        )
        process = processes.start(
            "store",
            [
                "/usr/bin/unshare", "--mount", "--propagation", "private", "--fork",
                "--kill-child", programs.path("containerd"), "--config", config,
            ],
            places.images(),
            dies_with_parent=True,
        )  # fmt: skip
        containerd = Containerd(
            (str(programs.path("ctr")), "--address", str(address), "-n", NAMESPACE)
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not address.exists():
                if time.monotonic() > deadline or not process.is_alive():
                    raise ClusterError(f"containerd did not start; see {places.images()}/logs")
                time.sleep(0.02)
            yield containerd
        finally:
            processes.stop([process, *processes.marked(places.images())])
