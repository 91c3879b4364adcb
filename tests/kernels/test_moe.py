import pytest
import torch

from deepseek_kernels import moe_combine, moe_group, moe_matmul, moe_route
from deepseek_kernels.moe import cost, reference, suitable_block_rows
from deepseek_kernels.testing import assert_close

ROUTES = {
    "softmax": {},
    "plain-weights": {"renormalize": False},
    "sigmoid-scaled": {"scoring": "sigmoid", "scale": 2.5},
    "groups": {"groups": 4, "top_groups": 2},
    "groups-and-bias": {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "bias": True},
}


def expected_route(logits, top_k, options):
    names = {"bias": None, "scoring": "softmax", "renormalize": True, "scale": 1.0}
    names |= {"groups": 1, "top_groups": 1} | options
    return reference.moe_route(
        logits,
        names["bias"],
        top_k,
        names["scoring"],
        names["renormalize"],
        names["scale"],
        names["groups"],
        names["top_groups"],
    )


@pytest.mark.parametrize("options", [pytest.param(o, id=i) for i, o in ROUTES.items()])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 1), (5, 60, 6), (3, 256, 8)])
def test_route_equals_its_reference(lane, tokens, experts, top_k, options):
    logits = lane.randn(tokens, 2 * experts)[:, :experts]
    options = dict(options)
    if options.get("bias"):
        options["bias"] = lane.randn(experts, dtype=torch.float32) * 0.1

    weights, chosen = moe_route(logits, top_k, **options)

    expected = expected_route(logits, top_k, options)
    assert_close("experts", chosen, expected[1])
    assert_close("weights", weights, expected[0])


def test_equal_choices_go_to_the_lower_index(lane):
    logits = torch.zeros(2, 16, dtype=lane.dtype, device=lane.device)

    _, chosen = moe_route(logits, 3)

    assert chosen.tolist() == [[0, 1, 2]] * 2


def test_rows_that_are_not_numbers_name_experts_that_exist(one_lane):
    logits = one_lane.randn(3, 16)
    logits[1] = float("nan")

    weights, chosen = moe_route(logits, 4)

    assert weights[[0, 2]].isfinite().all()
    assert weights[1].isnan().all()
    assert chosen[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 1, 1), (1, 4, 8), (63, 2, 5), (300, 1, 3)]
)
def test_group_equals_its_reference(one_lane, tokens, top_k, experts, block_rows):
    chosen = torch.randint(0, experts, (tokens, top_k), device=one_lane.device).int()

    order, block_experts = moe_group(chosen, experts, block_rows=block_rows)

    expected = reference.moe_group(chosen, experts, block_rows)
    assert_close("order", order, expected[0])
    assert_close("block_experts", block_experts, expected[1])


def test_all_rows_may_go_to_one_expert(one_lane):
    chosen = torch.full((70, 1), 2, dtype=torch.int32, device=one_lane.device)

    order, block_experts = moe_group(chosen, 4, block_rows=32)

    assert block_experts.tolist() == [2, 2, 2, -1, -1, -1]
    assert order.tolist() == [*range(70)] + [70] * 122


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "rows", "columns"), [(1, 2, 63, 500), (9, 3, 64, 128), (40, 1, 65, 129)]
)
def test_product_equals_its_reference(lane, tokens, top_k, rows, columns, block_rows):
    x = lane.randn(tokens, 2 * columns)[:, :columns]
    weight = lane.randn(4, rows, columns)
    chosen = torch.randint(0, 4, (tokens, top_k), device=lane.device).int()
    groups = moe_group(chosen, 4, block_rows=block_rows)

    out = moe_matmul(x, weight, *groups, top_k=top_k)
    again = moe_matmul(out, weight[:, :, :rows].contiguous(), *groups) if rows <= columns else None

    assert_close("out", out, reference.moe_matmul(x, weight, *groups, tokens * top_k))
    if again is not None:
        square = weight[:, :, :rows].contiguous()
        assert_close("again", again, reference.moe_matmul(out, square, *groups, tokens * top_k))


def test_weights_past_31_bits_are_read(one_lane):
    experts, rows, columns = 3, 16, 64
    stride = 2**30 + 64
    storage = torch.zeros(1, dtype=torch.float16, device=one_lane.device)
    storage.untyped_storage().resize_(2 * ((experts - 1) * stride + rows * columns))
    weight = storage.as_strided((experts, rows, columns), (stride, columns, 1))
    weight.copy_(one_lane.randn(experts, rows, columns))
    x = one_lane.randn(3, columns, dtype=torch.float16)
    groups = moe_group(torch.tensor([[0], [1], [2]], device=one_lane.device).int(), experts)

    out = moe_matmul(x, weight, *groups)

    assert_close("out", out, reference.moe_matmul(x, weight.contiguous(), *groups, 3))


