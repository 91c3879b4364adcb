"""Connections end after some requests or some time, and never within an answer."""

import gc
import itertools
import json
import re
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from deepseek_worker.connections import MAX_HEAD_BYTES, MAX_PIPELINED


def ask(api: Any, connection: socket.socket, **body: Any) -> tuple[bytes, bytes]:
    """Head and body of one answer over a kept connection."""
    send(api, connection, **body)
    return answer(connection)


def send(api: Any, connection: socket.socket, **body: Any) -> None:
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 3, **body}
    api.send(connection, "/v1/completions", asked)


def answer(connection: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    while len(rest) < int(length[1]) if length else not rest.endswith(b"0\r\n\r\n"):
        rest += connection.recv(65536)
    return head, rest


def closes(head: bytes) -> bool:
    return b"connection: close" in head


def test_the_last_request_of_a_connection_is_told_to_go(scripted: Any) -> None:
    with scripted.running(connection_max_requests=3) as api, api.connect() as connection:
        answers = [closes(ask(api, connection)[0]) for _ in range(3)]

        assert answers == [False, False, True]
        assert connection.recv(1) == b""


def test_a_stream_may_be_the_last_request_too(scripted: Any) -> None:
    with scripted.running(connection_max_requests=1) as api, api.connect() as connection:
        head, body = ask(api, connection, stream=True)

        assert closes(head)
        assert b"data: [DONE]\n\n" in body
        assert connection.recv(1) == b""


def test_an_old_connection_ends_with_its_next_answer(scripted: Any) -> None:
    with scripted.running(connection_max_seconds=3600) as api, api.connect() as connection:
        young = closes(ask(api, connection)[0])
        # Passed by now, however long that took.
        api.limits.max_seconds = 0.05
        time.sleep(api.limits.max_seconds)
        old = closes(ask(api, connection)[0])

        assert (young, old) == (False, True)
        assert connection.recv(1) == b""


def test_a_stream_that_outlives_its_connection_s_time_is_not_cut(scripted: Any) -> None:
    with scripted.running(connection_max_seconds=3600) as api, api.connect() as connection:
        api.engine.gate.clear()
        send(api, connection, stream=True, max_tokens=20)
        api.wait_until(lambda: api.engine.seen)
        api.limits.max_seconds = 0.0
        api.engine.gate.set()
        head, body = answer(connection)

        assert not closes(head)
        # A chunk has all that came since the one before.
        assert b"".join(re.findall(rb'"text":"(\w*)"', body)) == b"abcdefghabcdefghabcd"
        assert b"data: [DONE]\n\n" in body
        assert closes(ask(api, connection)[0])


def test_while_draining_every_answer_ends_its_connection(scripted: Any) -> None:
    with scripted.running() as api, api.connect() as connection:
        api.limits.is_draining = True

        assert closes(ask(api, connection)[0])


def test_a_client_that_counts_on_its_connection_notices_nothing(scripted: Any) -> None:
    with scripted.running(connection_max_requests=2) as api:
        statuses = [api.complete(max_tokens=1).status_code for _ in range(9)]

    assert statuses == [200] * 9


def test_refusals_count_as_requests(scripted: Any) -> None:
    with scripted.running(connection_max_requests=2) as api, api.connect() as connection:
        answers = [closes(ask(api, connection, n=0)[0]) for _ in range(2)]

        assert answers == [False, True]


def test_a_connection_on_which_nobody_asks_is_closed(scripted: Any) -> None:
    with scripted.running() as api:
        patient_seconds = api.limits.head_seconds
        with api.connect() as used:
            ask(api, used)
            api.limits.head_seconds = 0.5
            with api.connect() as silent, api.connect() as slow:
                slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost:")

                assert silent.recv(1) == b""
                assert slow.recv(1) == b""
                api.limits.head_seconds = patient_seconds
                assert ask(api, used)


@pytest.mark.parametrize("size", [200, 70_000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_an_offer_of_another_protocol_is_passed_over(
    scripted: Any, framing: str, size: int
) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 3, "user": "u" * size})
    framed = f"content-length: {len(body)}\r\n\r\n{body}"
    if framing == "chunked":
        framed = f"transfer-encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    offering = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        f"upgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n{framed}"
    ).encode()
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with scripted.running() as api:
        for cuts in ([], [100], [len(offering) - 150, len(offering) - 1]):
            with api.connect() as connection:
                for begin, end in itertools.pairwise([0, *cuts, len(offering)]):
                    connection.sendall(offering[begin:end])
                    time.sleep(0.02)
                connection.sendall(offering + last)
                answers = b"".join(iter(lambda: connection.recv(65536), b""))

            assert answers.count(b"HTTP/1.1 200 OK") == 3
            assert answers.count(b'"text":"abc"') == 2
            assert b'"version"' in answers


