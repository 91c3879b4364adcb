"""Connections end after some requests or some time, and never within an answer."""

import gc
import itertools
import json
import re
import socket
import struct
import time
from typing import Any

import pytest

from deepseek_worker.connections import MAX_HEAD_BYTES


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
        api.limits.first_request_seconds = 1.0
        # First, so that it asks in time.
        with api.connect() as used:
            ask(api, used)
            with api.connect() as silent, api.connect() as slow:
                slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost:")

                assert silent.recv(1) == b""
                assert slow.recv(1) == b""
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
