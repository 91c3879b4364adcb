"""What is told late of an object that went away."""

from typing import Any

import pytest

from deepseek_operator import versions
from deepseek_operator.versions import Departed, is_newer


def at(version: str, uid: str = "u") -> dict[str, Any]:
    return {"metadata": {"uid": uid, "resourceVersion": version}}


@pytest.mark.parametrize(
    ("version", "old", "newer"),
    [("10", "9", True), ("9", "10", False), ("9", "9", False), ("a", "b", True), ("a", "a", False)],
)
def test_versions_are_numbers_where_they_look_like_it(version: str, old: str, newer: bool) -> None:
    assert is_newer(at(version), at(old)) is newer


def test_what_went_out_of_sight_may_come_back_at_a_later_version() -> None:
    departed = Departed()

    departed.add(at("5"))

    assert "u" in departed
    assert not departed.is_back(at("5"))
    assert departed.is_back(at("6"))
    assert not departed.is_back(at("6", uid="another"))


def test_what_the_server_does_not_have_any_more_never_comes_back() -> None:
    departed = Departed()
    departed.add_for_good("u")

    # The watch's own word for it comes later, and before that older changes.
    departed.add(at("5"))

    assert "u" in departed
    assert not departed.is_back(at("6"))


def test_what_came_back_has_not_gone() -> None:
    departed = Departed()
    departed.add(at("5"))

    departed.discard("u")

    assert "u" not in departed


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "REMEMBERED", 2)
    departed = Departed()
    for uid in ("a", "b", "a", "c"):
        departed.add_for_good(uid)

    assert [uid for uid in "abc" if uid in departed] == ["a", "c"]
