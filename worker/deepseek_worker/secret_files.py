"""Tokens that come in files, as Kubernetes mounts Secrets."""

import hmac
from contextlib import suppress
from pathlib import Path

from deepseek_worker.errors import InvalidFlags


class SecretFile:
    """The lines of one file; a Secret that changes is followed without a restart."""

    def __init__(self, path: Path, flag: str) -> None:
        self._path = path
        self._changed_at = -1
        self._lines: tuple[str, ...] = ()
        try:
            self._reload()
        except OSError as error:
            raise InvalidFlags(f"{flag} {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidFlags(
                f"{flag} {path} is not UTF-8 from byte {error.start} on; it must hold text, one "
                "token a line"
            ) from error
        if not self._lines:
            raise InvalidFlags(f"{flag} {path} is empty; it must hold one token a line")

    def lines(self) -> tuple[str, ...]:
        """The tokens; the last ones that could be read while the file is being replaced."""
        with suppress(OSError, UnicodeDecodeError):
            if self._path.stat().st_mtime_ns != self._changed_at:
                self._reload()
        return self._lines

    def accepts(self, token: bytes) -> bool:
        """Whether `token` is one of the lines; takes as long for a near miss as for a far one."""
        matches = [hmac.compare_digest(token, line.encode()) for line in self.lines()]
        return any(matches)

    def _reload(self) -> None:
        changed_at = self._path.stat().st_mtime_ns
        lines = tuple(filter(None, map(str.strip, self._path.read_text("utf-8").splitlines())))
        # A file that is empty for a moment must not open or close the door.
        self._lines = lines or self._lines
        self._changed_at = changed_at
