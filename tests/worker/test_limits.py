"""Memory of the container or the machine."""

import pytest
import torch

from deepseek_worker.errors import MemoryHeld
from deepseek_worker.memory import limits

CPU = torch.device("cpu")


class Device:
    """A GPU whose holder lets go of its memory after some looks, and a clock."""

    def __init__(self, *free_bytes: int) -> None:
        self.free_bytes = list(free_bytes)
        self.now = 0.0

    def look(self) -> int:
        return self.free_bytes.pop(0) if len(self.free_bytes) > 1 else self.free_bytes[0]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, needed_bytes: int) -> float:
        limits.wait_until_free(
            needed_bytes, self.look, seconds=10, clock=lambda: self.now, sleep=self.sleep
        )
        return self.now


def test_free_memory_is_not_waited_for():
    assert Device(100).wait(100) == 0


def test_memory_that_a_predecessor_lets_go_of_is_waited_for():
    assert Device(20, 20, 60, 100).wait(90) == 3 * limits.RELEASE_POLL_SECONDS


def test_memory_that_is_never_let_go_of_is_said():
    device = Device(3 * 2**20)

    with pytest.raises(MemoryHeld, match="needs 90 MiB and 3 MiB of the device are free"):
        device.wait(90 * 2**20)

    assert device.now == 10


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemFree: 5 kB\nMemTotal:       1000 kB\n")
    monkeypatch.setattr(limits, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "CGROUP_LIMITS", (tmp_path / "v2", tmp_path / "v1"))
    return tmp_path


def test_without_a_container_it_is_the_machines(files):
    assert limits.device_memory_bytes(CPU) == 1000 * 1024


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_a_containers_limit_counts(name, files):
    (files / name).write_text("4096\n")

    assert limits.device_memory_bytes(CPU) == 4096


@pytest.mark.parametrize("text", ["max\n", str(2**63)])
def test_no_limit_is_none(text, files):
    (files / "v2").write_text(text)

    assert limits.device_memory_bytes(CPU) == 1000 * 1024


def test_a_missing_line_is_named(files):
    (files / "meminfo").write_text("MemFree: 5 kB\n")

    with pytest.raises(OSError, match="MemTotal"):
        limits.device_memory_bytes(CPU)


def test_a_process_holds_memory():
    assert limits.process_bytes(CPU) > 10 * 2**20


@pytest.fixture
def card(monkeypatch):
    """A GPU of 100 GiB, of which a number of bytes are free."""
    free = [100 * 2**30]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 100 * 2**30))
    return free


@pytest.mark.parametrize(("held_mib", "own_mib"), [(480, 480), (40_000, 600)])
def test_memory_of_others_on_a_card_is_not_counted_as_the_process_own(card, held_mib, own_mib):
    card[0] -= held_mib * 2**20

    assert limits.process_bytes(torch.device("cuda")) == own_mib * 2**20


@pytest.mark.parametrize(("gib", "fraction"), [(25, 0.25), (200, 1.0)])
def test_the_allocator_is_told_its_part_of_the_card(card, gib, fraction, monkeypatch):
    told = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: told.append(given)
    )

    limits.hold_to(gib * 2**30, torch.device("cuda"))

    assert told == [(fraction, None)]