def test_a_head_that_does_not_end_is_refused(scripted: Any) -> None:
    begun = b"GET /version HTTP/1.1\r\nhost: x\r\nx: "
    with scripted.running() as api, api.connect() as within, api.connect() as beyond:
        for connection, rest in ((within, b"\r\n\r\n"), (beyond, b"a")):
            connection.sendall(begun + b"a" * (MAX_HEAD_BYTES - len(begun)))
            time.sleep(0.1)
            connection.sendall(rest)

        assert within.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert b"The head of a request may have 65536 bytes" in beyond.recv(65536)


def all_of(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def post(version: str, headers: str = "", **asked: Any) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 3, **asked})
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("version", ["0.9", "1.0"])
def test_a_client_from_before_chunks_gets_none(api: Any, version: str) -> None:
    with api.connect() as connection:
        connection.sendall(post(version, "connection: keep-alive\r\n", stream=True))
        head, _, body = all_of(connection).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 OK")
    assert closes(head)
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    events = body.split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events[:-1])
    assert events[-2:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize("request_", [post("1.0"), b"HEAD /version HTTP/1.0\r\n\r\n"])
def test_a_client_from_before_chunks_is_told_the_length_where_it_is_known(
    api: Any, request_: bytes
) -> None:
    with api.connect() as connection:
        connection.sendall(request_)
        head, _, body = all_of(connection).partition(b"\r\n\r\n")

    assert closes(head)
    said = int(re.search(rb"content-length: (\d+)", head)[1])
    assert len(body) == (0 if request_.startswith(b"HEAD") else said)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_body_that_waits_to_be_asked_for_is_asked_for_where_that_exists(
    api: Any, version: str
) -> None:
    with api.connect() as connection:
        connection.sendall(post(version, "expect: 100-continue\r\nconnection: close\r\n"))
        answers = all_of(connection)

    is_asked = answers.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert is_asked == (version == "1.1")
    assert b'"text":"abc"' in answers


def test_a_connection_ends_whose_client_may_send_a_body_or_not(api: Any) -> None:
    waiting = b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n"
    with api.connect() as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\n" + waiting)
        answers = all_of(connection)

    assert answers.startswith(b"HTTP/1.1 404 ")
    assert closes(answers)


@pytest.mark.parametrize("begun", [b"POST /v1", b"\r\n", b"\r\n\r\n\r\n"])
def test_what_is_no_whole_request_keeps_no_connection_open(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr("deepseek_worker.api_process.KEEP_ALIVE_SECONDS", 1)
    with scripted.running() as api, api.connect() as connection:
        connection.sendall(GET)
        assert b'"version"' in connection.recv(65536)
        api.limits.head_seconds = 0.5
        connection.sendall(begun)

        assert connection.recv(1) == b""


def test_a_slow_head_behind_a_request_does_not_cut_its_answer(scripted: Any) -> None:
    with scripted.running() as api:
        api.engine.gate.clear()
        with api.connect() as connection:
            send(api, connection, stream=True)
            api.wait_until(lambda: api.engine.seen)
            api.limits.head_seconds = 0.2
            connection.sendall(b"POST /v1")
            time.sleep(0.5)
            api.engine.gate.set()

            assert all_of(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_no_http_does_not_get_an_answer_into_a_running_one(
    api: Any, is_stream: bool
) -> None:
    with api.connect() as connection:
        api.engine.gate.clear()
        send(api, connection, stream=is_stream)
        api.wait_until(lambda: api.engine.seen)
        connection.sendall(b"no HTTP\r\n\r\n")
        time.sleep(0.1)
        connection.sendall(GET)
        api.engine.gate.set()
        answers = all_of(connection)

    assert answers.count(b"HTTP/1.1") == 1
    assert answers.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if is_stream else b"}")


def test_trailers_do_not_pass_for_the_head_and_are_limited(scripted: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret")
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    begun = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + chunked + b"0\r\n"
    running = scripted.running(api_key_file=keys)
    with running as api, api.connect() as within, api.connect() as beyond:
        within.sendall(begun + b"authorization: Bearer secret\r\n\r\n")
        beyond.sendall(begun + b"a: ")
        for _ in range(5):
            time.sleep(0.05)
            beyond.sendall(b"b" * (MAX_HEAD_BYTES // 4))

        assert within.recv(65536).startswith(b"HTTP/1.1 401 ")
        assert b"so may trailers" in all_of(beyond)


def test_a_long_body_does_not_count_as_a_head(api: Any) -> None:
    with api.connect() as connection:
        connection.sendall(2 * post("1.1", user="u" * 100_000) + GET[:-2])
        time.sleep(0.1)
        connection.sendall(b"connection: close\r\n\r\n")
        answers = all_of(connection)

    assert answers.count(b'"text":"abc"') == 2
    assert b'"version"' in answers


def test_of_thousands_of_requests_at_once_few_are_kept(scripted: Any) -> None:
    with scripted.running() as api, api.connect() as connection:
        api.engine.gate.clear()
        connection.sendall(post("1.1", stream=True) + GET * 5000)
        api.wait_until(lambda: api.engine.seen)
        protocols = [k for k in gc.get_objects() if type(k).__name__ == "AgeingProtocol"]

        assert sum(len(protocol.pipeline) for protocol in protocols) == MAX_PIPELINED


def test_a_client_that_takes_nothing_is_let_go_and_others_are_served(scripted: Any) -> None:
    with scripted.running() as api, socket.socket() as deaf:
        api.limits.deaf_seconds = 1.0
        # The smallest, so that the answer fills it.
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
        deaf.connect(("127.0.0.1", api.port))
        send(api, deaf, stream=True, max_tokens=200, n=100, logprobs=5)
        api.wait_until(lambda: api.engine.seen)

        assert api.complete(max_tokens=1).status_code == 200
        api.wait_until_idle()
        # But for the one on which the other client was served.
        api.wait_until(lambda: api.limits.num_open == 1)


def test_open_connections_are_counted_so_that_an_end_can_wait_for_them(scripted: Any) -> None:
    with scripted.running() as api:
        with api.connect() as one, api.connect() as two:
            ask(api, one)
            ask(api, two)
            assert api.limits.num_open == 2

        api.wait_until(lambda: api.limits.num_open == 0)


@pytest.mark.parametrize("is_reset", [False, True])
def test_nothing_is_kept_of_a_connection_that_is_gone(scripted: Any, is_reset: bool) -> None:
    def num_kept() -> int:
        return sum(type(kept).__name__ == "AgeingProtocol" for kept in gc.get_objects())

    with scripted.running() as api:
        gc.collect()
        before = num_kept()
        for _ in range(5):
            with api.connect() as connection:
                ask(api, connection)
                if is_reset:
                    # To linger for no time resets the connection when it is closed.
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        api.wait_until(lambda: api.limits.num_open == 0)

        # Long before its timers would let go of it; gathered, for a stack may refer to itself.
        api.wait_until(lambda: gc.collect() >= 0 and num_kept() <= before)
