import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import deepseek_kernels
from deepseek_kernels import rms_norm, rms_norm_quantize, set_backend
from deepseek_kernels.norm import reference


def test_operators_are_registered_with_torch():
    assert torch.ops.deepseek.rms_norm.default._schema.arguments[2].alias_info.is_write


def test_fake_tensors_take_shapes_only():
    with FakeTensorMode():
        x = torch.empty(4, 256, device="cuda", dtype=torch.bfloat16)
        codes, scale = rms_norm_quantize(x, torch.empty(256, device="cuda"), group_columns=128)

    assert codes.shape == (4, 256)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.shape == (4, 2)
    assert scale.device.type == "cuda"


def test_compiled_programs_hold_the_operator():
    set_backend("reference")
    x, weight, residual = torch.randn(3, 64), torch.randn(64), torch.randn(3, 64)
    again = residual.clone()
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda x, residual: rms_norm(x, weight, residual=residual) + 1, backend=keep, fullgraph=True
    )

    out = compiled(x, residual)

    assert any("deepseek.rms_norm" in str(node.target) for node in graphs[0].graph.nodes)
    assert torch.equal(out, reference.rms_norm(x, weight, again, 1e-6) + 1)
    assert torch.equal(residual, again)


@pytest.mark.parametrize("name", deepseek_kernels.__all__)
def test_everything_exported_exists_and_is_documented(name):
    assert getattr(deepseek_kernels, name).__doc__
