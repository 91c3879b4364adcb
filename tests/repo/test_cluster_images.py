"""A tag follows what an image is built from, and pip inside a build is set up as outside."""

import json
import re
import subprocess
import sys
from pathlib import PurePosixPath

import pytest

from cluster import images, places
from cluster.images import IMAGES, Image

IMAGE = Image("thing", "thing/Dockerfile", ("locks/thing.txt", "thing/package"))


@pytest.fixture
def tree(tmp_path):
    for name, content in (
        ("thing/Dockerfile", "FROM scratch"),
        (".dockerignore", "*"),
        ("locks/thing.txt", "a==1"),
        ("thing/package/code.py", "x = 1"),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path


def test_the_tag_of_an_unchanged_tree_stays(tree):
    assert images.tag(tree, IMAGE) == images.tag(tree, IMAGE)
    assert re.fullmatch(r"[0-9a-f]{12}", images.tag(tree, IMAGE))


@pytest.mark.parametrize(
    "name", ["thing/Dockerfile", ".dockerignore", "locks/thing.txt", "thing/package/code.py"]
)
def test_the_tag_changes_with_each_input(tree, name):
    before = images.tag(tree, IMAGE)

    (tree / name).write_text("changed")

    assert images.tag(tree, IMAGE) != before


def test_the_tag_changes_when_a_file_moves(tree):
    before = images.tag(tree, IMAGE)

    (tree / "thing/package/code.py").rename(tree / "thing/package/moved.py")

    assert images.tag(tree, IMAGE) != before


def test_what_python_compiles_and_what_is_beside_does_not_count(tree):
    before = images.tag(tree, IMAGE)

    (tree / "thing/package/__pycache__").mkdir()
    (tree / "thing/package/__pycache__/code.pyc").write_bytes(b"1")
    (tree / "README.md").write_text("other")

    assert images.tag(tree, IMAGE) == before


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_a_dockerfile_copies_exactly_the_inputs(image):
    dockerfile = (places.REPOSITORY / image.dockerfile).read_text()

    copied = re.findall(r"^COPY (\S+) \S+$", dockerfile, re.MULTILINE)

    assert sorted(copied) == sorted(image.inputs)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_a_dockerfile_builds_elsewhere_too(image):
    dockerfile = (places.REPOSITORY / image.dockerfile).read_text()

    assert dockerfile.count("\nFROM ") == 1
    assert "\nFROM python:3.12-slim\n" in dockerfile
    assert "--require-hashes" in dockerfile


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_the_context_holds_every_input(image):
    allowed = [
        line.removeprefix("!")
        for line in (places.REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]

    for name in image.inputs:
        assert any(PurePosixPath(name).match(pattern) for pattern in allowed), name


def test_code_comes_after_everything_that_changes_less():
    for image in IMAGES:
        lines = (places.REPOSITORY / image.dockerfile).read_text().splitlines()
        first_code = next(i for i, line in enumerate(lines) if line.startswith("COPY contract/"))
        assert not any(line.startswith("RUN") for line in lines[first_code:])


def test_pip_settings_join_files_and_environment(tmp_path):
    file = tmp_path / "pip.conf"
    file.write_text("[global]\ncert = /from/file\ntimeout = 9\n[install]\nno-deps = true\n")

    text = images.pip_settings({"PIP_CERT": "/from/env", "HOME": "/root"}, [file])

    assert text == "[global]\ncert = /from/env\ntimeout = 9\n[install]\nno-deps = true\n"


def test_pip_settings_leave_out_folders_of_this_machine(tmp_path):
    environment = {"PIP_FIND_LINKS": "/opt/wheels", "PIP_CACHE_DIR": "/c", "PIP_RETRIES": "3"}

    assert images.pip_settings(environment, [tmp_path / "none"]) == "[global]\nretries = 3\n"


def test_a_snapshot_has_the_same_tags_and_permissions_that_anybody_may_read(tmp_path):
    images.snapshot(places.REPOSITORY, tmp_path)

    assert images.references(tmp_path) == images.references()
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)


HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
from cluster import images
images._claim()
print("claimed", flush=True)
sys.stdin.read()
"""


def test_what_another_process_was_given_is_not_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPSEEK_CACHE", str(tmp_path))
    removed = []
    monkeypatch.setattr(images, "_buildah_has", lambda name: False)
    monkeypatch.setattr(images.store, "remove", removed.append)
    layout = images.store.layout().folder
    layout.mkdir(parents=True)
    old = {"annotations": {"org.opencontainers.image.ref.name": "localhost/deepseek-worker:old"}}
    (layout / "index.json").write_text(json.dumps({"manifests": [old]}))

    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(places.SOURCE.parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"claimed\n"
        images._drop_stale(["localhost/deepseek-worker:new"])
        while_it_lives = list(removed)
        holder.kill()
    images._drop_stale(["localhost/deepseek-worker:new"])

    assert while_it_lives == []
    assert removed == [{"localhost/deepseek-worker:old"}]
