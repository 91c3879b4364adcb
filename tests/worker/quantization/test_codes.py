"""Codes and scales back to numbers, element by element."""

import pytest
import torch

from deepseek_worker.quantization.codes import BlockCodes, GroupCodes, RowCodes, dequantize

DRAW = torch.Generator().manual_seed(0)


def test_a_plain_matrix_stays_as_it_is():
    weight = torch.randn(3, 4)

    assert dequantize(weight, 4) is weight


def test_rows_have_one_scale_each():
    codes = torch.randint(-127, 128, (3, 5), generator=DRAW, dtype=torch.int8)
    scale = torch.rand(3, generator=DRAW)

    values = dequantize(RowCodes(codes, scale), 5)

    assert all(
        values[row, column] == pytest.approx(codes[row, column].item() * scale[row].item())
        for row in range(3)
        for column in range(5)
    )


def test_blocks_of_128_by_128_have_one_scale_each_and_the_last_are_cut():
    codes = torch.randn(130, 257, generator=DRAW).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=DRAW)

    values = dequantize(BlockCodes(codes, scale), 257)

    for row in (0, 127, 128, 129):
        for column in (0, 127, 128, 255, 256):
            expected = codes[row, column].float() * scale[row // 128, column // 128]
            assert values[row, column] == expected


@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_groups_of_128_columns_have_a_scale_and_a_zero_point(has_zero_points, is_sorted):
    codes = torch.randint(0, 16, (3, 200), generator=DRAW, dtype=torch.uint8)
    scale = torch.rand(3, 2, generator=DRAW).to(torch.float16)
    zero = torch.randint(0, 16, (3, 2), generator=DRAW, dtype=torch.uint8)
    order = torch.randperm(200, generator=DRAW) if is_sorted else None

    values = dequantize(GroupCodes(codes, scale, zero if has_zero_points else None, order), 200)

    for row in range(3):
        for column in (0, 1, 127, 128, 199):
            group = column // 128
            zero_code = zero[row, group].item() if has_zero_points else 8
            expected = (codes[row, column].item() - zero_code) * scale[row, group].item()
            place = order[column].item() if is_sorted else column
            assert values[row, place].item() == pytest.approx(expected)
