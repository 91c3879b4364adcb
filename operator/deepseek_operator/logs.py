"""The process's log: one JSON object a line, or text for a terminal."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, and the error if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Turn the record into a line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("namespace", "deployment"):
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logs(level: str, style: Literal["json", "text"]) -> None:
    """Send everything to standard error, kopf's and the client library's records too."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Their debug records hold whole objects.
    for name in ("aiohttp", "asyncio", "kubernetes"):
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
    # kopf tells of each event that its handler succeeded.
    logging.getLogger("kopf.objects").setLevel(max(logging.WARNING, root.level))
