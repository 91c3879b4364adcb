"""A real HTTP server on the loopback that can be told to misbehave."""

import hashlib
import json
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

Answer = Callable[["Handler", bytes], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    origin: "Origin"

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.origin.asked.append((self.path, headers))
        content = self.origin.files.get(self.path)
        if content is None:
            answer(self, 404, b"no such file")
        elif self.origin.token and headers.get("authorization") != f"Bearer {self.origin.token}":
            answer(self, 401, b"who are you")
        elif faults := self.origin.faults.get(self.path):
            faults.popleft()(self, content)
        else:
            serve(self, content)

    def log_message(self, *_: object) -> None:
        pass


def answer(handler: Handler, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("content-length", str(len(body)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def serve(handler: Handler, content: bytes) -> None:
    """As a good server does: ranges, if-range, etag."""
    etag = f'"{hashlib.md5(content).hexdigest()}"'
    start = int(handler.headers.get("range", "bytes=0-").split("=")[1].split("-")[0])
    if handler.headers.get("if-range", etag) != etag or "range" not in handler.headers:
        answer(handler, 200, content, etag=etag)
    elif start >= len(content):
        answer(handler, 416, content_range=f"bytes */{len(content)}")
    else:
        span = f"bytes {start}-{len(content) - 1}/{len(content)}"
        answer(handler, 206, content[start:], etag=etag, content_range=span)


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is what some tests are about."""


class Fault:
    """Answers of a server that is not well."""

    @staticmethod
    def status(code: int, **headers: str) -> Answer:
        return lambda handler, _: answer(handler, code, b"", **headers)

    @staticmethod
    def without_ranges(handler: Handler, content: bytes) -> None:
        answer(handler, 200, content)

    @staticmethod
    def instead(other: bytes) -> Answer:
        return lambda handler, _: serve(handler, other)

    @staticmethod
    def cut_after(num_bytes: int) -> Answer:
        def cut(handler: Handler, content: bytes) -> None:
            start = int(handler.headers.get("range", "bytes=0-").split("=")[1].split("-")[0])
            etag = f'"{hashlib.md5(content).hexdigest()}"'
            handler.send_response(206 if start else 200)
            handler.send_header("content-length", str(len(content) - start))
            handler.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            handler.send_header("etag", etag)
            handler.end_headers()
            handler.wfile.write(content[start : start + num_bytes])
            handler.wfile.flush()
            handler.close_connection = True

        return cut

    @staticmethod
    def silent_for(seconds: float) -> Answer:
        def wait(handler: Handler, content: bytes) -> None:
            time.sleep(seconds)
            handler.close_connection = True

        return wait

    @staticmethod
    def trickle(num_bytes: int, every_seconds: float) -> Answer:
        def send(handler: Handler, content: bytes) -> None:
            handler.send_response(200)
            handler.send_header("content-length", str(len(content)))
            handler.end_headers()
            handler.close_connection = True
            for index in range(num_bytes):
                try:
                    handler.wfile.write(content[index : index + 1])
                except OSError:
                    return
                time.sleep(every_seconds)

        return send


@dataclass
class Origin:
    """What the server has, what it does wrong next, and what it was asked."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, deque[Answer]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    fault: type[Fault] = Fault
    token: str | None = None
    certificate: Path | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    def put(self, path: str, content: bytes, *faults: Answer) -> str:
        self.files[path] = content
        self.faults[path] = deque(faults)
        return f"{self.url}{path}"

    def put_repository(
        self, name: str, files: dict[str, bytes], commit: str = "c0ffee", revision: str = "main"
    ) -> None:
        siblings = []
        for file, content in files.items():
            entry: dict[str, object] = {"rfilename": file, "size": len(content)}
            if file.endswith((".safetensors", ".gguf")):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content)}
            else:
                header = b"blob %d\0" % len(content)
                entry["blobId"] = hashlib.sha1(header + content).hexdigest()
            siblings.append(entry)
            self.put(f"/{name}/resolve/{commit}/{file}", content)
        information = json.dumps({"sha": commit, "siblings": siblings}).encode()
        self.put(f"/api/models/{name}/revision/{revision}?blobs=true", information)

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@pytest.fixture
def secure_origin(tmp_path: Path) -> Iterator[Origin]:
    """A server whose certificate no public authority has signed."""
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    yield from _running(certificate, context)


@pytest.fixture
def origin() -> Iterator[Origin]:
    yield from _running()


@pytest.fixture
def other_origin() -> Iterator[Origin]:
    yield from _running()


def _running(
    certificate: Path | None = None, context: ssl.SSLContext | None = None
) -> Iterator[Origin]:
    here = Origin(certificate=certificate)
    handler = type("OriginHandler", (Handler,), {"origin": here})
    with QuietServer(("127.0.0.1", 0), handler) as server:
        here.port = server.server_port
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield here
        server.shutdown()
        thread.join()
