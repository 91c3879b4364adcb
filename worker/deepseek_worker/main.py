"""The command `deepseek-worker`: flags in, exit code and last words out."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from deepseek_worker.config import EngineConfig, LoadConfig, ServerConfig
from deepseek_worker.errors import InvalidFlags, WorkerError
from deepseek_worker.loading.loader import load
from deepseek_worker.logs import configure
from deepseek_worker.serve import serve
from deepseek_worker.termination import write_termination_message

_Config = TypeVar("_Config", bound=BaseModel)
logger = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """argparse, with errors that reach the last words."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise InvalidFlags(f"{self.prog}: {message}; --help lists the flags")


def parser() -> Parser:
    """The whole command line, from the fields of the three models."""
    top = Parser(prog="deepseek-worker", allow_abbrev=False, description="Serves one model.")
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a model by the OpenAI API", allow_abbrev=False)
    load = commands.add_parser("load", help="download a model once", allow_abbrev=False)
    for model, command in ((EngineConfig, serve), (ServerConfig, serve), (LoadConfig, load)):
        for name, field in model.model_fields.items():
            _add_flag(command, name, field)
    return top


def main() -> NoReturn:
    """What the shell calls."""
    code = run(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: a thread that loads a model or waits for a GPU would keep the process.
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command; the exit code."""
    configure("json")
    last_words = Path(os.environ.get("TERMINATION_MESSAGE_PATH", "/dev/termination-log"))
    try:
        given = parser().parse_args(arguments)
        if given.command == "load":
            _load(given)
        else:
            _serve(given)
    except WorkerError as error:
        # One line for people: where in the code it was noticed says nothing to them.
        logger.error(str(error), extra={"reason": error.reason})  # noqa: TRY400
        write_termination_message(error, last_words)
        return error.exit_code
    except Exception as error:
        logger.exception("Unexpected error", extra={"reason": WorkerError.reason})
        write_termination_message(WorkerError(f"{type(error).__name__}: {error}"), last_words)
        return WorkerError.exit_code
    return 0


def _serve(given: argparse.Namespace) -> None:
    engine_config, config = _config(EngineConfig, given), _config(ServerConfig, given)
    configure(config.log_format)
    # torch's threads wait for each other by spinning; where processors are shared, that is 5 to 8
    # times slower than going to sleep after a moment. OpenMP reads this when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    asyncio.run(serve(engine_config, config))


def _load(given: argparse.Namespace) -> None:
    authority = os.environ.get("SSL_CERT_FILE")
    load(_config(LoadConfig, given), authority=Path(authority) if authority else None)


def _config(model: type[_Config], given: argparse.Namespace) -> _Config:
    values = {name: getattr(given, name) for name in model.model_fields if name in given}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        wrong = "; ".join(
            f"{_flag(str(part['loc'][0])) + ': ' if part['loc'] else ''}{part['msg']}"
            + (f", got {part['input']!r}" if part["loc"] else "")
            for part in error.errors(include_url=False)
        )
        raise InvalidFlags(wrong) from error


def _add_flag(command: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    text = " ".join((field.description or "").split()).replace("%", "%%").replace("`", "")
    options: dict[str, Any] = {
        "dest": name,
        "help": text,
        "default": argparse.SUPPRESS,
        "required": field.is_required(),
    }
    if field.annotation is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        kind = _without_none(field.annotation)
        if get_origin(kind) is tuple:
            options |= {"action": "append", "metavar": "NAME=PATH"}
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
    if not field.is_required() and field.default not in (None, ()):
        options["help"] += f" (default: {field.default})"
    command.add_argument(_flag(name), **options)


def _without_none(annotation: Any) -> Any:
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 and get_origin(annotation) is not Literal else annotation


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    main()
