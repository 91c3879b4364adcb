"""Grammars over tokens of bytes."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from deepseek_worker import grammar
from deepseek_worker.errors import InvalidRequest
from deepseek_worker.grammar import GrammarCompiler
from deepseek_worker.sequence import Structure

END, MARKER, VOCAB_SIZE = 256, 257, 300


def tokenizer(ends: frozenset[int] = frozenset({END})) -> Any:
    def token_bytes(token_id: int) -> bytes:
        named = {END: b"<end>", MARKER: b"<call>", 258: b"ab"}
        return bytes([token_id]) if token_id < 256 else named.get(token_id, b"")

    return SimpleNamespace(
        token_bytes=token_bytes,
        eos_token_ids=ends,
        marker_token_ids=frozenset({END, MARKER}),
        encode=lambda text, add_special_tokens=False: [
            ord(part) if len(part) == 1 else 258 for part in re.findall("ab|.", text)
        ],
    )


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB_SIZE)


def allowed(guide: Any) -> set[int] | None:
    bits = guide.allowed_tokens()
    if bits is None:
        return None
    assert len(bits) == 4 * 10
    return {token for token in range(320) if bits[token // 8] >> token % 8 & 1}


def test_only_what_the_grammar_allows_may_come(compiler: GrammarCompiler) -> None:
    guide = compiler.compile(Structure('start: "ab" /[xy]/ "!"?', "f"))()

    # Of what is certain, the tokens that the tokenizer itself would make.
    assert allowed(guide) == {258}
    guide.advance(258)
    assert allowed(guide) == {ord("x"), ord("y")}
    guide.advance(ord("y"))
    assert allowed(guide) == {ord("!"), END}
    assert not guide.is_finished
    guide.advance(ord("!"))
    assert guide.is_finished
    assert guide.error is None


def test_markers_are_tokens_and_no_text(compiler: GrammarCompiler) -> None:
    text = compiler.compile(Structure("start: /.*/", "f"))()
    marked = compiler.compile(Structure(f"start: <[{MARKER}]> /a*/", "f"))()

    # Bytes that begin no character are no text either.
    assert allowed(text) == {*range(0x80), *range(0xC2, 0xF5), 258, END} - {ord("\n")}
    assert allowed(marked) == {MARKER}
    marked.advance(MARKER)
    assert allowed(marked) == {ord("a"), END}


def test_a_grammar_begins_after_its_texts(compiler: GrammarCompiler) -> None:
    guide = compiler.compile(Structure('start: "1"', "f", ("</t>", "<call>")))()

    for byte in b"so </t":
        assert allowed(guide) is None
        guide.advance(byte)
    guide.advance(ord(">"))
    assert allowed(guide) is None
    guide.advance(MARKER)
    assert allowed(guide) == {ord("1")}
    guide.advance(ord("1"))
    assert guide.is_finished


def test_guides_of_one_grammar_go_their_own_ways(compiler: GrammarCompiler) -> None:
    make = compiler.compile(Structure('start: "ab"', "f"))
    one, other = make(), make()

    one.advance(258)

    assert one.is_finished
    assert not other.is_finished
    assert allowed(other) == {258}


def test_a_token_that_is_not_allowed_is_an_error(compiler: GrammarCompiler) -> None:
    guide = compiler.compile(Structure('start: "ab"', "f"))()

    guide.advance(ord("x"))

    assert guide.error is not None
    assert not guide.is_finished


def test_without_an_end_token_grammars_end_by_themselves() -> None:
    guide = GrammarCompiler(tokenizer(frozenset()), VOCAB_SIZE).compile(
        Structure('start: "a"', "f")
    )()

    assert allowed(guide) == {ord("a")}
    guide.advance(ord("a"))
    assert guide.is_finished


@pytest.mark.parametrize(
    ("lark", "says"),
    [
        ("start: other", "unknown name"),
        ("start: /(/", "unclosed group"),
        ("start: /(?=a)a/", "look-around"),
        ('start: start "a"', "nothing can satisfy it"),
        ('start: %json {"type": "text"}', "Invalid type: text"),
        ('start: %json {"not": {}}', "Unimplemented keys"),
        ('start: %json {"$ref": "https://example.org/schema"}', "not present"),
        ('start: %json {"allOf": [{"type": "string"}, {"type": "null"}]}', "Unsatisfiable"),
        ("nonsense", "Expected token"),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_field(
    compiler: GrammarCompiler, lark: str, says: str
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=says) as error:
            compiler.compile(Structure(lark, "response_format"))

        assert error.value.param == "response_format"
        assert len(str(error.value)) < 500


def test_a_grammar_whose_steps_take_long_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(clock))

    with pytest.raises(InvalidRequest, match=r"one token took 1\.00 s; simplify the grammar"):
        compiler.compile(Structure('start: "slow"', "f"))


def test_an_answer_whose_grammar_gets_slow_ends(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = compiler.compile(Structure('start: "quick"', "f"))()
    guide.allowed_tokens()
    assert guide.error is None

    clock = iter(range(1000))
    monkeypatch.setattr(grammar.time, "thread_time", lambda: next(clock))
    guide.allowed_tokens()

    assert guide.error is not None


def test_only_the_newest_grammars_are_kept(compiler: GrammarCompiler) -> None:
    for number in range(grammar.MAX_CACHED + 5):
        compiler.compile(Structure(f'start: "{number}"', "f"))

    assert len(compiler._cache) == grammar.MAX_CACHED
