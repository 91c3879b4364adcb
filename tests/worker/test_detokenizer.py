import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_worker.detokenizer import Detokenizer

Pieces = list[bytes]


def streamed(pieces: Pieces, stop: tuple[str, ...] = (), min_tokens: int = 0) -> list[str]:
    """What is sent after each piece, and at the end."""
    detokenizer = Detokenizer(pieces.__getitem__, stop, min_tokens)
    sent = []
    for index in range(len(pieces)):
        sent.append(detokenizer.push([index]))
        if detokenizer.is_stopped:
            return sent
    return [*sent, detokenizer.finish()]


def at_once(pieces: Pieces, stop: tuple[str, ...] = ()) -> str:
    detokenizer = Detokenizer(pieces.__getitem__, stop)
    return detokenizer.push(range(len(pieces))) + detokenizer.finish()


def cuts(data: bytes, num_pieces: int) -> list[Pieces]:
    """Every way to cut `data` into at most `num_pieces` tokens."""
    every = itertools.combinations_with_replacement(range(len(data) + 1), num_pieces - 1)
    return [
        [data[a:b] for a, b in itertools.pairwise([0, *borders, len(data)])] for borders in every
    ]


@pytest.mark.parametrize("length", range(1, 11))
def test_nothing_of_a_stop_string_is_sent_wherever_the_tokens_are_cut(length: int) -> None:
    stop = "DEFGHIJKLM"[:length]
    data = ("ABC" + stop + "XYZ").encode()

    for pieces in cuts(data, 4):
        sent = streamed(pieces, (stop,))

        assert "".join(sent) == "ABC" == at_once(pieces, (stop,))


def test_text_that_only_looked_like_a_stop_string_is_sent_as_soon_as_that_is_clear() -> None:
    assert streamed([b"ab", b"DE", b"F", b"xD", b"q"], ("DEFG",)) == [
        "ab", "", "", "DEFx", "Dq", "",
    ]  # fmt: skip


def test_what_is_held_back_comes_out_at_the_end() -> None:
    assert streamed([b"...", b"XY"], ("XYZ",)) == ["...", "", "XY"]
    assert streamed([b"</", b"think"], ("</think>", "</")) == [""]
    assert streamed([b"<", b"/thin"], ("</think>",)) == ["", "", "</thin"]


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (("ab", "abc"), "xabc", "x"),
        (("abc", "b"), "xabc", "xa"),
        (("bc", "abc"), "xabc", "x"),
        (("aab",), "aaaab", "aa"),
        (("\n\n",), "a\n\n\nb", "a"),
        (("é",), "caf\u00e9", "caf"),
        (("zz",), "azbzc", "azbzc"),
        (("a",), "a", ""),
    ],
)
def test_the_stop_string_that_is_complete_first_counts(
    stop: tuple[str, ...], text: str, expected: str
) -> None:
    data = text.encode()

    for pieces in cuts(data, 3):
        assert "".join(streamed(pieces, stop)) == expected == at_once(pieces, stop)


@pytest.mark.parametrize(
    "text",
    ["🙂", "👨‍👩‍👧‍👦 family", "안녕하세요", "नमस्ते", "𠜎𠜱", "naïve €"],
    ids=["emoji", "joined", "korean", "hindi", "four-byte cjk", "latin"],
)
def test_a_character_over_several_tokens_comes_whole(text: str) -> None:
    data = text.encode()

    bytewise = streamed([data[i : i + 1] for i in range(len(data))])

    assert "".join(bytewise) == text
    assert not any("\ufffd" in piece for piece in bytewise)
    for pieces in cuts(data, 3):
        assert "".join(streamed(pieces)) == text == at_once(pieces)


def test_bytes_that_are_no_text_are_replaced_as_in_one_go() -> None:
    bad = [b"a\xf0\x9f", b"b", b"\xff", b"\xe2\x82"]

    assert (
        "".join(streamed(bad)) == b"".join(bad).decode(errors="replace") == "a\ufffdb\ufffd\ufffd"
    )


def test_a_stop_string_over_an_incomplete_character_at_the_end_is_still_found() -> None:
    assert streamed([b"a", b"\xe2\x82"], ("\ufffd",)) == ["a", "", ""]


def test_stop_strings_in_the_first_tokens_do_not_count_when_more_are_wanted() -> None:
    assert "".join(streamed([b"aX", b"bX", b"cX", b"d"], ("X",), min_tokens=3)) == "aXbXc"


def test_tokens_after_the_stop_string_are_ignored() -> None:
    detokenizer = Detokenizer([b"aX", b"b"].__getitem__, ("X",))

    assert (detokenizer.push([0, 1]), detokenizer.push([1]), detokenizer.finish()) == ("a", "", "")


@given(
    data=st.text("abX🙂é", max_size=12).map(str.encode),
    stops=st.lists(st.text("abX🙂é", min_size=1, max_size=4), max_size=3),
    borders=st.lists(st.integers(0, 40), max_size=8),
)
def test_how_tokens_are_cut_changes_nothing(
    data: bytes, stops: list[str], borders: list[int]
) -> None:
    edges = sorted({0, len(data), *(border for border in borders if border < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    text = data.decode()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]

    sent = "".join(streamed(pieces, tuple(stops)))

    first = min(ends, default=None)
    matching = [stop for stop in stops if first is not None and text[:first].endswith(stop)]
    assert sent == (text if first is None else text[: first - max(map(len, matching))])
