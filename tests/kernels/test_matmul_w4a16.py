import importlib

import pytest
import torch

from deepseek_kernels import (
    _counters,
    gated_matmul_w4a16,
    matmul_w4a16,
    pack_w4a16,
    quantize_w4a16,
    unpack_w4a16,
)
from deepseek_kernels.gate import reference as gate
from deepseek_kernels.matmul_w4a16 import cost, reference
from deepseek_kernels.testing import assert_close

# The package's attribute of that name is the operation.
kernel = importlib.import_module("deepseek_kernels.matmul_w4a16.kernel")

ZEROS = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-points"])


def random_weight(lane, rows, columns, symmetric):
    groups = -(-columns // 128)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=lane.device)
    scale = (torch.rand(rows, groups, device=lane.device) + 0.1).bfloat16()
    zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8, device=lane.device)
    return codes, scale, None if symmetric else zeros


@ZEROS
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 63, 500), (1, 64, 576), (2, 65, 2048), (63, 64, 255), (65, 1, 257), (130, 129, 128)],
)
def test_product_equals_its_reference(lane, tokens, rows, columns, symmetric):
    x = lane.randn(tokens, columns)
    packed = pack_w4a16(*random_weight(lane, rows, columns, symmetric))

    out = matmul_w4a16(x, *packed, out_features=rows)

    assert_close("out", out, reference.matmul_w4a16(x, *packed, None, rows))


@ZEROS
@pytest.mark.parametrize("programs", [1, 2, 3, 7, 13, 24])
def test_equal_shares_of_tiles_add_up(lane, monkeypatch, run_backwards, programs, symmetric):
    """Of 12 tiles of 4 blocks: several tiles for one program, and several programs for one."""
    names = ("block_n", "block_m", "per_sm", "num_warps", "num_stages", "scaled", "equal")
    config = dict(zip(names, (64, 64, 1, 4, 3, 1, 1), strict=True))
    monkeypatch.setattr(kernel, "_config", lambda _x, _out_features: config)
    monkeypatch.setattr(kernel, "multiprocessors", lambda _device: programs)
    x, bias = lane.randn(130, 1000), lane.randn(250)
    packed = pack_w4a16(*random_weight(lane, 250, 1000, symmetric))

    out = matmul_w4a16(x, *packed, bias, out_features=250)

    assert_close("out", out, reference.matmul_w4a16(x, *packed, bias, 250))
    run_backwards()
    assert torch.equal(matmul_w4a16(x, *packed, bias, out_features=250), out)
    # Counters are as they were, or a later sum would end too early.
    assert not _counters._counters[x.device].any()


@ZEROS
def test_many_tokens_and_bias_equal_the_reference(lane, symmetric):
    x, bias = lane.randn(513, 256), lane.randn(70)
    packed = pack_w4a16(*random_weight(lane, 70, 256, symmetric))

    out = matmul_w4a16(x, *packed, bias, out_features=70)

    assert_close("out", out, reference.matmul_w4a16(x, *packed, bias, 70))


@ZEROS
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(0, 32, 128), (1, 63, 500), (65, 40, 257), (513, 36, 256)]
)
def test_gated_product_equals_its_parts(lane, tokens, rows, columns, symmetric):
    x = lane.randn(tokens, columns) / 16
    packed = pack_w4a16(*random_weight(lane, 2 * rows, columns, symmetric))

    out = gated_matmul_w4a16(x, *packed, out_features=rows)

    product = reference.matmul_w4a16(x, *packed, None, 2 * rows)
    assert_close("out", out, gate.silu_mul(product))


@ZEROS
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (63, 500), (64, 256), (130, 576)])
def test_packing_can_be_undone(lane, rows, columns, symmetric):
    codes, scale, zeros = random_weight(lane, rows, columns, symmetric)

    packed = pack_w4a16(codes, scale, zeros)
    again = unpack_w4a16(*packed, out_features=rows, in_features=columns)

    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scale)
    assert again[2] is None if symmetric else torch.equal(again[2], zeros)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-points"])
def test_rounding_is_to_the_nearest_code(lane, symmetric):
    weight = lane.randn(65, 300, dtype=torch.float32)

    packed = quantize_w4a16(weight, symmetric=symmetric)

    values = reference.dequantize(*packed)[:65, :300]
    groups = packed[1].float().transpose(0, 1).reshape(128, -1)[:65]
    steps = groups.repeat_interleave(128, 1)[:, :300]
    # Asymmetric groups may have to move their zero point by half a step more.
    assert ((values - weight).abs() <= steps * (0.51 if symmetric else 1.01)).all()


