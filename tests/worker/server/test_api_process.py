"""A worker of three processes: two for HTTP and text, one for the engine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from worker_process import NAME, Process

from deepseek_contract.state import WorkerState

pytestmark = [pytest.mark.timeout(400)]
TOKEN = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def worker(quick_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("split")
    (folder / "token").write_text("secret")
    process = Process(
        quick_model,
        folder,
        "--api-processes=2",
        "--max-context-tokens=20000",
        f"--state-token-file={folder / 'token'}",
    )
    process.wait_until_ready()
    yield process
    assert process.stop() == 0


@pytest.fixture
def own_worker(quick_model: Path, tmp_path: Path) -> Iterator[Process]:
    """One that a test may break."""
    process = Process(quick_model, tmp_path, "--api-processes=2", "--max-context-tokens=20000")
    process.wait_until_ready()
    yield process
    process.client.close()
    process.openai.close()
    if process.process.poll() is None:
        process.process.kill()
        process.process.wait()


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def connection_of(process: Process, pid: int) -> httpx.Client:
    """A client whose connection that API process has taken."""
    for _ in range(500):
        client = httpx.Client(base_url=process.url, timeout=60)
        client.get("/version")
        if pid in owners(client):
            return client
        client.close()
    raise AssertionError("one API process takes no connections")


def owners(client: httpx.Client) -> set[int]:
    """Who holds the other end of a client's connection."""
    (stream,) = client._transport._pool.connections
    port = stream._connection._network_stream.get_extra_info("client_addr")[1]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[2].endswith(f":{port:04X}")}
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) in {f"socket:[{inode}]" for inode in inodes}:
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return found


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_only_the_engine_s_process_loads_torch(worker: Process) -> None:
    (engine,) = worker.children("engine_process")
    apis = worker.children("api_process")

    assert len(apis) == 2
    assert "libtorch" in maps(engine)
    for pid in (*apis, worker.process.pid):
        assert "torch" not in maps(pid)
    for module in ("api_process", "serve", "main"):
        code = f"import sys, deepseek_worker.{module}; assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)


def test_both_processes_take_connections_and_say_the_same(worker: Process) -> None:
    clients = [connection_of(worker, pid) for pid in worker.children("api_process")]
    for at, client in enumerate(clients):
        for _ in range(at + 1):
            answer = client.post(
                "/v1/completions",
                json={"model": NAME, "prompt": "1 2", "max_tokens": 3, "temperature": 0},
            )
            assert answer.json()["usage"]["completion_tokens"] == 3
        assert client.post("/v1/completions", json={"model": "x", "prompt": "y"}).status_code == 404

    def said(client: httpx.Client) -> tuple[Any, ...]:
        text = client.get("/metrics").text
        lines = [line for line in text.splitlines() if "last_step" not in line]
        state = WorkerState.from_json(client.get("/state", headers=TOKEN).text)
        timeless = state.model_copy(update={"last_step_at": 0.0, "seconds_since_step": 0.0})
        cards = client.get("/v1/models").json()
        return lines, timeless, cards, client.get("/health/ready").json()["phase"]

    first, second = map(said, clients)

    assert first == second
    lines = first[0]
    assert 'deepseek_requests_rejected_total{reason="UnknownModel"} 2.0' in lines
    assert 'deepseek_requests_total{finish_reason="length"} 3.0' in lines
    assert "deepseek_inter_token_latency_seconds_count 6.0" in lines
    for client in clients:
        client.close()


