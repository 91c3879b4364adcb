"""GET over HTTP with what a download must be sure of.

Redirects are followed a few times and never from https to http; the token goes to the host it
was given for and to no other; every failure is either final, with a reason for people, or
`TryAgain`.
"""

import ssl
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urljoin, urlsplit

import certifi
import requests
from urllib3.exceptions import HTTPError

from deepseek_worker.errors import (
    CredentialsRefused,
    InvalidFlags,
    SourceError,
    SourceNotFound,
    Unreachable,
)
from deepseek_worker.loading.source import redacted

MAX_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
USABLE = frozenset({200, 206, 416})
NETWORK_ERRORS = (requests.RequestException, HTTPError, OSError)


class TryAgain(Exception):
    """The same request may succeed later."""

    def __init__(self, message: str, after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server may take before it counts as unreachable."""

    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    """Longest silence within an answer."""
    slow_seconds: float = 60.0
    slow_bytes_per_second: int = 1024
    """An answer slower than this for `slow_seconds` is given up and asked for again."""
    attempts: int = 8
    """Tries in a row that bring nothing."""
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 30.0

    def pause_seconds(self, attempt: int) -> float:
        """The wait before try number `attempt + 1`."""
        return min(self.backoff_seconds * 2.0 ** (attempt - 1), self.max_backoff_seconds)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A token and the only place it may be sent to."""

    token: str
    origin: str
    """Any address there; scheme, host and port count."""


class Authorities:
    """The certificate authorities to trust: the public ones, and one of the user's own."""

    def __init__(self, own: Path | None = None) -> None:
        self._bundle = None
        if own is None:
            return
        try:
            ssl.create_default_context(cafile=own)
        except OSError as error:
            raise InvalidFlags(
                f"SSL_CERT_FILE {own} holds no certificates in PEM form: {error}"
            ) from error
        # A download that begins in the user's own network may be redirected to the public one.
        bundle = "\n".join((Path(certifi.where()).read_text(), own.read_text()))
        self._bundle = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115
        self._bundle.write(bundle)
        self._bundle.flush()

    @property
    def verify(self) -> str | bool:
        """As requests wants it."""
        return self._bundle.name if self._bundle else True


class Transport:
    """Makes requests; one for all threads of a download."""

    def __init__(
        self,
        credentials: Credentials | None = None,
        patience: Patience | None = None,
        authorities: Authorities | None = None,
    ) -> None:
        self.patience = patience or Patience()
        self.cancelled = threading.Event()
        self._credentials = credentials
        self._authorities = authorities or Authorities()

    def get(self, url: str, headers: Mapping[str, str]) -> requests.Response:
        """An answer with status 200, 206 or 416, its body not read yet.

        Raises:
            TryAgain: a passing failure.
            SourceError: a lasting one.
        """
        for hop in range(MAX_REDIRECTS + 1):
            response = self._get_once(url, headers)
            if response.status_code in USABLE:
                return response
            response.close()
            if response.status_code not in REDIRECTS or "location" not in response.headers:
                raise _failure(url, response, redirected=hop > 0)
            target = urljoin(url, response.headers["location"])
            _refuse_unsafe_redirect(url, target)
            url = target
        raise Unreachable(f"{redacted(url)}: more than {MAX_REDIRECTS} redirects")

    def retried(self, what: str, attempt: int, error: TryAgain) -> None:
        """Wait before another try; the last one gives up instead.

        Raises:
            Unreachable: `attempt` was the last.
        """
        if attempt >= self.patience.attempts:
            raise Unreachable(f"{what}: gave up after {attempt} attempts; the last said: {error}")
        pause = self.patience.pause_seconds(attempt)
        if error.after_seconds is not None:
            pause = min(error.after_seconds, self.patience.max_backoff_seconds)
        self.cancelled.wait(pause)

    def _get_once(self, url: str, headers: Mapping[str, str]) -> requests.Response:
        session = requests.Session()
        # Without this, requests would look for other credentials in ~/.netrc.
        session.auth = lambda request: request
        # A compressed answer could neither be resumed nor verified.
        asked = {"accept-encoding": "identity", "user-agent": "deepseek-worker", **headers}
        if self._credentials and _origin(url) == _origin(self._credentials.origin):
            asked["authorization"] = f"Bearer {self._credentials.token}"
        try:
            return session.get(
                url,
                headers=asked,
                stream=True,
                allow_redirects=False,
                verify=self._authorities.verify,
                timeout=(self.patience.connect_seconds, self.patience.read_seconds),
            )
        except requests.exceptions.SSLError as error:
            raise Unreachable(
                f"{redacted(url)}: no trusted connection ({error}); give the server's own "
                "authority by spec.model.certificateAuthority or SSL_CERT_FILE"
            ) from error
        except NETWORK_ERRORS as error:
            raise TryAgain(f"{redacted(url)}: {error}") from error


def _failure(url: str, response: requests.Response, *, redirected: bool) -> Exception:
    status, shown = response.status_code, redacted(url)
    said = response.headers.get("x-error-message") or response.reason or ""
    text = f"{shown}: {status} {said}".rstrip()
    # A redirect's signature may just have run out: the first address gives a fresh one.
    if status in (408, 425, 429) or status >= 500 or (redirected and status == 403):
        return TryAgain(text, _retry_after(response))
    if status in (401, 403):
        return CredentialsRefused(
            f"{text}; the source is private, gated or does not exist: give a token that may "
            "read it (credentialsSecret, --token-file)"
        )
    if status in (404, 410):
        return SourceNotFound(f"{text}; check the name and the revision of the source")
    return SourceError(f"{text}; the server refuses the download")


def _retry_after(response: requests.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else None


def _refuse_unsafe_redirect(url: str, target: str) -> None:
    here, there = urlsplit(url), urlsplit(target)
    if there.scheme not in ("http", "https") or (here.scheme, there.scheme) == ("https", "http"):
        raise Unreachable(
            f"{redacted(url)} redirects to {redacted(target)}, which is not https: not followed"
        )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts: SplitResult = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, parts.port or default
