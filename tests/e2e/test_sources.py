"""Models from outside: downloaded once, checked, and what goes wrong heals by itself."""

import hashlib
import http.server
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import model
from cluster import storage
from cluster.certificates import Authority, Pair
from cluster.node import Node
from demo import PROMPT
from site_under_test import Namespace, Site

pytestmark = pytest.mark.e2e


@dataclass
class FileServer:
    """An HTTPS server on this machine, which pods reach at the cluster's host address."""

    address: str
    certificate_authority: str
    """Its certificate, in PEM form."""
    requests: list[str] = field(default_factory=list)
    """Paths in the order in which they were asked for."""

    def source(self, name: str, content: bytes) -> str:
        return f"https://{self.address}/{name}#sha256={hashlib.sha256(content).hexdigest()}"


@pytest.fixture(scope="module")
def weights() -> bytes:
    return model.fetch().read_bytes()


@pytest.fixture(scope="module")
def server(
    site: Site, weights: bytes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FileServer]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "model.gguf").write_bytes(weights)
    host = site.cluster.network.host
    state = site.cluster.state / "certificates"
    authority = Authority(Pair(state / "ca.crt", state / "ca.key"), folder)
    pair = authority.issue("server", host, [f"IP:{host}"])
    requests: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, directory=str(folder), **options)

        def do_GET(self) -> None:
            requests.append(self.path)
            super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer((host, 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    listener.socket = context.wrap_socket(listener.socket, server_side=True)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield FileServer(
        f"{host}:{listener.server_port}", Path(authority.certificate).read_text(), requests
    )
    listener.shutdown()
    listener.server_close()


def trust(namespace: Namespace, server: FileServer) -> dict[str, str]:
    """Make the ConfigMap with the server's certificate; how the object names it."""
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "trusted"},
            "data": {"ca.crt": server.certificate_authority},
        }
    )
    return {"name": "trusted"}


def test_a_model_is_downloaded_once_for_two_objects_and_after_deleting(
    namespace: Namespace, server: FileServer, weights: bytes
) -> None:
    server.requests.clear()
    model_spec = {
        "source": server.source("model.gguf", weights),
        "certificateAuthority": trust(namespace, server),
    }
    namespace.serve("first", model=model_spec)
    namespace.wait_ready("first")
    assert namespace.condition("first", "ModelCached")["reason"] == "Downloaded"
    with OpenAI(base_url=namespace.url("first"), api_key="none") as client:
        completion = client.completions.create(
            model="first", prompt=PROMPT, max_tokens=4, temperature=0
        )
    assert "Paris" in completion.choices[0].text

    namespace.kubectl("delete", "dsd", "first", "--timeout=240s")
    namespace.serve("second", model=model_spec)
    namespace.wait_ready("second")

    assert server.requests.count("/model.gguf") == 1


def test_a_wrong_checksum_is_said_and_heals_with_the_right_one(
    namespace: Namespace, server: FileServer, weights: bytes
) -> None:
    trusted = trust(namespace, server)
    wrong = server.source("model.gguf", b"something else")
    namespace.serve("checked", model={"source": wrong, "certificateAuthority": trusted})

    message = namespace.wait_reason("checked", "ChecksumMismatch", type_="ModelCached")

    assert hashlib.sha256(weights).hexdigest() in message
    assert namespace.pods("checked") == []
    right = server.source("model.gguf", weights)
    namespace.serve("checked", model={"source": right, "certificateAuthority": trusted})
    namespace.wait_ready("checked")


def test_a_missing_authority_is_said_and_heals(
    namespace: Namespace, server: FileServer, weights: bytes
) -> None:
    source = server.source("model.gguf", weights)
    namespace.serve(
        "untrusting", model={"source": source, "certificateAuthority": {"name": "trusted"}}
    )

    message = namespace.wait_reason("untrusting", "ConfigMapMissing", type_="ModelCached")

    assert "ConfigMap trusted" in message
    trust(namespace, server)
    # The kubelet tries the mount again after pauses of up to two minutes.
    namespace.wait_reason("untrusting", "Downloaded", type_="ModelCached")


def test_a_file_that_does_not_exist_is_said(namespace: Namespace, server: FileServer) -> None:
    source = server.source("nothing.gguf", b"nothing")
    namespace.serve(
        "absent", model={"source": source, "certificateAuthority": trust(namespace, server)}
    )

    message = namespace.wait_reason("absent", "ModelNotFound", type_="ModelCached")

    assert "nothing.gguf" in message


def test_a_full_disk_is_said_and_heals_when_there_is_room(
    site: Site, namespace: Namespace, server: FileServer, weights: bytes
) -> None:
    node = site.cluster.nodes[0]
    mount_small_volume(site, node)
    namespace.serve(
        "crowded",
        model={
            "source": server.source("model.gguf", weights),
            "certificateAuthority": trust(namespace, server),
            "cache": {"storageClassName": "small", "sizeGiB": 1},
        },
    )

    namespace.wait_reason("crowded", "DiskFull", type_="ModelCached")
    held(node, "mount", "-o", "remount,size=200m", "/var/lib/volumes/small")

    namespace.wait_ready("crowded")


def mount_small_volume(site: Site, node: Node) -> None:
    """A volume of 16 MB on the node, of a storage class of its own."""
    site.cluster.control_plane.apply(storage.volume(node, "small", "small"))
    held(node, "mount", "-t", "tmpfs", "-o", "size=16m,mode=777", "small", "/var/lib/volumes/small")


def held(node: Node, *words: str) -> None:
    """Run a command in the node's namespaces."""
    assert node.namespaces is not None
    node.namespaces.run(*words)


def test_a_model_on_a_volume_that_somebody_else_filled(
    site: Site, namespace: Namespace, weights: bytes
) -> None:
    node = site.cluster.nodes[1]
    site.cluster.control_plane.apply(storage.volume(node, "filled", "filled"))
    folder = node.folder / "lib/volumes/filled/smollm2"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(weights)
    namespace.serve("mounted", model={"source": "pvc://models/smollm2"})
    namespace.wait_reason("mounted", "ClaimMissing", type_="ModelCached")

    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models"},
            "spec": {
                "storageClassName": "filled",
                "volumeName": "filled",
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
    )

    namespace.wait_ready("mounted")


def test_a_model_in_an_image_of_its_own(site: Site, namespace: Namespace) -> None:
    # The worker's image holds a model too, so it serves as one that holds nothing else.
    source = f"oci://{site.target.worker_image}#path=models/smollm2"
    namespace.serve("imaged", model={"source": source})

    namespace.wait_ready("imaged")

    volumes = namespace.pods("imaged")[0]["spec"]["volumes"]
    assert any("image" in found for found in volumes)


def test_a_folder_of_the_node_is_refused_where_pod_security_forbids_it(
    namespace: Namespace,
) -> None:
    namespace.serve("noded", model={"source": "nodePath:///var/lib/volumes"})

    namespace.wait_reason("noded", "CacheForbidden", type_="ModelCached")


def test_a_missing_secret_is_said_and_heals_when_it_is_made(
    namespace: Namespace, server: FileServer, weights: bytes
) -> None:
    namespace.serve("keyed", security={"apiKeySecret": {"name": "keys"}})
    namespace.wait_reason("keyed", "SecretMissing")

    namespace.kubectl("create", "secret", "generic", "keys", "--from-literal=api-key=one-key")

    namespace.wait_ready("keyed")
    with OpenAI(base_url=namespace.url("keyed"), api_key="one-key") as client:
        assert client.models.list().data[0].id == "keyed"
