"""The last words of a process, where Kubernetes looks for them.

The operator reads them from the pod's status and turns the reason into a condition.
"""

import json
from contextlib import suppress
from pathlib import Path

from deepseek_worker.errors import WorkerError

# The kubelet keeps no more.
MAX_BYTES = 4096


def write_termination_message(error: WorkerError, path: Path) -> None:
    """Leave `{"reason", "message"}`, unless nobody made the file for it."""
    if not path.exists():
        return
    message = str(error)
    body = _body(error.reason, message)
    while len(body) > MAX_BYTES:
        message = message[: len(message) * MAX_BYTES // len(body) - 4] + "…"
        body = _body(error.reason, message)
    # The error itself is in the log and in the exit code.
    with suppress(OSError):
        path.write_bytes(body)


def _body(reason: str, message: str) -> bytes:
    return json.dumps({"reason": reason, "message": message}, ensure_ascii=False).encode()
