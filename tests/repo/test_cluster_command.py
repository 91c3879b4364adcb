"""The command line says what it cannot do, and what to do instead."""

import subprocess
import sys

import pytest

from cluster import debian, places
from cluster.command import main


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_CACHE", str(tmp_path))


@pytest.mark.parametrize("how", [["tools/cluster"], ["-m", "cluster"]])
def test_it_runs_by_folder_and_by_module(how):
    done = subprocess.run(
        [sys.executable, *how, "--help"],
        cwd=places.REPOSITORY,
        env={"PYTHONPATH": "tools"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "without Docker" in done.stdout


def test_env_of_a_cluster_that_is_down_tells_how_to_start_it(capsys):
    assert main(["--name", "none", "env"]) == 1

    assert "--name none up" in capsys.readouterr().err


def test_status_of_a_cluster_that_is_down(capsys):
    assert main(["status"]) == 1

    assert "is down" in capsys.readouterr().err


def test_down_of_a_cluster_that_is_down_succeeds(capsys):
    assert main(["down"]) == 0

    assert "nothing of it is left" in capsys.readouterr().err


def test_gpus_need_a_number(capsys):
    assert main(["gpus", "node1", "gpu=two"]) == 1

    assert "'gpu=two' is no UNIT=NUMBER" in capsys.readouterr().err


def test_the_number_of_nodes_is_limited(capsys):
    assert main(["up", "--nodes", "99"]) == 1

    assert "99 nodes; 1 to 15 are possible" in capsys.readouterr().err


def test_a_package_is_missing_when_its_program_is():
    needed = {"sh": "dash", "/no/such/program": "nowhere", "no-such-program": "nowhere"}

    assert debian.missing(needed) == ["nowhere"]
