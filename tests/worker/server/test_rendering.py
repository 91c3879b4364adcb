"""Pieces of answers as clients see them."""

import json
from typing import Any

from deepseek_worker.answers import TokenTexts, encode, usage
from deepseek_worker.generation import Piece
from deepseek_worker.rendering import ChatRenderer, CompletionRenderer, Head
from deepseek_worker.sequence import TokenLogprobs
from deepseek_worker.validation import parse_chat, parse_completion

HEAD = Head("id-1", 7, "model-1")
USAGE = usage(1, 2, 0, 0)


def token(value: int) -> bytes:
    return bytes([value])


def chat(**body: Any) -> ChatRenderer:
    messages = [{"role": "user", "content": "hi"}]
    request = parse_chat(json.dumps({"model": "m", "messages": messages, **body}).encode())
    return ChatRenderer(HEAD, request, TokenTexts(token))


def completion(echoes: list[str], **body: Any) -> CompletionRenderer:
    request = parse_completion(json.dumps({"model": "m", "prompt": "hi", **body}).encode())
    return CompletionRenderer(HEAD, request, TokenTexts(token), token, echoes)


def sent(events: bytes) -> list[Any]:
    return [json.loads(line.removeprefix(b"data: ")) for line in events.split(b"\n\n") if line]


def choices(events: bytes) -> list[Any]:
    return [choice for chunk in sent(events) for choice in chunk["choices"]]


def test_a_chat_begins_with_its_role_even_when_its_first_character_is_not_whole() -> None:
    renderer = chat()

    first = choices(renderer.events([Piece(0)]))
    nothing = renderer.events([Piece(0)])
    then = choices(renderer.events([Piece(0, "é")]))

    assert [choice["delta"] for choice in first] == [{"role": "assistant", "content": ""}]
    assert nothing == b""
    assert [choice["delta"] for choice in then] == [{"content": "é"}]


def test_a_chat_that_ends_with_its_first_piece_is_two_chunks() -> None:
    deltas = [
        (choice["delta"], choice["finish_reason"])
        for choice in choices(chat().events([Piece(0, "yes", [], "stop")]))
    ]

    assert deltas == [({"role": "assistant", "content": "yes"}, None), ({}, "stop")]


def test_each_answer_of_a_chat_has_its_own_beginning() -> None:
    renderer = chat(n=2)

    events = renderer.events([Piece(0, "a"), Piece(1, "b"), Piece(0, "c")])

    assert [(choice["index"], choice["delta"]) for choice in choices(events)] == [
        (0, {"role": "assistant", "content": "a"}),
        (1, {"role": "assistant", "content": "b"}),
        (0, {"content": "c"}),
    ]


def test_usage_is_sent_only_to_those_who_ask() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for renderer in (chat(), completion([""])):
        assert renderer.usage_event(USAGE) == b""
        assert "usage" not in sent(renderer.events([Piece(0, "a")]))[0]
    for renderer in (chat(**options), completion([""], **options)):
        (last,) = sent(renderer.usage_event(USAGE))
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 3)
        assert sent(renderer.events([Piece(0, "a")]))[0]["usage"] is None


def test_a_completion_without_new_text_is_not_sent() -> None:
    renderer = completion([""])

    assert renderer.events([Piece(0)]) == b""
    assert choices(renderer.events([Piece(0, "", [], "length")]))[0]["finish_reason"] == "length"


def test_a_prompt_is_echoed_once_before_its_answer() -> None:
    renderer = completion(["hi", "ho"])

    events = renderer.events([Piece(0, "a"), Piece(1, "b"), Piece(0, "c", [], "stop")])

    assert [choice["text"] for choice in choices(events)] == ["hia", "hob", "c"]


def test_offsets_of_logprobs_go_on_from_chunk_to_chunk() -> None:
    renderer = completion([""], logprobs=0)
    entry = TokenLogprobs(97, -1.0, 1)

    offsets = [
        choices(renderer.events([Piece(0, "aa", [(97, entry), (97, entry)])]))[0]["logprobs"][
            "text_offset"
        ]
        for _ in range(2)
    ]

    assert offsets == [[0, 1], [2, 3]]


def test_whole_answers_carry_everything_at_once() -> None:
    entry = TokenLogprobs(97, -1.0, 1)
    pieces = [Piece(0, "a", [(97, entry)], "stop"), Piece(1, "b", [], "length")]

    whole = json.loads(encode(chat(n=2, logprobs=True).whole(pieces, USAGE)))
    text = json.loads(encode(completion(["x", ""], n=2).whole(pieces, USAGE)))

    assert [choice["message"]["content"] for choice in whole["choices"]] == ["a", "b"]
    assert whole["choices"][0]["logprobs"]["content"][0]["token"] == "a"
    assert [choice["text"] for choice in text["choices"]] == ["xa", "b"]
    assert text["choices"][0]["logprobs"] is None
    assert (whole["usage"], text["usage"]) == (text["usage"], whole["usage"])
