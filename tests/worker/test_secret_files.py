import os
from pathlib import Path

import pytest

from deepseek_worker.errors import InvalidFlags
from deepseek_worker.secret_files import SecretFile


def write(path: Path, text: str, second: int) -> None:
    path.write_text(text)
    os.utime(path, (second, second))


def test_each_line_is_accepted_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, "one\n\n two \nschlüssel\n", 1)

    secret = SecretFile(path, "--api-key-file")

    tokens = ("one", "two", "schlüssel", "", "on", "one ", "ünf")
    accepted = [secret.accepts(token.encode()) for token in tokens]
    assert accepted == [True, True, True, False, False, False, False]


def test_a_secret_that_changes_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, "old", 1)
    secret = SecretFile(path, "--api-key-file")

    write(path, "new", 2)

    assert (secret.accepts(b"new"), secret.accepts(b"old")) == (True, False)


def test_a_secret_that_is_being_replaced_keeps_its_last_value(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, "old", 1)
    secret = SecretFile(path, "--api-key-file")

    write(path, "", 2)
    empty = secret.accepts(b"old"), secret.accepts(b"")
    path.write_bytes(b"\xff")
    rubbish = secret.accepts(b"old"), secret.accepts(b"\xff")
    path.unlink()
    gone = secret.accepts(b"old")

    assert (*empty, *rubbish, gone) == (True, False, True, False, True)


@pytest.mark.parametrize("content", [None, b"", b" \n", b"key\xff\n"])
def test_a_start_without_a_token_is_refused_by_the_flag_s_name(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)

    with pytest.raises(InvalidFlags, match=r"--api-key-file .*keys"):
        SecretFile(tmp_path / "keys", "--api-key-file")
