import pytest
import torch

from deepseek_kernels import lora_add
from deepseek_kernels.lora import cost, reference, workspace_bytes
from deepseek_kernels.testing import assert_close

QKV, GATE_UP, ONE = (100, 20, 20), (130, 130), (300,)


def weights(lane, num_adapters, widths, rank, in_features):
    a = lane.randn(num_adapters, len(widths), rank, in_features) / in_features**0.5
    return a, lane.randn(num_adapters, sum(widths), rank) / rank**0.5


def indices(lane, *adapters):
    return torch.tensor(adapters, dtype=torch.int32, device=lane.device)


def compare(out, x, a, b, adapters, widths):
    expected = out.clone()

    lora_add(out, x, a, b, adapters, widths)

    reference.lora_add(expected, x, a, b, adapters, widths)
    assert_close("out", out, expected)


@pytest.mark.parametrize("rank", [1, 8, 16, 63, 128])
@pytest.mark.parametrize("widths", [QKV, GATE_UP, ONE], ids=["qkv", "gate-up", "one"])
def test_equals_its_reference(lane, widths, rank):
    a, b = weights(lane, 3, widths, rank, 160)
    adapters = indices(lane, *([1] * 9), -1, 2, 0, 2, -1, 1, -1, -1, *([2] * 4))

    compare(lane.randn(21, sum(widths)), lane.randn(21, 160), a, b, adapters, widths)


@pytest.mark.parametrize(
    ("tokens", "in_features"),
    [(1, 63), (15, 128), (16, 129), (17, 1100), (63, 2048), (520, 64)],
    ids=str,
)
def test_any_size_and_split_of_the_sum(lane, tokens, in_features):
    a, b = weights(lane, 2, ONE, 8, in_features)
    adapters = torch.randint(-1, 2, (tokens,), dtype=torch.int32, device=lane.device)

    compare(lane.randn(tokens, 300), lane.randn(tokens, in_features), a, b, adapters, ONE)


def test_sixteen_rows_of_sixteen_adapters(lane):
    a, b = weights(lane, 16, QKV, 4, 96)
    adapters = torch.randperm(16, device=lane.device).int()

    compare(lane.randn(16, 140), lane.randn(16, 96), a, b, adapters, QKV)


def test_rows_without_an_adapter_keep_every_bit(lane):
    a, b = weights(lane, 2, ONE, 8, 64)
    out, adapters = lane.randn(40, 300), indices(lane, *([-1] * 16), *([-1, 1] * 12))
    before = out.clone()

    lora_add(out, lane.randn(40, 64), a, b, adapters, ONE)

    assert torch.equal(out[adapters < 0], before[adapters < 0])
    assert not torch.equal(out[adapters >= 0], before[adapters >= 0])


def test_a_row_does_not_depend_on_the_adapters_beside_it(lane):
    a, b = weights(lane, 3, GATE_UP, 8, 96)
    x, base = lane.randn(20, 96), lane.randn(20, 260)
    mixed, alone = base.clone(), base.clone()

    lora_add(mixed, x, a, b, indices(lane, *[index % 3 for index in range(20)]), GATE_UP)
    lora_add(alone, x, a, b, indices(lane, *([1] * 20)), GATE_UP)

    assert torch.equal(mixed[1::3], alone[1::3])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["x", "a", "b"])
def test_what_is_not_finite_stays_in_the_rows_that_use_it(one_lane, where, bad):
    a, b = weights(one_lane, 2, ONE, 8, 64)
    x, out = one_lane.randn(6, 64), one_lane.randn(6, 300)
    {"x": x[1], "a": a[1], "b": b[1]}[where].fill_(bad)

    lora_add(out, x, a, b, indices(one_lane, 0, 1, 0, -1, 0, 0), ONE)

    assert out[[0, 2, 3, 4, 5]].isfinite().all()
    assert not out[1].isfinite().all()


def test_rows_at_any_stride(lane):
    a, b = weights(lane, 1, ONE, 8, 64)
    wide, out = lane.randn(5, 200), lane.randn(5, 400)
    expected = out.clone()
    adapters = indices(lane, 0, 0, -1, 0, 0)

    lora_add(out[:, 50:350], wide[:, 64:128], a, b, adapters, ONE)

    reference.lora_add(expected[:, 50:350], wide[:, 64:128].contiguous(), a, b, adapters, ONE)
    assert_close("out", out, expected)


