import pytest
import torch

from deepseek_kernels import layer_norm, layer_norm_quantize, rms_norm, rms_norm_quantize
from deepseek_kernels.norm import cost, reference
from deepseek_kernels.testing import assert_close

SIZES = [
    pytest.param(rows, columns, id=f"{rows}x{columns}")
    for rows, columns in [(1, 1), (3, 63), (1, 500), (9, 256), (2, 257), (5, 1023), (3, 4096)]
]


def test_operation_runs_by_the_dispatcher_too(one_lane):
    x, weight = one_lane.randn(3, 64), one_lane.randn(64)
    residual = one_lane.randn(3, 64)

    torch.library.opcheck(torch.ops.deepseek.rms_norm, (x, weight, residual, 1e-6))
    torch.library.opcheck(
        torch.ops.deepseek.layer_norm_quantize, (x, weight, None, None, 1e-6, torch.int8, 64)
    )


@pytest.mark.parametrize("add", [False, True], ids=["plain", "add"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_rms_norm_equals_its_reference(lane, rows, columns, add):
    x, weight = lane.randn(rows, columns), lane.randn(columns)
    residual = lane.randn(rows, columns) if add else None
    expected_residual = residual.clone() if add else None

    out = rms_norm(x, weight, residual=residual)

    assert_close("out", out, reference.rms_norm(x, weight, expected_residual, 1e-6))
    if add:
        assert_close("residual", residual, expected_residual)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_layer_norm_equals_its_reference(lane, rows, columns, bias):
    x, weight = lane.randn(rows, columns) + 3, lane.randn(columns)
    shift = lane.randn(columns) if bias else None

    out = layer_norm(x, weight, shift)

    assert_close("out", out, reference.layer_norm(x, weight, shift, None, 1e-5))


@pytest.mark.parametrize("columns", [8193, 9001, 16384])
@pytest.mark.parametrize("rows", [4, 300], ids=["few", "many"])
def test_long_rows_keep_their_variance_however_they_begin(lane, rows, columns):
    x, weight = lane.randn(rows, columns + 8)[:, :columns] + 3, lane.randn(columns)
    # Large enough to cancel no result, whose error would count many times.
    bias = lane.randn(columns).abs() + 8
    # In fp32 the rounding of so large a mean is many ulp of a result near zero.
    x[1] += 200 if lane.dtype.itemsize == 2 else 0
    x[2, :8] = 1000
    x[3] = 7

    out = layer_norm(x, weight)
    shifted = layer_norm(x, weight, bias)

    assert torch.equal(out[3], torch.zeros_like(out[3]))
    others = torch.cat([x[:3], x[4:]])
    for given, result in ((None, out), (bias, shifted)):
        expected = reference.layer_norm(others, weight, given, None, 1e-5)
        assert_close("out", torch.cat([result[:3], result[4:]]), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_non_finite_input_stays_in_its_long_row(one_lane, bad):
    x, weight = one_lane.randn(257, 9001), one_lane.randn(9001)
    x[1, 9000] = bad

    out = layer_norm(x, weight)

    assert out[1].isnan().all()
    assert out[[0, *range(2, 257)]].isfinite().all()


@pytest.mark.parametrize("group", [None, 128], ids=["row", "group"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 384), (2, 1024)])
def test_quantized_norms_equal_their_references(lane, rows, columns, dtype, group):
    x, weight, residual = lane.randn(rows, columns), lane.randn(columns), lane.randn(rows, columns)
    again = residual.clone()
    width = group or columns

    codes, scale = rms_norm_quantize(x, weight, residual=residual, dtype=dtype, group_columns=group)
    layer_codes, layer_scale = layer_norm_quantize(x, weight, dtype=dtype, group_columns=group)

    expected = reference.rms_norm_quantize(x, weight, again, 1e-6, dtype, width)
    assert_close("residual", residual, again)
    assert_close("codes", codes, expected[0])
    assert_close("scale", scale, expected[1])
    expected = reference.layer_norm_quantize(x, weight, None, None, 1e-5, dtype, width)
    assert_close("codes", layer_codes, expected[0])
    assert_close("scale", layer_scale, expected[1])


def test_quantized_row_with_odd_width_has_one_scale(one_lane):
    x, weight = one_lane.randn(3, 500), one_lane.randn(500)

    codes, scale = rms_norm_quantize(x, weight)

    expected = reference.rms_norm_quantize(x, weight, None, 1e-6, torch.float8_e4m3fn, 500)
    assert_close("codes", codes, expected[0])
    assert_close("scale", scale, expected[1])


def test_rows_at_any_stride_are_read_and_written_in_place(lane):
    wide, weight = lane.randn(4, 192), lane.randn(64)
    residual = lane.randn(4, 128)
    kept = residual.clone()

    out = rms_norm(wide[:, 64:128], weight, residual=residual[:, :64])

    expected = kept[:, :64].clone()
    assert_close(
        "out", out, reference.rms_norm(wide[:, 64:128].contiguous(), weight, expected, 1e-6)
    )
    assert_close("residual", residual[:, :64], expected)
    assert torch.equal(residual[:, 64:], kept[:, 64:])


def test_no_rows_give_no_rows(lane):
    out = rms_norm(lane.randn(0, 64), lane.randn(64))

    assert out.shape == (0, 64)


def test_offsets_pass_31_bits(one_lane):
    rows, columns = 3, 64
    stride = 2**31 // 2 + 64
    storage = torch.zeros(1, dtype=torch.float16, device=one_lane.device)
    storage.untyped_storage().resize_(2 * ((rows - 1) * stride + columns))
    x = storage.as_strided((rows, columns), (stride, 1))
    x.copy_(one_lane.randn(rows, columns))
    weight = one_lane.randn(columns)

    out = rms_norm(x, weight)

    assert_close("out", out, reference.rms_norm(x.contiguous(), weight, None, 1e-6))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_non_finite_input_stays_in_its_row(one_lane, bad):
    x, weight = one_lane.randn(3, 256), one_lane.randn(256)
    x[1, 7] = bad

    out = rms_norm(x, weight)
    codes, scale = rms_norm_quantize(x, weight)

    clean = torch.tensor([True, False, True])
    assert out[clean].isfinite().all()
    assert out[1].isnan().any()
    value = codes.float() * scale
    assert value[clean].isfinite().all()
    assert not value[1].isfinite().all()


def test_rows_of_zeros_stay_zero(lane):
    x, weight = lane.randn(2, 128) * 0, lane.randn(128)

    codes, scale = rms_norm_quantize(x, weight)

    assert not rms_norm(x, weight).any()
    assert not (codes.float() * scale).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 64, dtype=torch.float64)}, "x has dtype float64; allowed are"),
        ({"x": torch.zeros(4)}, r"x has shape \[4\]; required is \[tokens, columns\]"),
        ({"x": torch.zeros(64, 4).t()}, "x has stride 4 in its last dimension; required is 1"),
        ({"x": torch.zeros(4, 0)}, "number of columns of x is 0; allowed is 1 to 65536"),
        ({"weight": torch.zeros(32)}, r"weight has shape \[32\]; required is \[64\]"),
        ({"weight": torch.zeros(64, device="meta")}, "weight is on meta; the other tensors are"),
        ({"residual": torch.zeros(4, 64, dtype=torch.float16)}, "residual has dtype float16"),
        ({"eps": -1.0}, "eps is -1.0; allowed is 0.0 to 1.0"),
        ({"dtype": torch.uint8}, "dtype is uint8; allowed are float8_e4m3fn, int8"),
        ({"group_columns": 64}, "group_columns is 64; allowed are None, 128"),
        (
            {"group_columns": 128},
            "the output has 64 columns; groups of 128 need a multiple of that",
        ),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"x": torch.zeros(4, 64), "weight": torch.zeros(64)} | change

    with pytest.raises(ValueError, match=message):
        rms_norm_quantize(**arguments)


