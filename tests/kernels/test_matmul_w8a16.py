import pytest
import torch

from deepseek_kernels import matmul_w8a16, quantize_weight, quantize_weight_blocks
from deepseek_kernels.matmul_w8a16 import reference
from deepseek_kernels.testing import assert_close

FP8 = torch.float8_e4m3fn
CODES = pytest.mark.parametrize("dtype", [FP8, torch.int8], ids=["fp8", "int8"])


@CODES
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "with_bias"),
    [
        (1, 63, 500, True),
        (1, 8, 4096, False),
        (2, 64, 576, False),
        (17, 65, 129, True),
        (64, 64, 63, False),
        (200, 33, 64, True),
    ],
)
def test_product_equals_its_reference(lane, tokens, rows, columns, dtype, with_bias):
    x = lane.randn(tokens, columns)
    weight, scale = quantize_weight(lane.randn(rows, columns), dtype)
    bias = lane.randn(rows) if with_bias else None

    out = matmul_w8a16(x, weight, scale, bias)

    assert_close("out", out, reference.matmul_w8a16(x, weight, scale, bias))


@pytest.mark.parametrize("tokens", [1, 3])
def test_every_code_means_its_value(lane, tokens):
    codes = torch.arange(256, dtype=torch.uint8, device=lane.device)
    codes = codes[codes & 127 != 127].view(FP8)
    weight = torch.zeros(len(codes), 16, dtype=torch.uint8, device=lane.device).view(FP8)
    weight[:, 3] = codes
    x = torch.zeros(tokens, 16, dtype=lane.dtype, device=lane.device)
    x[:, 3] = 1

    out = matmul_w8a16(x, weight, torch.ones(len(codes), device=lane.device))

    assert torch.equal(out, codes.float().to(lane.dtype).expand(tokens, -1))


@CODES
def test_weight_survives_quantization_within_half_a_step(lane, dtype):
    weight = lane.randn(65, 200, dtype=torch.float32)
    steps = 2**-4 if dtype == FP8 else 0.51 / 127

    for quantized in (quantize_weight(weight, dtype), quantize_weight_blocks(weight, dtype)):
        error = (reference.dequantize_weight(*quantized) - weight).abs()

        bound = weight.abs() if dtype == FP8 else weight.abs().max()
        assert (error <= bound * steps + 1e-3).all()


def test_blocks_have_their_own_scales(lane):
    weight = torch.ones(130, 300, device=lane.device)
    weight[128:, 256:] = 7

    codes, scale = quantize_weight_blocks(weight)

    assert codes.shape == (130, 300)
    assert scale.shape == (2, 3)
    assert torch.equal(reference.dequantize_weight(codes, scale), weight)


@pytest.mark.parametrize("tokens", [1, 4])
def test_operation_runs_by_the_dispatcher_too(one_lane, tokens):
    weight, scale = quantize_weight(one_lane.randn(32, 64), torch.int8)

    torch.library.opcheck(
        torch.ops.deepseek.matmul_w8a16, (one_lane.randn(tokens, 64), weight, scale, None)
    )


def test_no_tokens_give_no_rows(lane):
    weight, scale = quantize_weight(lane.randn(32, 64))

    assert matmul_w8a16(lane.randn(0, 64), weight, scale).shape == (0, 32)


def test_rows_at_any_stride_are_read(lane):
    weight, scale = quantize_weight(lane.randn(130, 128))
    x = lane.randn(4, 256)[:, :128]

    out = matmul_w8a16(x, weight[::2], scale[::2].contiguous())

    expected = reference.matmul_w8a16(x, weight[::2], scale[::2], None)
    assert_close("out", out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(32, 64)}, "weight has dtype float32; allowed are float8_e4m3fn"),
        ({"scale": torch.zeros(31)}, r"scale has shape \[31\]; required is \[32\]"),
        ({"scale": torch.zeros(32).half()}, "scale has dtype float16; allowed are float32"),
        ({"scale": torch.zeros(64)[::2]}, r"scale has strides \[2\]; it must be contiguous"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "x": torch.zeros(4, 64),
        "weight": torch.zeros(32, 64, dtype=torch.int8),
        "scale": torch.zeros(32),
    } | change

    with pytest.raises(ValueError, match=message):
        matmul_w8a16(**arguments)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("tokens", [16, 64, 128, 192, 1024])
def test_codes_stay_in_registers_on_hopper(compile_sm90, spec, tokens, dtype):
    (kernel,) = compile_sm90(
        "matmul_w8a16.kernel:matmul_w8a16",
        spec((tokens, 3584)),
        spec((4608, 3584), dtype),
        spec((4608,), "float32"),
        None,
    )

    assert kernel.spill_bytes == 0
    assert kernel.registers <= (128 if tokens == 16 else 255)
    assert kernel.matrix_instructions >= (16 if tokens == 16 else 4)
    assert (kernel.wgmma_instructions > 0) == (tokens > 32)
    assert kernel.shared_bytes <= 113 * 1024
