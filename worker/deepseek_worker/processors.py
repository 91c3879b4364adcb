"""Processors that this container may use. No torch."""

import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
PROCESSORS_PER_API_PROCESS = 4
MAX_API_PROCESSES = 4


def usable_cpus() -> int:
    """Processors that this process may keep busy.

    A container with a quota sees all of the machine's; as many threads as those would be stopped
    in the middle of each product, and the others would wait for them.
    """
    cpus = len(os.sched_getaffinity(0))
    if CPU_QUOTA.is_file():
        quota, period = CPU_QUOTA.read_text().split()
        if quota.isdigit():
            cpus = min(cpus, -(-int(quota) // int(period)))
    return cpus


def default_api_processes(cpus: int) -> int:
    """How many processes for HTTP and text so many processors are worth.

    One keeps up with about a thousand short requests a second. Where there are few processors the
    engine needs them.
    """
    return max(1, min(cpus // PROCESSORS_PER_API_PROCESS, MAX_API_PROCESSES))
