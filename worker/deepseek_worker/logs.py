"""Log lines on standard error: one JSON object a line, or text for a terminal."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

# What every record has anyway; all else came in by `extra=` and belongs into the line.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message, and each field of `extra=` under its own name."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        line = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        """The message, then `field=value` for each field."""
        fields = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        text = f"{_timestamp(record.created)} {record.levelname:<7} {record.getMessage()}{fields}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave by `extra=`."""
    return {name: value for name, value in vars(record).items() if name not in _OWN}


def configure(log_format: Literal["json", "text"]) -> None:
    """Send every logger of the process to standard error in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # uvicorn tells of each connection and request; the server's own line says more.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def _timestamp(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, tz=UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z")
