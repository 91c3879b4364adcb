import pytest
import torch
from torch.nn import functional

from deepseek_kernels import (
    fold_layer_norm,
    layer_norm_gelu_matmul,
    layer_norm_matmul_gelu,
)
from deepseek_kernels.layer_norm_gelu_matmul import cost, intermediate_bytes, reference
from deepseek_kernels.testing import assert_close

SIZES = [
    pytest.param(*sizes, id="x".join(map(str, sizes)))
    for sizes in [(1, 63, 500), (2, 64, 128), (17, 65, 129), (65, 40, 64), (129, 264, 72)]
]
GELUS = pytest.mark.parametrize("approximate", ["none", "tanh"])


def weights(lane, rows, columns):
    # Weights as models have them: the sums have the size of their terms.
    scale = columns**-0.5
    return (
        (lane.randn(rows, columns) * scale).to(lane.dtype),
        lane.randn(rows),
        lane.randn(columns),
        lane.randn(columns),
    )


@GELUS
@pytest.mark.parametrize(("tokens", "rows", "columns"), SIZES)
def test_gelu_last_equals_its_reference(lane, tokens, rows, columns, approximate):
    x = lane.randn(tokens, columns) + 1
    folded = fold_layer_norm(*weights(lane, rows, columns))

    out = layer_norm_matmul_gelu(x, *folded, approximate=approximate)

    expected = reference.layer_norm_matmul_gelu(x, *folded, 1e-5, approximate)
    assert_close("out", out, expected)


@GELUS
@pytest.mark.parametrize(("tokens", "rows", "columns"), SIZES)
def test_gelu_first_equals_its_reference(lane, tokens, rows, columns, approximate):
    x = lane.randn(tokens, columns) + 1
    weight, bias, norm_weight, norm_bias = weights(lane, rows, columns)
    arguments = (x, norm_weight, norm_bias, weight, bias)

    out = layer_norm_gelu_matmul(*arguments, approximate=approximate)

    expected = reference.layer_norm_gelu_matmul(*arguments, 1e-5, approximate)
    assert_close("out", out, expected)


def test_folding_changes_nothing_but_the_order(one_lane):
    x = one_lane.randn(3, 64, dtype=torch.float32)
    weight, bias, norm_weight, norm_bias = (one.float() for one in weights(one_lane, 32, 64))

    out = layer_norm_matmul_gelu(x, *fold_layer_norm(weight, bias, norm_weight, norm_bias))

    normalised = functional.layer_norm(x, (64,), norm_weight, norm_bias)
    expected = functional.gelu(functional.linear(normalised, weight, bias))
    assert (out - expected).norm() < 4e-6 * expected.norm()


def test_a_mean_far_from_zero_cancels(one_lane):
    x = one_lane.randn(3, 256) + 100
    folded = fold_layer_norm(*weights(one_lane, 64, 256))

    out = layer_norm_matmul_gelu(x, *folded).float()

    # The sums are some 50 times as large as what is left of them.
    expected = reference.layer_norm_matmul_gelu(x, *folded, 1e-5, "none").float()
    tolerance = 4e-3 if one_lane.dtype == torch.bfloat16 else 2e-4
    assert (out - expected).norm() < tolerance * expected.norm()


def test_no_tokens_give_no_rows(lane):
    weight, bias, norm_weight, norm_bias = weights(lane, 32, 64)
    x = lane.randn(0, 64)

    folded = fold_layer_norm(weight, bias, norm_weight, norm_bias)
    assert layer_norm_matmul_gelu(x, *folded).shape == (0, 32)
    assert layer_norm_gelu_matmul(x, norm_weight, None, weight).shape == (0, 32)


def test_rows_at_any_stride_are_read(lane):
    x = lane.randn(4, 192)[:, 64:128]
    weight, _, norm_weight, norm_bias = weights(lane, 32, 64)
    folded = fold_layer_norm(weight, None, norm_weight, norm_bias)

    last = layer_norm_matmul_gelu(x, *folded)
    first = layer_norm_gelu_matmul(x, norm_weight, None, weight)

    assert_close("last", last, reference.layer_norm_matmul_gelu(x, *folded, 1e-5, "none"))
    expected = reference.layer_norm_gelu_matmul(x, norm_weight, None, weight, None, 1e-5, "none")
    assert_close("first", first, expected)


def test_operations_run_by_the_dispatcher_too(one_lane):
    x = one_lane.randn(3, 64)
    weight, bias, norm_weight, norm_bias = weights(one_lane, 32, 64)
    folded = fold_layer_norm(weight, bias, norm_weight, norm_bias)

    torch.library.opcheck(torch.ops.deepseek.layer_norm_matmul_gelu, (x, *folded, 1e-5, "none"))
    torch.library.opcheck(
        torch.ops.deepseek.layer_norm_gelu_matmul,
        (x, norm_weight, norm_bias, weight, bias, 1e-5, "tanh"),
    )


def test_non_finite_input_stays_in_its_row(one_lane):
    x = one_lane.randn(3, 64)
    x[1, 5] = float("inf")
    folded = fold_layer_norm(*weights(one_lane, 32, 64))

    out = layer_norm_matmul_gelu(x, *folded)

    assert out[[0, 2]].isfinite().all()
    assert not out[1].isfinite().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight_sum": torch.zeros(32).half()},
            "weight_sum has dtype float16; allowed are float32",
        ),
        ({"bias": torch.zeros(31)}, r"bias has shape \[31\]; required is \[32\]"),
        ({"weight": torch.zeros(32, 63)}, r"weight has shape \[32, 63\]; required is"),
        ({"eps": 2.0}, "eps is 2.0; allowed is 0.0 to 1.0"),
        ({"approximate": "sigmoid"}, "approximate is sigmoid; allowed are none, tanh"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "x": torch.zeros(4, 64),
        "weight": torch.zeros(32, 64),
        "weight_sum": torch.zeros(32),
        "bias": torch.zeros(32),
    } | change

    with pytest.raises(ValueError, match=message):
        layer_norm_matmul_gelu(**arguments)


@pytest.mark.parametrize("tokens", [16, 512, 4096])
def test_kernels_fit_hopper(compile_sm90, spec, tokens):
    rows, product = compile_sm90(
        "layer_norm_gelu_matmul.kernel:layer_norm_matmul_gelu",
        spec((tokens, 4096)),
        spec((16384, 4096)),
        spec((16384,), "float32"),
        spec((16384,), "float32"),
        1e-5,
        "none",
    )

    assert rows.spill_bytes == product.spill_bytes == 0
    assert product.wgmma_instructions >= 4
    assert product.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("rows", [4096, 16384])
@pytest.mark.parametrize("tokens", [64, 512])
def test_fp32_fits_shared_memory(compile_sm90, spec, tokens, rows):
    _, product = compile_sm90(
        "layer_norm_gelu_matmul.kernel:layer_norm_matmul_gelu",
        spec((tokens, 4096), "float32"),
        spec((rows, 4096), "float32"),
        spec((rows,), "float32"),
        spec((rows,), "float32"),
        1e-5,
        "tanh",
    )

    assert product.shared_bytes <= 227 * 1024


def test_fused_calls_keep_less_between_their_steps():
    x = torch.empty(8, 1024, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")

    chain = intermediate_bytes(x, weight, fused=False, gelu_last=True)
    assert chain == 2 * 8 * 5120 * 2
    assert intermediate_bytes(x, weight, fused=True, gelu_last=True) < 0.01 * chain
    assert cost(x, weight).bytes == 2 * (8 * 1024 + 4096 * 1024 + 8 * 4096)
