"""Certificates and kubeconfigs of a cluster, made by the openssl command."""

import base64
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError

VALID_DAYS = "365"


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """A certificate authority and the folder that its certificates go to."""

    pair: Pair
    folder: Path

    @property
    def certificate(self) -> Path:
        """The authority's own certificate, which clients trust."""
        return self.pair.certificate

    def issue(
        self, name: str, subject: str, alternative_names: Sequence[str] = (), *, user: str = ""
    ) -> Pair:
        """Make NAME.crt and NAME.key, valid for servers and clients.

        Args:
            name: file name.
            subject: the common name, which Kubernetes reads as the user.
            alternative_names: `DNS:name` and `IP:address` of a server.
            user: the organisation, which Kubernetes reads as the group.
        """
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        request = self.folder / f"{name}.csr"
        extensions = "extendedKeyUsage=serverAuth,clientAuth\nkeyUsage=critical,digitalSignature\n"
        if alternative_names:
            extensions += f"subjectAltName={','.join(alternative_names)}\n"
        extension_file = self.folder / f"{name}.ext"
        extension_file.write_text(extensions, encoding="utf-8")
        _openssl(
            "req", "-new", "-nodes", *_ELLIPTIC, "-keyout", pair.key, "-out", request,
            "-subj", (f"/O={user}" if user else "") + f"/CN={subject}",
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", request, "-out", pair.certificate, "-days", VALID_DAYS,
            "-CA", self.pair.certificate, "-CAkey", self.pair.key, "-CAcreateserial",
            "-extfile", extension_file,
        )  # fmt: skip
        return pair


_ELLIPTIC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def authority(folder: Path, name: str) -> Authority:
    """Make a certificate authority NAME in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    _openssl(
        "req", "-x509", "-nodes", *_ELLIPTIC, "-keyout", pair.key, "-out", pair.certificate,
        "-days", VALID_DAYS, "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign",
    )  # fmt: skip
    return Authority(pair, folder)


def signing_key(folder: Path, name: str) -> Pair:
    """Make the key pair that signs service account tokens."""
    pair = Pair(folder / f"{name}.pub", folder / f"{name}.key")
    _openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", pair.key)
    _openssl("pkey", "-in", pair.key, "-pubout", "-out", pair.certificate)
    return pair


def kubeconfig(target: Path, server: str, trusted: Path, client: Pair) -> Path:
    """Write a kubeconfig with everything inside, so that the file can be copied alone."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "local",
                "cluster": {"server": server, "certificate-authority-data": _encoded(trusted)},
            }
        ],
        "users": [
            {
                "name": "user",
                "user": {
                    "client-certificate-data": _encoded(client.certificate),
                    "client-key-data": _encoded(client.key),
                },
            }
        ],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": "user"}}],
        "current-context": "local",
    }
    target.touch(mode=0o600)
    target.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return target


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _openssl(*words: str | Path) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"openssl {words[0]} failed: {done.stderr.strip()[-1000:]}")
