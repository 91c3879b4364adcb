"""One scripted worker that answers `GET /state` for all pods, with faults on demand."""

from __future__ import annotations

import asyncio
import base64
import itertools
import socket
import threading
import time
from typing import Any, Self

from aiohttp import web
from real import Server

from deepseek_operator.kinds import NODE, POD, SECRET, Manifest

STATE: dict[str, Any] = {
    "phase": "ready",
    "served_name": "chat",
    "model_id": "tiny",
    "device": "cpu",
    "started_at": 1.0,
    "memory": {
        "predicted_bytes": {"weights": 100},
        "measured_bytes": {"weights": 110},
        "limit_bytes": 1000,
    },
    "used_percent": 40.0,
}


_numbers = itertools.count(1)


class Responder:
    """Runs in a thread of its own. Pods are named in the address they are asked at."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, Any]] = {}
        """By pod, what differs from `STATE`."""
        self.silent: set[str] = set()
        """Pods that do not answer; a node's name stands for all its pods (see `nodes`)."""
        self.nodes: dict[str, str] = {}
        """By pod, its node."""
        self.asked: dict[str, int] = {}
        self.tokens: set[str] = set()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._stopped = asyncio.Event()

    @property
    def url(self) -> str:
        """The setting WORKER_STATE_URL."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/{{namespace}}/{{pod}}/state"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._loop.close()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._serve_until_stopped())

    async def _serve_until_stopped(self) -> None:
        app = web.Application()
        app.router.add_get("/{namespace}/{pod}/state", self._answer)
        # Who gives up asking a silent pod leaves nothing behind.
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        await web.SockSite(runner, self._socket).start()
        await self._stopped.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        pod = request.match_info["pod"]
        self.asked[pod] = self.asked.get(pod, 0) + 1
        self.tokens.add(request.headers.get("Authorization", ""))
        while not {pod, self.nodes.get(pod)}.isdisjoint(self.silent):  # noqa: ASYNC110 - tests change it
            await asyncio.sleep(0.1)
        return web.json_response(STATE | self.states.get(pod, {}))


def add_node(server: Server, name: str) -> None:
    """Make a node that says it is Ready.

    Of one that does not Kubernetes says after a minute that it is not, and that its pods are not.
    """
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ready = {
        "type": "Ready", "status": "True", "reason": "KubeletReady",
        "lastHeartbeatTime": now, "lastTransitionTime": now,
    }  # fmt: skip
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    server.must("POST", NODE.path(None), {**node, "status": {"conditions": [ready]}})


def bind(server: Server, pod: Manifest, node: str) -> None:
    """Play the scheduler."""
    metadata = pod["metadata"]
    server.must(
        "POST",
        POD.path(metadata["namespace"], metadata["name"], "binding"),
        {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]},
            "target": {"kind": "Node", "name": node},
        },
    )  # fmt: skip


def run_worker(server: Server, pod: Manifest, *, ready: bool = True) -> None:
    """Play the kubelet: the pod's container runs, and answers or not."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    container = {
        "name": "worker", "image": "x", "imageID": "x", "ready": ready, "restartCount": 0,
        "started": ready, "state": {"running": {"startedAt": now}},
    }  # fmt: skip
    # Nobody goes there; a Service takes no loopback address.
    address = f"10.9.{next(_numbers) % 250}.1"
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
    changes = {
        "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [condition],
            "containerStatuses": [container],
        }
    }
    metadata = pod["metadata"]
    server.patch(POD, metadata["namespace"], metadata["name"], changes, "status")


def token_of(server: Server, namespace: str, name: str = "chat") -> str:
    """The token that the operator has to send."""
    secret = server.get(SECRET, namespace, f"{name}-state-token") or {}
    return base64.b64decode(secret["data"]["token"]).decode()
