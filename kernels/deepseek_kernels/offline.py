"""Compiles what the launchers launch for sm_90, without a GPU, and reads the resources used.

The launchers of `<op>/kernel.py` are called with tensors that have no storage; every launch
they make is compiled with the specialisation that a real call would get and nothing runs.
`python -m deepseek_kernels.offline` answers one request a line, so that a test process that
interprets kernels can ask a second process that compiles them.
"""

import contextlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SM_90 = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes, and how often its machine code has some instructions."""

    kernel: str
    registers: int
    spill_bytes: int
    """Local memory of a thread: its stack and what did not fit its registers."""

    shared_bytes: int
    wide_loads: int
    """Global loads of 16 bytes; asynchronous copies to shared memory count too."""

    wide_stores: int
    matrix_instructions: int
    """wgmma (HGMMA, QGMMA, IGMMA) and mma.sync (HMMA, IMMA) alike."""

    wgmma_instructions: int


class _NoDriver:
    """Stands for a driver with an H200 while kernels are compiled and not run."""

    def get_current_target(self) -> GPUTarget:
        return SM_90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling() -> Iterator[list[Any]]:
    """Compile for sm_90 instead of launching; collects the compiled kernels in launch order."""
    compiled: list[Any] = []
    run, active = JITFunction.run, driver._active

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del grid, warmup
        kernel = run(self, *args, grid=None, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    driver.set_active(_NoDriver())
    JITFunction.run = record
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver.set_active(active)


def resources(kernel: Any) -> Resources:
    """Read the resources of a compiled kernel from its machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        dump = [str(tool), "-res-usage", "-sass", file.name]
        text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return Resources(
        kernel=kernel.metadata.name,
        registers=int(usage["REG"]),
        spill_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        shared_bytes=kernel.metadata.shared,
        wide_loads=len(re.findall(r"\b(?:LDG\.E(?:\.\w+)*\.128|LDGSTS\S*\.128|UTMALDG)", text)),
        wide_stores=len(re.findall(r"\b(?:STG\.E(?:\.\w+)*\.128|UTMASTG)", text)),
        matrix_instructions=len(re.findall(r"\b[HQI](?:G)?MMA\b", text)),
        wgmma_instructions=len(re.findall(r"\b[HQI]GMMA\b", text)),
    )


def compile_launches(launcher: str, arguments: list[Any]) -> list[Resources]:
    """Call a launcher with stand-in tensors and return what each of its launches takes.

    Args:
        launcher: `<op>.kernel:<function>` within the package.
        arguments: Its positional arguments. A tensor is `{"shape": [...], "dtype": "bfloat16"}`
            with `"strides"` where they are not the dense ones; `{"dtype": ...}` alone is a
            type; a dictionary with `"tuple"` is a tuple of such arguments.
    """
    module, function = launcher.split(":")
    launch = getattr(importlib.import_module(f"deepseek_kernels.{module}"), function)
    with compiling() as compiled:
        launch(*map(_argument, arguments))
    return [resources(kernel) for kernel in compiled]


def _argument(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(map(_argument, value["tuple"]))
    dtype = getattr(torch, value["dtype"])
    if "shape" not in value:
        return dtype
    if "strides" in value:
        return torch.empty_strided(value["shape"], value["strides"], dtype=dtype, device="meta")
    return torch.empty(value["shape"], dtype=dtype, device="meta")


def main() -> None:
    """Answer requests `{"launcher", "arguments"}`, one JSON document a line."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = compile_launches(request["launcher"], request["arguments"])
            answer: dict[str, Any] = {"resources": [asdict(one) for one in found]}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
