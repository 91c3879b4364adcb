"""Generated files are committed and as their owners make them; a change of either is noticed."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import generate  # noqa: E402

PATHS = [path for path, _ in generate.outputs()]


@pytest.fixture(scope="module")
def made() -> list[generate.Output]:
    """What the generators give, made once for all tests."""
    return [(path, partial(str, produce())) for path, produce in generate.outputs()]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The generated files alone, somewhere else."""
    for path in PATHS:
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    return tmp_path


def test_every_generated_file_is_listed_once() -> None:
    assert len(set(PATHS)) == len(PATHS)


def test_no_generated_file_is_ignored_by_git() -> None:
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *PATHS], cwd=ROOT, capture_output=True, text=True,
        check=False,
    ).stdout  # fmt: skip

    assert ignored == ""


def test_what_is_committed_is_what_the_generators_give(made: list[generate.Output]) -> None:
    assert generate.check(listed=made) == []


def test_nothing_is_written_where_nothing_differs(copy: Path, made: list[generate.Output]) -> None:
    assert generate.write(copy, made) == []


@pytest.mark.parametrize("path", PATHS)
def test_a_changed_byte_is_noticed_and_repaired(
    copy: Path, made: list[generate.Output], path: str
) -> None:
    target = copy / path
    target.write_bytes(target.read_bytes()[:-2] + b"x\n")

    diffs = generate.check(copy, made)

    assert len(diffs) == 1
    assert path in diffs[0]
    assert generate.write(copy, made) == [path]
    assert target.read_bytes() == (ROOT / path).read_bytes()


def test_a_missing_file_is_noticed(copy: Path, made: list[generate.Output]) -> None:
    (copy / PATHS[0]).unlink()

    assert len(generate.check(copy, made)) == 1


def test_the_check_changes_nothing(copy: Path, made: list[generate.Output]) -> None:
    (copy / PATHS[0]).write_text("changed\n")

    generate.check(copy, made)

    assert (copy / PATHS[0]).read_text() == "changed\n"


def test_every_yaml_below_the_generated_folders_is_generated() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("manifests/crds", "manifests/rendered")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }

    assert found <= set(PATHS)
