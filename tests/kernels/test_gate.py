import pytest
import torch

from deepseek_kernels import silu_mul, silu_mul_quantize
from deepseek_kernels.gate import cost, reference
from deepseek_kernels.testing import assert_close


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (3, 63), (2, 500), (2, 2047), (1, 2049), (2, 4096)],
    ids=str,
)
def test_equals_its_reference(lane, rows, columns):
    gate_up = lane.randn(rows, 2 * columns) * 3

    assert_close("out", silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("group", [None, 128], ids=["row", "group"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
@pytest.mark.parametrize("columns", [128, 1408])
def test_quantized_equals_its_reference(lane, columns, dtype, group):
    gate_up = lane.randn(3, 2 * columns)

    codes, scale = silu_mul_quantize(gate_up, dtype=dtype, group_columns=group)

    expected = reference.silu_mul_quantize(gate_up, dtype, group or columns)
    assert_close("codes", codes, expected[0])
    assert_close("scale", scale, expected[1])


def test_large_inputs_saturate_instead_of_overflowing(lane):
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4]])
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=-1).to(lane.device, lane.dtype)

    out = silu_mul(gate_up)

    assert_close("out", out, reference.silu_mul(gate_up))
    assert out.isfinite().all()


def test_rows_at_any_stride(lane):
    wide = lane.randn(3, 400)

    out = silu_mul(wide[:, 64:192])

    assert_close("out", out, reference.silu_mul(wide[:, 64:192].contiguous()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_non_finite_input_stays_in_its_row(one_lane, bad):
    gate_up = one_lane.randn(3, 256)
    gate_up[1, 7] = bad

    codes, scale = silu_mul_quantize(gate_up)

    value = codes.float() * scale
    assert value[[0, 2]].isfinite().all()
    assert not value[1].isfinite().all()


def test_no_rows_give_no_rows(lane):
    assert silu_mul(lane.randn(0, 128)).shape == (0, 64)


def test_offsets_pass_31_bits(one_lane):
    stride = 2**31 // 2 + 64
    storage = torch.zeros(1, dtype=torch.float16, device=one_lane.device)
    storage.untyped_storage().resize_(2 * (2 * stride + 128))
    gate_up = storage.as_strided((3, 128), (stride, 1))
    gate_up.copy_(one_lane.randn(3, 128))

    assert_close("out", silu_mul(gate_up), reference.silu_mul(gate_up.contiguous()))


def test_operation_runs_by_the_dispatcher_too(one_lane):
    gate_up = one_lane.randn(2, 256)

    torch.library.opcheck(torch.ops.deepseek.silu_mul, (gate_up,))
    torch.library.opcheck(torch.ops.deepseek.silu_mul_quantize, (gate_up, torch.int8, 128))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": torch.zeros(4, 64, dtype=torch.int8)}, "gate_up has dtype int8; allowed are"),
        ({"gate_up": torch.zeros(4, 63)}, "gate_up has 63 columns; an even number is required"),
        ({"gate_up": torch.zeros(64, 4).t()}, "gate_up has stride 4 in its last dimension"),
        ({"dtype": torch.float16}, "dtype is float16; allowed are float8_e4m3fn, int8"),
        ({"group_columns": 128}, "the output has 32 columns; groups of 128 need a multiple"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        silu_mul_quantize(**({"gate_up": torch.zeros(4, 64)} | change))


@pytest.mark.parametrize("columns", [1408, 18944])
def test_kernel_fits_hopper(compile_sm90, spec, columns):
    (kernel,) = compile_sm90("gate.kernel:silu_mul", spec((64, 2 * columns)))

    assert kernel.spill_bytes == 0
    assert kernel.registers <= 128
    assert kernel.wide_loads >= 2
    assert kernel.wide_stores >= 1


@pytest.mark.parametrize("group", [128, 18944])
def test_quantizing_kernel_fits_hopper(compile_sm90, spec, group):
    gate_up = spec((64, 2 * 18944))

    (kernel,) = compile_sm90("gate.kernel:silu_mul_quantize", gate_up, torch.float8_e4m3fn, group)

    assert kernel.spill_bytes == 0
    assert kernel.registers <= 128
    assert kernel.shared_bytes <= 227 * 1024


def test_cost_counts_each_tensor_once():
    gate_up = torch.empty(10, 128, dtype=torch.bfloat16, device="meta")

    assert cost(gate_up).bytes == 10 * 64 * 6
    assert cost(gate_up, dtype=torch.int8).bytes == 10 * 64 * 5