def test_scales_may_be_fp16(lane):
    x = lane.randn(3, 128)
    packed = quantize_w4a16(lane.randn(64, 128), dtype=torch.float16)

    out = matmul_w4a16(x, *packed, out_features=64)

    assert_close("out", out, reference.matmul_w4a16(x, *packed, None, 64))


def test_results_are_the_same_in_every_run(one_lane):
    x = one_lane.randn(5, 4096)
    packed = quantize_w4a16(one_lane.randn(64, 4096))

    out = matmul_w4a16(x, *packed, out_features=64)

    for _ in range(3):
        assert torch.equal(matmul_w4a16(x, *packed, out_features=64), out)


def test_operation_runs_by_the_dispatcher_too(one_lane):
    packed = quantize_w4a16(one_lane.randn(64, 128), symmetric=False)

    torch.library.opcheck(
        torch.ops.deepseek.matmul_w4a16, (one_lane.randn(3, 128), *packed, None, 60)
    )
    torch.library.opcheck(
        torch.ops.deepseek.gated_matmul_w4a16, (one_lane.randn(3, 128), *packed, 31)
    )


def test_no_tokens_give_no_rows(lane):
    packed = quantize_w4a16(lane.randn(40, 128))

    assert matmul_w4a16(lane.randn(0, 128), *packed, out_features=40).shape == (0, 40)


def test_non_finite_activations_stay_in_their_row(one_lane):
    x = one_lane.randn(3, 200)
    x[1, 150] = float("nan")
    packed = quantize_w4a16(one_lane.randn(64, 200))

    out = matmul_w4a16(x, *packed, out_features=64)

    assert out[[0, 2]].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": torch.zeros(4, 513)},
            r"weight has shape \[2, 2, 8192\]; required is \[row tiles, 3",
        ),
        ({"weight": torch.zeros(2, 2, 8192)}, "weight has dtype float32; allowed are uint8"),
        ({"scale": torch.zeros(2, 128, 2)}, "scale has dtype float32; allowed are bfloat16, float"),
        ({"scale": torch.zeros(2, 64, 2).half()}, r"scale has shape \[2, 64, 2\]; required is"),
        ({"out_features": 64}, "out_features is 64; allowed is 65 to 128"),
        ({"zero_point": torch.zeros(2, 128, 2).half()}, "zero_point has dtype float16; allowed"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "x": torch.zeros(4, 500),
        "weight": torch.zeros(2, 2, 8192, dtype=torch.uint8),
        "scale": torch.zeros(2, 128, 2).half(),
        "out_features": 100,
    } | change

    with pytest.raises(ValueError, match=message):
        matmul_w4a16(**arguments)


def test_gated_rows_are_counted_twice():
    weight = torch.zeros(2, 2, 8192, dtype=torch.uint8)
    scale = torch.zeros(2, 128, 2).half()

    with pytest.raises(ValueError, match="twice out_features is 130; allowed is 65 to 128"):
        gated_matmul_w4a16(torch.zeros(4, 500), weight, scale, out_features=65)


def test_codes_above_15_are_refused():
    codes, scale = torch.full((2, 128), 16, dtype=torch.uint8), torch.zeros(2, 1).half()

    with pytest.raises(ValueError, match="codes holds 16; allowed is 0 to 15"):
        pack_w4a16(codes, scale)


@pytest.mark.parametrize("tokens", [16, 64, 96, 128, 256])
def test_codes_stay_in_registers_on_hopper(compile_sm90, spec, tokens):
    (kernel,) = compile_sm90(
        "matmul_w4a16.kernel:matmul_w4a16",
        spec((tokens, 3584)),
        spec((592, 14, 8192), "uint8"),
        spec((14, 37888, 2)),
        None,
        None,
        37888,
    )

    assert kernel.spill_bytes == 0
    assert kernel.wgmma_instructions == 16
    assert kernel.shared_bytes <= 227 * 1024


def test_cost_counts_each_tensor_once():
    x = torch.empty(2, 256, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(1, 1, 8192, dtype=torch.uint8, device="meta")
    scale = torch.empty(1, 64, 2, dtype=torch.bfloat16, device="meta")

    expected = 2 * 256 * 2 + 8192 + 64 * 2 * 2 + 2 * 64 * 2
    assert cost(x, weight, scale, 64) == (expected, 2 * 2 * 64 * 256)
