"""Two lanes over the same tests: Triton's interpreter on a CPU, and an NVIDIA GPU (`-m gpu`).

A process either interprets or compiles: triton decides when it is first imported. The GPU lane
runs when the markers select it; everything else interprets, and the compile lane asks a second
process. Whatever the library allocates is filled with NaN, so unwritten output cannot pass.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepseek_kernels


@dataclass(frozen=True)
class Lane:
    """Where a test runs and in which floating-point type."""

    device: str
    dtype: torch.dtype

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)


def _on_gpu(config: pytest.Config) -> bool:
    # `-m gpu` and nothing else: an expression that leaves GPUs out can name them in many ways.
    return bool(config.option.markexpr == "gpu")


def pytest_configure(config: pytest.Config) -> None:
    if _on_gpu(config):
        return
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise pytest.UsageError(
            "triton was imported before tests/kernels could turn its interpreter on; "
            "run pytest tests/kernels in a process of its own"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    _round_fp8_in_interpreter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _on_gpu(config):
        return
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in here:
        # triton 3.6's interpreter turns the bounds of loops into integers the old way.
        item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"))
    gone = {item for item in here if item.get_closest_marker("gpu")}
    if gone:
        config.hook.pytest_deselected(items=list(gone))
        items[:] = [item for item in items if item not in gone]


def _round_fp8_in_interpreter() -> None:
    """Convert to fp8 e4m3 by torch, saturating as a GPU does.

    The interpreter of triton 3.6 drops the carry into the exponent and wraps out of range.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(values: Any, input_dtype: Any, output_dtype: Any, rounding: Any) -> Any:
        if input_dtype == tl.float32 and output_dtype == tl.float8e4nv:
            # numpy keeps fp8 as bytes.
            single = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
            codes = single.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            return codes.numpy().reshape(values.shape)
        return convert(values, input_dtype, output_dtype, rounding)

    interpreter._convert_float = convert_float


LANES = [
    pytest.param(Lane("cpu", torch.float32), id="interpreter-fp32"),
    pytest.param(Lane("cpu", torch.float16), id="interpreter-fp16"),
    pytest.param(Lane("cuda", torch.bfloat16), id="gpu-bf16", marks=pytest.mark.gpu),
]


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> Lane:
    """Every device and floating-point type that a kernel is compared in."""
    torch.manual_seed(20)
    return request.param


@pytest.fixture(
    params=[
        pytest.param(Lane("cpu", torch.float32), id="interpreter"),
        pytest.param(Lane("cuda", torch.bfloat16), id="gpu", marks=pytest.mark.gpu),
    ]
)
def one_lane(request: pytest.FixtureRequest) -> Lane:
    """One type for each device: for what does not depend on the type."""
    torch.manual_seed(20)
    return request.param


@pytest.fixture(
    params=[
        pytest.param(Lane("cuda", torch.bfloat16), id="gpu-bf16", marks=pytest.mark.gpu),
        pytest.param(Lane("cuda", torch.float16), id="gpu-fp16", marks=pytest.mark.gpu),
    ]
)
def gpu_lane(request: pytest.FixtureRequest) -> Lane:
    """Types of kernels that the interpreter does not know."""
    torch.manual_seed(20)
    return request.param


@pytest.fixture(autouse=True)
def triton_backend() -> Iterator[None]:
    """Run kernels, in the interpreter or on the GPU, never the reference by fallback."""
    deepseek_kernels.set_backend("triton")
    # A GPU makes NaN from infinities in silence; numpy, which interprets, would warn.
    with np.errstate(all="ignore"):
        yield
    deepseek_kernels.set_backend("auto")


