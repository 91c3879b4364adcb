import json
import logging
import sys

from deepseek_worker.logs import JsonFormatter, TextFormatter


def record(message: str, *args: object, exception: BaseException | None = None, **fields: object):
    info = (type(exception), exception, None) if exception else None
    made = logging.LogRecord("deepseek", logging.WARNING, "x.py", 1, message, args, info)
    vars(made).update(fields, created=1.5)
    return made


def test_a_line_is_one_json_object_with_the_caller_s_fields() -> None:
    line = JsonFormatter().format(record("two\nlines %s", "é", bytes=7, path=sys.path))

    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "logger": "deepseek",
        "message": "two\nlines é",
        "bytes": 7,
        "path": sys.path,
    }


def test_an_exception_is_a_field() -> None:
    line = json.loads(JsonFormatter().format(record("failed", exception=ValueError("why"))))

    assert line["exception"].endswith("ValueError: why")


def test_text_is_for_people() -> None:
    text = TextFormatter().format(record("Downloading", exception=ValueError("why"), percent=3.5))

    assert text.startswith("1970-01-01T00:00:01.500Z WARNING Downloading percent=3.5\n")
    assert text.endswith("ValueError: why")
