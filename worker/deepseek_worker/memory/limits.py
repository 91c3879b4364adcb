"""What there is: memory of a GPU, or memory and processors of a container or machine."""

import os
from pathlib import Path

import torch

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")


def device_memory_bytes(device: torch.device) -> int:
    """All memory of the device; on a CPU the container's limit where there is one."""
    if device.type == "cuda":
        # Not NVML: on a MIG slice it names the whole card.
        return int(torch.cuda.mem_get_info(device)[1])
    total = _kibibytes(MEMINFO, "MemTotal")
    for path in CGROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def process_bytes(device: torch.device) -> int:
    """What this process holds on the device, measured from outside torch's allocator."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return _kibibytes(STATUS, "VmRSS")


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


def _kibibytes(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no line {key}")
