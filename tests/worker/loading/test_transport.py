"""Redirects, credentials and which failures are final."""

from typing import Any

import pytest
import requests

from deepseek_worker.errors import (
    CredentialsRefused,
    SourceError,
    SourceNotFound,
    Unreachable,
)
from deepseek_worker.loading.transport import Credentials, Patience, Transport, TryAgain


def transport(token_for: str | None = None) -> Transport:
    credentials = Credentials("hf_secret", token_for) if token_for else None
    return Transport(credentials, Patience(connect_seconds=1, read_seconds=1, attempts=2))


def test_an_answer_is_not_compressed(origin: Any) -> None:
    with transport().get(origin.put("/a", b"hello"), {"range": "bytes=1-"}) as response:
        assert response.raw.read() == b"ello"

    (_, headers) = origin.asked[0]
    assert headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, CredentialsRefused),
        (403, CredentialsRefused),
        (404, SourceNotFound),
        (410, SourceNotFound),
        (451, SourceError),
        (408, TryAgain),
        (429, TryAgain),
        (500, TryAgain),
        (503, TryAgain),
    ],
)
def test_each_status_is_final_or_worth_another_try(
    origin: Any, status: int, expected: type[Exception]
) -> None:
    url = origin.put("/a?sig=signature", b"", origin.fault.status(status))

    with pytest.raises(expected) as failure:
        transport().get(url, {})

    assert str(status) in str(failure.value)
    assert "signature" not in str(failure.value)


def test_the_wait_that_a_server_asks_for_is_kept(origin: Any) -> None:
    url = origin.put("/a", b"", origin.fault.status(429, retry_after="7"))

    with pytest.raises(TryAgain) as failure:
        transport().get(url, {})

    assert failure.value.after_seconds == 7


def test_nobody_listening_is_worth_another_try_until_it_is_not() -> None:
    waiting = transport()
    with pytest.raises(TryAgain) as failure:
        waiting.get("http://127.0.0.1:1/a", {})

    with pytest.raises(Unreachable, match=r"a: gave up after 2 attempts; .*refused"):
        waiting.retried("a", 2, failure.value)


def test_pauses_double_up_to_a_limit() -> None:
    patience = Patience(backoff_seconds=1, max_backoff_seconds=30)

    assert [patience.pause_seconds(n) for n in (1, 2, 3, 6, 60)] == [1, 2, 4, 30, 30]


def test_the_token_goes_to_its_host_and_to_no_other(origin: Any, other_origin: Any) -> None:
    target = other_origin.put("/blob", b"content")
    first = origin.put("/a", b"", origin.fault.status(302, location="/b"))
    origin.put("/b", b"", origin.fault.status(307, location=target))

    with transport(origin.url).get(first, {}) as response:
        assert response.raw.read() == b"content"

    assert [headers.get("authorization") for _, headers in origin.asked] == [
        "Bearer hf_secret",
        "Bearer hf_secret",
    ]
    assert "authorization" not in other_origin.asked[0][1]


def test_other_credentials_of_the_machine_are_not_sent(
    origin: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(netrc))

    transport().get(origin.put("/a", b""), {}).close()

    assert "authorization" not in origin.asked[0][1]


def test_a_circle_of_redirects_ends(origin: Any) -> None:
    url = origin.put("/a", b"")
    again = origin.fault.status(301, location="/a")
    origin.put("/a", b"", *[again] * 9)

    with pytest.raises(Unreachable, match="more than 5 redirects"):
        transport().get(url, {})

    assert len(origin.asked) == 6


def test_a_signature_that_ran_out_behind_a_redirect_is_worth_another_try(
    origin: Any, other_origin: Any
) -> None:
    target = other_origin.put("/blob", b"", other_origin.fault.status(403))

    with pytest.raises(TryAgain, match="403"):
        transport().get(origin.put("/a", b"", origin.fault.status(302, location=target)), {})


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://example/a"])
def test_redirects_to_other_protocols_are_not_followed(origin: Any, target: str) -> None:
    with pytest.raises(Unreachable, match="not followed"):
        transport().get(origin.put("/a", b"", origin.fault.status(302, location=target)), {})


def test_nothing_is_followed_from_https_to_http(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepseek_worker.loading import transport as module

    with pytest.raises(Unreachable, match="not https"):
        module._refuse_unsafe_redirect("https://hub.example/a", "http://cdn.example/a")


def test_answers_that_are_not_http_are_worth_another_try(origin: Any) -> None:
    def rubbish(handler: Any, _: bytes) -> None:
        handler.wfile.write(b"SSH-2.0-OpenSSH_9\r\n")
        handler.close_connection = True

    with pytest.raises(TryAgain):
        transport().get(origin.put("/a", b"", rubbish), {})


def test_sessions_do_not_outlive_their_answer(origin: Any) -> None:
    response = transport().get(origin.put("/a", b"x"), {})
    assert isinstance(response, requests.Response)

    response.close()