@pytest.mark.parametrize(("tokens", "top_k", "columns"), [(1, 1, 1), (3, 8, 500), (2, 6, 2049)])
def test_combine_equals_its_reference(lane, tokens, top_k, columns):
    rows = lane.randn(tokens * top_k, 2 * columns)[:, :columns]
    weights = torch.rand(tokens, top_k, device=lane.device)

    out = moe_combine(rows, weights)

    assert_close("out", out, reference.moe_combine(rows, weights))


def test_no_tokens_give_no_rows(lane):
    weights, chosen = moe_route(lane.randn(0, 8), 2)
    groups = moe_group(chosen, 8)
    rows = moe_matmul(lane.randn(0, 64), lane.randn(8, 32, 64), *groups, top_k=2)

    assert rows.shape == (0, 32)
    assert moe_combine(rows, weights).shape == (0, 32)


def test_operations_run_by_the_dispatcher_too(one_lane):
    weights, chosen = moe_route(one_lane.randn(3, 8), 2)
    order, block_experts = moe_group(chosen, 8, block_rows=16)
    x, weight = one_lane.randn(3, 64), one_lane.randn(8, 32, 64)

    for name, arguments in {
        "moe_route": (one_lane.randn(3, 8), None, 2, "softmax", True, 1.0, 1, 1),
        "moe_group": (chosen, 8, 16),
        "moe_matmul": (x, weight, order, block_experts, 6),
        "moe_combine": (one_lane.randn(6, 32), weights),
    }.items():
        torch.library.opcheck(
            getattr(torch.ops.deepseek, name),
            arguments,
            test_utils=("test_schema", "test_faketensor"),
        )


def test_block_rows_follow_the_average():
    assert suitable_block_rows(8, 128) == 16
    assert suitable_block_rows(17 * 128, 128) == 32
    assert suitable_block_rows(2**20, 8) == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, "top_k is 9; allowed is 1 to 8"),
        ({"groups": 3}, "groups is 3; it must divide the 8 experts"),
        ({"groups": 4, "top_k": 3}, "top_k is 3; allowed is 1 to 2"),
        ({"scoring": "tanh"}, "scoring is tanh; allowed are softmax, sigmoid"),
        ({"logits": torch.zeros(2, 8).int()}, "logits has dtype int32; allowed are float16"),
        ({"bias": torch.zeros(7)}, r"bias has shape \[7\]; required is \[8\]"),
    ],
)
def test_wrong_routes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        moe_route(**({"logits": torch.zeros(2, 8), "top_k": 2} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 32, 63)}, r"weight has shape \[4, 32, 63\]; required is"),
        ({"order": torch.zeros(40).int()}, "order has 40 slots; allowed for 2 blocks are"),
        ({"order": torch.zeros(32)}, "order has dtype float32; allowed are int32"),
        ({"top_k": 0}, "top_k is 0; allowed is 1 to 64"),
    ],
)
def test_wrong_products_are_named(change, message):
    arguments = {
        "x": torch.zeros(4, 64),
        "weight": torch.zeros(4, 32, 64),
        "order": torch.zeros(32).int(),
        "block_experts": torch.zeros(2).int(),
    } | change

    with pytest.raises(ValueError, match=message):
        moe_matmul(**arguments)


@pytest.mark.parametrize("block_rows", [16, 128])
def test_product_fits_hopper(compile_sm90, spec, block_rows):
    (kernel,) = compile_sm90(
        "moe.kernel:moe_matmul",
        spec((4096, 2048)),
        spec((128, 1536, 2048)),
        spec((384 * block_rows,), "int32"),
        spec((384,), "int32"),
        4096 * 8,
    )

    assert kernel.spill_bytes == 0
    assert kernel.wgmma_instructions >= 4
    assert kernel.wide_loads >= 8


def test_cost_counts_touched_experts_once():
    x = torch.empty(2, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(8, 32, 64, dtype=torch.bfloat16, device="meta")

    expected = 2 * (2 * 64 + 3 * 32 * 64 + 4 * 32)
    assert cost(x, weight, rows=4, touched_experts=3).bytes == expected
