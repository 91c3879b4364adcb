import pytest
import torch

from deepseek_kernels import matmul
from deepseek_kernels.matmul import cost, reference
from deepseek_kernels.testing import assert_close

SIZES = [
    pytest.param(*sizes, bias, id="x".join(map(str, sizes)) + ("-bias" if bias else ""))
    for *sizes, bias in [
        (1, 1, 1, False),
        (1, 63, 500, True),
        (1, 9, 2048, False),
        (2, 64, 128, False),
        (17, 65, 129, True),
        (63, 64, 64, False),
    ]
]


@pytest.mark.parametrize(("tokens", "rows", "columns", "with_bias"), SIZES)
def test_product_equals_its_reference(lane, tokens, rows, columns, with_bias):
    x, weight = lane.randn(tokens, columns), lane.randn(rows, columns)
    bias = lane.randn(rows) if with_bias else None

    out = matmul(x, weight, bias)

    assert_close("out", out, reference.matmul(x, weight, bias))


@pytest.mark.parametrize("tokens", [1, 5])
def test_operation_runs_by_the_dispatcher_too(one_lane, tokens):
    x, weight = one_lane.randn(tokens, 64), one_lane.randn(32, 64)

    torch.library.opcheck(torch.ops.deepseek.matmul, (x, weight, None))


@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_at_any_stride_are_read(lane, tokens):
    x, weight = lane.randn(tokens, 256)[:, 64:192], lane.randn(130, 128)[::2]

    out = matmul(x, weight)

    assert_close("out", out, reference.matmul(x, weight, None))


@pytest.mark.parametrize("tokens", [1, 2])
def test_long_sums_are_split_and_added_in_one_order(one_lane, tokens):
    x, weight = one_lane.randn(tokens, 8192), one_lane.randn(64, 8192)

    out = matmul(x, weight)

    assert_close("out", out, reference.matmul(x, weight, None))
    for _ in range(3):
        assert torch.equal(matmul(x, weight), out)


def test_no_tokens_give_no_rows(lane):
    assert matmul(lane.randn(0, 64), lane.randn(32, 64)).shape == (0, 32)


@pytest.mark.parametrize("tokens", [1, 2])
def test_offsets_pass_31_bits(one_lane, tokens):
    rows, columns = 3, 64
    stride = 2**30 + 64
    storage = torch.zeros(1, dtype=torch.float16, device=one_lane.device)
    storage.untyped_storage().resize_(2 * ((rows - 1) * stride + columns))
    weight = storage.as_strided((rows, columns), (stride, 1))
    weight.copy_(one_lane.randn(rows, columns))
    x = one_lane.randn(tokens, columns, dtype=torch.float16)

    out = matmul(x, weight)

    assert_close("out", out, reference.matmul(x, weight.contiguous(), None))


def test_non_finite_activations_stay_in_their_row(one_lane):
    x, weight = one_lane.randn(3, 128), one_lane.randn(64, 128)
    x[1, 5] = float("nan")

    out = matmul(x, weight)

    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert out[2].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 64, dtype=torch.int8)}, "x has dtype int8; allowed are float16"),
        ({"x": torch.zeros(4)}, r"x has shape \[4\]; required is \[tokens, in_features\]"),
        ({"x": torch.zeros(4, 0)}, "number of columns of x is 0; allowed is 1 to"),
        ({"x": torch.zeros(64, 4).t()}, "x has stride 4 in its last dimension; required is 1"),
        ({"weight": torch.zeros(32, 63)}, r"weight has shape \[32, 63\]; required is \[out_"),
        ({"weight": torch.zeros(32, 64).half()}, "weight has dtype float16; allowed are float32"),
        ({"weight": torch.zeros(32, 64, device="meta")}, "weight is on meta; the other tensors"),
        ({"bias": torch.zeros(31)}, r"bias has shape \[31\]; required is \[32\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"x": torch.zeros(4, 64), "weight": torch.zeros(32, 64)} | change

    with pytest.raises(ValueError, match=message):
        matmul(**arguments)


@pytest.mark.parametrize(("rows", "columns"), [(4608, 3584), (3584, 18944), (576, 1536)])
def test_one_token_reads_wide_on_hopper(compile_sm90, spec, rows, columns):
    (kernel,) = compile_sm90(
        "matmul.kernel:matmul", spec((1, columns)), spec((rows, columns)), None
    )

    assert kernel.spill_bytes == 0
    assert kernel.registers <= 128
    assert kernel.wide_loads >= 4


def test_few_tokens_use_the_matrix_unit_on_hopper(compile_sm90, spec):
    (kernel,) = compile_sm90("matmul.kernel:matmul", spec((16, 3584)), spec((4608, 3584)), None)

    assert kernel.spill_bytes == 0
    assert kernel.wgmma_instructions >= 4
    assert kernel.shared_bytes <= 113 * 1024


def test_cost_counts_each_tensor_once():
    x = torch.empty(2, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(32, 64, dtype=torch.int8, device="meta")

    assert cost(x, weight) == (2 * 64 * 2 + 32 * 64 + 2 * 32 * 2, 2 * 2 * 32 * 64)
