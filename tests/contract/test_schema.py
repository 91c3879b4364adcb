"""Rules that are CEL and Python at once, and the reading of documents."""

from typing import ClassVar

import pytest
from pydantic import ValidationError

from deepseek_contract.schema import ApiModel, NotYet, Rule, UpdateRule


class Inner(ApiModel):
    mode: str = "plain"
    level_count: int | None = None


class Outer(ApiModel):
    inner: Inner | None = None
    labels: dict[str, str] | None = None
    note: str | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.note) || self.note != 'it\\'s'",
            holds=lambda outer: outer.note != "it's",
            message="note may not be '{note}', it's taken",
            field_path=".note",
        ),
    )


def test_a_broken_rule_says_what_was_given() -> None:
    with pytest.raises(ValidationError, match="note may not be 'it's', it's taken"):
        Outer.parse({"note": "it's"})


def test_a_rule_says_the_same_to_the_api_server() -> None:
    assert Outer.rules[0].validation() == {
        "rule": "!has(self.note) || self.note != 'it\\'s'",
        "message": "note may not be '…', it's taken",
        "messageExpression": "'note may not be \\'' + self.note + '\\', it\\'s taken'",
        "fieldPath": ".note",
    }


def test_null_is_absent_at_every_depth() -> None:
    document = {"note": None, "inner": {"levelCount": None}, "labels": {"a": None, "b": "c"}}

    assert Outer.parse(document).document() == {"inner": {"mode": "plain"}, "labels": {"b": "c"}}


def test_a_whole_number_is_one_however_it_is_written() -> None:
    parsed = Outer.parse({"inner": {"levelCount": 3.0}})

    assert parsed.inner == Inner(level_count=3)


@pytest.mark.parametrize("value", [3.5, "3", True, float("inf")])
def test_nothing_else_is_a_whole_number(value: object) -> None:
    with pytest.raises(ValidationError):
        Outer.parse({"inner": {"levelCount": value}})


def test_documents_are_written_in_camel_case_only() -> None:
    with pytest.raises(ValidationError, match="level_count"):
        Outer.parse({"inner": {"level_count": 3}})


def test_stored_objects_may_say_more() -> None:
    assert Outer.from_stored({"inner": {"new": 1}, "newer": {}}) == Outer(inner=Inner())


@pytest.mark.parametrize(
    ("row", "document", "is_refused"),
    [
        pytest.param(NotYet("inner"), {}, False, id="absent"),
        pytest.param(NotYet("inner"), {"inner": {}}, True, id="there"),
        pytest.param(NotYet("inner.levelCount"), {"inner": {}}, False, id="absent below"),
        pytest.param(NotYet("inner.levelCount"), {"inner": {"levelCount": 0}}, True, id="below"),
        pytest.param(NotYet("inner.mode", values=("a",)), {"inner": {"mode": "b"}}, False, id="b"),
        pytest.param(NotYet("inner.mode", values=("a",)), {"inner": {"mode": "a"}}, True, id="a"),
        pytest.param(
            NotYet("inner.levelCount", above=1), {"inner": {"levelCount": 1}}, False, id="1"
        ),
        pytest.param(
            NotYet("inner.levelCount", above=1), {"inner": {"levelCount": 2}}, True, id="2"
        ),
    ],
)
def test_what_is_not_available_yet_is_refused(
    row: NotYet, document: dict[str, object], is_refused: bool
) -> None:
    assert row.rule().holds(Outer.parse(document)) != is_refused


def test_a_refusal_names_the_field_the_value_and_the_way_out() -> None:
    rule = NotYet("inner.mode", values=("a", "b"), use="use plain").rule()

    assert rule.explain(Outer(inner=Inner(mode="b"))) == (
        "inner.mode b is not available in this version: use plain"
    )
    assert (
        rule.cel == "!has(self.inner) || !has(self.inner.mode) || !(self.inner.mode in ['a', 'b'])"
    )
    assert rule.field_path == ".inner.mode"


def test_update_rules_compare_with_what_is_replaced() -> None:
    class Frozen(ApiModel):
        note: str = ""
        update_rules: ClassVar[tuple[UpdateRule, ...]] = (
            UpdateRule(
                cel="self.note == oldSelf.note",
                holds=lambda new, old: new.note == old.note,
                message="note cannot change",
            ),
        )

    assert Frozen(note="a").broken_update_rules(Frozen(note="a")) == []
    assert Frozen(note="a").broken_update_rules(Frozen(note="b")) == ["note cannot change"]
