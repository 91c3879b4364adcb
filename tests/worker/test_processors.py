"""Processors of the container or the machine."""

import os

import pytest

from deepseek_worker import processors


@pytest.mark.parametrize(
    ("text", "cpus"), [("150000 100000", 2), ("100000 100000", 1), ("20000 100000", 1)]
)
def test_a_quota_of_processors_is_rounded_up(text, cpus, tmp_path, monkeypatch):
    monkeypatch.setattr(processors, "CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(text)

    assert processors.usable_cpus() == min(cpus, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("text", ["max 100000", None])
def test_without_a_quota_all_processors_count(text, tmp_path, monkeypatch):
    monkeypatch.setattr(processors, "CPU_QUOTA", tmp_path / "cpu.max")
    if text:
        (tmp_path / "cpu.max").write_text(text)

    assert processors.usable_cpus() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("cpus", "processes"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_api_processes_come_with_processors(cpus, processes):
    assert processors.default_api_processes(cpus) == processes
