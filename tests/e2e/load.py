"""Clients that keep their connections and ask as long as a load lasts."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from site_under_test import PATIENCE_SECONDS, Namespace


@dataclass
class Load:
    """Some clients at the Service of one deployment, each with one kept connection.

    A failed request is one that got anything but 200: nobody here asks again.
    """

    url: str
    model: str
    num_clients: int
    prompt_words: int
    max_tokens: int
    pause_seconds: float = 0.0
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(self.num_clients)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        # Prompts that start alike would share their pages.
        words = " ".join(f"{number}.{place}" for place in range(self.prompt_words))
        body = {
            "model": self.model, "prompt": words, "max_tokens": self.max_tokens,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        with httpx.Client(timeout=PATIENCE_SECONDS, trust_env=False) as client:
            while not self._ended.is_set():
                outcome = self._once(client, body)
                with self._lock:
                    self.answered += outcome is None
                    if outcome is not None:
                        self.failures.append(outcome)
                self._ended.wait(self.pause_seconds)

    def _once(self, client: httpx.Client, body: dict[str, Any]) -> str | None:
        try:
            answer = client.post(f"{self.url}/completions", json=body)
        except httpx.HTTPError as error:
            return f"{time.strftime('%X')} {error!r}"
        if answer.status_code == 200:
            return None
        return f"{time.strftime('%X')} {answer.status_code} {answer.text[:200]}"


@contextmanager
def watched_count(namespace: Namespace, deployment: str) -> Iterator[list[int]]:
    """The numbers of pods that are wanted meanwhile, each once it changes."""
    seen: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.3):
            live = namespace.get("deployment", deployment)
            count = live["spec"].get("replicas", 0)
            if not seen or seen[-1] != count:
                seen.append(count)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def answered_by(pod: dict[str, Any]) -> int:
    """Requests that a pod has answered."""
    url = f"http://{pod['status']['podIP']}:8000/metrics"
    text = httpx.get(url, timeout=PATIENCE_SECONDS, trust_env=False).text
    prefix = 'deepseek_requests_total{finish_reason="length"}'
    return sum(int(float(line.split()[-1])) for line in text.splitlines() if prefix in line)


def external_metric(namespace: Namespace, metric: str, deployment: str) -> dict[str, float]:
    """What the external metrics API says of a metric, by pod."""
    path = (
        f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{namespace.name}/{metric}"
        f"?labelSelector=deployment%3D{deployment}%2Ctier%3Dprimary"
    )
    items = json.loads(namespace.kubectl("get", "--raw", path))["items"]
    return {item["metricLabels"]["pod"]: _number(item["value"]) for item in items}


def _number(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
