"""`deepseek-worker serve` as a process, for the tests that share one."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from cluster import ports

# Starting Python with torch alone takes most of a minute where many tests share two processors.
SLOW_START_SECONDS = 200
NAME, MODEL_ID = "smollm2", "SmolLM2-135M-Instruct"


class Process:
    """`deepseek-worker serve` with the trained model."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.last_words = folder / "termination-log"
        self.last_words.touch()
        self.log = folder / "log"
        (self.port,) = ports.choose(1)
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable, "-m", "deepseek_worker.main", "serve", f"--model={model}",
            f"--served-model-name={NAME}", f"--model-id={MODEL_ID}", "--host=127.0.0.1",
            f"--port={self.port}", "--device=cpu", *flags,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "TERMINATION_MESSAGE_PATH": str(self.last_words),
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def children(self, kind: str) -> list[int]:
        """Process numbers of one kind: `api_process` or `engine_process`."""
        pid = self.process.pid
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [
            int(child)
            for child in listed
            if f"deepseek_worker.{kind}".encode() in Path(f"/proc/{child}/cmdline").read_bytes()
        ]

    def pids(self) -> list[int]:
        """All processes of the worker."""
        return [self.process.pid, *self.children("engine_process"), *self.children("api_process")]

    def health(self, kind: str) -> tuple[int | None, dict[str, Any]]:
        try:
            response = self.client.get(f"/health/{kind}")
        except httpx.TransportError:
            return None, {}
        return response.status_code, response.json()

    def wait_until_ready(self) -> list[dict[str, Any]]:
        """Wait, and tell what /health/ready said on the way."""
        said = []
        deadline = time.monotonic() + SLOW_START_SECONDS
        while (answer := self.health("ready"))[0] != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, said
            if answer[0] is not None:
                said.append(answer[1])
            time.sleep(0.05)
        return said

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition(" ")[0].partition("{")[0] == name
        )

    def idle_pages(self) -> float:
        """Pages that a request could have, once nothing runs."""
        deadline = time.monotonic() + 60
        while self.metric("deepseek_requests_running") + self.metric("deepseek_requests_waiting"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        text = self.client.get("/metrics").text
        pages = {
            state: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            for state in ("free", "cached", "held")
            if line.startswith(f'deepseek_kv_pages{{state="{state}"}}')
        }
        assert pages["held"] == 0
        return pages["free"] + pages["cached"]

    def stop(self) -> int:
        self.client.close()
        self.openai.close()
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


def chat(worker: Process, content: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    options = {"temperature": 0, "max_tokens": 30, **options}
    return worker.openai.chat.completions.create(model=NAME, messages=messages, **options)
