"""The project's own images: built by buildah from its Dockerfiles, tagged by what went in.

A tag is a hash of everything that an image is built from, so a pod with `IfNotPresent` never runs
stale code, and an unchanged tree builds nothing.
"""

import configparser
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import debian, fixed, places, programs, store
from cluster.errors import ClusterError
from cluster.progress import phase, say

FREE_BYTES_TO_BUILD = 20 * 2**30
"""torch with CUDA, three times: as buildah's layer, as a blob, and unpacked in the store."""
BASE_PACKAGES = ("ca-certificates", "python3", "python3-pip")
BASE_RECIPE = """\
set -e
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc /usr/share/man /var/log/*.log
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
ln -s /usr/bin/python3 /usr/local/bin/python
"""
"""Makes of a minimal Debian what `python:3.12-slim` offers: python and pip, free to install."""

_CONTAINED = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private")
"""A build ends when this command is killed, and what it mounted goes with it."""


_claims: list[int] = []
"""Files open while this process lives: its images stay, even before a node has them."""


@dataclass(frozen=True)
class Image:
    """An image of the project."""

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    """Files and folders of the repository that its Dockerfile copies."""


IMAGES = (
    Image(
        "operator",
        "operator/Dockerfile",
        (
            "requirements/operator.txt",
            "contract/deepseek_contract",
            "operator/deepseek_operator",
        ),
    ),
    Image(
        "worker",
        "worker/Dockerfile",
        (
            "requirements/model.txt",
            "requirements/torch.txt",
            "requirements/worker.txt",
            "contract/deepseek_contract",
            "kernels/deepseek_kernels",
            "worker/deepseek_worker",
        ),
    ),
)


def references(tree: Path = places.REPOSITORY) -> dict[str, str]:
    """Name of each image to its full reference for the tree as it is now."""
    return {image.name: f"localhost/deepseek-{image.name}:{tag(tree, image)}" for image in IMAGES}


