"""Log lines."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from deepseek_operator.logs import JsonFormatter, configure_logs


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.WARNING, __file__, 1, message, args, None)
    made.__dict__.update(extra)
    return made


def test_a_line_is_one_json_object() -> None:
    line = json.loads(JsonFormatter().format(record("%s is\nnew", "ä", namespace="team")))

    assert line["message"] == "ä is\nnew"
    assert line["level"] == "warning"
    assert line["logger"] == "a.b"
    assert line["namespace"] == "team"
    assert line["time"].endswith("+00:00")


def test_an_error_comes_with_its_trace() -> None:
    try:
        int("why")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()

    assert "ValueError: invalid literal" in json.loads(JsonFormatter().format(made))["error"]


@pytest.mark.usefixtures("untouched_logging")
@pytest.mark.parametrize(("style", "is_json"), [("json", True), ("text", False)])
def test_both_styles_write_to_standard_error(
    style: str, is_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("info", style)  # type: ignore[arg-type]

    logging.getLogger("x").info("hello")
    logging.getLogger("x").debug("quiet")
    logging.getLogger("kopf.objects").info("Handler succeeded.")

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("{") is is_json
