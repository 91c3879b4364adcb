"""Bodies that come in and answers that go out, to clients that come, go and stay."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from deepseek_worker.sequence import Output

USER = [{"role": "user", "content": "hello"}]


def test_an_error_within_a_stream_is_an_event_and_the_stream_ends(api: Any) -> None:
    api.engine.fault = lambda request: Output(
        request.request_id,
        finish_reason="error",
        error="the logits are not finite",
        error_reason="NonFiniteLogits",
    )

    chunks = api.events(api.chat(stream=True, stream_options={"include_usage": True}))

    assert chunks[-1]["error"]["type"] == "server_error"
    assert "NonFiniteLogits" in chunks[-1]["error"]["message"]
    api.wait_until_idle()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(api: Any) -> None:
    with api.connect() as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
        connection.sendall(head.encode())

        answer = connection.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"8388608 bytes" in answer
    assert b"connection: close" in answer


def test_a_body_without_a_length_is_refused_when_it_gets_too_large(api: Any) -> None:
    with api.connect() as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        # A byte too much and no more: the refusal of a body that goes on may be lost to a reset.
        for size in (8388608, 1):
            connection.sendall(b"%x\r\n" % size + b"x" * size + b"\r\n")

        answer = connection.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"8388608 bytes" in answer
    assert b"connection: close" in answer


@contextmanager
def streaming(api: Any, num_chunks: int = 2) -> Iterator[None]:
    """A client that has read some chunks of its stream; it hangs up in the end."""
    with api.connect() as connection:
        body = {"model": "tiny", "messages": USER, "stream": True, "max_tokens": 200}
        api.send(connection, "/v1/chat/completions", body)
        reader = connection.makefile("rb")
        seen = 0
        while seen < num_chunks:
            seen += reader.readline().startswith(b"data: ")
        yield


def ends_within_a_step(api: Any) -> None:
    """Let the engine go on, which was held before its client hung up."""
    api.wait_until(lambda: api.driver._inbox or not api.driver._callbacks)
    steps = api.stats().num_steps
    api.engine.gate.set()
    api.wait_until_idle()
    assert api.stats().num_steps - steps <= 1


def test_a_client_that_hangs_up_frees_its_pages_within_a_step(api: Any) -> None:
    aborts = api.metric('deepseek_requests_total{finish_reason="abort"}')
    api.engine.step_seconds = 0.05

    with streaming(api):
        api.engine.gate.clear()

    ends_within_a_step(api)
    assert api.metric('deepseek_requests_total{finish_reason="abort"}') == aborts + 1


def test_a_client_that_hangs_up_without_a_stream_is_noticed_too(api: Any) -> None:
    api.engine.step_seconds = 0.05
    connection = api.connect()
    api.send(connection, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 200})
    api.wait_until(lambda: api.stats().num_running == 1)

    api.engine.gate.clear()
    connection.close()

    ends_within_a_step(api)


def test_two_hundred_clients_that_hang_up_leave_nothing(api: Any) -> None:
    def hang_up(_: int) -> None:
        with streaming(api):
            pass

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(hang_up, range(200)))

    api.wait_until_idle()
    assert api.complete().status_code == 200


def test_two_hundred_clients_at_once_on_a_small_pool_are_all_served(api: Any) -> None:
    api.engine.pool_pages = 8
    api.engine.reply = lambda request: bytes(request.prompt_token_ids)
    limits = httpx.Limits(max_connections=200)
    with httpx.Client(base_url=api.url, limits=limits, timeout=60) as client:

        def ask(number: int) -> str:
            body = {"model": "tiny", "prompt": f"n{number:03d}", "stream": number % 2 == 0}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200
            if number % 2 == 0:
                return api.text_of(api.events(response))
            return response.json()["choices"][0]["text"]

        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(ask, range(200)))

    assert answers == [f"n{number:03d}" for number in range(200)]
    api.wait_until_idle()


def test_a_client_that_does_not_read_keeps_nobody_waiting(api: Any) -> None:
    with api.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = {"model": "tiny", "messages": USER, "stream": True}
        api.send(connection, "/v1/chat/completions", body)
        api.wait_until(lambda: len(api.engine.seen) == 1)

        assert api.complete().status_code == 200
        api.wait_until_idle()


def test_a_body_in_small_pieces_is_put_together(api: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    with api.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        for at in range(0, len(body), 7):
            connection.sendall(body[at : at + 7])
            time.sleep(0.001)

        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_hangs_up_within_its_body_leaves_nothing(api: Any) -> None:
    with api.connect() as connection:
        connection.sendall(
            b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"model"'
        )

    assert api.complete().status_code == 200
    assert len(api.engine.seen) == 1
