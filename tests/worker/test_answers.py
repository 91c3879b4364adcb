import math

import pytest

from deepseek_worker.answers import TextOffsets, TokenTexts, encode, error_answer, event, usage
from deepseek_worker.errors import (
    BodyTooLarge,
    Draining,
    InvalidRequest,
    QueueFull,
    RequestTooLarge,
    TemplateError,
    Unauthorized,
    UnknownModel,
    WorkerError,
)
from deepseek_worker.sequence import TokenLogprobs

TOKENS = [b"Hi", b"\xf0\x9f", b"\x99\x82", b" there", b"Hi", b"<end>"]
TEXTS = TokenTexts(TOKENS.__getitem__)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Unauthorized("x"), 401, "invalid_api_key"),
        (UnknownModel("x", "model"), 404, "model_not_found"),
        (BodyTooLarge("x"), 413, "request_too_large"),
        (RequestTooLarge("x"), 400, "context_length_exceeded"),
        (TemplateError("x"), 400, "invalid_messages"),
        (InvalidRequest("x", "n", "invalid_type"), 400, "invalid_type"),
        (InvalidRequest("x"), 400, "invalid_value"),
        (QueueFull("x"), 429, "engine_overloaded"),
        (Draining("x"), 503, "unavailable"),
        (WorkerError("x"), 500, "internal_error"),
    ],
)
def test_each_error_has_its_status_and_code(error: WorkerError, status: int, code: str) -> None:
    given, body = error_answer(error)

    assert (given, body.error.code, body.error.message) == (status, code, "x")
    assert body.error.param == getattr(error, "param", None)


def test_a_token_that_is_no_text_is_written_as_bytes() -> None:
    assert [TEXTS.text(token) for token in (0, 1, 3)] == ["Hi", "bytes:\\xf0\\x9f", " there"]


def test_chat_logprobs_name_every_alternative_with_its_bytes() -> None:
    entry = TokenLogprobs(1, -0.5, 1, ((1, -0.5), (0, -math.inf)))

    (answer,) = TEXTS.chat([(1, entry)]).content

    assert (answer.token, answer.logprob, answer.bytes) == ("bytes:\\xf0\\x9f", -0.5, [240, 159])
    assert [(top.token, top.logprob) for top in answer.top_logprobs] == [
        ("bytes:\\xf0\\x9f", -0.5),
        ("Hi", -9999.0),
    ]


def test_no_logprob_is_infinite_in_json() -> None:
    entry = TokenLogprobs(0, -math.inf, 1, ((3, -math.inf),))

    written = encode(TEXTS.completion([(0, entry)], 1, TextOffsets(TOKENS.__getitem__)))

    assert b'"token_logprobs":[-9999.0]' in written
    assert b'{" there":-9999.0,"Hi":-9999.0}' in written


def test_two_tokens_that_look_alike_do_not_hide_each_other() -> None:
    entry = TokenLogprobs(4, -2.0, 2, ((0, -1.0), (3, -1.5)))

    answer = TEXTS.completion([(4, entry)], 2, TextOffsets(TOKENS.__getitem__))

    assert answer.top_logprobs == [{"Hi": -1.0, " there": -1.5, "token_id:4": -2.0}]


def test_the_first_token_of_a_prompt_has_no_logprob() -> None:
    entry = TokenLogprobs(3, -1.0, 1, ())

    answer = TEXTS.completion([(0, None), (3, entry)], 0, TextOffsets(TOKENS.__getitem__))

    assert answer.tokens == ["Hi", " there"]
    assert answer.token_logprobs == [None, -1.0]
    assert answer.top_logprobs is None
    assert answer.text_offset == [0, 2]


def test_offsets_count_characters_and_go_on_over_chunks() -> None:
    shown = [*TOKENS[:5], b""]
    offsets = TextOffsets(shown.__getitem__)

    assert [offsets.take(token, "") for token in (0, 1, 2, 3, 5, 0)] == [0, 2, 2, 3, 9, 9]


def test_special_tokens_have_their_place_in_an_echo_that_shows_them() -> None:
    shown = [*TOKENS[:5], b""]

    def offsets(echo: str) -> list[int]:
        taken = TextOffsets(shown.__getitem__, echo)
        return [taken.take(token, text) for token, text in ((5, "<a>"), (0, "Hi"), (5, "<a>"))]

    assert offsets("<a>Hi") == [0, 3, 5]
    assert offsets("Hi") == [0, 0, 2]


def test_usage_adds_up() -> None:
    assert encode(usage(3, 4, 2, 1)) == (
        b'{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,'
        b'"prompt_tokens_details":{"cached_tokens":2},'
        b'"completion_tokens_details":{"reasoning_tokens":1}}'
    )


def test_an_event_is_one_line_whatever_the_text() -> None:
    written = event(error_answer(WorkerError("two\nlines"))[1])

    assert written.startswith(b"data: {")
    assert written.count(b"\n") == 2
    assert written.endswith(b"}\n\n")