def test_no_rows_and_no_adapters_change_nothing(lane):
    a, b = weights(lane, 0, ONE, 8, 64)
    out = lane.randn(2, 300)
    before = out.clone()

    lora_add(out, lane.randn(2, 64), a, b, indices(lane, -1, -1), ONE)
    lora_add(out[:0], lane.randn(0, 64), a, b, indices(lane), ONE)

    assert torch.equal(out, before)


def test_operation_runs_by_the_dispatcher_too(one_lane):
    a, b = weights(one_lane, 2, QKV, 4, 32)
    arguments = one_lane.randn(3, 140), one_lane.randn(3, 32), a, b, indices(one_lane, 0, -1, 1)

    torch.library.opcheck(torch.ops.deepseek.lora_add, (*arguments, QKV))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.zeros(4, 30, dtype=torch.int8)}, "out has dtype int8; allowed are"),
        ({"x": torch.zeros(3, 8)}, r"x has shape \[3, 8\]; required is \[4, in_features\]"),
        ({"x": torch.zeros(4, 8).half()}, "x has dtype float16; allowed are float32"),
        ({"widths": (10, 10, 5, 5)}, "the number of widths is 4; allowed is 1 to 3"),
        ({"widths": (10, 10)}, r"widths are \[10, 10\]; their sum must be the 30 columns of out"),
        ({"a": torch.zeros(2, 1, 4, 8)}, r"required is \[adapters, 2, rank, 8\]"),
        ({"a": torch.zeros(2, 2, 300, 8)}, "the rank of a is 300; allowed is 1 to 256"),
        ({"b": torch.zeros(2, 30, 5)}, r"b has shape \[2, 30, 5\]; required is \[2, 30, 4\]"),
        ({"adapters": torch.zeros(4)}, "adapters has dtype float32; allowed are int32"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "out": torch.zeros(4, 30),
        "x": torch.zeros(4, 8),
        "a": torch.zeros(2, 2, 4, 8),
        "b": torch.zeros(2, 30, 4),
        "adapters": torch.zeros(4, dtype=torch.int32),
        "widths": (20, 10),
    }

    with pytest.raises(ValueError, match=message):
        lora_add(**(arguments | change))


@pytest.mark.parametrize("tokens", [16, 8192])
@pytest.mark.parametrize("rank", [8, 16, 64, 256])
@pytest.mark.parametrize(
    ("widths", "in_features"),
    [((3584, 512, 512), 3584), ((18944, 18944), 3584), ((3584,), 18944)],
    ids=["qkv", "gate-up", "down"],
)
def test_kernels_fit_hopper(compile_sm90, spec, widths, in_features, rank, tokens):
    columns = sum(widths)

    shrink, expand = compile_sm90(
        "lora.kernel:lora_add",
        spec((tokens, columns)),
        spec((tokens, in_features)),
        spec((4, len(widths), rank, in_features)),
        spec((4, columns, rank)),
        spec((tokens,), "int32"),
        widths,
    )

    for kernel in (shrink, expand):
        assert kernel.spill_bytes == 0
        assert kernel.shared_bytes <= 227 * 1024
        assert kernel.matrix_instructions > 0
    assert shrink.wide_loads > 0
    assert expand.wide_loads > 0


@pytest.mark.parametrize("tokens", [1, 40, 511, 512, 700])
def test_a_call_takes_no_more_memory_than_it_says(one_lane, tokens, monkeypatch):
    a, b = weights(one_lane, 1, (16, 16), 4, 2048)
    out, x = one_lane.randn(tokens, 32), one_lane.randn(tokens, 2048)
    adapters = torch.full((tokens,), -1, dtype=torch.int32, device=one_lane.device)
    allocated = []
    empty = torch.empty

    def counting(*arguments, **options):
        tensor = empty(*arguments, **options)
        allocated.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counting)

    lora_add(out, x, a, b, adapters, (16, 16))

    assert 0 < sum(allocated) <= workspace_bytes(tokens, 2, 4)


def test_cost_counts_the_weights_of_the_used_adapters():
    out, x = (torch.empty(10, n, dtype=torch.bfloat16, device="meta") for n in (300, 64))
    a = torch.empty(4, 1, 8, 64, dtype=torch.bfloat16, device="meta")

    one, two = cost(out, x, a, 1), cost(out, x, a, 2)

    assert two.bytes - one.bytes == 8 * (64 + 300) * 2
    assert one.bytes == 2 * (2 * 3000 + 640 + 8 * 364) + 40
    assert one.flops == two.flops == 2 * 10 * 8 * 364
