"""Memory and processors of the container or the machine."""

import os

import pytest
import torch

from deepseek_worker.memory import limits

CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemFree: 5 kB\nMemTotal:       1000 kB\n")
    monkeypatch.setattr(limits, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "CGROUP_LIMITS", (tmp_path / "v2", tmp_path / "v1"))
    monkeypatch.setattr(limits, "CPU_QUOTA", tmp_path / "cpu.max")
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


@pytest.mark.parametrize(
    ("text", "cpus"), [("150000 100000", 2), ("100000 100000", 1), ("20000 100000", 1)]
)
def test_a_quota_of_processors_is_rounded_up(text, cpus, files):
    (files / "cpu.max").write_text(text)

    assert limits.usable_cpus() == min(cpus, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("text", ["max 100000", None])
def test_without_a_quota_all_processors_count(text, files):
    if text:
        (files / "cpu.max").write_text(text)

    assert limits.usable_cpus() == len(os.sched_getaffinity(0))
