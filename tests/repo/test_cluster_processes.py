"""Processes are known by identity, found after a crash, and ended without touching another."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import processes

SLEEP = ["/bin/sleep", "300"]


@pytest.fixture
def state(tmp_path):
    yield tmp_path
    processes.stop(processes.marked(tmp_path), grace_seconds=0)


def test_a_started_process_is_recorded_and_ends_when_asked(state):
    process = processes.start("sleeper", SLEEP, state)
    assert processes.recorded(state) == [process]
    assert process.is_alive()

    processes.stop([process])

    assert not process.is_alive()
    assert not Path(f"/proc/{process.pid}").exists()


def test_output_goes_to_the_log(state):
    process = processes.start("talker", ["/bin/echo", "hello"], state)
    wait_until(lambda: not process.is_alive())

    assert (state / "logs/talker.log").read_text() == "hello\n"


def test_what_a_process_makes_can_be_read_by_others_whatever_the_caller_forbids(state):
    before = os.umask(0o077)
    try:
        process = processes.start("maker", ["/bin/sh", "-c", "umask"], state)
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    wait_until(lambda: not process.is_alive())

    assert (state / "logs/maker.log").read_text() == "0022\n"


def test_a_process_that_ignores_the_request_is_made_to_end(state):
    script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    process = processes.start("stubborn", ["/bin/sh", "-c", script], state)
    wait_until(lambda: (state / "logs/stubborn.log").read_text() == "ready\n")

    processes.stop([process], grace_seconds=0.1)

    assert not process.is_alive()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"start_ticks": 1}, id="another start time"),
        pytest.param({"argv": ("/usr/bin/other",)}, id="other arguments"),
    ],
)
def test_a_recycled_process_id_is_not_touched(state, other):
    bystander = processes.start("bystander", SLEEP, state)
    remembered = replace(bystander, **other)
    assert not remembered.is_alive()

    processes.stop([remembered], grace_seconds=0)

    assert bystander.is_alive()


def test_a_process_without_a_record_is_found_by_its_mark(state):
    process = processes.start("forgotten", SLEEP, state)
    (state / "processes/forgotten.json").unlink()

    assert [found.pid for found in processes.marked(state)] == [process.pid]


def test_another_cluster_is_not_found(state, tmp_path_factory):
    processes.start("mine", SLEEP, state)

    assert processes.marked(tmp_path_factory.mktemp("other")) == []


@pytest.mark.parametrize("content", ["", '{"name": "x"', '{"name": "x"}', "[]"])
def test_a_record_that_a_crash_cut_off_is_passed_over(state, content):
    process = processes.start("whole", SLEEP, state)
    (state / "processes/cut.json").write_text(content)

    assert processes.recorded(state) == [process]


def test_a_record_that_is_removed_meanwhile_is_passed_over(state):
    process = processes.start("whole", SLEEP, state)
    # Listed, and gone when it is opened.
    (state / "processes/gone.json").symlink_to(state / "nowhere")

    assert processes.recorded(state) == [process]


def test_who_reads_a_record_while_it_is_written_has_the_whole_one_of_before(state):
    first = processes.start("sleeper", SLEEP, state)
    with (state / "processes/sleeper.json").open() as opened:
        processes.start("sleeper", SLEEP, state)

        assert json.load(opened)["pid"] == first.pid


def test_a_process_can_die_with_the_one_that_started_it(state):
    source = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from cluster import processes\n"
        "processes.start('child', ['/bin/sleep', '300'], Path(sys.argv[2]), dies_with_parent=True)"
        "\ntime.sleep(300)\n"
    )
    tools = str(Path(processes.__file__).parents[1])
    parent = subprocess.Popen([sys.executable, "-c", source, tools, str(state)])
    with parent:
        wait_until(lambda: len(processes.recorded(state)) == 1)
        (child,) = processes.recorded(state)
        assert child.is_alive()

        parent.send_signal(signal.SIGKILL)

    wait_until(lambda: not child.is_alive())


def test_a_process_is_known_by_its_own_arguments_however_long_its_wrapper_takes(state, monkeypatch):
    slow = ("/bin/sh", "-c", 'sleep 1.5; exec "$@"', "sh")
    monkeypatch.setattr(processes, "_DYING_WITH_PARENT", slow)

    process = processes.start("late", SLEEP, state, dies_with_parent=True)

    assert process.argv == tuple(SLEEP)
    assert process.is_alive()


def test_an_owner_is_known_by_its_start_time_too():
    pid, ticks = processes.owner().split("-")

    assert int(pid) == os.getpid()
    assert processes.is_owner_alive(f"{pid}-{ticks}")
    assert not processes.is_owner_alive(f"{pid}-{int(ticks) - 1}")


def test_an_owner_that_ended_is_gone(state):
    sleeper = processes.start("sleeper", SLEEP, state)
    word = f"{sleeper.pid}-{sleeper.start_ticks}"
    assert processes.is_owner_alive(word)

    processes.stop([sleeper], grace_seconds=0)

    assert not processes.is_owner_alive(word)


def test_the_record_names_what_runs(state):
    process = processes.start("sleeper", SLEEP, state)

    record = json.loads((state / "processes/sleeper.json").read_text())

    assert record["pid"] == process.pid
    assert record["argv"] == SLEEP
    assert os.getsid(process.pid) == process.pid


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
