import pytest
import torch

from deepseek_kernels import matmul_w8a8, quantize, quantize_weight, quantize_weight_blocks
from deepseek_kernels.matmul_w8a8 import kernel, reference
from deepseek_kernels.testing import assert_close

FP8 = torch.float8_e4m3fn
CODES = pytest.mark.parametrize("dtype", [FP8, torch.int8], ids=["fp8", "int8"])


@CODES
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "with_bias"),
    [
        (1, 63, 500, True),
        (2, 64, 576, False),
        (17, 65, 129, True),
        (65, 64, 64, False),
        (129, 32, 160, True),
    ],
)
def test_product_by_rows_equals_its_reference(lane, tokens, rows, columns, dtype, with_bias):
    x, x_scale = quantize(lane.randn(tokens, columns), dtype=dtype)
    weight, scale = quantize_weight(lane.randn(rows, columns), dtype)
    bias = lane.randn(rows) if with_bias else None

    out = matmul_w8a8(x, x_scale, weight, scale, bias, dtype=lane.dtype)

    expected = reference.matmul_w8a8(x, x_scale, weight, scale, bias, lane.dtype)
    assert_close("out", out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [96, 200, 512])
@pytest.mark.parametrize("columns", [kernel.FAST_COLUMNS, kernel.FAST_COLUMNS + 128, 18944])
def test_sums_are_as_exact_as_the_output_at_any_length(tokens, columns):
    x, x_scale = quantize(torch.randn(tokens, columns, device="cuda").bfloat16())
    weight, scale = quantize_weight(torch.randn(1024, columns, device="cuda").bfloat16())

    out = matmul_w8a8(x, x_scale, weight, scale, dtype=torch.bfloat16)

    expected = reference.matmul_w8a8(x, x_scale, weight, scale, None, torch.bfloat16)
    assert_close("out", out, expected)


@CODES
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(1, 63, 384), (3, 130, 256), (17, 256, 128), (129, 128, 512)]
)
def test_product_by_blocks_equals_its_reference(lane, tokens, rows, columns, dtype):
    values = lane.randn(tokens, columns)
    values[:, ::128] *= 50
    x, x_scale = quantize(values, dtype=dtype, group_columns=128)
    weight, scale = quantize_weight_blocks(lane.randn(rows, columns), dtype)

    out = matmul_w8a8(x, x_scale, weight, scale, dtype=lane.dtype)

    expected = reference.matmul_w8a8(x, x_scale, weight, scale, None, lane.dtype)
    assert_close("out", out, expected)


def test_last_block_may_be_short(one_lane):
    x, _ = quantize(one_lane.randn(3, 200))
    x_scale = torch.rand(3, 2, device=one_lane.device)
    weight, scale = quantize_weight_blocks(one_lane.randn(70, 200))

    out = matmul_w8a8(x, x_scale, weight, scale, dtype=one_lane.dtype)

    expected = reference.matmul_w8a8(x, x_scale, weight, scale, None, one_lane.dtype)
    assert_close("out", out, expected)


@CODES
@pytest.mark.parametrize(
    ("columns", "group"), [(63, None), (500, None), (1025, None), (128, 128), (1152, 128)]
)
def test_quantize_equals_its_reference(lane, columns, group, dtype):
    x = lane.randn(3, 2 * columns)[:, :columns]

    codes, scale = quantize(x, dtype=dtype, group_columns=group)

    expected = reference.quantize(x, dtype, group or columns)
    assert_close("codes", codes, expected[0])
    assert_close("scale", scale, expected[1])


def test_operations_run_by_the_dispatcher_too(one_lane):
    x, x_scale = quantize(one_lane.randn(3, 64), dtype=torch.int8)
    weight, scale = quantize_weight(one_lane.randn(32, 64), torch.int8)

    torch.library.opcheck(
        torch.ops.deepseek.matmul_w8a8, (x, x_scale, weight, scale, None, torch.float32)
    )
    torch.library.opcheck(torch.ops.deepseek.quantize, (one_lane.randn(3, 64), torch.int8, 64))


def test_no_tokens_give_no_rows(lane):
    x, x_scale = quantize(lane.randn(0, 64))
    weight, scale = quantize_weight(lane.randn(32, 64))

    assert matmul_w8a8(x, x_scale, weight, scale).shape == (0, 32)


def test_non_finite_activations_stay_in_their_row(one_lane):
    values = one_lane.randn(3, 128)
    values[1, 5] = float("inf")
    x, x_scale = quantize(values)
    weight, scale = quantize_weight(one_lane.randn(64, 128))

    out = matmul_w8a8(x, x_scale, weight, scale, dtype=one_lane.dtype)

    assert out[[0, 2]].isfinite().all()
    assert not out[1].isfinite().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 256)}, "x has dtype float32; allowed are float8_e4m3fn, int8"),
        ({"weight": torch.zeros(32, 256).to(FP8)}, "weight has dtype float8_e4m3fn; allowed are"),
        ({"x_scale": torch.zeros(4, 2)}, r"x_scale has shape \[4, 2\]; required is \[4, 1\]"),
        ({"weight_scale": torch.zeros(2, 2)}, r"weight_scale has shape \[2, 2\]; required is"),
        ({"weight_scale": torch.zeros(1, 2)}, r"x_scale has shape \[4, 1\]; required is \[4, 2\]"),
        ({"dtype": torch.int8}, "dtype is int8; allowed are float16, bfloat16, float32"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "x": torch.zeros(4, 256, dtype=torch.int8),
        "x_scale": torch.zeros(4, 1),
        "weight": torch.zeros(32, 256, dtype=torch.int8),
        "weight_scale": torch.zeros(32),
    } | change

    with pytest.raises(ValueError, match=message):
        matmul_w8a8(**arguments)


@pytest.mark.parametrize(
    ("tokens", "dtype", "blocks"),
    [
        (16, "int8", False),
        (16, "float8_e4m3fn", True),
        (64, "float8_e4m3fn", False),
        (64, "float8_e4m3fn", True),
        (128, "float8_e4m3fn", False),
    ],
)
def test_few_tokens_fit_hopper(compile_sm90, spec, tokens, dtype, blocks):
    (kernel,) = compile_sm90(
        "matmul_w8a8.kernel:matmul_w8a8",
        spec((tokens, 3584), dtype),
        spec((tokens, 28 if blocks else 1), "float32"),
        spec((4608, 3584), dtype),
        spec((36, 28) if blocks else (4608,), "float32"),
        None,
        torch.bfloat16,
    )

    assert kernel.spill_bytes == 0
    assert kernel.wgmma_instructions >= 4
    assert kernel.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_tokens_of_int8_fit_hopper(compile_sm90, spec, dtype):
    (kernel,) = compile_sm90(
        "matmul_w8a8.kernel:matmul_w8a8",
        spec((4096, 3584), "int8"),
        spec((4096, 1), "float32"),
        spec((4608, 3584), "int8"),
        spec((4608,), "float32"),
        None,
        dtype,
    )

    assert kernel.spill_bytes == 0
    assert kernel.wgmma_instructions >= 4
    assert kernel.shared_bytes <= 227 * 1024
