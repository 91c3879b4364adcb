import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_worker.config import EngineConfig, LoadConfig, ServerConfig
from deepseek_worker.main import parser, run


@pytest.fixture
def last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv("TERMINATION_MESSAGE_PATH", str(path))
    return path


def flags(command: str) -> set[str]:
    actions = parser()._subparsers._group_actions[0].choices[command]._actions  # type: ignore[union-attr,index]
    return {action.dest for action in actions} - {"help"}


def test_every_field_of_the_configuration_is_a_flag() -> None:
    assert flags("serve") == set(EngineConfig.model_fields) | set(ServerConfig.model_fields)
    assert flags("load") == set(LoadConfig.model_fields)


def test_the_help_says_what_each_flag_does_and_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["serve", "--help"])

    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "--connection-max-requests INT A connection is closed after this many" in text
    assert "(default: 64)" in text
    assert "--prefix-cache, --no-prefix-cache" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: command"),
        (["server"], "invalid choice: 'server'"),
        (["serve"], "the following arguments are required: --model"),
        (["serve", "--model", "m", "--prot", "8000"], "unrecognized arguments: --prot 8000"),
        (["serve", "--model", "m", "--port", "eighty"], "--port: invalid int value: 'eighty'"),
        (["serve", "--model", "m", "--port", "70000"], "--port: Input should be less than or"),
        (["serve", "--model", "m", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["serve", "--model", "m", "--weights", "int2"], "invalid choice: 'int2'"),
        (["serve", "--model", "m", "--lora", "terse"], "--lora: Value error, expected NAME=PATH"),
        (
            ["serve", "--model", "m", "--lora", "a=b", "--lora", "a=c"],
            "--lora names two adapters 'a'",
        ),
        (["serve", "--model", "m", "--lora=m=b"], "--lora m=b has a name of the model itself"),
        (
            ["serve", "--model", "m", "--model-id", "x", "--lora=x=b"],
            "--lora x=b has a name of the model itself",
        ),
        (["load", "--source", "hf://a/b"], "required: --destination"),
        (["load", "--source", "s3://a", "--destination", "d"], "--source 's3://a' is not"),
    ],
)
def test_wrong_flags_end_the_process_with_one_line_and_last_words(
    arguments: list[str],
    says: str,
    last_words: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    code = run(arguments)

    line = json.loads(capsys.readouterr().err)
    assert code == 2
    assert line["reason"] == "InvalidFlags"
    assert says in line["message"]
    assert json.loads(last_words.read_text()) == {
        "reason": "InvalidFlags",
        "message": line["message"],
    }


def test_what_nobody_expected_is_told_too(
    last_words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "file"
    occupied.touch()

    code = run(["load", "--source", "hf://a/b", "--destination", str(occupied)])

    assert code == 1
    assert "Traceback" in json.loads(capsys.readouterr().err)["exception"]
    assert json.loads(last_words.read_text())["reason"] == "InternalError"


def test_the_loader_runs_without_torch() -> None:
    seen = subprocess.run(
        [sys.executable, "-c", "import deepseek_worker.main, sys; print('torch' in sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert seen == "False\n"