@pytest.fixture
def run_backwards(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the interpreter run the last program first from now on: on a GPU any may be the first."""
    from triton.runtime.interpreter import interpreter_builder as builder

    def run() -> None:
        set_grid_idx = builder.set_grid_idx
        monkeypatch.setattr(
            builder,
            "set_grid_idx",
            lambda *index: set_grid_idx(
                *(size - 1 - one for size, one in zip(builder.grid_dim, index, strict=True))
            ),
        )

    return run


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill everything that `torch.empty` and its kin allocate with NaN, or the largest integer."""

    def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            return poison(allocate(*args, **kwargs))

        return allocate_poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta" or type(tensor) is not torch.Tensor:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


@dataclass(frozen=True)
class Spec:
    """A tensor without storage, as the compile lane names it."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    strides: tuple[int, ...] | None = None


def _described(value: Any) -> Any:
    if isinstance(value, Spec):
        described: dict[str, Any] = {"shape": value.shape, "dtype": value.dtype}
        return described | ({"strides": value.strides} if value.strides else {})
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_described(one) for one in value]}
    return value


@pytest.fixture(scope="session")
def spec() -> type[Spec]:
    return Spec


@pytest.fixture(scope="session")
def _compiler() -> Iterator[subprocess.Popen[str]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(deepseek_kernels.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-m", "deepseek_kernels.offline"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def compile_sm90(_compiler: subprocess.Popen[str]) -> Callable[..., list[Any]]:
    """Compile what `<op>.kernel:<launcher>` launches with these arguments, for an H200.

    Returns one object per launch with registers, spill_bytes, shared_bytes, wide_loads,
    wide_stores, matrix_instructions and wgmma_instructions; see deepseek_kernels.offline.
    """
    from types import SimpleNamespace

    def compile_launches(launcher: str, *arguments: Any) -> list[Any]:
        request = {"launcher": launcher, "arguments": [_described(one) for one in arguments]}
        assert _compiler.stdin is not None
        assert _compiler.stdout is not None
        _compiler.stdin.write(json.dumps(request) + "\n")
        _compiler.stdin.flush()
        answer = json.loads(_compiler.stdout.readline())
        assert "error" not in answer, answer["error"]
        return [SimpleNamespace(**one) for one in answer["resources"]]

    return compile_launches


@dataclass
class PagedCache:
    """Keys and values of some sequences."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"key_scale": self.key_scale, "value_scale": self.value_scale}


def fill_pages(
    lane: Lane,
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype | None = None,
    page_tokens: int = 16,
) -> PagedCache:
    """Make a cache on random pages; what no sequence owns is NaN, the table past a length -1."""
    width = max([1, *(-(-length // page_tokens) for length in lengths)])
    pages = len(lengths) * width + 1
    order = torch.randperm(pages, device=lane.device)[: len(lengths) * width].int()
    table = order.view(len(lengths), width)
    owned = torch.zeros(pages, page_tokens, dtype=torch.bool, device=lane.device)
    for row, length in zip(table, lengths, strict=True):
        tokens = torch.arange(length, device=lane.device)
        owned[row[tokens // page_tokens].long(), tokens % page_tokens] = True
        row[-(-length // page_tokens) :] = -1
    shape = (pages, page_tokens, kv_heads, head_dim)
    keys, values = (lane.randn(*shape, dtype=torch.float32) for _ in range(2))
    scales: list[torch.Tensor | None] = [None, None]
    if dtype == torch.int8:
        keys, values = ((one * 40).round().clamp(-127, 127) for one in (keys, values))
        scales = [torch.rand(shape[:3], device=lane.device) / 50 + 0.001 for _ in range(2)]
        for scale in scales:
            scale[~owned] = torch.nan
    else:
        keys[~owned] = torch.nan
        values[~owned] = torch.nan
        if dtype == torch.float8_e4m3fn:
            scales = [torch.rand(kv_heads, device=lane.device) + 0.5 for _ in range(2)]
    keys, values = (one.to(dtype or lane.dtype) for one in (keys, values))
    lengths = torch.tensor(lengths, dtype=torch.int32, device=lane.device)
    return PagedCache(keys, values, table, lengths, *scales)


@pytest.fixture(scope="session")
def paged_cache() -> Callable[..., PagedCache]:
    """Make the KV cache of some sequences: `paged_cache(lane, lengths, kv_heads, head_dim)`."""
    return fill_pages
