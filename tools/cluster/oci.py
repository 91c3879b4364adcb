"""Images as files: one OCI layout that all images share, and its way into a containerd.

Layers are not compressed, so that a layer's digest is known without reading it again, nothing
is spent on packing and unpacking, and what a node already has is never sent to it.
"""

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cluster import files
from cluster.errors import ClusterError

_MEDIA = "application/vnd.oci.image"


@dataclass(frozen=True)
class Layout:
    """A folder in the OCI image layout, where every image has a full reference."""

    folder: Path

    def references(self) -> set[str]:
        """The images in it."""
        return set(self._manifests())

    def blob(self, digest: str) -> Path:
        """Where the content with this digest is, or belongs."""
        algorithm, _, value = digest.partition(":")
        return self.folder / "blobs" / algorithm / value

    def add(
        self, reference: str, files: Mapping[str, Path], entrypoint: Sequence[str], uid: int
    ) -> None:
        """Make an image of one layer out of files that need nothing else.

        Args:
            reference: full name with tag.
            files: path in the image to the file that goes there.
            entrypoint: its command.
            uid: the user that it runs as, in group 0.
        """
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as archive:
            for target, source in sorted(files.items()):
                info = tarfile.TarInfo(target.lstrip("/"))
                info.size, info.mode = source.stat().st_size, 0o755
                with source.open("rb") as content:
                    archive.addfile(info, content)
        layer_digest = self._write(layer.getvalue())
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "User": f"{uid}:0", "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": self._described(f"{_MEDIA}.config.v1+json", config),
            "layers": [
                {
                    "mediaType": f"{_MEDIA}.layer.v1.tar",
                    "digest": layer_digest,
                    "size": self.blob(layer_digest).stat().st_size,
                }
            ],
        }
        described = self._described(f"{_MEDIA}.manifest.v1+json", manifest)
        manifests = self._manifests()
        manifests[reference] = described
        self._write_index(manifests)

    def remove(self, references: Collection[str]) -> None:
        """Forget images, and the content that no other image needs."""
        manifests = self._manifests()
        self._write_index(
            {name: found for name, found in manifests.items() if name not in references}
        )
        needed = self.digests(self.references())
        for file in (self.folder / "blobs" / "sha256").iterdir():
            if f"sha256:{file.name}" not in needed:
                file.unlink()

    def digests(self, references: Collection[str]) -> set[str]:
        """All content that the images consist of."""
        found = set()
        for name, described in self._manifests().items():
            if name in references:
                manifest = json.loads(self.blob(described["digest"]).read_bytes())
                found |= {described["digest"], manifest["config"]["digest"]}
                found |= {layer["digest"] for layer in manifest["layers"]}
        return found

    def send(
        self, references: Collection[str], present: Collection[str], target: IO[bytes]
    ) -> None:
        """Write an archive that `ctr images import` reads, without the content in `present`."""
        with tarfile.open(fileobj=target, mode="w|") as archive:
            _add_bytes(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            chosen = [
                {
                    **described,
                    "annotations": {"io.containerd.image.name": name},
                }
                for name, described in self._manifests().items()
                if name in references
            ]
            _add_bytes(archive, "index.json", _index(chosen).encode())
            # Layers come last: a manifest names them.
            for digest in sorted(
                self.digests(references) - set(present),
                key=lambda name: self.blob(name).stat().st_size,
            ):
                blob = self.blob(digest)
                archive.add(blob, f"blobs/sha256/{blob.name}", recursive=False)

    def _manifests(self) -> dict[str, dict[str, Any]]:
        index = self.folder / "index.json"
        if not index.exists():
            return {}
        return {
            described["annotations"]["org.opencontainers.image.ref.name"]: described
            for described in json.loads(index.read_bytes())["manifests"]
        }

    def _write_index(self, manifests: Mapping[str, dict[str, Any]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        named = [
            {**described, "annotations": {"org.opencontainers.image.ref.name": name}}
            for name, described in manifests.items()
        ]
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        files.write(self.folder / "index.json", _index(named))

    def _described(self, media_type: str, document: object) -> dict[str, Any]:
        content = json.dumps(document, sort_keys=True).encode()
        return {"mediaType": media_type, "digest": self._write(content), "size": len(content)}

    def _write(self, content: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        blob = self.blob(digest)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        return digest


@dataclass(frozen=True)
class Containerd:
    """A running containerd, by the words that run `ctr` against it."""

    ctr: tuple[str, ...]

    def images(self) -> set[str]:
        """References of its images."""
        return set(self._run("images", "ls", "-q").split())

    def load(self, layout: Layout, references: Collection[str]) -> None:
        """Bring images into it, sending only the content that it lacks.

        Raises:
            ClusterError: the import fails.
        """
        present = set(self._run("content", "ls", "-q").split())
        command = subprocess.Popen(
            [*self.ctr, "images", "import", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with command:
            assert command.stdin is not None
            try:
                layout.send(references, present, command.stdin)
                command.stdin.close()
            except BrokenPipeError:
                pass  # its own words, below, say why it ended early
            assert command.stdout is not None
            said = command.stdout.read().decode(errors="replace")
        if command.returncode != 0:
            raise ClusterError(f"containerd refused {sorted(references)}: {said.strip()[-1000:]}")

    def remove(self, references: Collection[str]) -> None:
        """Remove images and wait until their content is gone."""
        self._run("images", "rm", "--sync", *references)

    def _run(self, *words: str) -> str:
        done = subprocess.run([*self.ctr, *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"ctr {' '.join(words)} failed: {done.stderr.strip()}")
        return done.stdout


def link(existing: Path, target: Path) -> None:
    """Make `target` another name of `existing`, replacing what was there."""
    part = target.with_name(f".{target.name}.link")
    part.unlink(missing_ok=True)
    os.link(existing, part)
    part.rename(target)


def _index(manifests: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"schemaVersion": 2, "manifests": manifests}, indent=1)


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))
