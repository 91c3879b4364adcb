import pytest
import torch

import deepseek_kernels
from deepseek_kernels import UnsupportedDevice, _backend, get_backend, rms_norm, set_backend
from deepseek_kernels._backend import multiprocessors, uses_triton
from deepseek_kernels.norm import reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Example")


def test_auto_takes_references_on_a_cpu_in_silence():
    set_backend("auto")

    assert not uses_triton(CPU)
    assert get_backend() == "auto"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_auto_takes_kernels_from_hopper_on(monkeypatch, capability):
    pretend_gpu(monkeypatch, capability)
    set_backend("auto")

    assert uses_triton(CUDA)


def test_auto_falls_back_on_an_old_gpu_with_one_warning(monkeypatch, recwarn):
    pretend_gpu(monkeypatch, (8, 0))
    set_backend("auto")

    with pytest.warns(
        RuntimeWarning, match=r"need compute capability 9.0 .* NVIDIA Example has 8.0"
    ):
        assert not uses_triton(CUDA)
    assert not uses_triton(CUDA)
    assert not recwarn.list


def test_triton_refuses_an_old_gpu(monkeypatch):
    pretend_gpu(monkeypatch, (8, 9))
    set_backend("triton")

    with pytest.raises(UnsupportedDevice, match="call set_backend\\('auto'\\) to fall back"):
        uses_triton(CUDA)


def test_triton_refuses_other_devices():
    set_backend("triton")

    with pytest.raises(UnsupportedDevice, match="written for NVIDIA GPUs, not for 'xpu'"):
        uses_triton(torch.device("xpu", 0))


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    set_backend("triton")
    monkeypatch.setattr(_backend, "_interprets", lambda: False)

    with pytest.raises(UnsupportedDevice, match="TRITON_INTERPRET=1"):
        uses_triton(CPU)


def test_reference_is_taken_when_asked_for(monkeypatch):
    set_backend("reference")
    called = []
    original = deepseek_kernels.norm._rms_norm._reference
    monkeypatch.setattr(
        deepseek_kernels.norm._rms_norm,
        "_reference",
        lambda *given: called.append(given) or original(*given),
    )

    out = rms_norm(torch.ones(2, 8), torch.ones(8))

    assert called
    assert torch.equal(out, reference.rms_norm(torch.ones(2, 8), torch.ones(8), None, 1e-6))


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend is 'cuda'; allowed are auto, triton, reference"):
        set_backend("cuda")


def test_programs_run_one_by_one_on_a_cpu_and_132_at_once_on_the_stand_in():
    assert multiprocessors(CPU) == 1
    assert multiprocessors(torch.device("meta")) == 132
