import pytest
import torch

from deepseek_kernels import gated_matmul
from deepseek_kernels.gate import reference as gate
from deepseek_kernels.gated_matmul import cost, kernel, reference
from deepseek_kernels.matmul import reference as matmul
from deepseek_kernels.testing import assert_close


def inputs(lane, tokens, rows, columns):
    weight = lane.randn(2 * rows, columns) * columns**-0.5
    return lane.randn(tokens, columns), weight.to(lane.dtype)


def apart(x, weight):
    """What few tokens give: the products are rounded before they are gated."""
    return gate.silu_mul(matmul.matmul(x, weight, None))


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 63, 500), (2, 64, 128), (17, 65, 129), (65, 40, 64), (129, 264, 72)],
    ids=str,
)
def test_equals_its_reference(lane, tokens, rows, columns):
    x, weight = inputs(lane, tokens, rows, columns)

    assert_close("out", gated_matmul(x, weight), apart(x, weight))


def test_rounding_the_products_costs_less_than_a_bit(one_lane):
    x, weight = inputs(one_lane, 40, 264, 128)

    out, exact = gated_matmul(x, weight).double(), reference.gated_matmul(x.double(), weight)

    assert (out - exact).norm() < torch.finfo(one_lane.dtype).eps * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 8, 8), (64, 128, 64), (129, 136, 72), (200, 1000, 640), (2100, 1160, 1032)],
    ids=str,
)
def test_specialized_warps_equal_the_reference(tokens, rows, columns, dtype):
    x = torch.randn(tokens, columns, device="cuda").to(dtype)
    weight = (torch.randn(2 * rows, columns, device="cuda") * columns**-0.5).to(dtype)
    assert kernel.fits_specialized(x, weight)

    out = kernel.specialized(x, weight)

    assert_close("out", out, reference.gated_matmul(x, weight))
    assert torch.equal(out, kernel.specialized(x, weight))


@pytest.mark.gpu
def test_many_tokens_take_specialized_warps(monkeypatch):
    x = torch.randn(1024, 256, device="cuda").bfloat16()
    weight = (torch.randn(2 * 18944, 256, device="cuda") / 16).bfloat16()
    monkeypatch.setattr(kernel, "matmul", None)

    assert_close("out", gated_matmul(x, weight), reference.gated_matmul(x, weight))


def test_rows_at_any_stride(lane):
    x, weight = inputs(lane, 3, 64, 400)
    x, weight = x[:, 64:192], weight[:, 8:136]

    assert_close("out", gated_matmul(x, weight), apart(x, weight))


def test_no_tokens_give_no_rows(lane):
    x, weight = inputs(lane, 0, 32, 64)

    assert gated_matmul(x, weight).shape == (0, 32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_non_finite_input_stays_in_its_row(one_lane, bad):
    x, weight = inputs(one_lane, 3, 64, 128)
    x[1, 7] = bad

    out = gated_matmul(x, weight)

    assert out[[0, 2]].isfinite().all()
    assert not out[1].isfinite().all()


def test_operation_runs_by_the_dispatcher_too(one_lane):
    x, weight = inputs(one_lane, 2, 32, 64)

    torch.library.opcheck(torch.ops.deepseek.gated_matmul, (x, weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 64, dtype=torch.int8)}, "x has dtype int8; allowed are"),
        ({"weight": torch.zeros(64, 64).half()}, "weight has dtype float16; allowed are float32"),
        ({"weight": torch.zeros(63, 64)}, "weight has 63 rows; an even number is required"),
        ({"weight": torch.zeros(64, 63)}, r"weight has shape \[64, 63\]; required is"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        gated_matmul(**({"x": torch.zeros(4, 64), "weight": torch.zeros(64, 64)} | change))


@pytest.mark.parametrize(("rows", "columns"), [(18944, 3584), (8960, 1536), (14336, 4096)])
def test_kernel_fits_hopper(compile_sm90, spec, rows, columns):
    x, weight = spec((8192, columns)), spec((2 * rows, columns))

    (compiled,) = compile_sm90("gated_matmul.kernel:gated_matmul", x, weight)

    assert compiled.kernel == "gated_matmul_kernel"
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 168
    assert compiled.shared_bytes <= 227 * 1024
    assert compiled.wgmma_instructions >= 16


def test_a_last_round_that_fills_few_multiprocessors_is_left_to_the_library(compile_sm90, spec):
    weight = spec((2 * 18944, 3584))

    def kernels(tokens):
        x = spec((tokens, 3584))
        return [one.kernel for one in compile_sm90("gated_matmul.kernel:gated_matmul", x, weight)]

    # 9 times 148 tiles of 132 at a time: a tenth of the last round.
    assert kernels(1152) == ["silu_mul_kernel"]
    assert kernels(1024) == ["gated_matmul_kernel"]


def test_cost_counts_each_tensor_once():
    x = torch.empty(10, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(256, 64, dtype=torch.bfloat16, device="meta")

    assert cost(x, weight).bytes == 2 * (10 * 64 + 256 * 64 + 10 * 128)
    assert cost(x, weight).flops == 2 * 10 * 64 * 256
