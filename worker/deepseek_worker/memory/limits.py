"""What there is: memory of a GPU, or of a container or machine."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepseek_contract.sizing import CUDA_CONTEXT_BYTES
from deepseek_worker.errors import MemoryHeld

RELEASE_SECONDS = 60.0
RELEASE_POLL_SECONDS = 0.5
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
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


def free_bytes(device: torch.device) -> int:
    """Memory of the GPU that nobody holds."""
    return int(torch.cuda.mem_get_info(device)[0])


def wait_until_free(
    needed_bytes: int,
    free_bytes: Callable[[], int],
    *,
    seconds: float = RELEASE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until a process that ended has let go of its memory: the driver takes a while.

    Raises:
        MemoryHeld: Somebody still holds it after so many seconds.
    """
    deadline = clock() + seconds
    while (free := free_bytes()) < needed_bytes:
        if clock() >= deadline:
            raise MemoryHeld(
                f"the model needs {needed_bytes / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB of "
                f"the device are free, still after {seconds:.0f} s: another process holds them"
            )
        sleep(RELEASE_POLL_SECONDS)


def hold_to(num_bytes: int, device: torch.device) -> None:
    """Have torch's allocator refuse more than this of a GPU: the rest of a card is its neighbours'.

    What it refuses is an out-of-memory error in this process, which splits its batch.
    """
    fraction = min(1.0, num_bytes / device_memory_bytes(device))
    torch.cuda.set_per_process_memory_fraction(fraction, device.index)


def process_bytes(device: torch.device) -> int:
    """What this process holds on the device, measured from outside torch's allocator.

    A GPU says how much all processes hold together. On a shared card that is mostly others', so no
    more is taken for this one's than a context is reckoned with.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(int(total - free), CUDA_CONTEXT_BYTES)
    return _kibibytes(STATUS, "VmRSS")


def _kibibytes(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no line {key}")
