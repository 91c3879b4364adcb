"""Every error that the operator raises by name.

OperatorError
├── SettingsError          an environment variable is wrong: the process does not start
├── LeaseLostError         somebody else leads, or may: the process exits
└── ApiError               the API server's answer
    ├── NotFoundError      404: the object, its namespace or its kind is not there; 410: the
    │                      list or watch is too old
    ├── ConflictError      409: somebody changed the object meanwhile, or it exists already
    ├── RefusedError       400, 403, 405, 422: the same request will be refused again
    └── ClusterBusyError   401, 408, 429, 5xx, a time-out or a broken connection: worth another
                           try later
"""

from __future__ import annotations

MESSAGE_LENGTH = 1024
"""Longest part of a server's answer that reaches logs and conditions."""


class OperatorError(Exception):
    """Base of all errors here."""


class SettingsError(OperatorError):
    """A setting is unknown or has a value that is not allowed."""


class LeaseLostError(OperatorError):
    """The Lease could not be renewed in time, so another operator may lead."""


class ApiError(OperatorError):
    """The API server refused or failed a request.

    Args:
        message: The server's own words, cut to `MESSAGE_LENGTH`.
        status: HTTP status, 0 when there was no answer.
        reason: The `reason` of the Status object, empty when there was none.
        causes: The reasons of the Status object's causes.
        retry_after_seconds: What the server asked to wait, if it asked.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        causes: frozenset[str] = frozenset(),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message[:MESSAGE_LENGTH])
        self.status = status
        self.reason = reason
        self.causes = causes
        self.retry_after_seconds = retry_after_seconds

    @property
    def message(self) -> str:
        """The server's words."""
        return str(self.args[0])


class NotFoundError(ApiError):
    """404 or 410."""


class ConflictError(ApiError):
    """409."""


class RefusedError(ApiError):
    """A request that stays wrong until a person or another object changes."""


class ClusterBusyError(ApiError):
    """The server or the way to it is busy or broken; the request may be repeated."""


def api_error(
    status: int,
    message: str,
    *,
    reason: str = "",
    causes: frozenset[str] = frozenset(),
    retry_after_seconds: float | None = None,
) -> ApiError:
    """The class that belongs to an HTTP status of 400 or more."""
    kind: type[ApiError]
    if status in {404, 410}:
        kind = NotFoundError
    elif status == 409:
        kind = ConflictError
    elif status in {408, 429} or status >= 500 or status == 401:
        # 401 is repeated, because a rotated token is read again before the next try.
        kind = ClusterBusyError
    else:
        kind = RefusedError
    return kind(
        message,
        status=status,
        reason=reason,
        causes=causes,
        retry_after_seconds=retry_after_seconds,
    )
