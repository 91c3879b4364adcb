"""Words to codes, and inputs into groups of 128."""

import pytest
import torch

from deepseek_worker.errors import BrokenCheckpoint
from deepseek_worker.quantization.unpacking import (
    group_of_inputs,
    in_groups_of_128,
    unpack_columns,
    unpack_rows,
)


@pytest.mark.parametrize(
    ("word", "bits", "codes"),
    [
        (0x76543210, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        (-1, 4, [15] * 8),
        (-(2**31), 4, [0, 0, 0, 0, 0, 0, 0, 8]),
        (-2, 8, [254, 255, 255, 255]),
    ],
)
def test_the_lowest_bits_come_first_and_the_sign_is_a_bit(word, bits, codes):
    words = torch.tensor([[word, 0]], dtype=torch.int32)

    assert unpack_rows(words, bits)[:, 0].tolist() == codes
    assert unpack_columns(words, bits)[0, : len(codes)].tolist() == codes


def test_inputs_are_in_groups_in_order_unless_an_index_says_otherwise():
    assert group_of_inputs(None, 5, 2).tolist() == [0, 0, 1, 1, 2]
    assert group_of_inputs(None, 3, -1).tolist() == [0, 0, 0]
    assert group_of_inputs(torch.tensor([1, 0], dtype=torch.int32), 2, 1).tolist() == [1, 0]


def test_a_group_of_more_than_128_inputs_repeats_its_scale():
    codes = torch.zeros(2, 300, dtype=torch.uint8)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    spread = in_groups_of_128(codes, scale, None, torch.arange(300) // 256, "g_idx")

    assert spread.scale.tolist() == [[1.0, 1.0, 2.0], [3.0, 3.0, 4.0]]
    assert spread.order is None


def test_negative_groups_are_refused():
    codes = torch.zeros(2, 4, dtype=torch.uint8)

    with pytest.raises(BrokenCheckpoint, match="g_idx"):
        in_groups_of_128(codes, torch.ones(2, 1), None, torch.tensor([0, -1, 0, 0]), "g_idx")
