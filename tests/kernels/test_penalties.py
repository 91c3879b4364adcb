import pytest
import torch

from deepseek_kernels import penalize
from deepseek_kernels.penalties import IN_PROMPT, IS_END, cost, kernel, reference
from deepseek_kernels.testing import assert_close

NUM_STATES, NUM_BIASES = 5, 300


def arguments(lane, vocabulary, states=(3, 0, 4), **changes):
    """Some rows of random logits with random pasts, penalties and biases."""
    n = len(states)
    device = lane.device
    tokens = torch.randint(0, vocabulary, (20,), device=device)
    counts = torch.randint(-4, 4, (NUM_STATES, vocabulary), device=device).clamp_min(0)
    flags = torch.randint(0, 4, (NUM_STATES, vocabulary), device=device)
    seen = counts + (flags & 1) * IN_PROMPT + (flags >> 1) * IS_END
    num_biases = min(NUM_BIASES, vocabulary)
    biased = torch.stack([torch.randperm(vocabulary)[:num_biases] for _ in range(NUM_STATES)])

    def numbers(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    given = {
        "logits": lane.randn(n + 3, vocabulary) * 4,
        "token_ids": tokens,
        "rows": numbers([(5 * index + 2) % (n + 3) for index in range(n)]),
        "states": numbers(states),
        "previous": numbers([(7 * index - 1) for index in range(n)]),
        "is_banning": numbers([index % 2 for index in range(n)]),
        "num_biases": numbers([(index * 170) % (num_biases + 1) for index in range(n)]),
        "repetition": numbers([1.3 - 0.2 * index for index in range(n)], torch.float32),
        "frequency": numbers([0.5 * index - 0.5 for index in range(n)], torch.float32),
        "presence": numbers([1.5 - index for index in range(n)], torch.float32),
        "seen": seen.int().contiguous(),
        "bias_tokens": biased.int().to(device),
        "bias_values": torch.randn(NUM_STATES, num_biases, device=device) * 5,
    }
    return given | changes


def both(given):
    """What kernel and reference return, and the counts that each leaves."""
    ours, theirs = given["seen"].clone(), given["seen"].clone()
    found = penalize(**(given | {"seen": ours}))
    return found, reference.penalize(*(given | {"seen": theirs}).values()), ours, theirs


@pytest.mark.parametrize("vocabulary", [1, 63, 500, 2049, 5000])
def test_equals_its_reference(lane, vocabulary):
    found, expected, ours, theirs = both(arguments(lane, vocabulary))

    assert torch.equal(found.isneginf(), expected.isneginf())
    finite = expected.isfinite()
    assert_close("logits", found[finite], expected[finite])
    assert torch.equal(ours, theirs)


def test_rows_without_a_state_are_copied_and_count_nothing(lane):
    given = arguments(lane, 2100, states=(-1, 2, -1))

    found, expected, ours, _ = both(given)

    assert torch.equal(found[[0, 2]], given["logits"][given["rows"][[0, 2]]])
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(ours[[0, 1, 3, 4]], given["seen"][[0, 1, 3, 4]])
    assert not torch.equal(ours[2], given["seen"][2])


def test_each_step_counts_the_token_before_it(one_lane):
    vocabulary = 2500
    chosen = [7, 2400, 7, 7]
    given = arguments(one_lane, vocabulary, states=(1,))
    given["seen"].zero_()
    given["seen"][1, 3] = IN_PROMPT
    given["token_ids"] = torch.tensor(chosen, device=one_lane.device)

    for step in range(4):
        given["previous"].fill_(step)
        penalize(**given)

    row = given["seen"][1]
    assert {token: int(row[token]) for token in row.nonzero()[:, 0].tolist()} == {
        3: IN_PROMPT,
        7: 3,
        2400: 1,
    }


def test_the_same_step_again_without_counting_gives_the_same_logits(one_lane):
    given = arguments(one_lane, 600)

    first = penalize(**given)
    again = penalize(**(given | {"previous": torch.full_like(given["previous"], -1)}))

    assert torch.equal(first, again)


def test_an_end_token_is_banned_whatever_its_bias(one_lane):
    given = arguments(one_lane, 40, states=(0,))
    given["is_banning"].fill_(1)
    given["num_biases"].fill_(40)
    given["bias_values"].fill_(100.0)
    given["seen"][0, 11] = IS_END + 2

    found = penalize(**given)

    assert found[0, 11] == -torch.inf
    assert (found[0] == -torch.inf).sum() == ((given["seen"][0] & IS_END) != 0).sum()


def test_logits_at_any_stride_stay_as_they_are(one_lane):
    given = arguments(one_lane, 700)
    wide = one_lane.randn(6, 900)
    given["logits"] = wide[:, 100:800]
    before = wide.clone()

    found, expected, _, _ = both(given)

    assert torch.equal(found.isneginf(), expected.isneginf())
    assert torch.equal(wide, before)


@pytest.mark.parametrize("states", [(), (2,)], ids=["no rows", "one row"])
def test_what_is_not_finite_stays_in_its_place(one_lane, states):
    given = arguments(one_lane, 300, states=states)
    given["logits"][:, 17] = float("nan")
    given["num_biases"].fill_(0)
    given["is_banning"].fill_(0)

    found = penalize(**given)

    assert found.shape == (len(states), 300)
    assert found.isnan().sum() == len(states)


def test_is_an_operator(one_lane):
    torch.library.opcheck(torch.ops.deepseek.penalize, tuple(arguments(one_lane, 64).values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": torch.zeros(2).long()}, r"states has shape \[2\]; required is \[3\]"),
        ({"rows": torch.zeros(3)}, "rows has dtype float32; allowed are int64"),
        ({"seen": torch.zeros(5, 63).int()}, r"seen has shape \[5, 63\]; required is \[states, 64"),
        (
            {"bias_values": torch.zeros(5, 8)},
            r"bias_values has shape \[5, 8\]; required is \[5, 64",
        ),
        ({"seen": torch.zeros(64, 5).int().t()}, "it must be contiguous"),
    ],
    ids=["shape", "type", "vocabulary", "biases", "strides"],
)
def test_wrong_arguments_are_named(change, message):
    from types import SimpleNamespace

    lane = SimpleNamespace(device="cpu", randn=torch.randn)

    with pytest.raises(ValueError, match=message):
        penalize(**(arguments(lane, 64) | change))


def test_kernel_fits_hopper(compile_sm90, spec):
    rows, floats = spec((8,), "int64"), spec((8,), "float32")
    (found,) = compile_sm90(
        "penalties.kernel:penalize",
        spec((256, 151_936)),
        spec((256,), "int64"),
        *(rows,) * 5,
        *(floats,) * 3,
        spec((16, 151_936), "int32"),
        spec((16, 1024), "int32"),
        spec((16, 1024), "float32"),
    )

    assert found.kernel == "penalties_kernel"
    assert found.spill_bytes == 0
    assert found.registers <= 128
    assert found.wide_loads >= 2
    assert found.wide_stores >= 1


def test_cost_counts_logits_twice_and_counts_once():
    logits = torch.empty(9, 100, dtype=torch.bfloat16, device="meta")

    assert cost(logits, 4).bytes == 4 * 100 * (2 + 2 + 4)
    assert kernel.BLOCK % 256 == 0