def test_an_api_process_that_dies_is_replaced_and_others_are_not_touched(
    own_worker: Process,
) -> None:
    dying, staying = own_worker.children("api_process")
    (engine,) = own_worker.children("engine_process")
    ask = {"model": NAME, "prompt": "1", "stream": True, "temperature": 0}
    lost, kept = (connection_of(own_worker, pid) for pid in (dying, staying))
    with closing(lost), closing(kept):
        with (
            lost.stream("POST", "/v1/completions", json={**ask, "max_tokens": 19_000}) as broken,
            kept.stream("POST", "/v1/completions", json={**ask, "max_tokens": 400}) as whole,
        ):
            lines, broken_lines = whole.iter_lines(), broken.iter_lines()
            next(lines), next(broken_lines)

            os.kill(dying, signal.SIGKILL)

            with pytest.raises(httpx.TransportError):
                list(broken_lines)
            chunks = [json.loads(line[6:]) for line in lines if line and line[6:] != "[DONE]"]
        # Its requests are gone, and what it had counted is not.
        wait_for(lambda: own_worker.metric("deepseek_requests_running") == 0)
        assert kept.get("/health/ready").status_code == 200
    wait_for(lambda: len(own_worker.children("api_process")) == 2)
    (new,) = set(own_worker.children("api_process")) - {staying}

    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert own_worker.children("engine_process") == [engine]
    with closing(connection_of(own_worker, new)) as client:
        answer = client.post(
            "/v1/completions", json={"model": NAME, "prompt": "x", "max_tokens": 2}
        )
        assert answer.status_code == 200
    assert "was ended by SIGKILL" in own_worker.log.read_text()
    assert own_worker.stop() == 0


def test_an_engine_that_dies_is_said_and_ends_the_pod_with_its_reason(own_worker: Process) -> None:
    (engine,) = own_worker.children("engine_process")
    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(
                own_worker.client.post,
                "/v1/completions",
                json={"model": NAME, "prompt": "x", "max_tokens": 19_000},
            )
            for _ in range(6)
        ]
        wait_for(lambda: own_worker.metric("deepseek_requests_running") == 6)

        os.kill(engine, signal.SIGSEGV)

        said = [answer.result() for answer in answers]
        code = own_worker.process.wait(60)

    assert {answer.status_code for answer in said} == {503}
    assert "the engine's process has ended" in said[0].json()["error"]["message"]
    words = json.loads(own_worker.last_words.read_text())
    assert (code, words["reason"]) == (1, "InternalError")
    assert words["message"] == "the engine's process was ended by SIGSEGV"


def test_all_processes_end_with_the_one_that_started_them(own_worker: Process) -> None:
    pids = own_worker.pids()[1:]

    own_worker.process.kill()
    own_worker.process.wait()

    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_worker_that_drains_finishes_what_both_processes_have(own_worker: Process) -> None:
    clients = [connection_of(own_worker, pid) for pid in own_worker.children("api_process")]
    body = {"model": NAME, "prompt": "x", "max_tokens": 600}
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(client.post, "/v1/completions", json=body) for client in clients]
        wait_for(lambda: own_worker.metric("deepseek_requests_running") == 2)

        own_worker.process.terminate()

        said = [answer.result() for answer in answers]
    for client in clients:
        client.close()

    assert [answer.json()["usage"]["completion_tokens"] for answer in said] == [600, 600]
    assert own_worker.process.wait(60) == 0


def test_clients_that_hang_up_on_either_process_leave_nothing(worker: Process) -> None:
    pages = worker.idle_pages()
    gate = threading.Semaphore(32)

    def hang_up(number: int) -> None:
        body = {"model": NAME, "prompt": f"{number}", "stream": True, "max_tokens": 10_000}
        with (
            gate,
            httpx.Client(base_url=worker.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as stream,
        ):
            assert stream.status_code == 200
            if number % 2:
                next(stream.iter_lines())

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(hang_up, range(200)))

    assert worker.idle_pages() == pages
    assert worker.metric("deepseek_requests_waiting") == 0


def test_a_long_prompt_goes_through_beside_short_ones(worker: Process) -> None:
    def ask(prompt: str) -> dict[str, Any]:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 2}
        response = worker.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        usage: dict[str, Any] = response.json()["usage"]
        return usage

    with ThreadPoolExecutor() as pool:
        long = pool.submit(ask, "abcdefgh" * 1500)
        short = [pool.submit(ask, str(number)) for number in range(20)]

        assert long.result()["prompt_tokens"] == 12_000
        assert all(answer.result()["completion_tokens"] == 2 for answer in short)
