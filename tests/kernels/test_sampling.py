from types import SimpleNamespace

import pytest
import torch

from deepseek_kernels import sample
from deepseek_kernels.sampling import cost, kernel, reference


def cpu_lane():
    """What the tests of references use of a lane."""
    return SimpleNamespace(device="cpu", dtype=torch.float32, randn=torch.randn)


def arguments(lane, rows, **changes):
    """Plain sampling of `rows` rows; a change is one value for all rows or one for each."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    types = {"top_k": torch.int32}
    filled = {}
    for name, default in defaults.items():
        value = torch.as_tensor(changes.get(name, default)).expand(rows)
        filled[name] = value.to(lane.device, types.get(name, torch.float32)).contiguous()
    filled["seeds"] = torch.randint(-(2**62), 2**62, (rows,), device=lane.device)
    filled["positions"] = torch.arange(rows, device=lane.device) * 1000
    return filled


FILTERS = {
    "nothing": {},
    "temperature": {"temperature": 0.3},
    "greedy": {"temperature": 0.0, "top_k": 5, "top_p": 0.1, "min_p": 0.5},
    "top-1": {"top_k": 1},
    "top-k": {"top_k": 20},
    "top-k of all": {"top_k": 2**30},
    "large top-k": {"top_k": 530},
    "top-p": {"top_p": 0.9},
    "top-p 0": {"top_p": 0.0},
    "top-p nearly 1": {"top_p": 0.99999},
    "min-p": {"min_p": 0.05},
    "top-k, top-p": {"top_k": 50, "top_p": 0.95, "temperature": 0.6},
    "large top-k, top-p": {"top_k": 530, "top_p": 0.8},
    "all three": {"top_k": 100, "top_p": 0.97, "min_p": 0.02, "temperature": 1.7},
    "wild": {"temperature": 1e6, "top_k": 3},
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_draws_the_reference_tokens(one_lane, filters):
    logits = one_lane.randn(2, 1100) * 3
    given = arguments(one_lane, 2, **filters)

    tokens = sample(logits, **given)

    assert torch.equal(tokens, reference.sample(logits, **given))


@pytest.mark.parametrize("filters", [{"top_k": 50, "top_p": 0.95}, {"top_p": 0.9}], ids=str)
def test_usual_rows_are_not_searched_by_bisection(monkeypatch, filters):
    lane = cpu_lane()

    def refuse(*_):
        raise AssertionError("a usual row was searched by bisection")

    monkeypatch.setattr(kernel, "_drawn_by_bisection", refuse)
    logits = lane.randn(3, 2000) * 3

    sample(logits, **arguments(lane, 3, **filters))


@pytest.mark.parametrize("vocabulary", [1, 63, 513])
def test_any_vocabulary(lane, vocabulary):
    logits = lane.randn(2, vocabulary)
    given = arguments(lane, 2, top_k=7, top_p=0.9)

    assert torch.equal(sample(logits, **given), reference.sample(logits, **given))


def test_rows_have_filters_of_their_own(lane):
    logits = lane.randn(5, 700) * 2
    given = arguments(
        lane,
        5,
        temperature=torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0]),
        top_k=torch.tensor([0, 3, 0, 650, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.7, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3]),
    )

    assert torch.equal(sample(logits, **given), reference.sample(logits, **given))


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}], ids=["top-k", "top-p"])
def test_more_ties_than_the_list_holds(lane, filters):
    logits = torch.zeros(1, kernel.CAPACITY + 200, device=lane.device, dtype=lane.dtype)
    logits[0, 17] = 0.5
    given = arguments(lane, 1, **filters)

    assert torch.equal(sample(logits, **given), reference.sample(logits, **given))


def test_a_row_draws_the_same_token_in_any_batch(one_lane):
    logits = one_lane.randn(3, 300) * 3
    given = arguments(one_lane, 3, top_p=0.9)

    together = sample(logits, **given)

    alone = [
        sample(logits[i : i + 1], **{k: v[i : i + 1] for k, v in given.items()}) for i in range(3)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_frequencies_follow_the_probabilities():
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 20_000
    noise = reference.gumbel(torch.full((rows,), 7), torch.arange(rows), 4)

    drawn = (probability.log() + noise).argmax(-1)

    frequency = torch.bincount(drawn, minlength=4) / rows
    assert (frequency - probability).abs().max() < 0.012


def test_only_kept_tokens_are_drawn():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, 2.0]]).repeat(200, 1)
    given = arguments(cpu_lane(), 200, top_k=2, temperature=5.0)

    tokens = set(reference.sample(logits, **given).tolist())

    # Tokens 1 and 4 tie for the second place and are kept together.
    assert tokens == {0, 1, 4}


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")], ids=["nan", "-inf"])
def test_impossible_tokens_are_not_drawn(lane, bad):
    logits = torch.full((3, 600), bad, device=lane.device, dtype=lane.dtype)
    logits[0, 599] = -5.0
    logits[1, :10] = 1.0
    given = arguments(lane, 3, top_k=20, top_p=0.9)

    tokens = sample(logits, **given)

    assert tokens[0] == 599
    assert tokens[1] < 10
    assert tokens[2] == 0
    assert torch.equal(tokens, reference.sample(logits, **given))


def test_infinite_logit_wins(lane):
    logits = lane.randn(1, 300)
    logits[0, 123] = float("inf")

    assert sample(logits, **arguments(lane, 1, top_p=0.9)).item() == 123


def test_rows_at_any_stride(lane):
    wide = lane.randn(3, 900)
    given = arguments(lane, 3, top_k=10)

    tokens = sample(wide[:, 100:700], **given)

    assert torch.equal(tokens, reference.sample(wide[:, 100:700].contiguous(), **given))


def test_no_rows(lane):
    assert sample(lane.randn(0, 100), **arguments(lane, 0)).shape == (0,)


@pytest.mark.gpu
def test_full_vocabulary_draws_the_reference_tokens():
    torch.manual_seed(20)
    lane = SimpleNamespace(device="cuda")
    for rows in (3, 64):
        for filters in ({"top_k": 50, "top_p": 0.95}, {"top_p": 0.9}, {"top_k": 5000}, {}):
            for scale in (0.5, 2.5):
                logits = (torch.randn(rows, 151_936, device="cuda") * scale).bfloat16()
                given = arguments(lane, rows, **filters)
                assert torch.equal(sample(logits, **given), reference.sample(logits, **given))


def test_operation_runs_by_the_dispatcher_too(one_lane):
    given = arguments(one_lane, 1, top_k=5)

    torch.library.opcheck(torch.ops.deepseek.sample, (one_lane.randn(1, 40), *given.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 9, dtype=torch.int32)}, "logits has dtype int32"),
        ({"logits": torch.zeros(9)}, r"logits has shape \[9\]; required is \[rows, vocabulary\]"),
        ({"logits": torch.zeros(2, 2**18)}, "vocabulary of logits is 262144; allowed is 1 to"),
        ({"top_k": torch.zeros(2)}, "top_k has dtype float32; allowed are int32"),
        ({"top_p": torch.zeros(3)}, r"top_p has shape \[3\]; required is \[2\]"),
        ({"seeds": torch.zeros(4, dtype=torch.int64)[::2]}, "seeds has strides"),
        ({"min_p": torch.zeros(2, device="meta")}, "min_p is on meta; the other tensors are on"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {"logits": torch.zeros(2, 9)} | arguments(cpu_lane(), 2) | change

    with pytest.raises(ValueError, match=message):
        sample(**given)


@pytest.mark.parametrize("rows", [1, 64])
def test_kernels_fit_hopper(compile_sm90, spec, rows):
    floats = spec((rows,), "float32")
    longs = spec((rows,), "int64")

    kernels = compile_sm90(
        "sampling.kernel:sample",
        spec((rows, 128_256)),
        floats,
        spec((rows,), "int32"),
        floats,
        floats,
        longs,
        longs,
    )

    assert len(kernels) == (5 if rows == 1 else 6)
    for one in kernels:
        assert one.spill_bytes == 0, one.kernel
        assert one.registers <= 200, one.kernel


def test_cost_counts_every_logit_once():
    assert cost(torch.empty(4, 100, dtype=torch.bfloat16, device="meta")).bytes == 800