@pytest.mark.parametrize("columns", [500, 1024, 3584, 4096, 8192, 16384])
def test_kernel_fits_hopper(compile_sm90, spec, columns):
    x = spec((8192, columns))

    weight = spec((columns,))
    (kernel,) = compile_sm90("norm.kernel:rms_norm", x, weight, x, 1e-6)
    (centred,) = compile_sm90("norm.kernel:layer_norm", x, weight, weight, None, 1e-6)

    assert kernel.spill_bytes == centred.spill_bytes == 0
    assert kernel.registers <= 128
    assert centred.registers <= 168
    if columns % 8 == 0:
        assert kernel.wide_loads >= 3
        assert kernel.wide_stores >= 2


@pytest.mark.parametrize("group", [128, 4096])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
def test_quantizing_kernel_fits_hopper(compile_sm90, spec, dtype, group):
    x, weight = spec((8192, 4096)), spec((4096,))

    (kernel,) = compile_sm90(
        "norm.kernel:layer_norm_quantize", x, weight, weight, x, 1e-6, dtype, group
    )

    assert kernel.spill_bytes == 0
    assert kernel.registers <= 168
    assert kernel.wide_stores >= 2


def test_cost_counts_each_tensor_once():
    x = torch.empty(10, 64, dtype=torch.bfloat16, device="meta")

    assert cost(x).bytes == 10 * 64 * 4
    assert cost(x, residual=True).bytes == 10 * 64 * 8
    assert cost(x, residual=True, dtype=torch.int8).bytes == 10 * 64 * 7
