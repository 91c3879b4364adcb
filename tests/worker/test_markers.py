"""Texts in bytes that come piece by piece."""

import pytest

from deepseek_worker.markers import MarkerSearch


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_texts_are_found_however_they_are_cut(size: int) -> None:
    search = MarkerSearch(("ab", "c", "</think>"))
    data = b"abab </c </th</think> rest"

    for at in range(0, len(data), size):
        search.push(data[at : at + size])

    assert search.is_done
