"""Which error an answer of the API server becomes."""

import pytest

from deepseek_operator.errors import (
    MESSAGE_LENGTH,
    ApiError,
    ClusterBusyError,
    ConflictError,
    NotFoundError,
    RefusedError,
    api_error,
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RefusedError),
        (401, ClusterBusyError),
        (403, RefusedError),
        (404, NotFoundError),
        (408, ClusterBusyError),
        (409, ConflictError),
        (410, NotFoundError),
        (422, RefusedError),
        (429, ClusterBusyError),
        (500, ClusterBusyError),
        (503, ClusterBusyError),
    ],
)
def test_a_status_has_its_class(status: int, kind: type[ApiError]) -> None:
    error = api_error(status, "words", reason="Why", retry_after_seconds=3)

    assert type(error) is kind
    assert (error.status, error.reason, error.retry_after_seconds) == (status, "Why", 3)


def test_long_answers_are_cut() -> None:
    assert len(api_error(500, "x" * 5000).message) == MESSAGE_LENGTH