def tag(repository: Path, image: Image) -> str:
    """Twelve hexadecimal digits that change when anything that the image is built from does."""
    digest = hashlib.sha256(_base_key().encode())
    for file in sorted(_files(repository, (image.dockerfile, ".dockerignore", *image.inputs))):
        digest.update(str(file.relative_to(repository)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def ensure() -> dict[str, str]:
    """Build what is not built yet, bring it into the store, and return each image's reference.

    Until this process ends no other one, of another checkout say, removes what was returned.

    Raises:
        ClusterError: not root, the disk is too full, or a build fails; the message has its end.
    """
    programs.ensure(store.PROGRAMS)
    with store.locked(), tempfile.TemporaryDirectory(prefix="deepseek-images-") as folder:
        tree = Path(folder)
        snapshot(places.REPOSITORY, tree)
        wanted = references(tree)
        present = store.references()
        missing = [image for image in IMAGES if wanted[image.name] not in present]
        if missing:
            _build_all(tree, {image: wanted[image.name] for image in missing})
        _drop_stale(wanted.values())
        _claim()
    return wanted


def snapshot(repository: Path, target: Path) -> None:
    """Copy what the images are built from, so that an edit meanwhile cannot mix two states.

    Permissions become the same on every machine: they count in an image and in buildah's cache.
    """
    for image in IMAGES:
        for file in _files(repository, (image.dockerfile, ".dockerignore", *image.inputs)):
            copy = target / file.relative_to(repository)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            copy.chmod(0o644)
    for folder in (path for path in target.rglob("*") if path.is_dir()):
        folder.chmod(0o755)


def is_built() -> bool:
    """Whether the layers that take long were built at some time."""
    return _storage().exists()


def _build_all(tree: Path, wanted: Mapping[Image, str]) -> None:
    if os.geteuid() != 0:
        raise ClusterError("building images needs root: overlay mounts and chroot")
    debian.ensure(debian.IMAGES, debian.NODES)
    if not _buildah_has(_base_reference()):
        programs.check_disk(places.images(), FREE_BYTES_TO_BUILD, "build the images")
        say("building the images from nothing, about 7 minutes, once:")
        _build_base()
    for image, reference in wanted.items():
        with phase(f"built {reference}"):
            _build(tree, image, reference)
        with phase(f"exported {reference}"):
            _export(reference)
    with phase("unpacked the images into the store"):
        store.add(wanted.values())


def _claim() -> None:
    """Keep the images from `_drop_stale` of others; the caller holds `store.locked`."""
    claim = os.open(_claim_file(), os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(claim, fcntl.LOCK_SH)
    _claims.append(claim)


def _is_claimed() -> bool:
    """Whether a process that lives was given images."""
    with _claim_file().open("w") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _claim_file() -> Path:
    return places.images() / ".claims"


def _drop_stale(keep: Iterable[str]) -> None:
    """Remove the project's images of earlier trees, unless nodes run them or are about to."""
    if any(fixed.of_all()) or _is_claimed():
        return
    stale = {
        name
        for name in store.layout().references()
        if name.startswith("localhost/deepseek-") and name not in set(keep)
    }
    store.remove_others()
    if stale:
        with phase("removed the images of earlier trees"):
            store.remove(stale)
            for name in filter(_buildah_has, stale):
                _buildah("rmi", name)


def _build(tree: Path, image: Image, reference: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pip.conf"
        settings.write_text(pip_settings(os.environ, _pip_files()), encoding="utf-8")
        volumes = ["/etc/ssl/certs:/etc/ssl/certs:ro", f"{settings}:/etc/pip.conf:ro"]
        _buildah(
            "bud", "--layers", "--from", _base_reference(), "--tag", reference,
            *(word for volume in volumes for word in ("--volume", volume)),
            "--file", str(tree / image.dockerfile), str(tree),
        )  # fmt: skip


def _export(reference: str) -> None:
    """Write an image into the layout; layers that are there already are not even read."""
    layout = store.layout()
    layout.folder.mkdir(parents=True, exist_ok=True)
    for unfinished in layout.folder.glob("oci-put-blob*"):
        unfinished.unlink()
    storage = f"[overlay@{_storage() / 'root'}+{_storage() / 'run'}]"
    _run(
        *_CONTAINED, "skopeo", "copy", "--dest-oci-accept-uncompressed-layers",
        f"containers-storage:{storage}{reference}", f"oci:{layout.folder}:{reference}",
    )  # fmt: skip


def _build_base() -> None:
    mirror, release = _debian_mirror()
    root = places.images() / "base.part"
    shutil.rmtree(root, ignore_errors=True)
    with phase(f"made a base image of Debian {release}"):
        _run(
            *_CONTAINED, "debootstrap", "--variant=minbase",
            f"--include={','.join(BASE_PACKAGES)}", release, str(root), mirror,
        )  # fmt: skip
        _run("chroot", str(root), "/bin/sh", "-c", BASE_RECIPE)
        container = _buildah("from", "scratch").strip()
        _buildah("add", container, str(root), "/")
        _buildah("config", "--cmd", "python3", container)
        _buildah("commit", "--rm", container, _base_reference())
    shutil.rmtree(root)


def _base_key() -> str:
    return hashlib.sha256(f"{BASE_PACKAGES}{BASE_RECIPE}".encode()).hexdigest()[:12]


def _base_reference() -> str:
    return f"localhost/base:{_base_key()}"


def _debian_mirror() -> tuple[str, str]:
    """The mirror and the release that this machine's own apt uses.

    Raises:
        ClusterError: apt names no archive with the component main of this release.
    """
    release = _os_release()
    listed = _run("apt-get", "indextargets", "--format", "$(SITE) $(CODENAME) $(COMPONENT)")
    for line in listed.splitlines():
        site, codename, component = line.split()
        if (codename, component) == (release, "main"):
            return site, release
    raise ClusterError(f"apt's sources name no archive with {release} main to make a base image")


def _os_release() -> str:
    for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip('"')
    raise ClusterError("/etc/os-release has no VERSION_CODENAME; this is not Debian or its like")


def pip_settings(environment: Mapping[str, str], files: Sequence[Path]) -> str:
    """This machine's pip settings as one pip.conf, for pip inside a build.

    Folders of this machine are left out: a build does not see them.
    """
    merged = configparser.RawConfigParser()
    merged.read(files, encoding="utf-8")
    if not merged.has_section("global"):
        merged.add_section("global")
    for name, value in environment.items():
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE":
            merged.set("global", name.removeprefix("PIP_").lower().replace("_", "-"), value)
    for section in merged.sections():
        merged.remove_option(section, "find-links")
        merged.remove_option(section, "cache-dir")
    lines = []
    for section in merged.sections():
        lines.append(f"[{section}]")
        lines += [f"{key} = {value}" for key, value in merged.items(section)]
    return "\n".join(lines) + "\n"


def _pip_files() -> list[Path]:
    chosen = os.environ.get("PIP_CONFIG_FILE")
    if chosen:
        return [Path(chosen)]
    home = Path.home()
    return [Path("/etc/pip.conf"), home / ".pip/pip.conf", home / ".config/pip/pip.conf"]


def _files(repository: Path, inputs: Iterable[str]) -> Iterable[Path]:
    for name in inputs:
        path = repository / name
        if path.is_file():
            yield path
        yield from (
            file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts
        )


def _buildah_has(reference: str) -> bool:
    listed = json.loads(_buildah("images", "--json") or "null") or []
    return any(reference in (image.get("names") or []) for image in listed)


def _buildah(*words: str) -> str:
    storage = _storage()
    storage.mkdir(parents=True, exist_ok=True)
    return _run(
        *_CONTAINED,
        "buildah", "--root", str(storage / "root"), "--runroot", str(storage / "run"),
        "--storage-driver", "overlay", *words,
    )  # fmt: skip


def _storage() -> Path:
    """Storage of our own, so that images that this machine's user has made stay untouched."""
    return places.images() / "buildah"


def _run(*words: str) -> str:
    """Run a command from the repository's root and return what it prints.

    Raises:
        ClusterError: it fails; the message has the end of what it said.
    """
    if shutil.which(words[0]) is None:
        raise ClusterError(f"{words[0]} was not found; install it and run this again")
    log = places.images() / "build.log"
    with log.open("ab") as errors:
        begin = errors.tell()
        done = subprocess.run(
            words,
            cwd=places.REPOSITORY,
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            umask=0o022,
            check=False,
        )
        errors.write(done.stdout)
    said = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        with log.open("rb") as written:
            written.seek(begin)
            end = written.read().decode(errors="replace")[-3000:]
        say(f"the whole output is in {log}")
        raise ClusterError(f"{' '.join(words[:9])} ... failed:\n{end}")
    return said
